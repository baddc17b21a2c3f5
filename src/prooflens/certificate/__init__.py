"""Run directories: what is kept of a certificate, for others to read and check without torch (`docs/certify.md`)."""

from prooflens.certificate.store import SCHEMA, Run, RunWriter, read_run

__all__ = ["SCHEMA", "Run", "RunWriter", "read_run"]
