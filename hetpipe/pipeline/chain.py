"""A model as a chain of layers, and a stage as a run of consecutive ones.

The chain is the model's own: the entries of an `nn.Sequential`, or what the model's documented `layers()` returns. Cut
or not, a layer boundary treats values alike: forward and backward tensors are contiguous and 64-byte aligned
(`wsp.md` §3, Arithmetic), so that another partition of the same model computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hetpipe.errors import CallableError
from hetpipe.pipeline.modes import ModuleMode, modes_of
from hetpipe.values.ids import LayerIndex
from hetpipe.values.plan import DTYPE_BYTES, TensorSpec

#: What crosses a layer boundary: a flat tuple of tensors.
Values = tuple[Tensor, ...]

ALIGNMENT_BYTES = 64

#: What `Tensor.register_hook` takes: a gradient → the gradient to use instead, or None to use it as it is.
GradientHook = Callable[[Tensor], Tensor | None]

#: What `nn.Module` calls around forward and backward: attribute → how it is registered.
_MODULE_HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry of the chain. The mappings go from the layer's own names to the model's (`state_dict`) names."""

    index: LayerIndex
    name: str
    module: nn.Module
    parameters: Mapping[str, str]
    """Trainable parameters."""
    frozen: Mapping[str, str]
    """Parameters with `requires_grad=False`: they never change and never reach a shard."""
    buffers: Mapping[str, str]
    places: tuple[tuple[dict[str, Tensor], str, str], ...]
    """Where the module looks up its trainable parameters: a module's own dictionary, the key in it, the model's name.
    A parameter that the layer uses twice has two places."""
    modes: tuple[ModuleMode, ...] = ()
    """The training flags of the module and of all modules in it."""
    gradient_hooks: Mapping[str, Mapping[int, GradientHook]] = field(default_factory=dict)
    """The model's parameter name → the hooks that the user registered on the parameter, in order. The mapping is
    torch's own, so a hook that is removed is gone here as well."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of `tensor` under `name`.

    Raises:
        CallableError: the dtype may not cross a wire.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        raise CallableError(f"{name} has dtype {dtype}; hetpipe moves {', '.join(DTYPE_BYTES)}")
    return TensorSpec(name, tuple(tensor.shape), dtype)


def has_forward(model: nn.Module) -> bool:
    """Whether the model says itself what it computes; else its chain of layers does."""
    return type(model).forward is not nn.Module.forward or "forward" in vars(model)


def _entries(model: nn.Module) -> Sequence[nn.Module]:
    layers = getattr(model, "layers", None)
    if not callable(layers) or isinstance(layers, nn.Module):
        if isinstance(model, nn.Sequential):
            return list(model)
        raise CallableError(
            f"model is a {type(model).__name__}: hetpipe needs a chain of layers, so return an nn.Sequential or give "
            "the model a method layers() that returns its modules in the order in which they run"
        )
    entries = list(layers())
    wrong = [type(entry).__name__ for entry in entries if not isinstance(entry, nn.Module)]
    if wrong:
        raise CallableError(f"model.layers() must return nn.Module objects, not {', '.join(sorted(set(wrong)))}")
    return entries


def chain_of(model: nn.Module) -> tuple[Layer, ...]:
    """Cut `model` into its layers, and leave it in the mode in which it trains (`modes`).

    Raises:
        CallableError: no chain, an empty one, parameters outside of it or without a shape, one parameter in two
            layers, a hook that would never run, or a `train()` or `eval()` of the model's own that raised.
    """
    modes = modes_of(model)
    parameter_names = {id(p): name for name, p in model.named_parameters()}
    buffer_names = {id(b): name for name, b in model.named_buffers()}
    module_names = {id(m): name for name, m in model.named_modules()}
    owner: dict[str, int] = {}
    layers: list[Layer] = []
    for index, module in enumerate(_entries(model)):
        names = {id(parameter): local for local, parameter in module.named_parameters()}
        parameters: dict[str, str] = {}
        frozen: dict[str, str] = {}
        for local, parameter in module.named_parameters():
            name = parameter_names.get(id(parameter), f"layers.{index}.{local}")
            if nn.parameter.is_lazy(parameter):
                raise CallableError(
                    f"parameter {name} has no shape before the first forward (a lazy module); run the model once on a "
                    "sample before you return it, or give the module its sizes"
                )
            if owner.setdefault(name, index) != index:
                raise CallableError(
                    f"parameter {name} belongs to layers {owner[name]} and {index}: tied weights across layers are not "
                    "supported; put both uses into one layer"
                )
            (parameters if parameter.requires_grad else frozen)[local] = name
        buffers = {
            local: buffer_names.get(id(buffer), f"layers.{index}.{local}") for local, buffer in module.named_buffers()
        }
        places = tuple(
            (cast("dict[str, Tensor]", part._parameters), key, parameters[names[id(parameter)]])  # noqa: SLF001 - see run_layers
            for part in module.modules()
            for key, parameter in part.named_parameters(recurse=False)
            if parameter.requires_grad
        )
        label = module_names.get(id(module)) or str(index)
        layers.append(
            Layer(
                LayerIndex(index),
                label,
                module,
                parameters,
                frozen,
                buffers,
                places,
                # A module that `layers()` makes at each call is none of the model's: it has the flags of any new one.
                tuple(
                    modes.get(id(part)) or ModuleMode(part, part.training, evaluation=False)
                    for part in module.modules()
                ),
                _gradient_hooks(module, parameters),
            )
        )
    if not layers:
        raise CallableError("the model's chain of layers is empty")
    outside = sorted(set(parameter_names.values()) - set(owner))
    if outside:
        raise CallableError(f"parameters outside of the chain of layers would never train: {', '.join(outside)}")
    _refuse_hooks_outside(model, layers)
    return tuple(layers)


def _gradient_hooks(module: nn.Module, parameters: Mapping[str, str]) -> dict[str, Mapping[int, GradientHook]]:
    """The hooks on the parameters of a layer.

    Raises:
        CallableError: one waits for `.grad`, which no stage ever has.
    """
    found: dict[str, Mapping[int, GradientHook]] = {}
    for local, name in parameters.items():
        parameter = module.get_parameter(local)
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CallableError(
                f"model: parameter {name} has a hook of register_post_accumulate_grad_hook, which would never run: "
                "stages accumulate no .grad; use register_hook, or leave the step to the job's optimizer"
            )
        hooks = parameter._backward_hooks  # noqa: SLF001 - the only name for it
        if hooks:
            found[name] = hooks
    return found


def _refuse_hooks_outside(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse hooks on modules that no stage calls: those that hold the layers.

    Raises:
        CallableError: naming the module and the hook.
    """
    inside = {id(part) for layer in layers for part in layer.module.modules()}
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        for attribute, method in _MODULE_HOOKS.items():
            for hook in getattr(module, attribute).values():
                who = f"module {name}" if name else "the model itself"
                label = getattr(hook, "__qualname__", type(hook).__name__)
                raise CallableError(
                    f"model: the hook {label} ({method}) is on {who}, which no stage calls, so it would never run; "
                    "register it on a module in one of the layers, or do in a layer what it does"
                )


