"""Files for exchange between people and programs: profiles, clusters, plans. All mistakes are reported at once.

A document is JSON or YAML; the models define what is valid, this module how a file is parsed into one. Mistakes within
one key are found by pydantic, contradictions between keys by the document's `contradictions`, which operates on plain
data and so also works on a file with other mistakes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hetpipe.errors import DocumentError
from hetpipe.values.problems import Path as KeyPath
from hetpipe.values.problems import Problem, problems_of, shown
from hetpipe.values.suggest import join_names
from hetpipe.values.yaml_text import YamlSyntaxError, parse_yaml


class Section(BaseModel):
    """Base of all document sections: frozen, unknown keys rejected, no type coercion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Document(Section):
    """Base of documents stored in a file of their own."""

    version: int = 1
    """Of the format; each document says which ones it reads."""

    #: Whether keys with their default value are written, too.
    WRITES_DEFAULTS: ClassVar[bool] = False

    @classmethod
    def contradictions(cls, value: Mapping[str, Any]) -> Iterator[Problem]:  # noqa: ARG003 - for the formats below
        """Contradictions between keys.

        Args:
            value: plain data with lists as tuples; parts may be missing or have a wrong type; these mistakes are
                reported elsewhere.
        """
        yield from ()

    @model_validator(mode="after")
    def _without_contradictions(self) -> Self:
        found = [str(problem) for problem in self.contradictions(self.model_dump())]
        if found:
            raise ValueError("; ".join(found))
        return self


DocumentT = TypeVar("DocumentT", bound=Document)


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The keys of nested plain data with their values, without those that are not set; lists are values.

    >>> dotted({"sync": {"D": 1}, "epochs": 2, "loss": None})
    {'sync.D': 1, 'epochs': 2}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= dotted(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def entries(value: object) -> Sequence[Any]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, tuple) else ()


def document_of(kind: type[DocumentT], value: object, *, what: str) -> DocumentT:
    """Validate plain data, as parsed from JSON or YAML, as a document.

    Args:
        kind: the document class.
        value: mappings, lists, numbers, text.
        what: the origin named in the error, for example the file.

    Raises:
        DocumentError: lists every mistake.
    """
    return _checked(kind, value, what=what, known=())


def parse_document(kind: type[DocumentT], text: str, *, what: str) -> DocumentT:
    """Parse a document from JSON or YAML text.

    Raises:
        DocumentError: lists every mistake.
    """
    try:
        value, repeated = _parsed(text, what)
        return _checked(kind, value, what=what, known=repeated)
    except RecursionError as error:
        raise DocumentError(what, ["is nested too deeply"]) from error


def read_document(kind: type[DocumentT], path: Path) -> DocumentT:
    """Read a document from the file `path`.

    Raises:
        DocumentError: the file cannot be read, or the document has mistakes, all of which are listed.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DocumentError(str(path), [f"cannot be read ({error.strerror}); give the path of a file"]) from error
    except UnicodeDecodeError as error:
        raise DocumentError(str(path), [f"is not UTF-8 text ({error.reason}); save it as UTF-8"]) from error
    return parse_document(kind, text, what=str(path))


def write_document(document: Document, path: Path) -> None:
    """Write `document` as JSON, replacing `path` atomically.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(to_json(document) + "\n", encoding="utf-8")
    temporary.replace(path)


def to_json(document: Document) -> str:
    """The JSON text of `document`, indented."""
    return json.dumps(to_plain(document), indent=2, ensure_ascii=False)


def to_yaml(document: Document) -> str:
    """The YAML text of `document`, without a newline at its end."""
    return yaml.safe_dump(to_plain(document), sort_keys=False, allow_unicode=True).rstrip("\n")


def to_plain(document: Document) -> dict[str, Any]:
    """Plain JSON data of `document`, the version first; keys with their default value only if the format wants them."""
    without = not document.WRITES_DEFAULTS
    return {"version": document.version, **document.model_dump(mode="json", exclude_defaults=without)}


def _checked(kind: type[DocumentT], value: object, *, what: str, known: Iterable[Problem]) -> DocumentT:
    """Validate `value` unless `known` already lists mistakes of its text."""
    problems = list(known)
    if not isinstance(value, Mapping):
        keys = join_names((name for name, field in kind.model_fields.items() if field.is_required()), "and")
        given = "is empty" if value is None else f"is {shown(value)}"
        raise DocumentError(what, [f"{given}; expected a mapping with the keys {keys}"])
    plain = _plain(value)
    try:
        document = kind.model_validate(plain)
    except ValidationError as error:
        contradictions = list(kind.contradictions(plain))
        # Of two mistakes of the same key the contradiction is more specific; the model-level error repeats them all.
        reported = {problem.path for problem in (*problems, *contradictions)} | ({()} if contradictions else set())
        problems += [problem for problem in problems_of(error, kind) if problem.path not in reported]
        problems += contradictions
    if problems:
        raise DocumentError(what, [str(problem) for problem in problems])
    return document


def _plain(value: object) -> Any:
    """Convert to JSON data: text keys, tuples for lists, and text for types that only YAML has (dates)."""
    if isinstance(value, Mapping):
        return {_text(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return tuple(_plain(entry) for entry in value)
    return value if value is None or isinstance(value, bool | int | float) else _text(value)


def _text(value: object) -> str:
    """Encodable text: JSON escapes may contain lone surrogates, which become question marks."""
    return str(value).encode(errors="replace").decode()


class _Object(dict[str, Any]):
    """A JSON object that records duplicate keys."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        made.repeated = tuple(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return made


def _repeated_below(value: object, path: KeyPath) -> Iterator[Problem]:
    if isinstance(value, _Object):
        for key in value.repeated:
            yield Problem((*path, key), "is given twice; keep one of them")
        for key, entry in value.items():
            yield from _repeated_below(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _repeated_below(entry, (*path, index))


def _parsed(text: str, what: str) -> tuple[Any, list[Problem]]:
    """Parse JSON or YAML text; returns the value and the duplicate keys."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        as_json = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
    else:
        return value, list(_repeated_below(value, ()))
    try:
        return parse_yaml(text)
    except YamlSyntaxError as error:
        if text.lstrip().startswith("{"):
            raise DocumentError(what, [f"{as_json}; expected JSON or YAML"]) from error
        where = f"line {error.line}: " if error.line is not None else ""
        raise DocumentError(what, [f"{where}{error}; expected JSON or YAML"]) from error
