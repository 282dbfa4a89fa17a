"""From the user's model and one minibatch to the chain of layers that stages share, and to the loss behind it.

A model that says itself how it is cut (`nn.Sequential`, `layers()`) is taken at its word; any other one is cut by its
own forward (`hetpipe.model`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.errors import CallableError
from hetpipe.model.cut_model import CutModel, Signature, whole_output
from hetpipe.model.user_errors import place_of_function
from hetpipe.pipeline.callables import LossFunction
from hetpipe.pipeline.chain import Layer, chain_of, cut_chain
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.seeds import preserved_generators


def says_its_layers(model: nn.Module) -> bool:
    """Whether the model gives its layers itself."""
    layers = getattr(model, "layers", None)
    return isinstance(model, nn.Sequential) or (callable(layers) and not isinstance(layers, nn.Module))


def layers_of(
    model: nn.Module, example: Batch, loss: LossFunction | None, *, splits_ties: bool = True
) -> tuple[Layer, ...]:
    """The chain of `model`, which is left in the mode in which it trains.

    Every process that makes it from the same model and example gets the same one.

    Args:
        model: as the user's callable returned it.
        example: a minibatch, or a few samples of one.
        loss: the job's; None: the model computes it.
        splits_ties: allow cuts between the uses of one weight. Where weights are predicted there must be none: what
            came to the later use would be what was predicted, and its backward shall read the current weights.

    Raises:
        CallableError: the model cannot be cut, or takes other minibatches.
    """
    if says_its_layers(model):
        if example.keys is not None:
            raise CallableError(
                f"data.train: samples are mappings ({', '.join(example.keys)}), and {type(model).__name__} is a chain, "
                "whose first layer takes tensors by position; return pairs ((tensor, …), target)"
            )
        if loss is None:
            raise CallableError(
                f"loss: is not given, and {type(model).__name__} is a chain of layers, which computes none; name one, "
                "for example `loss: torch.nn.functional:cross_entropy`"
            )
        return chain_of(model)
    keys = example.keys
    signature = Signature(keys or tuple(map(str, range(len(example.inputs)))), is_mapping=keys is not None)
    _check_arguments(model, signature)
    with preserved_generators(), torch.enable_grad():
        return cut_chain(
            model,
            signature,
            example.inputs,
            results_of=own_loss if loss is None else whole_output,
            splits_ties=splits_ties,
        )


def _check_arguments(model: nn.Module, signature: Signature) -> None:
    """Refuse samples that are no arguments of the model.

    Raises:
        CallableError: it needs one that they lack, or they have one that it does not take.
    """
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # of a compiled forward, which tells when it is called
    keys, named = signature.keys, signature.is_mapping
    try:
        takes.bind(*(() if named else keys), **(dict.fromkeys(keys) if named else {}))
    except TypeError:
        pass
    else:
        return
    who = f"{type(model).__name__}.forward"
    where = place_of_function(model.forward)
    parameters = [p for p in takes.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty]
    if not named:
        given = f"{len(keys)} input{'s' if len(keys) > 1 else ''}"
        raise CallableError(
            f"data.train: samples have {given}, but {who} takes {', '.join(p.name for p in parameters) or 'none'}"
            f"{where}; return pairs ((tensor, …), target) with one tensor for each of {', '.join(needed) or 'these'}, "
            "or mappings of its arguments by name"
        )
    lacking = [name for name in needed if name not in keys]
    if lacking:
        raise CallableError(
            f"data.train: samples are mappings of {', '.join(keys)}, but {who} needs `{lacking[0]}` as well{where}; "
            f"give every sample an entry `{lacking[0]}`, or the argument a default"
        )
    taken = {p.name for p in parameters}
    unknown = next(key for key in keys if key not in taken)
    raise CallableError(
        f"data.train: samples have an entry `{unknown}`, which {who} does not take{where}: it takes "
        f"{', '.join(p.name for p in parameters)}; leave it out of the samples, or give it the name of an argument"
    )


def why_one_layer(cut: CutModel) -> str:
    """Why a model has no cuts, as a predicate: `cannot be cut: …`."""
    survey = cut.survey
    reasons = survey.whole or tuple(each.reason for each in survey.cuts if each.reason)
    if reasons:
        return f"cannot be cut: {reasons[0]}"
    return (
        "cannot be cut: it calls only one module or function"
        if not survey.cuts
        else "has no cut that is worth its bytes"
    )


def own_loss(output: Any) -> Tensor:
    """The loss that a model has computed itself.

    Raises:
        CallableError: there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    has_key = "loss" in output if isinstance(output, Mapping) else hasattr(output, "loss")
    if found is None and has_key:
        raise CallableError(
            f"loss: is not given, and the model's output ({type(output).__name__}) has `loss: None`: it computes one "
            "only where it is given what to compare with; add its `labels` to every sample of `data.train`, or name a "
            "loss, for example `loss: model:loss`"
        )
    if not isinstance(found, Tensor):
        raise CallableError(
            f"loss: is not given, and the model's output ({type(output).__name__}) has no tensor `loss`; name a loss, "
            "or give the model what it computes one from, as `labels`"
        )
    return found


class OutputFunction:
    """A loss or metric on what a cut model really returned, of which only the tensors came out of its last layer."""

    def __init__(self, cut: CutModel, function: LossFunction | None) -> None:
        """Call `function` with (output, target); None: take the model's own loss."""
        self._cut = cut
        self._function = function

    def __call__(self, _: Any, target: Any) -> object:
        """Of the model's last forward."""
        output = self._cut.output
        return own_loss(output) if self._function is None else self._function(output, target)


def on_output(chain: tuple[Layer, ...], function: LossFunction | None) -> LossFunction:
    """What stages call with (output, target) instead of the job's loss or metric."""
    cut = chain[0].cut
    if cut is not None:
        return OutputFunction(cut, function)
    assert function is not None, "a chain has a loss"
    return function
