"""The inspected model in one file of the run: how it is cut, and its initial tensors.

The inspection builds and records the model once. Each stage reads how it is cut, builds the model without memory, on
torch's `meta` device, where tensors have shapes but no data, and takes the tensors of its own layers from the file.
Trainable parameters stay memory-mapped: only the stage that provides the initial weights reads them. Frozen parameters
and buffers are copied, since the model computes with them.

Some models cannot be built this way: those that load pretrained weights, or compute with tensors in their constructor,
need memory for all tensors. Such a model is built whole, by one stage of a node at a time, and reduced to the stage's
layers immediately; how it is cut still comes from the file. The inspection tests both constructions, layer by layer,
before it writes the file (`prove_construction`).

The file's header has a checksum of every tensor, and the plan a digest of the header. A stage verifies the tensors that
it takes, block by block, so that those which stay memory-mapped do not count as its memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hetpipe.checksum import BLOCK_BYTES, checksum, checksum_of
from hetpipe.clock import Clock
from hetpipe.durable import replacing
from hetpipe.errors import CallableError, DeadlineExceeded, HetpipeError
from hetpipe.model.cut_model import CutDescription
from hetpipe.model.description import from_plain, to_plain
from hetpipe.pipeline.chain import (
    Layer,
    SeedKey,
    Values,
    chain_of,
    copied_buffers,
    described_chain,
    free_tensors,
    hold,
    keep_layers,
    run_layers,
    tensor_places,
)
from hetpipe.pipeline.comparison import same
from hetpipe.pipeline.modes import enter_evaluation, enter_training
from hetpipe.pipeline.seeds import layer_seed, preserved_generators, seed_generators
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.precision import Precision

#: Key of the description in the file's metadata.
_DESCRIPTION = "hetpipe"

#: `meta`: without memory; `whole`: with all weights, one stage of a node at a time.
Construction = Literal["meta", "whole"]

_MAX_HEADER_BYTES = 100_000_000

#: Size of the field before the header, its length.
_LENGTH_BYTES = 8

#: Poll interval for the lock of whole construction.
_PAUSE_SECONDS = 0.02


class ModelFileUnusable(HetpipeError):
    """The file is missing, is not the planned one, or does not match the user's code on this machine."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """The location of a tensor's bytes in the file, and their checksum."""

    start: int
    """Offset in the file."""
    num_bytes: int
    checksum: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file verified to be the one that the plan refers to."""

    path: Path
    construction: Construction
    num_layers: int
    cut: Mapping[str, Any] | None
    """How the model is cut by its own forward (`hetpipe.model.description`); None if it defines its layers."""
    tensors: Mapping[str, _StoredTensor] = field(default_factory=dict)
    """The initial tensors by name; none under `whole`."""

    def chain(self, model: nn.Module, *, precision: Precision = "fp32") -> tuple[Layer, ...]:
        """The layers of `model`, built by `construct`; they compute in `precision`.

        Raises:
            ModelFileUnusable: the model does not match the file.
            CallableError: the model cannot be cut (`chain_of`).
        """
        if self.cut is None:
            layers = chain_of(model, precision=precision)
        else:
            try:
                layers = described_chain(model, from_plain(self.cut), precision=precision)
            except (HetpipeError, KeyError, TypeError, ValueError) as error:
                raise ModelFileUnusable(f"{self.path} describes another model: {error!r}") from error
        if len(layers) != self.num_layers:
            raise ModelFileUnusable(f"{self.path} has {self.num_layers} layers, but the model has {len(layers)}")
        return layers

    def take(self, layers: Sequence[Layer], device: torch.device, *, is_filled: bool = True) -> None:
        """Load the tensors of `layers`, and free those of other layers.

        Args:
            layers: layers of one stage.
            device: of the stage.
            is_filled: whether their own tensors are read; else they are allocated, with unspecified contents, because
                the caller has newer ones.

        Raises:
            ModelFileUnusable: a tensor is missing, damaged, or has another shape.
        """
        if self.construction == "meta":
            made = {name: owner[key] for name, ((owner, key), *_) in tensor_places(layers).items()}
            tensors = {} if is_filled else _allocated(layers, made)
            read = {name: tensor for name, tensor in made.items() if name not in tensors}
            self._verify(read)
            hold(layers, tensors | _read(self.path, layers, read))
        keep_layers(layers, device)

    def _verify(self, names: Iterable[str]) -> None:
        """Compare the checksums of these tensors.

        Raises:
            ModelFileUnusable: naming the first tensor that is missing or damaged.
        """
        try:
            with self.path.open("rb") as file:
                for name in names:
                    stored = self.tensors.get(name)
                    if stored is None:
                        raise ModelFileUnusable(f"{self.path} does not have {name}")
                    file.seek(stored.start)
                    if checksum_of(_blocks(file, stored.num_bytes), place=0).hex() != stored.checksum:
                        raise ModelFileUnusable(f"{self.path} is damaged: {name} does not have its checksum")
        except OSError as error:
            raise ModelFileUnusable(f"{self.path} cannot be read: {error}") from error


