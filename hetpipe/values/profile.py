"""The profile: what each layer costs on each device type; a public file format (`docs/files.md`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hetpipe.values.document import Document, Section, entries, mapping
from hetpipe.values.plan import compute_dtype
from hetpipe.values.precision import Precision
from hetpipe.values.problems import Path, Problem, format_path, shown
from hetpipe.values.suggest import closest, did_you_mean, join_names

#: Plausibility bound: no layer takes an hour for a minibatch, so a larger figure is in another unit.
_LONGEST_MS = 3_600_000.0

_TIMES = ("forward_ms", "backward_ms")

#: Keys of layers that version 1 lacks.
_SINCE_2 = ("gradient_bytes", "alive", "no_cut", "forbidden")

#: Prefix of the names of tied weights among the values of a cut.
TIE = "parameter:"


def _in_milliseconds(time_ms: float) -> float:
    if time_ms > _LONGEST_MS:
        raise ValueError(
            f"is {time_ms:g} ms, more than an hour; for microseconds write {time_ms / 1e3:g}, for nanoseconds "
            f"{time_ms / 1e6:g}"
        )
    return time_ms


Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0), AfterValidator(_in_milliseconds)]


class ParameterProfile(Section):
    """One trainable parameter of a layer."""

    name: str
    """The model's own (`state_dict`) name."""
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    """The shape."""
    dtype: str
    """Name of the torch dtype, for example `float32`."""


class AliveValue(Section):
    """A tensor that crosses a cut, for one minibatch."""

    name: str
    """`MODULE:OUTPUT`, `input:NAME`, `parameter:NAME` of a tied weight, or `log`: the calls made by earlier stages."""
    num_bytes: Bytes
    """Of the tensor; its gradient has the same size."""
    has_gradient: bool = False
    """Whether its gradient is sent back."""

    @property
    def is_tie(self) -> bool:
        """Whether it is a weight that both sides of the cut use."""
        return self.name.startswith(TIE)


class ForbiddenCut(Section):
    """Neighbouring places within a layer where the model cannot be cut, all for one reason."""

    before: str
    """The call after the first of them."""
    upto: str
    """The call after the last of them."""
    places: Annotated[int, Field(ge=1)] = 1
    """Number of these places."""
    reason: str
    """The reason."""


class LayerProfile(Section):
    """One layer of the chain, for one minibatch."""

    name: str
    """Name in the model; unique among layers with parameters."""
    parameter_bytes: Bytes
    """Of all its trainable parameters."""
    activation_bytes: Bytes
    """Bytes saved on the device from forward to backward, for one minibatch."""
    output_bytes: Bytes
    """Bytes sent forward over a cut after this layer: values that are alive there, and tied weights."""
    gradient_bytes: Bytes | None = None
    """Bytes sent backward: gradients of values and of tied weights. Null: as many as forward."""
    alive: tuple[AliveValue, ...] = ()
    """The tensors that cross the cut, in a measured profile; their sums are the two figures above."""
    no_cut: str = ""
    """The reason why no stage may end after this layer; empty: a stage may end here."""
    forbidden: tuple[ForbiddenCut, ...] = ()
    """Places within this layer where the model cannot be cut; for people, as no stage ends within a layer."""
    forward_ms: dict[str, Milliseconds]
    """Device type → milliseconds."""
    backward_ms: dict[str, Milliseconds]
    """Device type → milliseconds."""
    forward_flops: Count | None = None
    """Floating-point operations of the model in the forward, for one minibatch: a multiply-add counts as two; only
    matrix products, convolutions and attention are counted. Null: not counted.
    """
    backward_flops: Count | None = None
    """Likewise for the backward, without recomputation."""
    parameters: tuple[ParameterProfile, ...] = ()
    """The layer's trainable parameters, if measured; placement assigns them individually."""

    @property
    def backward_bytes(self) -> int:
        """Bytes sent backward over a cut after this layer."""
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def tie_bytes(self) -> int:
        """The part of both directions that is tied weights and their gradients."""
        return sum(value.num_bytes for value in self.alive if value.is_tie)


