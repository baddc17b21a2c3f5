"""Attention over the image: the patches of a vision model, as bright as the weight that a token gives them."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prooflens.report.attention import AttentionRow, attention_heads
from prooflens.report.source import RowSource
from prooflens.report.svg import Drawing, hit, number

MOST_IMAGES = 48
"""How many rows of attention are drawn over the image."""
SIDE = 360.0
"""The longer side of the picture."""
OUTLINED = "fill:#fff;stroke:#000;stroke-width:2.5px;paint-order:stroke"
"""Text that can be read on any image."""
LARGEST = 1 << 22
"""How many pixels an image may have to be put into a page."""


@dataclass(frozen=True)
class ImageAttention:
    """A row of attention over the patches of an image.

    Attributes:
        layer: counted from 0.
        head: counted from 0.
        row: the weights, with proved ranges.
        front: how many tokens stand before the patches.
        grid: rows and columns of patches.
        picture: the image as a data URI.
        region: what the ranges are proved on.
    """

    layer: int
    head: int
    row: AttentionRow
    front: int
    grid: tuple[int, int]
    picture: str
    region: str

    @property
    def name(self) -> str:
        """Head and query, as in `0.1@0`."""
        return f"{self.layer}.{self.head}@{self.row.position} {self.region}"


def image_attention(sources: Sequence[RowSource]) -> tuple[ImageAttention, ...]:
    """Rows asked for their most attended key, of regions that have an image whose patches are the tokens.

    Args:
        sources: the rows of runs and results.
    """
    found: list[ImageAttention] = []
    for source in sources:
        image = source.image
        if image is None or source.circuit or image.ndim != 3 or image.dtype != np.uint8:
            continue
        fits = image.shape[0] in (1, 3) and image.size <= LARGEST
        laid = _grid(image.shape, len(source.tokens)) if fits else None
        if laid is None:
            continue
        picture = data_uri(image)
        for head in attention_heads([source], balls=False):
            found += [
                ImageAttention(head.layer, head.head, row, *laid, picture, source.region) for row in head.rows
            ]
    return tuple(found[:MOST_IMAGES])


def _grid(shape: tuple[int, ...], tokens: int) -> tuple[int, tuple[int, int]] | None:
    """How many tokens stand in front, and the rows and columns of patches; None if tokens are no patches of it."""
    _, high, wide = shape
    for front in (1, 0):
        for side in range(1, math.gcd(high, wide) + 1):
            if high % side == wide % side == 0 and (high // side) * (wide // side) == tokens - front:
                return front, (high // side, wide // side)
    return None


def data_uri(image: Any) -> str:
    """An image of bytes [C, H, W], one colour or three, as a PNG in a data URI.

    Args:
        image: the bytes, shape [C, H, W].
    """
    pixels = np.asarray(image, dtype=np.uint8)
    pixels = np.moveaxis(pixels if len(pixels) == 3 else np.repeat(pixels[:1], 3, axis=0), 0, -1)
    high, wide = pixels.shape[:2]
    lines = b"".join(b"\0" + pixels[i].tobytes() for i in range(high))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    made = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return "data:image/png;base64," + base64.b64encode(made).decode()


def image_map(shown: ImageAttention) -> Drawing:
    """The image, darkened patch by patch where attention is small; the most attended patch has the verdict's frame.

    Args:
        shown: an image and the attention over its patches.
    """
    rows, columns = shown.grid
    size = SIDE / max(rows, columns)
    left, top = 20.0, 20.0
    drawing = Drawing(
        max(left + size * columns + 20.0, 420.0),
        top + size * rows + 66.0,
        f"Attention of head {shown.layer}.{shown.head} from token {shown.row.position} over the image",
    )
    drawing.add(
        "image",
        None,
        href=shown.picture,
        x=left,
        y=top,
        width=size * columns,
        height=size * rows,
        preserveAspectRatio="none",
        style="image-rendering:pixelated",
    )
    weights = {cell.key: cell for cell in shown.row.cells}
    largest = max((c.clean for key, c in weights.items() if key >= shown.front), default=1.0) or 1.0
    for patch in range(rows * columns):
        cell = weights.get(patch + shown.front)
        clean = 0.0 if cell is None else cell.clean
        proved = "nothing proved"
        if cell is not None and cell.low is not None:
            proved = f"proved [{number(cell.low)}, {number(cell.high)}]"
        where = f"row {patch // columns}, column {patch % columns}"
        tip = (
            f"head {shown.layer}.{shown.head}, query {shown.row.position} to the patch in {where}: clean "
            f"{number(clean)}, {proved} on {shown.region}"
        )
        here = hit(tip, layer=shown.layer, head=shown.head, position=shown.row.position)
        x, y = left + size * (patch % columns), top + size * (patch // columns)
        shade = f"fill:#000;fill-opacity:{0.8 * (1.0 - math.sqrt(clean / largest)):.3f}"
        drawing.rect(x, y, size, size, kind="hit", style=shade, **here)
        if size > 30.0:
            told = f"{clean:.2f}".lstrip("0") or "0"
            drawing.text(
                x + size / 2, y + size / 2 + 4.0, told, "small", style=OUTLINED, pointer_events="none"
            )
    base = top + size * rows + 22.0
    if shown.row.top >= shown.front:
        x, y = divmod(shown.row.top - shown.front, columns)[::-1]
        frame = {"kind": f"mark {shown.row.verdict}", "pointer_events": "none"}
        drawing.rect(left + size * x + 1.5, top + size * y + 1.5, size - 3.0, size - 3.0, **frame)
        said = f"most attended patch: {shown.row.verdict}"
    else:
        said = f"the token in front is attended most: {shown.row.verdict}"
    drawing.text(left, base, said, "small", "start")
    for token in range(shown.front):
        cell = weights.get(token)
        if cell is not None:
            drawing.text(
                left, base + 18.0, f"token in front: weight {number(cell.clean)}", "small quiet", "start"
            )
    return drawing
