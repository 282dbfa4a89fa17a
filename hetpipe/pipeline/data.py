"""The tensors of a minibatch: the data contract (`wsp.md` §5).

The first stage reads inputs and the last one targets, each from its own instance of the data set; only activations are
transferred between stages. Random augmentation draws from generators seeded by (seed, virtual worker, minibatch), so
both read the same samples. `reading.py` calls these functions, in the stage or in worker processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.model.packed import pack
from hetpipe.model.structure_text import NotDescribable
from hetpipe.model.user_errors import raised_text
from hetpipe.observe.log import get_logger, log_path
from hetpipe.pipeline.callables import CollatedDataset, CollateFunction, MapDataset, stream_of
from hetpipe.pipeline.seeds import evaluation_fetch_seed, fetch_seed, seed_generators
from hetpipe.pipeline.user_data import read_user_data
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex

_log = get_logger(__name__)

#: Samples in the minibatch on which a model is cut.
EXAMPLE_SAMPLES = 4

#: Limit on the dict keys listed in a message.
_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one minibatch."""

    inputs: tuple[Tensor, ...]
    """One per argument of the model; packed, if it is not a tensor itself (`model/packed.py`)."""
    target: Any
    """Second argument of the loss; the whole batch if samples are mappings."""
    num_samples: int
    keys: tuple[str, ...] | None = None
    """Names of `inputs` as keyword arguments of the model; None for positional arguments."""


def read_batch(dataset: MapDataset, indices: Sequence[int], *, key: str = "data.train") -> Batch:
    """Read and collate samples, in order.

    Args:
        dataset: the data set.
        indices: indices of the samples.
        key: job key of the data set, for messages.

    Raises:
        CallableError: reading a sample raised, a sample is not an (input, target) pair, its input has no tensors, or
            the samples cannot be stacked. Names the key, the index, and the line of user code.
    """
    if isinstance(dataset, CollatedDataset):
        samples = _read(dataset.dataset, indices, key)
        return _collated_by_user(dataset.collate_fn, samples, indices, key)
    samples = _read(dataset, indices, key)
    for index, sample in zip(indices, samples, strict=True):
        _check_sample(sample, index, key)
    try:
        collated = default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CallableError(_why_not_stacked(samples, indices, key, error)) from error
    if isinstance(collated, Mapping):
        return _mapping_batch(collated, len(indices), f"{key}: sample {indices[0]}: its entry")
    inputs, target = collated
    values = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not all(isinstance(value, Tensor) for value in values):
        raise CallableError(f"{key}: sample {indices[0]}: {_why_no_tensors(samples[0][0])}")
    return Batch(values, target, len(indices))


def _collated_by_user(collate_fn: CollateFunction, samples: list[Any], indices: Sequence[int], key: str) -> Batch:
    """Build a minibatch by the job's `data.collate_fn`.

    Raises:
        CallableError: it raised, or returned something else than a minibatch.
    """
    where = f"data.collate_fn: given samples {listed(indices)} of {key}, it"
    try:
        collated = collate_fn(samples)
    except (Exception, SystemExit) as error:
        log = log_path()
        _log.exception("collate_fn_raised", key=key, indices=str(list(indices)))
        traceback = f"; the traceback is in {log}" if log is not None else ""
        raise CallableError(f"{where} raised {raised_text(error)}{traceback}") from error
    if isinstance(collated, Mapping):
        return _mapping_batch(collated, len(indices), f"{where} returned a mapping whose entry")
    if not (isinstance(collated, tuple | list) and len(collated) == len(("inputs", "target"))):
        raise CallableError(
            f"{where} returned {collated!r:.80}; return a pair (inputs, target), or a mapping of the model's arguments"
        )
    inputs, target = collated
    values = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not all(isinstance(value, Tensor) for value in values):
        raise CallableError(
            f"{where} returned inputs of type {type(inputs).__name__}; return a tensor, or a tuple of tensors"
        )
    return Batch(values, target, len(indices))


def listed(indices: Sequence[int]) -> str:
    """Samples as text, the first ones of many."""
    shown = ", ".join(map(str, indices[:_MAX_NAMED]))
    return shown if len(indices) <= _MAX_NAMED else f"{shown}, …"


def _mapping_batch(collated: Mapping[str, Any], num_samples: int, whose: str) -> Batch:
    """Build a minibatch of the model's arguments by name; those that are not a tensor each are packed.

    Args:
        collated: the arguments.
        num_samples: samples in it.
        whose: begins a message that continues with the name of an entry.

    Raises:
        CallableError: an entry has an object that cannot be packed.
    """
    inputs: list[Tensor] = []
    for name, value in collated.items():
        try:
            inputs.append(value if isinstance(value, Tensor) else pack(value))
        except NotDescribable as error:
            raise CallableError(
                f"{whose} {name} is of type {type(value).__name__} and has {error}; the arguments of a model are "
                "tensors, numbers, texts, None, and lists, tuples or mappings of these: convert it to them"
            ) from error
    return Batch(tuple(inputs), dict(collated), num_samples, tuple(map(str, collated)))


