"""Did-you-mean: what every message about an unknown name ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
"""Similarity from which a name counts as a likely slip of the pen (`difflib`'s own default)."""


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that was most likely meant, or None. Case never matters.

    >>> closest("batchsize", ["batch_size", "seed"])
    'batch_size'
    >>> closest("sgd", ["SGD", "Adam"])
    'SGD'
    >>> closest("zebra", ["SGD", "Adam"]) is None
    True
    """
    by_folded: dict[str, str] = {}
    for candidate in allowed:
        by_folded.setdefault(candidate.casefold(), candidate)
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=_CUTOFF)
    return by_folded[found[0]] if found else None


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
