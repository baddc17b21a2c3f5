"""Running members shape by shape, in batches that fit, and counting them; parts can be kept and gone on with."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from prooflens.certificate.store import write_atomically
from prooflens.enumeration.claims import ShapeClaim, compile_claim, parts_of
from prooflens.enumeration.tally import Margins, Tally
from prooflens.errors import ModelError, RunError
from prooflens.families import Family, Shape
from prooflens.families.shapes import Numbers
from prooflens.memory import available, is_shortage
from prooflens.models.tree import Runner, row_bytes
from prooflens.progress import Progress
from prooflens.queries import Query, SiteQuery
from prooflens.verdicts.sites import Vectors

KEEP_SECONDS = 30.0
"""A run that can be resumed keeps what it has this often."""

MOST_ROWS = 2**16
"""Members of one batch, at most."""

CPU_BYTES = 2**30
"""What a batch may take on a cpu, where no memory is given: larger batches are no faster there."""


@dataclass(frozen=True)
class Plan:
    """How members are run.

    Attributes:
        early: stop when every claim has failed once.
        as_tree: run every prefix once, where the model can.
        batch: members of one batch; None for as many as fit.
        memory: bytes that a batch may take; None for what there is.
        part: (i, n): only the i-th of n parts of the family, counted from 1.
    """

    early: bool = False
    as_tree: bool = True
    batch: int | None = None
    memory: int | None = None
    part: tuple[int, int] = (1, 1)


@dataclass(eq=False)
class Walk:
    """A walk over the members of a family.

    Attributes:
        family: the prompts.
        queries: the claims.
        tallies: one per claim.
        plan: how members are run.
        state: a file that keeps the counts, to go on with; None for none.
        tell: is told how far it is.
        cursor: the shape and the combination that come next.
        vectors: the directions and dictionaries that claims name.
    """

    family: Family
    queries: Sequence[Query]
    tallies: Sequence[Tally]
    plan: Plan
    state: Path | None
    tell: Progress
    cursor: tuple[int, int] = (0, 0)
    vectors: Vectors | None = None
    _saved: float = field(default_factory=time.monotonic)
    _held: tuple[int, Sequence[ShapeClaim], Runner] | None = None

    @property
    def stopped(self) -> bool:
        """Whether every claim failed, and no more is wanted."""
        return self.plan.early and all(tally.held < tally.asked for tally in self.tallies)

    def enumerate(self) -> None:
        """Run every member of the part, from the cursor on."""
        if self.state is not None and self.state.is_file():
            self.resume(self.state)
        part, parts = self.plan.part
        total = max(1, self.family.size // parts)
        first, begin = self.cursor, time.monotonic()
        for number in range(first[0], len(self.family.shapes)):
            shape = self.family.shapes[number]
            start, stop = (shape.combinations * i // parts for i in (part - 1, part))
            start = max(start, first[1]) if number == first[0] else start
            for following, digits in shape.blocks(start, self._size(shape), stop):
                self._count(number, shape, digits)
                self.cursor = number, following
                asked = self.tallies[0].asked
                rate = asked / max(1e-9, time.monotonic() - begin)
                self.tell(f"{asked:,} of {total:,} members, {rate:,.0f} a second", min(1.0, asked / total))
                self._keep()
                if self.stopped:
                    return
        self.cursor = len(self.family.shapes), 0
        self._keep(at_once=True)

    def sample(self, n: int, seed: int) -> None:
        """Run members that are drawn by chance.

        Args:
            n: how many.
            seed: of the random numbers.
        """
        for shape, digits in self.family.draw(n, seed):
            number = self.family.shapes.index(shape)
            size = self._size(shape)
            for start in range(0, len(digits), size):
                self._count(number, shape, digits[start : start + size])
                asked = self.tallies[0].asked
                self.tell(f"{asked:,} of {n:,} members drawn", asked / n)
                if self.stopped:
                    return

    def _size(self, shape: Shape) -> int:
        """How many members are run together."""
        if self.plan.batch is not None:
            return self.plan.batch
        model = self.family.model
        room = self.plan.memory
        if room is None and model.device.type == "cuda":
            room = torch.cuda.mem_get_info(model.device)[0] // 2
        if room is None:
            room = min(CPU_BYTES, (available() or CPU_BYTES) // 4)
        each = row_bytes(model, shape.n_tokens, model.architecture.n_layers)
        return max(1, min(MOST_ROWS, room // each))

    def _count(self, number: int, shape: Shape, digits: Numbers) -> None:
        """Run and count some members; where memory runs out, half of them at a time."""
        try:
            judged = self._judge(number, shape, digits)
        except Exception as error:
            if not is_shortage(error) or len(digits) == 1:
                raise
            judged = None
        if judged is None:  # outside the handler, which would keep the tensors of the attempt
            if self.family.model.device.type == "cuda":
                torch.cuda.empty_cache()
            for half in np.array_split(digits, 2):
                self._count(number, shape, half)
            return
        columns = [shape.fillers[slot][digits[:, i]] for i, slot in enumerate(shape.slots)]
        members = np.stack([np.full(len(digits), number), *columns], axis=1)
        for tally, (margins, held) in zip(self.tallies, judged, strict=True):
            tally.add(margins, held, members)

    def _judge(self, number: int, shape: Shape, digits: Numbers) -> list[tuple[Margins, NDArray[np.bool_]]]:
        """The margin of every claim on every member, and whether it holds there."""
        model = self.family.model
        claims, runner = self._compiled(number, shape)
        ids = torch.as_tensor(shape.ids_of(digits)).to(model.device)
        reading, found = runner(ids), []
        for claim in claims:
            margins, held = (tensor.cpu().numpy() for tensor in claim.judge(reading, model, ids))
            if np.isnan(margins).any():
                (member, *_) = self.family.members(shape, digits[np.isnan(margins)][:1])
                raise ModelError(
                    f"{model.name} gives no number on {member.text!r}: its weights or inputs overflow"
                )
            found.append((margins, held))
        return found

    def _compiled(self, number: int, shape: Shape) -> tuple[Sequence[ShapeClaim], Runner]:
        """The claims about a shape, and the runner that reads what they need and no deeper; the last ones are kept."""
        if self._held is None or self._held[0] != number:
            model = self.family.model
            texts = [self.family.token(i) if i >= 0 else "\0" for i in shape.ids.tolist()]
            claims = [compile_claim(query, shape, model, texts, self.vectors) for query in self.queries]
            rows = [(row.layer, row.position) for claim in claims for row in claim.rows]
            output = any(claim.outputs or claim.distribution for claim in claims)
            sites = [place for claim in claims for place in claim.sites]
            runner = Runner.of(model, shape.n_tokens, rows, output, self.plan.as_tree, sites)
            self._held = (number, claims, runner)
        return self._held[1], self._held[2]

    def check(self) -> None:
        """Compile every claim for every shape, so that a wrong one is told before anything is run."""
        for number, shape in enumerate(self.family.shapes):
            self._compiled(number, shape)

    @property
    def compares_hooks(self) -> bool:
        """Whether a claim compares readouts at different hooks or tokens."""
        return any(claim.crossed for claim in self._compiled(0, self.family.shapes[0])[0])

    @property
    def directions(self) -> dict[str, tuple[str, NDArray[np.float64], float]]:
        """What readouts of directions and features read: the hook, the direction and the bias by name."""
        if not any(isinstance(part, SiteQuery) for query in self.queries for part in parts_of(query)):
            return {}
        claims = self._compiled(0, self.family.shapes[0])[0]
        return {
            name: (read.hook, read.weight[i].numpy(), float(read.bias[i]))
            for claim in claims
            for read in claim.reads
            for i, name in enumerate(read.names)
            if not name.startswith("neuron ")
        }

    def fingerprint(self) -> str:
        """What a kept state must be about."""
        part = {"queries": [str(query) for query in self.queries], "part": list(self.plan.part)}
        if directions := self.directions:
            held = b"".join(weight.astype("<f8").tobytes() for _, weight, _ in directions.values())
            part |= {"directions": [hashlib.sha256(held).hexdigest()]}
        return json.dumps(part | {"model": self.family.model.sha256, "family": self.family.to_dict()})

    def _keep(self, at_once: bool = False) -> None:
        if self.state is None or not (at_once or time.monotonic() - self._saved > KEEP_SECONDS):
            return
        arrays = {
            name: a for i, tally in enumerate(self.tallies) for name, a in tally.to_arrays(str(i)).items()
        }
        about = np.frombuffer(self.fingerprint().encode(), np.uint8)
        cursor = np.array(self.cursor, dtype=np.int64)

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez_compressed(file, about=about, cursor=cursor, **arrays)  # type: ignore[arg-type]

        write_atomically(self.state, write)
        self._saved = time.monotonic()

    def resume(self, path: Path) -> None:
        """Take over the counts of a state.

        Args:
            path: the file.

        Raises:
            RunError: if it is about something else, or cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as held:
                if held["about"].tobytes().decode() != self.fingerprint():
                    raise RunError(
                        f"{path} is about another family, model or claims: remove it, or choose another folder"
                    )
                for i, tally in enumerate(self.tallies):
                    tally.read_arrays(str(i), held)
                self.cursor = tuple(map(int, held["cursor"]))  # type: ignore[assignment]
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise RunError(f"{path} cannot be gone on with ({error}): remove it to start anew") from error

    @property
    def done(self) -> bool:
        """Whether every member of the part was run."""
        return self.cursor[0] >= len(self.family.shapes)


def part_file(out: Path, part: tuple[int, int]) -> Path:
    """Where the counts of a part are kept, beside the run that they are for.

    Args:
        out: the run directory.
        part: (i, n): the i-th of n parts.
    """
    digits = max(1, math.ceil(math.log10(part[1] + 1)))
    return out.with_name(f"{out.name}.part-{part[0]:0{digits}d}-of-{part[1]}.npz")