def _read(dataset: MapDataset, indices: Sequence[int], key: str) -> list[Any]:
    """Read samples, in one call if the data set offers it."""
    read_all = getattr(dataset, "__getitems__", None)
    if read_all is None:
        return [_read_one(dataset, index, key) for index in indices]
    where = f"samples {listed(indices)}"
    samples = list(read_user_data(lambda: read_all(list(indices)), key, where))
    if len(samples) != len(indices):
        raise CallableError(
            f"{key}: `__getitems__` returned {len(samples)} samples when asked for {len(indices)} "
            f"({listed(indices)}); return one per index, in order"
        )
    return samples


def _read_one(dataset: MapDataset, index: int, key: str) -> Any:
    """Read one sample."""
    return read_user_data(lambda: dataset[index], key, f"sample {index}")


def _check_sample(sample: Any, index: int, key: str) -> None:
    """Refuse what is no sample.

    Raises:
        CallableError: it is neither a pair nor a mapping.
    """
    is_pair = isinstance(sample, tuple | list) and len(sample) == len(("input", "target"))
    if not (is_pair or isinstance(sample, Mapping)):
        raise CallableError(
            f"{key}: sample {index} must be a pair (input, target), or a mapping of the model's arguments, not "
            f"{sample!r:.80}"
        )


def _why_no_tensors(value: object) -> str:
    """The reason why an input does not collate to tensors, and the fix."""
    if isinstance(value, Mapping):
        names = ", ".join(map(str, list(value)[:_MAX_NAMED]))
        return (
            f"its input is a dict ({names}), and layers take tensors; return ((tensor, tensor, …), target) with the "
            "values in a fixed order, and let the first layer take them as its arguments"
        )
    return (
        f"its input is of type {type(value).__name__}; return a tensor, a number or a NumPy array, or a tuple of these"
    )


def _why_not_stacked(samples: Sequence[Any], indices: Sequence[int], key: str, error: Exception) -> str:
    """The samples that differ, and the fix."""
    parts: list[tuple[Any, str]] = [(0, "input"), (1, "target")]
    if isinstance(samples[0], Mapping):
        parts = [(name, f"entry {name}") for name in samples[0]]
    for part, name in parts:
        shapes = [_shape(sample.get(part) if isinstance(sample, Mapping) else sample[part]) for sample in samples]
        other = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None:
            return (
                f"{key}: samples {indices[0]} and {indices[other]} cannot be stacked into one minibatch: the {name} of "
                f"one is {shapes[0]}, of the other {shapes[other]}; bring all samples to one shape in "
                "__getitem__ (pad or crop them), name a `data.collate_fn` that pads a minibatch or makes lists, or set "
                "`batch_size: 1`"
            )
    text = str(error).split("\n", maxsplit=1)[0]
    return (
        f"{key}: samples {indices[0]} to {indices[-1]} cannot be stacked into one minibatch ({type(error).__name__}: "
        f"{text:.200}); return tensors, numbers or NumPy arrays of the same shape for every sample"
    )


def _shape(value: object) -> str:
    """The property that must be equal for two values to be stacked, as text."""
    if isinstance(value, Mapping):
        return "a dict of " + ", ".join(f"{name}: {_shape(entry)}" for name, entry in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shape, value))})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"of shape {list(shape)}"


def read_minibatch(
    dataset: MapDataset, indices: Sequence[int], *, seed: int, vw: VirtualWorkerIndex, p: Minibatch, epoch: int = 0
) -> Batch:
    """Read the tensors of minibatch `p` of `vw`, under its own seed; a stream is read as in `epoch` (from 0)."""
    stream = stream_of(dataset)
    if stream is not None:
        stream.begin_epoch(epoch)
    seed_generators(fetch_seed(seed, vw, p))
    return read_batch(dataset, indices, key="data.train")


def example_of(job: Job, dataset: MapDataset) -> Batch:
    """The samples on which a model is cut; the same in every process of the job."""
    count = min(EXAMPLE_SAMPLES, job.batch_size)
    return read_minibatch(dataset, range(count), seed=job.seed, vw=VirtualWorkerIndex(0), p=Minibatch(1))


def read_evaluation_minibatch(
    dataset: MapDataset, indices: Sequence[int], *, seed: int, vw: VirtualWorkerIndex, number: int
) -> Batch:
    """Read the tensors of evaluation minibatch `number` (from 1) of `vw`, under its own seed."""
    seed_generators(evaluation_fetch_seed(seed, vw, number))
    return read_batch(dataset, indices, key="data.eval")
