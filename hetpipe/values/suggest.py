"""Did-you-mean suggestions for messages about unknown names."""

from __future__ import annotations

from collections.abc import Iterable

_CHARACTERS_PER_SLIP = 4
"""Allowed edit distance: one in a name of 3 to 6 characters, two in one of 7 to 10, and so on."""

_SEPARATORS = str.maketrans("", "", "_-. ")


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The most similar allowed name, or None. Case and separators are ignored.

    Names match if a few typing errors turn one into the other (a character omitted, added or replaced, or two
    neighbours swapped), about one for every four characters of the longer name. They also match if one is a whole word,
    of four characters or more, of the other, as `decay` of `weight_decay`. A different word with a similar beginning
    and end does not match.

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
        # Among equal distances prefer a common first character, which is rarely mistyped.
        return by_folded[min(near, key=lambda candidate: (slips[candidate], candidate[:1] != given[:1]))]
    if len(given) < _CHARACTERS_PER_SLIP:
        return None
    words = set(given.split("_"))
    holding = [candidate for candidate in by_folded if words <= set(candidate.split("_"))]
    return by_folded[holding[0]] if len(holding) == 1 else None


def _allowed(one: str, other: str) -> int:
    shortest, longest = sorted((len(one), len(other)))
    # In names of two characters no replacement is allowed: `n7` is not a misspelt `n0`.
    return (longest + 1) // _CHARACTERS_PER_SLIP or int(0 < shortest < longest)


def _slips(one: str, other: str) -> int:
    """Damerau-Levenshtein distance in the variant that edits no substring twice (optimal string alignment)."""
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
    """Join names to a list in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b or c'
    """
    *head, last = list(names) or ["nothing"]
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Hint for an unknown `name`, as the end of a message: the most similar name, else all of them.

    >>> did_you_mean("momentm", ["lr", "momentum"])
    'did you mean `momentum`?'
    >>> did_you_mean("zebra", ["lr", "momentum"])
    'use lr or momentum'
    """
    candidates = sorted(allowed)
    likely = closest(name, candidates)
    return f"did you mean `{likely}`?" if likely else f"use {join_names(candidates)}"