class Profile(Document):
    """A whole model, layer by layer, on every measured or estimated device type."""

    version: Literal[1, 2]
    """Of the format. In 1 there is one figure per cut, `output_bytes`, for both directions; 2 adds what is alive at
    each cut and which cuts are forbidden."""
    model: str
    """Name of the model; informational."""
    batch_size: Annotated[int, Field(ge=1)]
    """Samples per minibatch; all other figures are for a minibatch of this size."""
    input_bytes: Bytes
    """Input bytes of the first stage per minibatch."""
    layers: tuple[LayerProfile, ...]
    """Layers in the order of the chain."""
    tokens_per_sample: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one sample, for tokens/s beside samples/s; null: samples are not token sequences."""
    precision: Precision = "fp32"
    """Precision of the measurement: the job's `precision`."""
    estimated: tuple[str, ...] = ()
    """Device types whose times were estimated from the catalogue instead of measured."""

    @classmethod
    def contradictions(cls, value: Mapping[str, Any]) -> Iterator[Problem]:
        """Duplicate names, layers without a time that others have, types for which hardly any layer has a time."""
        layers = entries(value.get("layers"))
        if value.get("layers") == ():
            yield Problem(("layers",), "is an empty list; a model has at least one layer")
            return
        yield from _names_given_twice(layers)
        for index, layer in enumerate(map(mapping, layers)):
            yield from _wrong_cuts(layer, index, is_last=index == len(layers) - 1, version=value.get("version"))
        tables = [(index, key, layer[key]) for index, layer in enumerate(layers) for key in _TIMES if _has(layer, key)]
        counts = Counter(kind for _, _, times in tables for kind in times)
        if tables and not counts:
            yield Problem(("layers", 0, "forward_ms"), "names no device type; give the times of at least one")
        # A type missing from most tables is a mistake in the tables that have it, not in all others.
        expected = {kind for kind, count in counts.items() if 2 * count > len(tables) or len(layers) == 1}
        for index, key, times in tables:
            yield from _slips(index, key, times, expected)
        for position, kind in enumerate(entries(value.get("estimated"))):
            if isinstance(kind, str) and counts and kind not in expected:
                yield Problem(
                    ("estimated", position),
                    f"is {shown(kind)}, which no layer has times for; {did_you_mean(kind, expected)}",
                )

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types with times, sorted."""
        return tuple(sorted(self.layers[0].forward_ms))

    @property
    def compute_dtype(self) -> str:
        """The dtype that most of the work is computed in; without `precision` that of most of the parameters."""
        sizes = ((p.dtype, prod(p.shape)) for layer in self.layers for p in layer.parameters)
        return compute_dtype(sizes, self.precision)

    def model_flops(self, first: int, last: int) -> int | None:
        """Operations of layers [first, last), forward and backward, for one minibatch; None if not counted."""
        total = 0
        for layer in self.layers[first:last]:
            if layer.forward_flops is None or layer.backward_flops is None:
                return None
            total += layer.forward_flops + layer.backward_flops
        return total


def _wrong_cuts(layer: Mapping[str, Any], index: int, *, is_last: bool, version: object) -> Iterator[Problem]:
    """Keys that the version lacks, sums that are none, and a reason where there is no cut."""
    path: Path = ("layers", index)
    if version == 1:
        strange = [key for key in _SINCE_2 if layer.get(key) not in (None, (), "")]
        for key in strange:
            yield Problem((*path, key), "is unknown to version 1 of the format; write version: 2")
    if is_last and layer.get("no_cut"):
        yield Problem((*path, "no_cut"), "is about the last layer, after which there is no cut; leave it out")
    alive = [mapping(value) for value in entries(layer.get("alive"))]
    sizes: list[int] = [size for value in alive if isinstance(size := value.get("num_bytes"), int)]
    if not alive or len(sizes) < len(alive):
        return
    forward = sum(sizes)
    backward = sum(size for value, size in zip(alive, sizes, strict=True) if value.get("has_gradient"))
    for key, total in (("output_bytes", forward), ("gradient_bytes", backward)):
        if layer.get(key) != total:
            yield Problem((*path, key), f"is {shown(layer.get(key))}, but what is `alive` sums to {total}")


def _names_given_twice(layers: Sequence[Any]) -> Iterator[Problem]:
    """Duplicate names: a placement refers to parameters or layers by name. Layers without parameters may share one."""
    owners: dict[str, Path] = {}
    for index, layer in enumerate(map(mapping, layers)):
        parameters = entries(layer.get("parameters"))
        named: list[tuple[object, Path]] = [
            (mapping(parameter).get("name"), ("layers", index, "parameters", position))
            for position, parameter in enumerate(parameters)
        ]
        if parameters or layer.get("parameter_bytes"):
            named.insert(0, (layer.get("name"), ("layers", index)))
        for name, path in named:
            if isinstance(name, str) and owners.setdefault(name, path) != path:
                yield Problem((*path, "name"), f"is {shown(name)}, as that of {format_path(owners[name])}; rename one")


def _has(layer: object, key: str) -> bool:
    return isinstance(mapping(layer).get(key), Mapping)


def _slips(index: int, key: str, times: Mapping[str, Any], expected: set[str]) -> Iterator[Problem]:
    """Mistakes in the types of one table of times, if all tables are to contain the `expected` ones."""
    missing, strange = sorted(expected - times.keys()), sorted(times.keys() - expected)
    for kind in strange:
        likely = closest(kind, missing)
        if likely:
            missing.remove(likely)
        hint = f"did you mean `{likely}`?" if likely else "give every layer both times for it, or remove it"
        yield Problem(("layers", index, key, kind), f"most layers have no time for this type; {hint}")
    if missing:
        names = join_names(missing, "and")
        yield Problem(("layers", index, key), f"has no time for {names}; every layer needs one for every type")
