"""Changes that keep an input near to one that is understood: bytes, words, and nodes of JSON."""

import json
import random
from typing import Any

WORDS = (
    b"", b"\0", b"\xff\xfe", b"-1", b"1e999", b"99999999999999999999", b"NaN", b"null", b"true", b"[]", b"{}", b'""',
    b"../../../etc/passwd", b"<script>alert(1)</script>", "‮evil⁦".encode(), b"!!python/object/apply:os.system [id]",
    b"&a [*a,*a]", b"@", b"&", b"{", b"}", b">=", b"top", b"mass>=", b"entropy", b"*", b" + ", b"\n", b"0.5 * ",
    b"__class__",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 1e308, float("inf"), "", "x", "../x", "/etc/passwd", "<script>", "\u202e", [], {},
    [[]], {"a": None}, ["0.1", "a0.h9"], [None], -0.0, "NaN", 10**400,
)  # fmt: skip


def mutated(data: bytes, seed: int) -> bytes:
    """A few changes, the same ones for the same seed."""
    choose = random.Random(seed)
    if choose.random() < 0.5 and (changed := _json(data, choose)) is not None:
        return changed
    held = bytearray(data)
    for _ in range(choose.randint(1, 6)):
        at = choose.randrange(len(held) + 1)
        end = min(len(held), at + choose.randint(0, 8))
        kind = choose.randrange(4)
        if kind == 0:
            held[at:end] = choose.choice(WORDS)
        elif kind == 1:
            held[at:end] = bytes(choose.randrange(256) for _ in range(end - at))
        elif kind == 2:
            held[at:at] = held[at:end] * choose.randint(1, 4)
        else:
            del held[at : choose.choice((end, len(held)))]
    return bytes(held)


def _json(data: bytes, choose: random.Random) -> bytes | None:
    """One node of a JSON document replaced, removed or copied elsewhere; a safetensors header likewise."""
    if len(data) > 8 and data[8:9] == b"{":  # safetensors: the length of the header, the header, the tensors
        size = int.from_bytes(data[:8], "little")
        head = _json(data[8 : 8 + size], choose)
        if head is None:
            return None
        stated = choose.choice((len(head), size, 0, 2**62, len(head) + 8))
        return stated.to_bytes(8, "little") + head + data[8 + size :]
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    places = list(_places(document))
    for _ in range(choose.randint(1, 3)):
        if not places:
            return json.dumps(choose.choice(VALUES)).encode()
        holder, key = choose.choice(places)
        try:
            if choose.random() < 0.2:
                del holder[key]
            elif choose.random() < 0.3:
                other, where = choose.choice(places)
                holder[key] = json.loads(json.dumps(other[where]))
            else:
                holder[key] = choose.choice(VALUES)
        except (KeyError, IndexError):
            continue
    return json.dumps(document).encode()


def _places(node: Any) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from _places(value)
