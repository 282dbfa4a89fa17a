"""What of PromQL can be checked without Prometheus: which metrics, labels and functions an expression names.

A tokenizer, not a parser: expressions that are wrong otherwise pass. It knows the functions that hetpipe's own
dashboard and alerts use; a new one is added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = {"changes", "histogram_quantile", "increase", "max", "min_over_time", "rate", "sum"}
#: Functions of counters.
OF_COUNTERS = {"increase", "rate"}
_GROUPING = {"by", "group_left", "group_right", "ignoring", "on", "without"}
_WORDS = {"and", "bool", "inf", "nan", "offset", "or", "unless"}

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")
      | (?P<range>\[[^\]]*\])
      | (?P<number>\d+(?:\.\d+)?)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])
      | (?P<space>\s+)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric as an expression names it."""

    name: str
    matched: dict[str, str]
    """Label → what it is compared with, quotes off."""
    function: str
    """What it is the direct argument of; empty: none."""


@dataclass(slots=True)
class Expression:
    """What an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)
    """Labels of `by`, `on` and the like."""


def read_expression(text: str) -> Expression:
    """Take `text` apart.

    Raises:
        ValueError: it has an unknown function, a character that means nothing, or brackets that do not match.
    """
    tokens = list(_tokens(text))
    _check_brackets(tokens)
    found = Expression()
    position = 0
    while position < len(tokens):
        position = _take(tokens, position, found)
    return found


def _check_brackets(tokens: list[str]) -> None:
    closing: list[str] = []
    for token in tokens:
        if token in _CLOSING:
            closing.append(_CLOSING[token])
        elif token in _CLOSING.values() and (not closing or closing.pop() != token):
            raise ValueError(f"{token} closes nothing: {' '.join(tokens)}")
    if closing:
        raise ValueError(f"{closing[-1]} is missing: {' '.join(tokens)}")


_CLOSING = {"(": ")", "{": "}"}


def _take(tokens: list[str], position: int, found: Expression) -> int:
    """Take the token at `position` and what belongs to it; the position after it."""
    token, following = tokens[position], tokens[position + 1] if position + 1 < len(tokens) else ""
    if not re.fullmatch(r"[a-zA-Z_:]\w*", token) or token.lower() in _WORDS:
        return position + 1
    if token in _GROUPING:
        end = tokens.index(")", position)
        found.grouping.update(name for name in tokens[position + 2 : end] if name != ",")
        return end + 1
    if following == "(" or following in _GROUPING:
        if token not in FUNCTIONS:
            raise ValueError(f"unknown function {token}")
        return position + 1
    matched, end = _matchers(tokens, position + 1)
    before = tokens[position - 2] if position >= 2 and tokens[position - 1] == "(" else ""
    found.selectors.append(Selector(token, matched, before if before in FUNCTIONS else ""))
    return end


def _matchers(tokens: list[str], position: int) -> tuple[dict[str, str], int]:
    """The matchers that begin at `position`, if any do, and the position after them."""
    if position >= len(tokens) or tokens[position] != "{":
        return {}, position
    end = tokens.index("}", position)
    inside = [token for token in tokens[position + 1 : end] if token != ","]
    if len(inside) % 3:
        raise ValueError(f"no matchers: {inside}")
    return {inside[i]: inside[i + 2].strip('"') for i in range(0, len(inside), 3)}, end + 1


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:]!r} means nothing")
        position = match.end()
        if match.lastgroup not in {"space", "range"}:
            yield match.group()
