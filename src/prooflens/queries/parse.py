"""Short strings for queries.

    query    = part {"&" part} | weight "*" part {" + " weight "*" part} ">" "0"
    part     = [heads ":"] kind ["@" position]
    kind     = "top" K ["=" set] | "rank" K | "mass>=" x ["@" set] | "spec" set ">" set
             | "entropy" ["<=" x | ">=" x] | x "<=entropy<=" x | "argmax" ["=" output] | "logit" output ">logit" output
             | "logit" C [level] | "neuron " layer "." N [level] | "feature " NAME "." N ("active" | "off" | [level])
             | "read(" hook "@" token "," NAME ")" [level]
             | ("dla " | "dla-live ") part " logit" output "-logit" output [level]
             | readout (">" | ">=" | "<" | "<=") readout, one of the last four without a level on either side
             | "lens " layer ("argmax" ["=" output] | "logit" output ">logit" output | "logit" C [level])
    level    = (">" | ">=" | "<" | "<=") x, without it the range is asked for
    set      = "{" token {"," token} "}"
    position = token | "[" token {"," token} "]" | "{" role {"," role} "}" | "all"
    token    = an index, negative from the end | a word | a text in double quotes | role
    output   = C | "{" role "}"
    role     = slot ["." occurrence] ["." ("first" | "last")] | "self" [("+" | "-") K]
    part     = a head "9.6" | an attention "a9" | a network "m3"
    heads    = "1.10" | a layer "2" | layers "0-2" | a comma list of these | "all"

Braces name tokens: those that a mass is on or that are attended most. What follows the last `@` is the query position.
A bare number is an index; a token whose text is a number, `all`, `self`, a slot of the template, or has punctuation is
written in quotes. In `top1={-1}` the number counts from the query: it is `top1={self-1}`, the token before it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from prooflens.errors import QueryError
from prooflens.queries.attention import Entropy, Mass, Ranking, RowQuery, Specialised, TopK
from prooflens.queries.base import Query
from prooflens.queries.circuit import Argmax, Beats, Circuit
from prooflens.queries.lens import AttributionQuery, Lens, SiteComparison
from prooflens.queries.measures import DistributionQuery
from prooflens.queries.rows import Named, Role, suggestion
from prooflens.queries.sites import OutputLevel, SiteQuery, TopFeature

NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
LEVEL = rf"\s*(?:(>=|<=|>|<)\s*{NUMBER})?"
"""A comparison with a number, or nothing."""
NAME = r"[A-Za-z_][\w-]*"
"""The name of a direction or of a dictionary."""

OUTPUT = r"(?:(\d{1,9})|\{([^{}]*)\})"

PART = r"(\d{1,6}\.\d{1,9}|a\d{1,6}(?:\.h\d{1,9})?|m\d{1,6})"
"""A head, an attention or a network."""

Slots = Collection[str]
"""The slots of a template: the words that are roles."""

SHAPES: dict[str, Callable[[re.Match[str], Slots], Query]] = {
    r"top(\d{1,9})": lambda m, _: TopK(int(m[1])),
    r"top(\d{1,9})\s*=\s*\{(.*)\}": lambda m, slots: TopK(int(m[1]), _tokens(m[2], slots)),
    r"rank(\d{1,9})": lambda m, _: Ranking(int(m[1])),
    rf"mass\s*>=\s*{NUMBER}": lambda m, _: Mass(tau=float(m[1])),
    r"spec\s*\{(.*)\}\s*>\s*\{(.*)\}": lambda m, slots: Specialised(
        _tokens(m[1], slots), _tokens(m[2], slots)
    ),
    r"entropy": lambda m, _: Entropy(),
    rf"entropy\s*<=\s*{NUMBER}": lambda m, _: Entropy(upper=float(m[1])),
    rf"entropy\s*>=\s*{NUMBER}": lambda m, _: Entropy(lower=float(m[1])),
    rf"{NUMBER}\s*<=\s*entropy\s*<=\s*{NUMBER}": lambda m, _: Entropy(float(m[1]), float(m[2])),
    r"argmax": lambda m, _: Argmax(),
    rf"argmax\s*=\s*{OUTPUT}": lambda m, _: Argmax(answer=_output(m[1], m[2])),
    rf"logit{OUTPUT}\s*>\s*logit{OUTPUT}": lambda m, _: Beats(_output(m[1], m[2]), _output(m[3], m[4])),
    rf"logit(\d{{1,9}}){LEVEL}": lambda m, _: OutputLevel(int(m[1]), *_level(m[2], m[3])),
    rf"neuron\s+(\d{{1,9}})\.(\d{{1,9}}){LEVEL}": lambda m, _: SiteQuery(
        "neuron", m[1], "", int(m[2]), *_level(m[3], m[4])
    ),
    rf"feature\s+({NAME})\.(\d{{1,9}})\s+(active|off)": lambda m, _: SiteQuery(
        "feature", None, m[1], int(m[2]), ">" if m[3] == "active" else "<="
    ),
    rf"feature\s+({NAME})\.(\d{{1,9}})\s+(not\s+)?top(\d{{1,9}})": lambda m, _: TopFeature(
        "feature", None, m[1], int(m[2]), "<=" if m[3] else ">", k=int(m[4])
    ),
    rf"feature\s+({NAME})\.(\d{{1,9}}){LEVEL}": lambda m, _: SiteQuery(
        "feature", None, m[1], int(m[2]), *_level(m[3], m[4])
    ),
    rf"dla(-live)?\s+{PART}\s+logit{OUTPUT}\s*[-−]\s*logit{OUTPUT}{LEVEL}": lambda m, _: (
        AttributionQuery.about(
            m[2], _output(m[3], m[4]), _output(m[5], m[6]), _level(m[7], m[8]), live=m[1] is not None
        )
    ),
    r"lens\s+(\d{1,9})\s+(?!lens)(.+)": lambda m, slots: Lens(int(m[1]), _parse_kind(m[2], slots)),
}

EXAMPLES = {
    "top": "top1",
    "rank": "rank3",
    "mass": "mass>=0.2",
    "spec": "spec{1,2}>{3}",
    "entropy": "entropy<=1.5",
    "argmax": "argmax",
    "logit": "logit3>logit5",
    "neuron": "neuron 5.1234>0@-1",
    "feature": "feature SAE.512 active@-1",
    "read": "read(blocks.8.hook_resid_post@-1,DIR)>=0.5",
    "dla": "dla 9.6 logit3-logit5>0",
    "lens": "lens 12 argmax",
}
"""One well-formed query of each kind, for error messages."""

MEANT = {"prev": "top1={self-1}", "previous": "top1={self-1}", "self": "top1={self}", "itself": "top1={self}"}
"""What people mean by words that are no kinds of queries."""


def parse_query(text: str, slots: Slots = ()) -> Query:
    """Parse the short form of a query; `parse_query(str(query)) == query`.

    Args:
        text: as in `"top1"`, `"2.4:top1@-1"`, `"mass>=0.2@{0,1}"`, `"entropy<=1.5"`, `"0.1:top1 & 1.0:top1"`; the
            module's docstring has the grammar.
        slots: the slots of the template that the prompts are members of: words in `{A}` or `{B.2}` that are roles.

    Returns:
        The query; several parts joined by `&`, or a weighted sum, become a `Circuit`.

    Raises:
        QueryError: if the text is no query; the message shows a well-formed one.

    Example:
        >>> parse_query("2.4:top1@-1")
        TopK(heads='2.4', positions=(-1,), k=1, tokens=None)
        >>> str(parse_query("mass >= 0.3 @ {0, 1}"))
        'mass>=0.3@{0,1}'
        >>> parse_query("0.3:top1={B.2}@-1", slots=["A", "B"]).tokens
        (Role(name='B', occurrence=2, part=None, offset=0),)
    """
    if len(list(_split(text, "*"))) > 1:
        return _parse_sum(text, slots)
    parts = [_parse_part(part, slots) for part in _split(text, "&")]
    return parts[0] if len(parts) == 1 else Circuit(tuple(parts))


def _parse_sum(text: str, slots: Slots) -> Circuit:
    body = re.fullmatch(r"(.*)>\s*0\s*", text, re.DOTALL)
    if body is None:
        raise QueryError(f"a weighted sum ends in '> 0', as in '1 * 0.3:spec{{1}}>{{2}} > 0'; got {text!r}")
    weights, parts = [], []
    for term in _split(body[1], " + "):
        weight, star, part = term.partition("*")
        if not star or not re.fullmatch(NUMBER, weight.strip()):
            raise QueryError(f"{term.strip()!r} is not 'weight * query', as in '0.5 * 0.3:spec{{1}}>{{2}}'")
        weights.append(float(weight))
        parts.append(_parse_part(part, slots))
    return Circuit(tuple(parts), tuple(weights))


READ = re.compile(rf"read\(\s*([\w.]+)\s*@\s*([^,]+),\s*({NAME})\s*\){LEVEL}")


def _level(comparison: str | None, threshold: str | None) -> tuple[str | None, float]:
    return comparison, 0.0 if threshold is None else float(threshold)


SITE = r"(?:neuron\s|feature\s|read\(|dla\s)"
COMPARED = re.compile(rf"\s*({SITE}.*?)\s*(>=|<=|>|<)\s*({SITE}.*)", re.DOTALL)
"""Two readouts, and what stands between them."""


def _parse_part(text: str, slots: Slots) -> Query:
    if match := COMPARED.fullmatch(text):
        one, other = _parse_part(match[1], slots), _parse_part(match[3], slots)
        if isinstance(one, SiteQuery) and isinstance(other, SiteQuery) and "@" not in match[1]:
            one = replace(one, position=other.position)
        return SiteComparison.of(one, match[2], other)
    if match := READ.fullmatch(text.strip()):
        hook, at, name, comparison, threshold = match.groups()
        return SiteQuery("read", hook, name, None, *_level(comparison, threshold), _site_token(at, slots))
    first, *suffixes = (piece.strip() for piece in _split(text, "@"))
    *prefix, kind = (piece.strip() for piece in _split(first, ":"))
    query = _parse_kind(kind, slots)
    if isinstance(query, Mass) and suffixes and suffixes[0].startswith("{") and suffixes[0].endswith("}"):
        query = replace(query, tokens=_tokens(suffixes.pop(0)[1:-1], slots))
    if len(prefix) > 1 or len(suffixes) > 1:
        raise QueryError(f"{text.strip()!r} names heads or a position twice; write 'heads:query@position'")
    if isinstance(query, RowQuery):
        query = replace(query, heads=prefix[0] if prefix else None)
        return replace(query, positions=_positions(suffixes[0], text, slots)) if suffixes else query
    if isinstance(query, SiteQuery) and query.kind != "dla" and not prefix:
        return replace(query, position=_site_token(suffixes[0], slots)) if suffixes else query
    if prefix or suffixes:
        raise QueryError(f"{kind} is about outputs and takes no heads and no position; got {text.strip()!r}")
    return query


def _parse_kind(kind: str, slots: Slots) -> Query:
    for shape, make in SHAPES.items():
        if match := re.fullmatch(shape, kind):
            return make(match, slots)
    if not kind:
        raise QueryError("a query is empty: write one, as in 'top1', or 'mass>=0.2@-1'")
    word = _word(kind)
    if word in EXAMPLES:
        raise QueryError(f"query {kind!r} is not complete or has too much; write it as in {EXAMPLES[word]!r}")
    hint = (
        f"; write it as in {MEANT[word]!r}" if word in MEANT else suggestion(word, EXAMPLES, EXAMPLES, 0.65)
    )
    raise QueryError(f"unknown query {kind!r}{hint or '; known are ' + ', '.join(EXAMPLES.values())}")


def _word(text: str) -> str:
    """The letters that a query starts with, in small ones."""
    stem = re.match(r"\s*([A-Za-z]*)", text)
    return stem[1].lower() if stem else ""


def _positions(text: str, whole: str, slots: Slots) -> tuple[Named, ...] | None:
    if text == "all":
        return None
    if not text.startswith(("[", "{")) or text[-1] not in "]}":
        return _tokens(text, slots)
    found = _tokens(text[1:-1], slots)
    if text.startswith("{") and not any(isinstance(token, Role) for token in found):
        raise QueryError(
            f"only mass takes tokens in braces, as in 'mass>=0.2@{{0,1}}', and a position only roles; got "
            f"{whole.strip()!r}"
        )
    return found


def parse_metric(text: str, slots: Slots = ()) -> Query:
    """Parse what an effect is measured on: a difference of two outputs, an output, a distribution, or a readout.

    Args:
        text: as in `"logit{A}-logit{B}"`, `"logit3"`, `"prob(3)"`, `"prob({A}|{A},{B})"`, `"kl(3,5)"`,
            `"neuron 5.12@-1"`, `"read(blocks.8.hook_resid_post@-1,DIR)"`.
        slots: the slots of the template that the prompts are members of.

    Raises:
        QueryError: if the text is none of these.

    Example:
        >>> parse_metric("logit3 - logit5")
        Beats(winner=3, loser=5)
    """
    if measured := re.fullmatch(r"\s*(prob|kl)\s*\((.*)\)\s*", text, re.DOTALL):
        return _distribution(measured[1], measured[2])
    match = re.fullmatch(rf"\s*(logit{OUTPUT})\s*[-−]\s*(logit{OUTPUT})\s*", text)
    if match is None and _word(text) not in EXAMPLES:
        raise _no_metric(text)
    query = parse_query(f"{match[1]}>{match[4]}" if match else text, slots)
    if isinstance(query, Beats) and query.winner == query.loser:
        raise QueryError(f"{text!r} is 0 whatever the model does: name two outputs")
    is_range = isinstance(query, OutputLevel | SiteQuery) and query.comparison is None
    is_range = is_range and not isinstance(
        query, AttributionQuery
    )  # its direction would be another in an edit
    if match is None and not is_range:
        raise _no_metric(text)
    return query


def _no_metric(text: str) -> QueryError:
    return QueryError(
        f"{text!r} measures nothing: write a difference of outputs as logit3-logit5, an output as logit3, "
        "a probability as prob(3|3,5), a divergence as kl(3,5), or a readout as neuron 5.12@-1"
    )


def _distribution(kind: str, inside: str) -> DistributionQuery:
    """Read what stands between the brackets of `prob(3|3,5)` and `kl(3,5)`."""
    first, bar, rest = inside.partition("|") if kind == "prob" else ("", "|", inside)
    among = [_bare_output(piece) for piece in _split(rest, ",")] if bar else None
    index = _bare_output(first) if kind == "prob" else None
    return DistributionQuery(index, None if among is None else tuple(among))


def _bare_output(text: str) -> int | Role:
    match = re.fullmatch(OUTPUT, text.strip())
    if match is None:
        raise QueryError(
            f"{text.strip()!r} names no output: write indices or slots, as in prob(3|3,5) or kl({{A}},{{B}})"
        )
    return _output(match[1], match[2])


def metric_text(query: Query) -> str:
    """Return how a metric is written.

    Args:
        query: what `parse_metric` returned.
    """
    return str(query).replace(">", "-") if isinstance(query, Beats) else str(query)


def _output(index: str | None, role: str | None) -> int | Role:
    """An output by its index, or by the slot whose token it is."""
    if index is not None:
        return int(index)
    found = as_role(str(role).strip())
    if found is None or found.name == "self":
        raise QueryError(
            f"{{{role}}} does not name an output: use an index, or a slot of the template, as in {{A}}"
        )
    return found


def as_role(text: str, slots: Slots | None = None) -> Role | None:
    """Read a role, as in `A`, `B.2`, `A.1.last` or `self-1`; None if the text is none.

    Args:
        text: what was written.
        slots: the slots that there are; None to take any word for one.
    """
    if match := re.fullmatch(r"self([+-]\d{1,9})?", text):
        return Role("self", offset=int(match[1] or 0))
    match = re.fullmatch(r"([A-Za-z_]\w*)(?:\.(\d{1,9}))?(?:\.(first|last))?", text)
    if match is None or (slots is not None and match[1] not in slots):
        return None
    return Role(match[1], None if match[2] is None else int(match[2]), match[3])


def _tokens(text: str, slots: Slots) -> tuple[Named, ...]:
    return tuple(_token(piece.strip(), slots) for piece in _split(text, ","))


def _token(text: str, slots: Slots) -> Named:
    if role := as_role(text, slots):
        return role
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except json.JSONDecodeError as error:
            raise QueryError(f"{text} is not a text in double quotes: {error.msg}") from error
    if not text or re.search(r"[\s{}\[\]]", text):
        raise QueryError(f"{text!r} does not name a token; use an index, a word, or a text in double quotes")
    return text


def _site_token(text: str, slots: Slots) -> Named:
    """A token of a site: an index, a text, or a slot in braces."""
    inner = re.fullmatch(r"\s*\{(.*)\}\s*", text)
    found = _token(inner[1].strip() if inner else text.strip(), slots)
    if isinstance(found, Role) and found.name == "self":
        raise QueryError(f"{text.strip()!r} is relative to a query, and a value inside the model has none")
    if inner and not isinstance(found, Role):
        raise QueryError(
            f"{text.strip()!r} names no slot: a value inside the model is read at an index, a text or a slot as {{A}}"
        )
    return found


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the pieces of a text between separators that are outside double quotes, braces and brackets."""
    pieces = re.split(r'("(?:[^"\\]|\\.)*")', text)
    if any('"' in piece for piece in pieces[::2]):
        raise QueryError(f"a double quote is not closed in {text!r}")
    depth, current = 0, ""
    for index, piece in enumerate(pieces):
        if index % 2:
            current += piece
            continue
        start = 0
        for at, letter in enumerate(piece):
            depth += (letter in "{[") - (letter in "}]")
            if depth == 0 and at >= start and piece.startswith(separator, at):
                yield current + piece[start:at]
                current, start = "", at + len(separator)
        current += piece[start:]
    if depth != 0:
        raise QueryError(f"brackets do not match in {text!r}")
    yield current
