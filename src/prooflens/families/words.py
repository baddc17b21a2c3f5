"""Built-in lists of words for slots: names, places, objects, colours, numbers.

Every word begins with a space, as tokens inside a sentence do. A family keeps those that are one token of its model in
every place of their slot, so a list is a little shorter in one model than in another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WordList:
    """A built-in list: a family keeps the words that are single tokens of its model.

    Attributes:
        name: how the command line calls it.
        words: the words, each with a space before it.

    Example:
        >>> len(COLOURS.words) > 10, COLOURS.words[0]
        (True, ' red')
    """

    name: str
    words: tuple[str, ...]


def _list(name: str, text: str) -> WordList:
    return WordList(name, tuple(f" {word}" for word in text.split()))


NAMES = _list(
    "names",
    """Mary John Alice Tom Kate James Robert Michael William David Richard Joseph Thomas Charles Daniel Matthew Anthony
    Mark Paul Steven Andrew Kenneth Joshua Kevin Brian George Edward Ronald Timothy Jason Jeffrey Ryan Jacob Gary
    Nicholas Eric Jonathan Stephen Larry Justin Scott Brandon Benjamin Samuel Gregory Frank Alexander Raymond Patrick
    Jack Dennis Jerry Tyler Aaron Jose Adam Nathan Henry Peter Kyle Walter Simon Luke Martin Oliver Harry Lewis Max
    Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Lisa Nancy Margaret Sandra Ashley Emily Donna
    Michelle Carol Amanda Melissa Deborah Stephanie Rebecca Laura Helen Amy Anna Angela Ruth Virginia Catherine
    Christine Rachel Julia Emma Diana Maria Jane Rose Lucy Grace Charlotte Sophie Victoria Claire Ellen Martha Sam Ben
    Joe Bob Bill Jim Mike Dan Steve Chris Alex Nick Tim Fred Roger Leo Ian Jean Louis Philip""",
)
PLACES = _list(
    "places",
    """store park school office station hospital beach garden market library restaurant museum church hotel house farm
    city village river forest mountain theater airport bank bridge factory kitchen lake shop street""",
)
OBJECTS = _list(
    "objects",
    """drink book ring ball letter phone key gift box cup bag watch card map flower picture knife hat coat shirt apple
    bottle basket camera pen ticket toy chair lamp plate""",
)
COLOURS = _list(
    "colours",
    "red blue green yellow black white brown orange purple pink gray grey silver gold golden violet",
)
NUMBERS = _list(
    "numbers",
    """one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty sixty hundred
    thousand""",
)

BUILT_IN = {known.name: known for known in (NAMES, PLACES, OBJECTS, COLOURS, NUMBERS)}
"""The built-in lists by name."""
