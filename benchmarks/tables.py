"""What benchmarks print: tables of Markdown."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """What a part prints."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join([f"**{self.title}**", "", *("| " + " | ".join(line) + " |" for line in lines), ""])
