"""A model as a chain of layers, and a stage as consecutive layers of it.

The chain is the model's own (the entries of an `nn.Sequential`, or the return value of `layers()`), or it is derived
from the model's forward (`hetpipe.model`), with layers between its cuts. Whether or not a layer boundary is a cut, it
treats values the same way: forward and backward tensors are contiguous and 64-byte aligned (`wsp.md` §3, Arithmetic),
so that every partition of a model computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hetpipe.errors import CallableError
from hetpipe.model.absent import AbsentParameter, AbsentTensor
from hetpipe.model.cut_model import CutDescription, CutModel, Signature, describe, whole_output
from hetpipe.pipeline.modes import ModuleMode, enter_evaluation, enter_training, modes_of
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.seeds import preserved_generators
from hetpipe.values.alignment import alignment_on
from hetpipe.values.freezing import FreezeMode
from hetpipe.values.ids import LayerIndex
from hetpipe.values.measurement import AliveTensor
from hetpipe.values.plan import DTYPE_BYTES, ForbiddenPlaces, TensorSpec
from hetpipe.values.precision import Precision

#: Values at a layer boundary: a flat tuple of tensors.
Values = tuple[Tensor, ...]

#: Argument of `Tensor.register_hook`: gradient → its replacement, or None to keep it.
GradientHook = Callable[[Tensor], Tensor | None]

#: Identifies a draw of random numbers within a minibatch: the layer, or in a cut model the name of the call.
SeedKey = LayerIndex | str

#: Hooks that `nn.Module` runs around forward and backward: attribute → registration method.
_MODULE_HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry of the chain. The mappings go from names within the layer to names in the model (`state_dict`)."""

    index: LayerIndex
    name: str
    module: nn.Module
    parameters: Mapping[str, str]
    """Trainable parameters."""
    frozen: Mapping[str, str]
    """Parameters with `requires_grad=False`: constant, and never sent to a shard."""
    buffers: Mapping[str, str]
    places: tuple[tuple[dict[str, Tensor], str, str], ...]
    """Entries through which modules look up trainable parameters: a module's own dictionary, the key in it, the name in
    the model. A parameter that the layer uses twice has two entries."""
    modes: tuple[ModuleMode, ...] = ()
    """Training flags of the module and of all its submodules."""
    gradient_hooks: Mapping[str, Mapping[int, GradientHook]] = field(default_factory=dict)
    """Name of a parameter in the model → the hooks registered on it by the user, in order. The mapping is torch's own,
    so removing a hook takes effect here."""
    buffer_places: tuple[tuple[dict[str, Tensor], str], ...] = ()
    """Entries through which modules look up buffers, and frozen parameters that the forward writes: a module's own
    dictionary, and the key in it."""
    cut: CutModel | None = None
    """The model whose forward runs this layer; None if `module` is called."""
    precision: Precision = "fp32"
    """What it computes in: `run_layers` runs it under autocast."""
    constant: Mapping[str, str] = field(default_factory=dict)
    """Trainable parameters while the layer is frozen (`freeze`): constant, in their modules."""
    sends_gradients: bool = True
    """Whether layers before it are trained, and need the gradients of what it receives."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Spec of `tensor` under `name`.

    Raises:
        CallableError: the dtype is not supported on the wire.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        fix = (
            "keep its real and its imaginary part as one real tensor, and join them in the forward "
            "(torch.view_as_real, torch.view_as_complex)"
            if tensor.is_complex()
            else "convert it before the model is returned"
        )
        raise CallableError(
            f"model: {name} is of type {dtype}, which links and shards do not support; they support "
            f"{', '.join(DTYPE_BYTES)}; {fix}"
        )
    return TensorSpec(name, tuple(tensor.shape), dtype)


def has_forward(model: nn.Module) -> bool:
    """Whether the model defines a forward; if not, its chain of layers defines the computation."""
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


def chain_of(model: nn.Module, *, precision: Precision = "fp32") -> tuple[Layer, ...]:
    """Split `model` into its layers, which compute in `precision`; sets it to its training mode (`modes`).

    Raises:
        CallableError: no chain or an empty one, parameters outside it or without a shape, a parameter in two layers, a
            hook that would never run, or an overridden `train()` or `eval()` that raised.
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
                    "supported; put both uses into one layer, or remove layers(), and the model is cut by its forward"
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
                # A module that `layers()` builds at each call is not a submodule of the model: it has default flags.
                tuple(
                    modes.get(id(part)) or ModuleMode(part, part.training, evaluation=False)
                    for part in module.modules()
                ),
                _gradient_hooks(module, parameters),
                tuple(
                    (cast("dict[str, Tensor]", part._buffers), key)  # noqa: SLF001 - as parameters
                    for part in module.modules()
                    for key, _ in part.named_buffers(recurse=False)
                ),
                precision=precision,
            )
        )
    if not layers:
        raise CallableError("the model's chain of layers is empty")
    outside = sorted(set(parameter_names.values()) - set(owner))
    if outside:
        raise CallableError(f"parameters outside of the chain of layers would never train: {', '.join(outside)}")
    _refuse_hooks_outside(model, layers)
    return tuple(layers)