def construct(build: Callable[[], nn.Module], construction: Construction) -> nn.Module:
    """Build the user's model, on the `meta` device or with its weights."""
    if construction == "whole":
        return build()
    with torch.device("meta"):
        return build()


def write_model_file(path: Path, chain: Sequence[Layer], construction: Construction) -> str:
    """Write the file atomically; returns its digest.

    Args:
        path: path of the file; its folder must exist.
        chain: all layers of the model, with their initial tensors.
        construction: how stages build the model.

    Raises:
        NotDescribable: the cut cannot be described.
        OSError: the disk is full or broken.
    """
    cut = chain[0].cut
    tensors: dict[str, Tensor] = {}
    if construction == "meta":
        places = {name: owner[key] for name, ((owner, key), *_) in tensor_places(chain).items()}
        tensors = {name: _alone(tensor) for name, tensor in places.items()}
    description = {
        "construction": construction,
        "num_layers": len(chain),
        "cut": None if cut is None else to_plain(cut.description),
        "checksums": {name: checksum(_memory(tensor), place=0).hex() for name, tensor in tensors.items()},
    }
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={_DESCRIPTION: json.dumps(description)})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return _digest(_header(path))


def open_model_file(path: Path, digest: str) -> ModelFile:
    """Open and verify the file.

    Args:
        path: path of the file.
        digest: digest in the plan.

    Raises:
        ModelFileUnusable: the file is missing, or its digest differs.
    """
    try:
        header = _header(path)
    except (OSError, ValueError) as error:
        raise ModelFileUnusable(f"{path} cannot be read: {error}") from error
    if _digest(header) != digest:
        raise ModelFileUnusable(f"{path} is not the file that the plan was made with")
    entries = json.loads(header)
    description = json.loads(entries["__metadata__"][_DESCRIPTION])
    tensors = {
        name: _StoredTensor(_LENGTH_BYTES + len(header) + start, stop - start, digest)
        for name, digest in description.get("checksums", {}).items()
        for start, stop in [entries[name]["data_offsets"]]
    }
    return ModelFile(path, description["construction"], description["num_layers"], description["cut"], tensors)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        found = file.read(length)
    if len(found) < length:
        raise ValueError("the file is truncated")
    return found


