"""Tensors that a layer uses without registering them, found in its graph and in its modules' attributes.

A stage puts weights in the places where modules register parameters (`chain.weights_in_place`). A weight that a layer
reads from elsewhere, such as a plain list or a closure, is not the one being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from hetpipe.pipeline.chain import Layer, Values

#: Attributes that torch itself keeps in every module, and in recurrent ones to detect replaced parameters.
_TORCHS_OWN = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}

#: Maximum depth of nested containers.
_DEEPEST = 4


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Leaf tensors that require a gradient in the graph of `outputs`."""
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Node] = set()
    found: dict[int, Tensor] = {id(output): output for output in outputs if output.is_leaf and output.requires_grad}
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        ahead += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def strangers(outputs: Values, weights: Mapping[str, Tensor], inputs: Values) -> list[Tensor]:
    """Leaves of the graph of `outputs` that are neither weights nor inputs of the layer."""
    known = {id(weight) for weight in weights.values()}
    storages = {value.untyped_storage().data_ptr() for value in inputs}
    return [
        leaf
        for leaf in leaves_behind(outputs)
        if id(leaf) not in known and leaf.untyped_storage().data_ptr() not in storages
    ]


def unregistered_paths(layer: Layer, wanted: Callable[[Tensor], bool]) -> list[str]:
    """Python expressions for the unregistered tensors that the modules of `layer` hold."""
    prefix = layer.name
    found: list[str] = []
    for name, module in layer.module.named_modules():
        path = ".".join(part for part in (prefix, name) if part)
        for attribute, value in vars(module).items():
            if attribute not in _TORCHS_OWN:
                found += [where for where, tensor in _tensors(value, f"{path}.{attribute}", 0) if wanted(tensor)]
        forward = vars(module).get("forward", type(module).forward)
        if isinstance(forward, FunctionType):
            found += [where for where, tensor in _tensors(forward, f"{path}.forward", 0) if wanted(tensor)]
    return found


def _tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `value`, with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if depth == _DEEPEST:
        return
    for where, part in _parts(value):
        yield from _tensors(part, f"{path}{where}", depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case nn.Module():
            yield from ((f".{name}", parameter) for name, parameter in value.named_parameters())
        case list() | tuple():
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
        case set() | frozenset():
            yield from (("{…}", item) for item in value)
        case dict():
            yield from ((f"[{key!r}]", item) for key, item in value.items())
        case partial():
            yield from _parts([value.func, *value.args])
            yield from _parts(value.keywords)
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType():
            yield from _names_in(value)


def _names_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Closure variables of a function, and the globals that it refers to."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not yet bound
            yield f"({name})", cell.cell_contents
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Tensor | nn.Module | list | tuple | dict):
            yield f"({name})", value