class LayerTensors(nn.Module):
    """The parameters and buffers of one layer of a cut model, whose modules may belong to several layers."""

    def __init__(self, cut: CutModel, names: Mapping[str, Sequence[tuple[dict[str, Tensor], str]]]) -> None:
        """Register the tensor at the first place of each name."""
        super().__init__()
        self._places = names
        self._model = [cut.model]  # in a list, so that it is not registered as a submodule
        for name, places in names.items():
            owner, key = places[0]
            tensor = owner[key]
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(local_name(name), tensor)
            else:
                self.register_buffer(local_name(name), tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerTensors:  # noqa: FBT001, FBT002 - torch's
        """Move the tensors, and the read-only buffers of the other layers, as `fn` does."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        for name, places in self._places.items():
            local = local_name(name)
            moved = self._parameters.get(local)
            tensor = self._buffers[local] if moved is None else moved
            assert tensor is not None, "registered above"
            for owner, key in places:
                owner[key] = tensor
        for module in self._model[0].modules():
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta or isinstance(buffer, AbsentTensor):
                    continue  # not on this stage
                module._buffers[key] = fn(buffer)  # noqa: SLF001 - as torch does
        for name in self._places:
            local = local_name(name)
            if local in self._buffers:
                owner, key = self._places[name][0]
                self._buffers[local] = owner[key]
        return self


def state_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Names of parameters and buffers of `model` in its `state_dict`, where they differ from the unique name.

    A tied weight has several names there; a non-persistent buffer has none.
    """
    found: dict[int, list[str]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), []).append(key)
    named = [*model.named_parameters(), *model.named_buffers()]
    names = {name: tuple(found.get(id(tensor), ())) for name, tensor in named}
    return {name: keys for name, keys in names.items() if keys != (name,)}


def local_name(name: str) -> str:
    """Name of a tensor within its layer of a cut model, without dots, which would denote submodules."""
    return name.replace(".", "/")


def cut_chain(
    model: nn.Module,
    signature: Signature,
    example: Values,
    *,
    results_of: Callable[[Any], Any] = whole_output,
    keep_all: bool = False,
    splits_ties: bool = True,
    precision: Precision = "fp32",
) -> tuple[Layer, ...]:
    """Derive a chain from the forward of any `model`; sets it to its training mode.

    Args:
        model: the model as returned by the user's callable.
        signature: how to call it with a minibatch.
        example: the tensors of one minibatch.
        results_of: selects the part of its output that the loss needs.
        keep_all: end a layer at every allowed cut.
        splits_ties: allow cuts between the uses of one weight.
        precision: what the model computes in, here and as layers; it determines the dtypes of what crosses cuts.

    Raises:
        CallableError: the model fails, or parameters have no shape.
    """
    modes = tuple(modes_of(model).values())
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise CallableError(
                f"parameter {name} has no shape before the first forward (a lazy module); run the model once on a "
                "sample before you return it, or give the module its sizes"
            )
    with autocast(precision, device_of(example)):
        description, survey = describe(
            model,
            signature,
            example,
            results_of=results_of,
            set_training=lambda training: (enter_training if training else enter_evaluation)(modes),
            preserved=preserved_generators,
            keep_all=keep_all,
            splits_ties=splits_ties,
        )
    return _described(CutModel(model, description, survey), modes, precision)


def described_chain(
    model: nn.Module, description: CutDescription, *, precision: Precision = "fp32"
) -> tuple[Layer, ...]:
    """The same chain for another instance of the model, which is not run and may be on torch's `meta` device.

    Args:
        model: the model as returned by the user's callable; set to its training mode.
        description: the description by which `cut_chain` cut another instance.
        precision: what the layers compute in.
    """
    return _described(CutModel(model, description), tuple(modes_of(model).values()), precision)