def _blocks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """The next `num_bytes` of the file, or less at its end, one block after the other."""
    while num_bytes and (block := file.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(block)
        yield block


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, valid as long as it is; not a copy."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _digest(header: bytes) -> str:
    return blake2b(header, digest_size=16).hexdigest()


def _alone(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory of its own: safetensors rejects views and tensors that share memory."""
    plain = tensor.detach().cpu()
    is_view = plain.untyped_storage().nbytes() != plain.nbytes or not plain.is_contiguous()
    return plain.contiguous().clone() if is_view else plain


def _allocated(layers: Sequence[Layer], made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are the layers' own, with unspecified contents, for those `made` without memory."""
    own = [
        name for layer in layers for part in (layer.parameters, layer.frozen, layer.buffers) for name in part.values()
    ]
    return {name: torch.empty(made[name].shape, dtype=made[name].dtype) for name in own}


def _read(path: Path, layers: Sequence[Layer], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors for `wanted`, those of `layers` without memory: trainable parameters memory-mapped, the rest copied.

    Raises:
        ModelFileUnusable: one cannot be read, or has another shape or dtype.
    """
    trainable = {name for layer in layers for name in layer.parameters.values()}
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name, made in wanted.items():
                tensor = file.get_tensor(name)
                if tensor.shape != made.shape or tensor.dtype != made.dtype:
                    raise ModelFileUnusable(f"{path} has {name} as {list(tensor.shape)} {tensor.dtype}")
                found[name] = tensor if name in trainable else tensor.clone()
    except (OSError, SafetensorError) as error:
        raise ModelFileUnusable(f"{path} cannot be read: {error}") from error
    return found


@contextmanager
def one_at_a_time(path: Path, clock: Clock, *, deadline_seconds: float) -> Iterator[None]:
    """Serialise this block among the processes of a node, for work that needs the memory of a whole model.

    Args:
        path: lock file; the lock is released at the latest when the process ends.
        clock: source of time for polling.
        deadline_seconds: maximum wait.

    Raises:
        DeadlineExceeded: the lock was not released in time.
    """
    started = clock.monotonic()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if clock.monotonic() - started > deadline_seconds:
                    raise DeadlineExceeded(
                        f"waited {deadline_seconds:.0f} s for the other stages of this node, which build the whole "
                        f"model one at a time ({path})"
                    ) from None
                clock.sleep(_PAUSE_SECONDS)
        try:
            yield
        finally:
            _give_back_memory()


def _give_back_memory() -> None:
    """Return freed memory to the kernel; processes that compute otherwise retain it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- proof ---------------------------------------------------------------------------------------------------------


def prove_construction(
    build: Callable[[], nn.Module], chain: Sequence[Layer], inputs: Values, *, seed: int
) -> tuple[Construction | None, str]:
    """Determine how stages may build the model: each layer alone must compute the same as in `chain`.

    Args:
        build: builds the user's model under the job's seed.
        chain: all layers of a model built by `build`, with their initial tensors; left unchanged.
        inputs: inputs of a few samples.
        seed: seed of the job.

    Returns:
        The construction, None if each stage must build and record the model itself; and why it is not `meta`, or "".
    """
    why = ""
    cut, precision = chain[0].cut, chain[0].precision
    ways: tuple[Construction, ...] = ("meta", "whole")
    for construction in ways:
        try:
            with preserved_generators():
                model = construct(build, construction)
                if cut is None:
                    made = chain_of(model, precision=precision)
                else:
                    made = described_chain(model, _again(cut.description), precision=precision)
                _compare(chain, made, inputs, seed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it does not work this way
            why = why or str(error).split("\n", maxsplit=1)[0]
        else:
            return construction, why
    return None, why


def _again(description: CutDescription) -> CutDescription:
    """The description as a stage decodes it."""
    return from_plain(json.loads(json.dumps(to_plain(description))))


def _compare(chain: Sequence[Layer], made: Sequence[Layer], inputs: Values, seed: int) -> None:
    """Run each layer of `made` with its own tensors only.

    Raises:
        CallableError: it computes something else, or fails.
    """
    if len(made) != len(chain):
        raise CallableError(f"it has {len(made)} layers then, instead of {len(chain)}")
    both = (*chain, *made)
    for is_training in (True, False):
        for layer in both:
            (enter_training if is_training else enter_evaluation)(layer.modes)
        try:
            with torch.set_grad_enabled(is_training):
                _compare_layers(chain, made, inputs, seed)
        finally:
            for layer in both:
                enter_training(layer.modes)


def _compare_layers(chain: Sequence[Layer], made: Sequence[Layer], inputs: Values, seed: int) -> None:
    with copied_buffers(chain if chain[0].cut is None else chain[:1]):
        expected = _outputs(chain, _tensors(chain), inputs, seed)
    before = _tensors(made)
    with _absent(made):
        values = inputs
        for layer, other in zip(chain, made, strict=True):
            with _held(other, _tensors([layer]), before):
                values = _outputs([other], _tensors([other]), values, seed)
    if len(expected) != len(values) or not all(map(same, expected, values)):
        raise CallableError("it computes something else then")


def _tensors(layers: Sequence[Layer]) -> dict[str, Tensor]:
    return {name: owner[key] for name, ((owner, key), *_) in tensor_places(layers).items()}


def _outputs(layers: Sequence[Layer], tensors: Mapping[str, Tensor], values: Values, seed: int) -> Values:
    names = [name for layer in layers for name in layer.parameters.values()]
    weights = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    given = tuple(value.detach().clone() for value in values)

    def seeded(key: SeedKey) -> None:
        seed_generators(layer_seed(seed, VirtualWorkerIndex(0), Minibatch(1), key))

    return tuple(value.detach() for value in run_layers(layers, weights, given, seeded))


@contextmanager
def _absent(layers: Sequence[Layer]) -> Iterator[None]:
    """Replace all tensors of a cut model by placeholders in this block."""
    kept = [(owner, key, owner[key]) for places in tensor_places(layers).values() for owner, key in places]
    free_tensors(layers, (), torch.device("cpu"))
    try:
        yield
    finally:
        for owner, key, tensor in kept:
            owner[key] = tensor


@contextmanager
def _held(layer: Layer, tensors: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> Iterator[None]:
    """Put copies of `tensors` in place of the layer's tensors `made`, in this block; placeholders before and after."""
    places = tensor_places([layer])
    absent = [(owner, key, owner[key]) for each in places.values() for owner, key in each]
    for name, each in places.items():
        for owner, key in each:
            owner[key] = made[name]
    try:
        hold([layer], {name: tensor.detach().clone() for name, tensor in tensors.items()})
        yield
    finally:
        for owner, key, tensor in absent:
            owner[key] = tensor
