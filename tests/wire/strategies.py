"""Values of any dataclass that travels, made from the types of its fields: every one is set, and within its bounds."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from hetpipe.values.plan import DTYPE_BYTES

_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=["Cs"]), max_size=8)
_NAME = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
_INTEGER = st.integers(1, 1_000)

#: What stands for a type that is only a name, and for fields that hold more than their type says.
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {"JobId": _NAME, "MemberId": _NAME}
_BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "MemberInfo.host": _NAME,
    "MemberInfo.address": st.just("h:7000"),
    "MemberInfo.shard_index": st.integers(0, 63),
    "AgentDevice.device": st.just("n0/0"),
    "AgentDevice.type": _NAME,
    "AgentDevice.torch_device": st.sampled_from(["cpu", "cuda:3"]),
    "LinkAwaited.address": st.just("h:7000"),
    "TensorSpec.dtype": st.sampled_from(list(DTYPE_BYTES)),
    "InspectCommand.job_json": st.just('{"model": "m:f"}'),
    "Submission.job_json": st.just('{"model": "m:f"}'),
}


def values_of(kind: Any, where: str = "") -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one per kind of type
    """Values of a type."""
    if where in _BY_FIELD:
        return _BY_FIELD[where]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values_of(arguments[0], where)
    if hasattr(kind, "__supertype__"):
        return _BY_NAME.get(kind.__name__, values_of(kind.__supertype__, where))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0], where), min_size=1, max_size=2).map(tuple)
        return st.tuples(*(values_of(argument, where) for argument in arguments))
    if origin is dict and arguments[1] is Any:
        return st.just({"a": [1, 2.5, None], "b": {"c": "ä"}})
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), min_size=1, max_size=2)
    if arguments and (origin is Union or type(kind).__name__ == "UnionType"):
        return st.one_of(*(values_of(argument, where) for argument in arguments if argument is not type(None)))
    return _of_class(kind)


def _of_class(kind: Any) -> st.SearchStrategy[Any]:
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        given = {
            field.name: values_of(hints[field.name], f"{cast('type', kind).__name__}.{field.name}")
            for field in fields(kind)
        }
        return st.builds(cast("Any", kind), **given)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return {
        bool: st.booleans(),
        int: _INTEGER,
        float: st.floats(0.5, 1e6),
        str: _TEXT,
        bytes: st.binary(max_size=8),
        type(None): st.none(),
    }[kind]
