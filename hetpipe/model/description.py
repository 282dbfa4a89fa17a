"""The description of a cut as JSON: the inspection records the model once, and every stage loads the result.

It consists of names, numbers and structure only. Types and functions are written as names, which are resolved among the
modules that the model's own code has imported; nothing is imported or called to resolve them. If one has no such name
(a class inside a function), each stage records the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hetpipe.model.calls import CustomFunction
from hetpipe.model.cut_model import CutDescription, ModeDescription, ModelLayer, Signature
from hetpipe.model.draws import drawing_functions
from hetpipe.model.graph import Crossing, CutPoint
from hetpipe.model.structure_text import NotDescribable, imported, plain_skeleton, skeleton_of, type_name, type_of

#: Start of the name of a function of `random` or NumPy.
_DRAW = "draw "

#: Start of the name of a custom `torch.autograd.Function`.
_APPLY = "apply "

#: Modules that define torch's functions: a function mode receives functions of these.
_TORCHS = {
    "torch": torch,
    "Tensor": Tensor,
    "functional": torch.nn.functional,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "nn": torch._C._nn,  # noqa: SLF001 - its only name
}


def to_plain(description: CutDescription) -> dict[str, Any]:
    """Convert to JSON values.

    Raises:
        NotDescribable: a type or function has no name.
    """
    return {
        "signature": asdict(description.signature),
        "floating": description.floating,
        "layers": [asdict(layer) for layer in description.layers],
        "training": _plain_mode(description.training),
        "evaluation": _plain_mode(description.evaluation),
        "decisions": description.decisions,
        "rewritten": description.rewritten,
        "assigned": description.assigned,
    }


def from_plain(plain: Mapping[str, Any]) -> CutDescription:
    """Convert from the result of `to_plain`, once the model's code is imported.

    Raises:
        NotDescribable: the name of a type or function does not resolve.
        KeyError, TypeError, ValueError: `plain` is not a description.
    """
    return CutDescription(
        Signature(tuple(plain["signature"]["keys"]), is_mapping=plain["signature"]["is_mapping"]),
        tuple(plain["floating"]),
        tuple(
            ModelLayer(
                layer["name"],
                *(tuple(layer[key]) for key in ("parameters", "frozen", "buffers", "reads", "modules")),
            )
            for layer in plain["layers"]
        ),
        _mode(plain["training"]),
        _mode(plain["evaluation"]),
        tuple(plain["decisions"]),
        tuple(plain["rewritten"]),
        tuple(plain["assigned"]),
    )


def _plain_mode(mode: ModeDescription) -> dict[str, Any]:
    return {
        # Pairs, because the order is significant.
        "skeletons": [[key, plain_skeleton(skeleton)] for key, skeleton in mode.skeletons.items()],
        "open_paths": sorted(mode.open_paths),
        "watched_paths": sorted(mode.watched_paths),
        "normalised": sorted(mode.normalised),
        "drawing_paths": sorted(mode.drawing_paths),
        "drawing_functions": sorted(map(_function_name, mode.drawing_functions)),
        "seeded_after": dict(mode.seeded_after),
        "left": dict(mode.left),
        "cuts": [asdict(cut) for cut in mode.cuts],
    }


def _mode(plain: Mapping[str, Any]) -> ModeDescription:
    return ModeDescription(
        {key: skeleton_of(skeleton) for key, skeleton in plain["skeletons"]},
        frozenset(plain["open_paths"]),
        frozenset(plain["watched_paths"]),
        frozenset((key, leaf) for key, leaf in plain["normalised"]),
        frozenset(plain["drawing_paths"]),
        frozenset(map(_function, plain["drawing_functions"])),
        plain["seeded_after"],
        {key: tuple((path, name) for path, name in left) for key, left in plain["left"].items()},
        tuple(map(_cut, plain["cuts"])),
    )


def _cut(plain: Mapping[str, Any]) -> CutPoint:
    crossing = tuple(
        Crossing(
            each["name"],
            tuple((key, leaf) for key, leaf in each["places"]),
            each["dtype"],
            each["num_bytes"],
            each["has_gradient"],
            tuple(tuple((key, leaf) for key, leaf in places) for places in each["others"]),
        )
        for each in plain["crossing"]
    )
    return CutPoint(
        plain["key"],
        plain["label"],
        plain["order"],
        tuple(plain["around"]),
        crossing,
        plain["reason"],
        plain["draw"],
    )


# -- functions -------------------------------------------------------------------------------------------------------


def _function_names(function: Any) -> Iterator[str]:
    name = getattr(function, "__name__", "")
    for place, owner in _TORCHS.items():
        if getattr(owner, name, None) == function:
            yield f"{place}.{name}"
    yield from (f"{_DRAW}{each}" for each, draw in drawing_functions().items() if draw == function)
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", name)
    if module and imported(f"{module}:{path}") == function:
        yield f"{module}:{path}"


def _function_name(function: Any) -> str:
    if isinstance(function, CustomFunction):
        return f"{_APPLY}{type_name(function.kind)}"
    found = next(_function_names(function), None)
    if found is None:
        raise NotDescribable(f"the function {function!r:.80}, which draws random numbers")
    return found


def _function(name: str) -> Any:
    if name.startswith(_APPLY):
        return CustomFunction(type_of(name.removeprefix(_APPLY)))
    if name.startswith(_DRAW):
        found = drawing_functions().get(name.removeprefix(_DRAW))
        if found is None:
            raise NotDescribable(f"the function {name.removeprefix(_DRAW)}, whose module is not imported")
        return found
    place, _, attribute = name.partition(".")
    found = imported(name) if ":" in name else getattr(_TORCHS[place], attribute, None)
    if not callable(found):
        raise NotDescribable(f"the function {name}, which cannot be resolved by this name")
    return found