@torch.no_grad()
def hooked(layers: Sequence[Layer], gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """`gradients` (parameter name → gradient), after the hooks that the user registered on the parameters of `layers`.

    Autograd calls such a hook with the whole gradient of a backward, which is what is here; so each is called once per
    minibatch, as in a plain loop.
    """
    for layer in layers:
        for name, hooks in layer.gradient_hooks.items():
            for hook in tuple(hooks.values()):
                gradient = gradients[name]
                if gradient is not None:
                    changed = hook(gradient)
                    gradients[name] = gradient if changed is None else changed
    return gradients


def forget_weights(layers: Sequence[Layer]) -> None:
    """Free the modules' own trainable parameters, for who always gives weights to `run_layers`.

    Placeholders of the same shape and dtype stand in their places, so that modules can still be printed and counted.
    """
    placeholders: dict[str, nn.Parameter] = {}
    for layer in layers:
        for owner, key, name in layer.places:
            placeholder = placeholders.setdefault(name, nn.Parameter(torch.empty_like(owner[key], device="meta")))
            owner[key] = placeholder


@contextmanager
def copied_buffers(layers: Sequence[Layer]) -> Iterator[None]:
    """In this block, copies stand where the modules of `layers` keep their buffers: whatever is written is undone.

    The buffers themselves are not touched, as minibatches between forward and backward may have saved them.
    """
    kept = [
        (part._buffers, name, buffer)  # noqa: SLF001 - as the places of parameters
        for layer in layers
        for part in layer.module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        for owner, name, buffer in kept:
            owner[name] = buffer.clone()
        yield
    finally:
        for owner, name, buffer in kept:
            owner[name] = buffer


def _normal(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()


class _Boundary(torch.autograd.Function):
    """Identity that normalises strides and alignment both ways, and hides leaves from in-place layers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _normal(value.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _normal(gradient)


def _boundary(value: Tensor) -> Tensor:
    normal: Tensor = _Boundary.apply(value)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return normal


def as_values(output: object, layer: Layer) -> Values:
    """What `layer` returned, as values.

    Raises:
        CallableError: it is neither a tensor nor a flat, non-empty tuple or list of tensors.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, tuple | list) and output and all(isinstance(item, Tensor) for item in output):
        return tuple(output)
    raise CallableError(
        f"layer {layer.index} ({layer.name}) must return a tensor or a tuple of tensors, not {output!r:.80}"
    )


def run_layers(
    layers: Sequence[Layer],
    weights: Mapping[str, Tensor],
    values: Values,
    before_layer: Callable[[Layer], None] | None = None,
) -> Values:
    """Run consecutive layers with the given weights instead of the modules' own.

    What `torch.func.functional_call` does, less what it looks up anew at every call (80 µs per layer on a cold cache):
    a plain tensor stands where a module keeps its parameter while the module runs.

    Args:
        layers: consecutive layers.
        weights: the model's parameter name → tensor; every trainable parameter of `layers`.
        values: the input of the first layer.
        before_layer: called before each layer, to seed the random generator.
    """
    with weights_in_place(layers, weights):
        for layer in layers:
            if before_layer is not None:
                before_layer(layer)
            values = as_values(layer.module(*at_boundary(values)), layer)
    return values


def at_boundary(values: Values) -> Values:
    """`values` as the next layer receives them, wherever it runs."""
    return tuple(_boundary(value) if value.is_floating_point() else value for value in values)


@contextmanager
def weights_in_place(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """In this block, `weights` stand where the modules of `layers` keep their trainable parameters.

    A backward needs it as well: what a layer recomputes (`torch.utils.checkpoint`) or computes in a hook of its own
    reads the weights that stand there by then.

    Args:
        layers: any of the chain.
        weights: the model's parameter name → tensor; every trainable parameter of `layers`.
    """
    places = [place for layer in layers for place in layer.places]
    kept = [owner[key] for owner, key, _ in places]
    try:
        for owner, key, name in places:
            owner[key] = weights[name]
        yield
    finally:
        for (owner, key, _), parameter in zip(places, kept, strict=True):
            owner[key] = parameter
