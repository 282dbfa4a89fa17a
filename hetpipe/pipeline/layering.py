"""Construction of the chain of layers, and of the loss after it, from the user's model and one minibatch.

A model that defines its layers (`nn.Sequential`, `layers()`) is cut accordingly; any other one by its own forward
(`hetpipe.model`).
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.model.cut_model import CutModel, Signature, whole_output
from hetpipe.model.user_errors import place_of_function
from hetpipe.pipeline.callables import (
    LossFunction,
    MapDataset,
    WeightedLosses,
    build_train_data,
    load_loss,
    own_loss,
)
from hetpipe.pipeline.chain import Layer, chain_of, cut_chain
from hetpipe.pipeline.data import Batch, example_of
from hetpipe.pipeline.seeds import preserved_generators
from hetpipe.values.policies import POLICIES
from hetpipe.values.precision import Precision


def defines_layers(model: nn.Module) -> bool:
    """Whether the model defines its layers: by a method `layers()`, or as an `nn.Sequential`.

    A sequential model with a forward of its own, or whose entries share a parameter, is cut by its forward instead.
    """
    layers = getattr(model, "layers", None)
    if callable(layers) and not isinstance(layers, nn.Module):
        return True
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and not _has_ties(model)


def _has_ties(model: nn.Sequential) -> bool:
    used = [{id(parameter) for parameter in entry.parameters()} for entry in model]
    return sum(map(len, used)) > len(set().union(*used))


def layers_of(
    model: nn.Module,
    example: Batch,
    loss: LossFunction | None,
    *,
    splits_ties: bool = True,
    precision: Precision = "fp32",
) -> tuple[Layer, ...]:
    """The chain of `model`, which is set to its training mode.

    Deterministic: every process that builds the same model and example gets the same chain.

    Args:
        model: the model as returned by the user's callable.
        example: a minibatch, or a few samples of one.
        loss: the job's loss; None if the model computes it.
        splits_ties: allow cuts between the uses of one weight (`Policy.splits_ties`).
        precision: what the layers compute in.

    Raises:
        CallableError: the model cannot be cut, or does not accept such minibatches.
    """
    _check_kinds(model)
    if defines_layers(model):
        if example.keys is not None:
            raise CallableError(
                f"data.train: samples are mappings ({', '.join(example.keys)}), and {type(model).__name__} is a chain, "
                "whose first layer takes tensors by position; return pairs ((tensor, …), target)"
            )
        if loss is None:
            raise CallableError(
                f"loss: is not set, and {type(model).__name__} is a chain of layers, which computes none; name one, "
                "for example `loss: torch.nn.functional:cross_entropy`"
            )
        own = loss.computed_by_model if isinstance(loss, WeightedLosses) else None
        if own is not None:
            raise CallableError(
                f"loss.{own}: has no `call`, and {type(model).__name__} is a chain of layers, which computes no loss; "
                f"name one, for example `loss: {{{own}: {{call: model:loss}}}}`"
            )
        return chain_of(model, precision=precision)
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
            precision=precision,
        )


def layers_of_job(job: Job, import_path: Path, model: nn.Module, train: MapDataset | None = None) -> tuple[Layer, ...]:
    """The chain of a job's model; all processes of a job cut it by the same samples.

    Args:
        job: the job.
        import_path: the first folder to import user code from.
        model: the job's, as built.
        train: the job's training data, built if needed and not given.

    Raises:
        CallableError: the user's code cannot be used.
    """
    if defines_layers(model):
        return chain_of(model, precision=job.precision)
    example = example_of(job, build_train_data(job, import_path) if train is None else train)
    splits_ties = POLICIES[job.weights].splits_ties
    return layers_of(model, example, load_loss(job, import_path), splits_ties=splits_ties, precision=job.precision)


def _check_kinds(model: nn.Module) -> None:
    """Check that layers can be made of the model's modules and tensors.

    Raises:
        CallableError: one of them is compiled, or a tensor is sparse.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CallableError(
            f"model: is a {type(model).__name__}, whose forward torch.jit has compiled as a whole, with its weights; "
            "return the module that was scripted or traced, and script parts of it at most"
        )
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and imported where it was used
    compiled: Any = getattr(dynamo, "OptimizedModule", ())
    for name, module in model.named_modules():
        if isinstance(module, compiled) or module._compiled_call_impl is not None:  # noqa: SLF001 - its only name
            who = f"module {name}" if name else "the model"
            raise CallableError(
                f"model: {who} is compiled by torch.compile, which would compile it again for each version of the "
                "weights; return the model uncompiled"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise CallableError(
                f"model: {name} is sparse ({tensor.layout}), which links and checkpoints do not support; "
                "register its indices and values, or keep it dense (to_dense()), and make it sparse in the forward"
            )


def _check_arguments(model: nn.Module, signature: Signature) -> None:
    """Check that the samples are valid arguments of the model.

    Raises:
        CallableError: a required argument is missing, or an entry is not an argument.
    """
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # a compiled forward, which reports mismatches when it is called
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
    """The reason why a model has no cuts, as a predicate: `cannot be cut: …`."""
    survey = cut.survey
    reasons = survey.whole or tuple(each.reason for each in survey.cuts if each.reason)
    if reasons:
        return f"cannot be cut: {reasons[0]}"
    return (
        "cannot be cut: it calls only one module or function"
        if not survey.cuts
        else "has no cut that is worth its bytes"
    )


class OutputFunction:
    """A loss or metric on the complete output of a cut model, of which its last layer returns only the tensors."""

    def __init__(self, cut: CutModel, function: LossFunction | None) -> None:
        """Call `function` with (output, target); None selects the model's own loss."""
        self._cut = cut
        self._function = function

    def __call__(self, _: Any, target: Any) -> object:
        """Apply the function to the output of the model's last forward."""
        output = self._cut.output
        return own_loss(output) if self._function is None else self._function(output, target)


def on_output(chain: tuple[Layer, ...], function: LossFunction | None) -> LossFunction:
    """The function that stages call with (output, target) in place of the job's loss or metric."""
    cut = chain[0].cut
    if cut is not None:
        return OutputFunction(cut, function)
    assert function is not None, "a chain has a loss"
    return function