def _described(cut: CutModel, modes: tuple[ModuleMode, ...], precision: Precision) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for index, layer in enumerate(cut.layers):
        names = (*layer.parameters, *layer.frozen)
        module = LayerTensors(
            cut,
            {
                **{name: cut.parameter_places[name] for name in names},
                **{name: cut.buffer_places[name] for name in layer.buffers},
            },
        )
        for name in set(layer.buffers) & set(cut.description.assigned):
            cut.registered[name] = ((cast("dict[str, Tensor]", module._buffers), local_name(name)),)  # noqa: SLF001
        parameters = {local_name(name): name for name in layer.parameters}
        layers.append(
            Layer(
                LayerIndex(index),
                layer.name,
                module,
                parameters,
                {local_name(name): name for name in layer.frozen},
                {local_name(name): name for name in layer.buffers},
                tuple((owner, key, name) for name in layer.parameters for owner, key in cut.parameter_places[name]),
                modes,
                _gradient_hooks(module, parameters),
                (*(place for places in cut.buffer_places.values() for place in places), *cut.rewritten_parameters),
                cut,
                precision,
            )
        )
    return tuple(layers)


def tensor_places(layers: Sequence[Layer]) -> dict[str, list[tuple[dict[str, Tensor], str]]]:
    """Entries through which modules and owners look up the tensors that `layers` need, by names in the model.

    These are the layers' own parameters and buffers, and the buffers and frozen parameters of other layers of a cut
    model that they read.
    """
    found: dict[str, list[tuple[dict[str, Tensor], str]]] = {}
    cut = layers[0].cut
    for layer in layers:
        own = {**layer.parameters, **layer.frozen, **layer.buffers}
        names = {id(tensor): own[local] for local, tensor in _named_tensors(layer.module)}
        for part in layer.module.modules():
            for table in (part._parameters, part._buffers):  # noqa: SLF001 - see run_layers
                for key, tensor in table.items():
                    if tensor is not None:
                        found.setdefault(names[id(tensor)], []).append((cast("dict[str, Tensor]", table), key))
        if cut is not None:
            places = {**cut.parameter_places, **cut.buffer_places}
            for name in (*own.values(), *cut.layers[layer.index].reads):
                found.setdefault(name, []).extend(places[name])
    return found


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def hold(layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> None:
    """Put `tensors` in the places of `layers`, for a model that was built without memory.

    Args:
        layers: layers of one stage.
        tensors: by names in the model; parameters are created with the flag and the attributes of the ones they
            replace.

    Raises:
        CallableError: a parameter is of a custom class.
    """
    for name, places in tensor_places(layers).items():
        owner, key = places[0]
        before, tensor = owner[key], tensors[name]
        if type(before) not in {Tensor, nn.Parameter}:
            raise CallableError(f"model: {name} is a {type(before).__name__}, which cannot be created from its data")
        if isinstance(before, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=before.requires_grad)
        vars(tensor).update(vars(before))
        for owner, key in places:
            owner[key] = tensor


def keep_layers(layers: Sequence[Layer], device: torch.device) -> None:
    """Free the parameters and buffers that `layers` of a cut model do not need.

    Placeholders with shape, dtype and device remain, because models query these.

    Args:
        layers: layers of one stage.
        device: device of the stage.
    """
    free_tensors(layers, tensor_places(layers), device)


def free_tensors(layers: Sequence[Layer], kept: Container[str], device: torch.device) -> None:
    """Free all tensors of the cut model of `layers` except those named in `kept`; cf. `keep_layers`."""
    cut = layers[0].cut
    if cut is None:
        return
    for kind, table in ((AbsentParameter, cut.parameter_places), (AbsentTensor, cut.buffer_places)):
        for name, places in table.items():
            if name in kept:
                continue
            owner, key = places[0]
            before = owner[key]
            absent = kind(name, before.shape, before.dtype, device, requires_grad=before.requires_grad)
            for owner, key in places:
                owner[key] = absent


def _gradient_hooks(module: nn.Module, parameters: Mapping[str, str]) -> dict[str, Mapping[int, GradientHook]]:
    """Hooks on the parameters of a layer.

    Raises:
        CallableError: a hook depends on `.grad`, which stages never accumulate.
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
    """Reject hooks on modules that no stage calls: those that contain the layers.

    Raises:
        CallableError: names the module and the hook.
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
                    "register it on a module in one of the layers, or move its work into a layer"
                )


