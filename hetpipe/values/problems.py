"""Conversion of pydantic's errors to messages that name the fix.

A `Problem` is one mistake: its location (`workers.stages[1][0]`, as the user would write it) and the fix. This module
only words the messages; validity is defined by the models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from hetpipe.values.suggest import closest, did_you_mean, join_names

#: Keys and list positions from the root of the job.
Path = tuple[str | int, ...]

_NOUNS: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
}
_PHRASES: Mapping[str, str] = {
    "finite_number": "must be a finite number, not {value}",
    "too_long": "must have {max_length} entries, not {actual_length}",
}
_MAX_SHOWN_CHARACTERS = 60
_ELSEWHERE = "elsewhere"
"""Type of an error that carries problems with paths of their own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a job: `str()` gives `path: what is wrong; how to fix it`."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{format_path(self.path)}: {self.message}" if self.path else self.message


def format_path(path: Path) -> str:
    """Format a path as the user would write it.

    >>> format_path(("workers", "stages", 1, 0))
    'workers.stages[1][0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def refusal(problems: Iterable[Problem]) -> PydanticCustomError:
    """The error with which a validator of any key reports `problems`, whose paths start at the root (`problems_of`)."""
    return PydanticCustomError(_ELSEWHERE, "several keys contradict each other", {"problems": tuple(problems)})


def is_tag(part: str | int) -> bool:
    """Whether `part` of a pydantic location names a branch of a union (`<…>` by convention) and not a key."""
    return isinstance(part, str) and part.startswith("<")


def shown(value: object) -> str:
    """Format a value for a message: short, and distinguishing text from numbers."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"the text {value!r}" if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def model_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model of the mapping at `path`, or None for free keys (`metrics`) and values that are not mappings."""
    current: type[BaseModel] | None = root
    names_entries = False
    for part in path:
        if isinstance(part, int) or is_tag(part):
            continue
        if names_entries:
            names_entries = False
            continue
        field = current.model_fields.get(part) if current is not None else None
        current = next(_models_in(field.annotation), None) if field is not None else None
        names_entries = field is not None and _maps_to_models(field.annotation)
    return current


def _maps_to_models(annotation: Any) -> bool:
    """Whether a value of this type is a mapping with free keys, whose values are models."""
    if get_origin(annotation) is dict:
        return next(_models_in(annotation), None) is not None
    return any(_maps_to_models(argument) for argument in get_args(annotation))


def field_at(root: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field at `path`, or None for a list entry, a free key or an unknown one."""
    owner = model_at(root, path[:-1]) if path and isinstance(path[-1], str) else None
    return owner.model_fields.get(str(path[-1])) if owner is not None else None


def unknown_key(root: type[BaseModel], path: Path) -> Problem:
    """The problem of a key that the enclosing mapping does not have."""
    owner = model_at(root, path[:-1])
    allowed = list(owner.model_fields) if owner is not None else []
    return Problem(path, f"unknown key; {did_you_mean(str(path[-1]), allowed)}")


def _example(root: type[BaseModel], path: Path) -> str:
    field = field_at(root, path)
    if field is None or not field.examples:
        return ""
    return f", for example `{path[-1]}: {field.examples[0]}`"


def _fix(kind: str, value: object, example: str) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return f"; write a number without quotes{example}"
        return "; remove the quotes"
    return f"; write {_NOUNS[kind]}{example}" if example else ""


def _message(root: type[BaseModel], path: Path, error: Mapping[str, Any]) -> str:
    kind, value, context = str(error["type"]), error["input"], error.get("ctx", {})
    example = _example(root, path)
    if kind == "missing":
        return f"is missing; add it{example}"
    if kind in _NOUNS:
        return f"must be {_NOUNS[kind]}, not {shown(value)}{_fix(kind, value, example)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}, not {shown(value)}"
    if kind in _PHRASES:
        return _PHRASES[kind].format(value=shown(value), **context)
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        likely = closest(value, allowed) if isinstance(value, str) else None
        question = f" (did you mean `{likely}`?)" if likely and likely != value else ""
        return f"must be {join_names(allowed)}{question}, not {shown(value)}"
    return str(context.get("error", error["msg"]))


def _keys(location: Sequence[str | int]) -> Path:
    """The user's keys within a pydantic location."""
    return tuple(part for part in location if not is_tag(part) and part != "[key]")


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Every mistake that pydantic found in a `root`, in its order, one problem per mistake.

    A misspelt key is reported only as unknown, and not also as missing.
    """
    unknown: list[Problem] = []
    others: list[tuple[str, Problem]] = []
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            # The last part is a user's key, even if it looks like a tag.
            *above, key = item["loc"]
            unknown.append(unknown_key(root, (*_keys(above), key)))
        elif item["type"] == _ELSEWHERE:
            others += [(_ELSEWHERE, problem) for problem in item["ctx"]["problems"]]
        else:
            path = _keys(item["loc"])
            others.append((item["type"], Problem(path, _message(root, path, item))))
    meant: set[Path] = set()
    for problem in unknown:
        owner = model_at(root, problem.path[:-1])
        likely = closest(str(problem.path[-1]), owner.model_fields) if owner is not None else None
        if likely:
            meant.add((*problem.path[:-1], likely))
    absent = ("missing", "absent")
    return [problem for kind, problem in others if not (kind in absent and problem.path in meant)] + unknown
