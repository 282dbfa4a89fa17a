"""YAML parser that also reports mistakes visible only in the text: syntax errors and duplicate keys.

PyYAML's safe loader, with one repair: `1e-3` is a number (YAML 1.1 wants `1.0e-3` and would read it as text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from hetpipe.values.problems import Path, Problem

#: Maximum number of values in a document with aliases expanded; nine lists of ten aliases each would expand to a
#: billion.
MAX_VALUES = 200_000

_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*)?\.?[0-9]+[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class YamlSyntaxError(ValueError):
    """The text is not YAML. `line` counts from 1."""

    def __init__(self, reason: str, line: int | None) -> None:
        super().__init__(reason)
        self.line = line


def parse_yaml(text: str) -> tuple[Any, list[Problem]]:
    """Parse the only document in `text`; returns its value (None when empty) and the duplicate keys.

    Of duplicate keys the last one is used in the value.

    Raises:
        YamlSyntaxError: the text is not a single YAML document.
    """
    try:
        return _parsed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlSyntaxError(error.problem or "cannot be read", mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise YamlSyntaxError("is nested too deeply", None) from error
    except (yaml.YAMLError, ValueError) as error:
        raise YamlSyntaxError(" ".join(str(error).split()), None) from error
    except (LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML's own error for explicit tags with an invalid value, such as `!!bool maybe`.
        raise YamlSyntaxError("a value does not match its tag; remove the tag", None) from error


def _parsed(text: str) -> tuple[Any, list[Problem]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        if _num_values(node, {}) > MAX_VALUES:
            raise YamlSyntaxError(f"expands to more than {MAX_VALUES} values; use fewer lists, keys or aliases", None)
        problems = list(_problems_below(node, (), ()))
        return loader.construct_document(node), problems
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values below `node` with aliases expanded; computed without expanding, as that may never end."""
    number = known.get(id(node))
    if number is not None:
        return number
    known[id(node)] = 1  # of a value that contains itself, which is reported later
    below: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        below = node.value
    elif isinstance(node, yaml.MappingNode):
        below = [part for pair in node.value for part in pair]
    number = known[id(node)] = 1 + sum(_num_values(part, known) for part in below)
    return number


def _problems_below(node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> Iterator[Problem]:
    if node in above:
        raise yaml.MarkedYAMLError(problem="a value contains itself", problem_mark=node.start_mark)
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            yield from _problems_below(entry, (*path, index), above)
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
        line = key.start_mark.line + 1
        if key.tag != _MERGE_TAG and key.value in first_lines:
            lines = f"lines {first_lines[key.value]} and {line}"
            yield Problem((*path, key.value), f"is given twice, on {lines}; keep one of them")
        first_lines.setdefault(key.value, line)
        yield from _problems_below(value, (*path, key.value), above)