@torch.no_grad()
def hooked(layers: Sequence[Layer], gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Apply the user's hooks on the parameters of `layers` to `gradients` (parameter name → gradient).

    Autograd calls such a hook with the complete gradient of a backward, which is what `gradients` holds; each hook
    therefore runs once per minibatch, as in a plain training loop.
    """
    for layer in layers:
        for name, hooks in layer.gradient_hooks.items():
            for hook in tuple(hooks.values()):
                gradient = gradients[name]
                if gradient is not None:
                    changed = hook(gradient)
                    gradients[name] = gradient if changed is None else changed
    return gradients


def freeze(chain: Sequence[Layer], first: int, last: int, frozen: int, mode: FreezeMode) -> tuple[Layer, ...]:
    """The layers [first, last) of `chain` where its first `frozen` layers are frozen (freezing.md §1).

    Their parameters stay in their modules and require no gradients any more.

    Args:
        chain: all layers.
        first, last: the layers of a stage, whose tensors are here.
        frozen: number of frozen layers.
        mode: training flags of modules that no layer behind the frozen ones calls; the others keep theirs.
    """
    asleep = _modules_of_frozen(chain, frozen) if mode == "eval" else frozenset()
    found = []
    for layer in chain[first:last]:
        modes = tuple(
            replace(each, training=each.evaluation) if id(each.module) in asleep else each for each in layer.modes
        )
        found.append(replace(layer, modes=modes, sends_gradients=layer.index > frozen))
        if layer.index < frozen:
            for local in layer.parameters:
                layer.module.get_parameter(local).requires_grad = False
            found[-1] = replace(found[-1], parameters={}, constant=layer.parameters, places=(), gradient_hooks={})
    return tuple(found)


def _modules_of_frozen(chain: Sequence[Layer], frozen: int) -> frozenset[int]:
    """The ids of the modules that only the first `frozen` layers call."""
    cut = chain[0].cut
    if cut is None:
        later = {id(part) for layer in chain[frozen:] for part in layer.module.modules()}
        return frozenset(id(part) for layer in chain[:frozen] for part in layer.module.modules()) - later
    layer_of = {path: index for index, layer in enumerate(cut.layers) for path in layer.modules}
    found = set()
    for path, module in cut.model.named_modules():
        called = path
        while called and called not in layer_of:  # a container, or a part of a module that runs whole
            called = called.rpartition(".")[0]
        if layer_of.get(called, len(chain)) < frozen:
            found.add(id(module))
    return frozenset(found)


def active_layers(layers: Sequence[Layer], inactive: Container[int]) -> tuple[Layer, ...]:
    """Those of `layers` that are not among the `inactive` ones of the chain."""
    return tuple(layer for layer in layers if layer.index not in inactive)


def constants_of(layers: Sequence[Layer]) -> dict[str, Tensor]:
    """The parameters of the frozen ones of `layers`, by names in the model."""
    return {name: layer.module.get_parameter(local) for layer in layers for local, name in layer.constant.items()}


def forget_weights(layers: Sequence[Layer]) -> None:
    """Free the modules' own trainable parameters, if weights are always passed to `run_layers`.

    Placeholders of the same shape and dtype take their places, so that modules can still be printed and counted.
    """
    placeholders: dict[str, nn.Parameter] = {}
    for layer in layers:
        # A layer of a cut model registers its parameters once more (`LayerTensors`).
        table = cast("dict[str, Tensor]", layer.module._parameters)  # noqa: SLF001 - see run_layers
        registered = [(table, local, name) for local, name in layer.parameters.items() if local in table]
        for owner, key, name in (*layer.places, *registered):
            placeholder = placeholders.setdefault(name, nn.Parameter(torch.empty_like(owner[key], device="meta")))
            owner[key] = placeholder


@contextmanager
def copied_buffers(layers: Sequence[Layer]) -> Iterator[None]:
    """Replace the buffers of the modules of `layers` by copies in this block, so that writes are discarded.

    The buffers themselves are unchanged: minibatches between forward and backward may have saved them.
    """
    kept = [(owner, key, owner[key]) for layer in layers for owner, key in layer.buffer_places]
    try:
        for owner, name, buffer in kept:
            if not isinstance(buffer, AbsentTensor):  # of another stage
                owner[name] = buffer.clone()
        yield
    finally:
        for owner, name, buffer in kept:
            owner[name] = buffer


def _is_normal(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % alignment_on(tensor.device.type) == 0


def _normal(tensor: Tensor) -> Tensor:
    if _is_normal(tensor):
        return tensor
    tensor = tensor.contiguous()
    return tensor if _is_normal(tensor) else tensor.clone()


def _normal_gradient(gradient: Tensor | None) -> Tensor | None:
    """The same, of a gradient; it is None where all that follows has none (a custom function that returns None)."""
    return None if gradient is None else _normal(gradient)


class _Boundary(torch.autograd.Function):
    """Identity that normalises strides and alignment in both directions and hides leaves from in-place layers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return _normal(value.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return _normal_gradient(gradient)


def _boundary(value: Tensor) -> Tensor:
    if not value.is_leaf and _is_normal(value):
        # The forward has nothing to do, and a hook is much cheaper than a Python function in the graph.
        value.register_hook(_normal_gradient)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return value
    normal: Tensor = _Boundary.apply(value)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return normal


def as_values(output: object, layer: Layer) -> Values:
    """Convert the return value of `layer` to values.

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
    seed: Callable[[SeedKey], None] | None = None,
) -> Values:
    """Run consecutive layers with the given weights instead of the modules' own, in the layers' precision.

    Equivalent to `torch.func.functional_call`, without its lookups at every call (80 µs per layer on a cold cache): a
    plain tensor takes the parameter's place while the module runs.

    Args:
        layers: consecutive layers, or those of them that are active; none: `values` cross a boundary only.
        weights: name of a parameter in the model → tensor; every trainable parameter of `layers`.
        values: the input of the first layer.
        seed: seeds the generators; called before each layer, in a cut model before each call that draws.
    """
    if not layers:
        return at_boundary(values)
    with autocast(layers[0].precision, device_of(values)), weights_in_place(layers, weights):
        if layers[0].cut is not None:
            first, last = layers[0].index, layers[-1].index + 1
            placed = {**weights, **constants_of(layers)}
            return layers[0].cut.run(first, last, placed, values, seed=seed or _unseeded, normalise=_boundary)
        for layer in layers:
            if seed is not None:
                seed(layer.index)
            values = as_values(layer.module(*at_boundary(values)), layer)
    return values


def device_of(values: Values) -> torch.device:
    """The device of a minibatch; the CPU if it has no tensors."""
    return values[-1].device if values else torch.device("cpu")


def _unseeded(_: SeedKey) -> None:
    """Do not seed."""


def gradient_flags(layers: Sequence[Layer], values: Values) -> tuple[bool, ...]:
    """Per value received by `layers`: whether its gradient is sent back to the previous stage."""
    first = layers[0]
    if not first.sends_gradients:
        return (False,) * len(values)
    if first.cut is not None:
        return first.cut.gradient_flags(first.index)
    return tuple(value.is_floating_point() and first.index > 0 for value in values)


def alive_behind(chain: Sequence[Layer], position: int, values: Values) -> tuple[AliveTensor, ...]:
    """Tensors that cross the cut after a layer of the whole `chain`; none after the last one.

    Args:
        chain: all layers.
        position: index of the layer.
        values: output of the layer.
    """
    if position + 1 == len(chain):
        return ()
    layer, behind = chain[position], chain[position + 1]
    names = [f"{layer.name}:{at}" for at in range(len(values))]
    if behind.cut is not None:
        names = [each.lstrip("/") for each in behind.cut.value_names(behind.index)]
    flags = gradient_flags((behind,), values)
    return tuple(AliveTensor(name, value.nbytes, flag) for name, value, flag in zip(names, values, flags, strict=True))


def forbidden_in(layer: Layer) -> tuple[ForbiddenPlaces, ...]:
    """Places within `layer` where it cannot be cut, if known."""
    found = () if layer.cut is None else layer.cut.forbidden_in(layer.index)
    return tuple(ForbiddenPlaces(each.before, each.upto, each.places, each.reason) for each in found)


def at_boundary(values: Values) -> Values:
    """`values` as the next layer receives them, on this stage or another."""
    return tuple(_boundary(value) if value.is_floating_point() else value for value in values)


@contextmanager
def ties_in_place(layers: Sequence[Layer], ties: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the weights of other stages that a forward of `layers` used (`ties_of`) in their places in this block."""
    cut = layers[0].cut
    if cut is None or not ties:
        yield
        return
    with cut.ties_in_place(ties):
        yield


def ties_of(layers: Sequence[Layer]) -> Mapping[str, Tensor]:
    """Weights of other stages that the last forward of `layers` used; empty unless the model is a cut one."""
    cut = layers[0].cut
    return {} if cut is None else cut.ties


@contextmanager
def weights_in_place(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Put `weights` in the places of the trainable parameters of the modules of `layers` in this block.

    Backwards need this too: recomputation (`torch.utils.checkpoint`) and a layer's own hooks read the weights in place
    at that time.

    Args:
        layers: any layers of the chain.
        weights: name of a parameter in the model → tensor; every trainable parameter of `layers`.
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
