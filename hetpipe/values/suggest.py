"""Did-you-mean: what every message about an unknown name ends with."""

from __future__ import annotations

from collections.abc import Iterable

_CHARACTERS_PER_SLIP = 4
"""Of a name with 3 to 6 characters one may be wrong, of one with 7 to 10 two, …: more is another word."""

_SEPARATORS = str.maketrans("", "", "_-. ")


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that was most likely meant, or None. Case and separators never matter.

    Likely is what a few slips of the pen turn into the other: a character left out, added or replaced, or two
    neighbours swapped, about one for every four characters of the longer name. So is a word
    of four characters or more that stands in one of the names alone, as `decay` in `weight_decay`. Another word with a
    similar beginning and end is not.

    >>> closest("batchsize", ["batch_size", "seed"])
    'batch_size'
    >>> closest("sgd", ["SGD", "Adam"])
    'SGD'
    >>> closest("precision", ["prediction", "seed"]) is None
    True
    """
    by_folded: dict[str, str] = {}
    for candidate in allowed:
        by_folded.setdefault(candidate.casefold(), candidate)
    given = name.casefold()
    plain = given.translate(_SEPARATORS)
    slips = {candidate: _slips(plain, candidate.translate(_SEPARATORS)) for candidate in by_folded}
    near = [
        candidate for candidate, count in slips.items() if count <= _allowed(plain, candidate.translate(_SEPARATORS))
    ]
    if near:
        # Of equally many slips the one that begins alike: the first character is rarely the wrong one.
        return by_folded[min(near, key=lambda candidate: (slips[candidate], candidate[:1] != given[:1]))]
    if len(given) < _CHARACTERS_PER_SLIP:
        return None
    words = set(given.split("_"))
    holding = [candidate for candidate in by_folded if words <= set(candidate.split("_"))]
    return by_folded[holding[0]] if len(holding) == 1 else None


def _allowed(one: str, other: str) -> int:
    shortest, longest = sorted((len(one), len(other)))
    # Of two characters none may be replaced: `n7` is not a misspelt `n0`.
    return (longest + 1) // _CHARACTERS_PER_SLIP or int(0 < shortest < longest)


def _slips(one: str, other: str) -> int:
    """Characters left out, added, replaced, and neighbours swapped, from one text to the other at least.

    That is the distance of Damerau and Levenshtein in which no place is edited twice.
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, character in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (character != wanted))
            if i > 1 and j > 1 and character == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def join_names(names: Iterable[str], conjunction: str = "or") -> str:
    """Names as a list in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b or c'
    """
    *head, last = list(names) or ["nothing"]
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Half a sentence that helps with the unknown `name`: the likely one, else all of them.

    >>> did_you_mean("momentm", ["lr", "momentum"])
    'did you mean `momentum`?'
    >>> did_you_mean("zebra", ["lr", "momentum"])
    'use lr or momentum'
    """
    candidates = sorted(allowed)
    likely = closest(name, candidates)
    return f"did you mean `{likely}`?" if likely else f"use {join_names(candidates)}"
