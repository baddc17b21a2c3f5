"""Answers as they come, in a file beside the results, so that a run that fails loses none: the next one reads them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from prooflens.evaluation.studies.base import StudyError, StudySettings
from prooflens.evaluation.studies.revision import sources
from prooflens.json_files import parse_json

FOLDER = "answers"
"""Where the files lie, beside `data`."""


@dataclass(frozen=True)
class ProbeAnswer:
    """One prompt at one ε: what is proved and what stands, by the name of the head or circuit."""

    proved: dict[str, bool]
    standing: dict[str, bool]
    seconds: float


@dataclass(frozen=True)
class Journal:
    """A file with a line per answer; without a path nothing is kept."""

    path: Path | None

    @classmethod
    def of(cls, settings: StudySettings) -> Journal:
        """The file of these settings and of this code: what other code has proved is not believed."""
        if settings.kept is None:
            return cls(None)
        digest = hashlib.sha256(json.dumps([sources(), *settings.arguments]).encode()).hexdigest()
        return cls(settings.kept / FOLDER / f"{digest[:16]}.jsonl")

    def read(self) -> dict[str, ProbeAnswer]:
        """Answers by their keys; a last line that was only begun is cut off."""
        if self.path is None or not self.path.is_file():
            return {}
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        try:
            lines = [parse_json(line) for line in whole.splitlines()]
            return {line.pop("key"): ProbeAnswer(**line) for line in lines}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise StudyError(f"{self.path} holds no answers: delete it, and they are asked anew") from error

    def add(self, key: str, answer: ProbeAnswer) -> None:
        """One more line."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **asdict(answer)}) + "\n")

    def end(self) -> None:
        """The run is over: its result holds what is worth keeping."""
        if self.path is not None and self.path.is_file():
            self.path.unlink()
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
