"""Profiling subject: the job's model as a chain of layers, one minibatch of its data, and its loss.

Created in a process of its own, because this imports the user's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.pipeline.callables import (
    LossFunction,
    MapDataset,
    build_model,
    build_train_data,
    load_callable,
    load_loss,
    stream_of,
)
from hetpipe.pipeline.chain import Layer
from hetpipe.pipeline.data import Batch, example_of, read_minibatch
from hetpipe.pipeline.layering import layers_of, on_output
from hetpipe.pipeline.model_work import tokens_of
from hetpipe.pipeline.optimizer_choice import check_groups, check_optimization, check_optimizer_names
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES

#: The profiled minibatch, taken as representative.
MINIBATCH = Minibatch(1)
VIRTUAL_WORKER = VirtualWorkerIndex(0)

#: Number of samples, spread over the data, whose lengths are compared; of a stream, one of each of the first
#: minibatches.
_COMPARED_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """A job's own code, loaded and ready to run."""

    job: Job
    chain: tuple[Layer, ...]
    train: MapDataset
    batch: Batch
    loss: LossFunction


def load_subject(job: Job, import_path: Path) -> Subject:
    """Import and call the job's callables; read its first minibatch.

    Raises:
        CallableError, JobError: unusable callables, by their path in the job.
    """
    # The cheapest checks first; with the first optimizer torch imports its compiler.
    check_optimizer_names(job.optimizer, import_path)
    load_callable(str(job.model), import_path)
    loss = load_loss(job, import_path)
    load_callable(str(job.data.train), import_path, "data.train")
    check_optimization(job, import_path)
    train = build_train_data(job, import_path)
    batch = read_minibatch(train, range(job.batch_size), seed=job.seed, vw=VIRTUAL_WORKER, p=MINIBATCH)
    chain = layers_of(
        build_model(job, import_path),
        example_of(job, train),
        loss,
        splits_ties=POLICIES[job.weights].splits_ties,
        precision=job.precision,
    )
    check_groups(job.optimizer, [name for layer in chain for name in layer.parameters.values()])
    return Subject(job, chain, train, batch, on_output(chain, loss))


def tokens_per_sample(subject: Subject) -> int | None:
    """Tokens of every sample: the job's value, otherwise the common length of a few samples spread over the data.

    None if samples are not sequences of token ids, or `has_unequal_lengths`.
    """
    if subject.job.tokens_per_sample is not None:
        return subject.job.tokens_per_sample
    return None if has_unequal_lengths(subject) else tokens_of(subject.batch.inputs)


def has_unequal_lengths(subject: Subject) -> bool:
    """Whether samples are token sequences of different lengths, so that one minibatch is not representative."""
    expected = tokens_of(subject.batch.inputs)
    if expected is None:
        return False
    count = len(subject.train)
    if stream_of(subject.train) is not None:  # later samples would require reading the stream
        count = min(count, _COMPARED_SAMPLES * subject.job.batch_size)
    compared = dict.fromkeys(number * (count - 1) // (_COMPARED_SAMPLES - 1) for number in range(_COMPARED_SAMPLES))
    try:
        alone = [
            read_minibatch(subject.train, [index], seed=subject.job.seed, vw=VIRTUAL_WORKER, p=MINIBATCH)
            for index in compared
        ]
    except CallableError:
        return False  # its `collate_fn` takes whole minibatches only
    return any(tokens_of(each.inputs) != expected for each in alone)
