"""What is kept of a certificate: run directories that others can read and check without torch (`docs/certify.md`)."""

from prooflens.certificate.store import SCHEMA, Run, RunWriter, read_run

__all__ = ["SCHEMA", "Run", "RunWriter", "read_run"]
