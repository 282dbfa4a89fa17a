"""What a job's own code cannot do is refused where the code is first looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.errors import JobError
from hetpipe.job.file import Job
from hetpipe.pipeline.data import read_minibatch
from hetpipe.pipeline.streams import StreamDataset
from hetpipe.profiler.subject import (
    MINIBATCH,
    VIRTUAL_WORKER,
    Subject,
    has_unequal_lengths,
    load_subject,
    tokens_per_sample,
)
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT


def told(**keys: Any) -> Job:
    """A job as an agent is told of it: through JSON."""
    job = small_job(data={"train": "tests.models:data32"}, **keys)
    return Job.model_validate(job.model_dump(mode="json"))


def test_groups_that_fit_the_model() -> None:
    groups = ({"parameters": ("*.bias",), "weight_decay": 0.0},)
    assert load_subject(told(optimizer={"name": "AdamW", "groups": groups}), ROOT).chain


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"optimizer": {"name": "AdamW", "groups": ({"parameters": ("encoder.*",), "lr": 0.5},)}},
            "optimizer.groups[0].parameters: no parameter matches 'encoder.*'; there are ",
        ),
        (
            {"optimizer": {"name": "Adagrad"}, "weights": "predict"},
            "optimizer.name: is Adagrad, but update rules exist only for ",
        ),
        ({"lr_schedule": {"name": "CosineAnnealingLR"}}, "lr_schedule.T_max: is missing; "),
    ],
    ids=["groups", "prediction", "schedule"],
)
def test_what_does_not(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError) as caught:
        load_subject(told(**keys), ROOT)
    assert caught.value.problems[0].startswith(problem)


class Sentences:
    """Samples of ids, of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.lengths[index], dtype=torch.int64), torch.tensor(0)


def of_lengths(*lengths: int, **keys: Any) -> Subject:
    """A subject whose first minibatch is of the first two samples."""
    subject, train = load_subject(told(), ROOT), Sentences(*lengths)
    batch = read_minibatch(train, range(2), seed=0, vw=VIRTUAL_WORKER, p=MINIBATCH)
    return replace(subject, job=told(**keys), train=train, batch=batch)


class TestTokens:
    def test_samples_of_one_length(self) -> None:
        assert tokens_per_sample(of_lengths(*[12] * 100)) == 12

    def test_a_minibatch_does_not_stand_for_samples_of_other_lengths(self) -> None:
        """Lengths 10 to 32 in ascending order: the first minibatch has the shortest."""
        ragged = of_lengths(*[10 + index * 22 // 99 for index in range(100)])
        assert has_unequal_lengths(ragged)
        assert tokens_per_sample(ragged) is None

    def test_one_longer_sample_at_the_end(self) -> None:
        assert tokens_per_sample(of_lengths(*[12] * 99, 13)) is None

    def test_the_job_may_say_their_mean(self) -> None:
        assert tokens_per_sample(of_lengths(10, 10, 32, tokens_per_sample=21)) == 21

    def test_other_data_have_no_tokens(self) -> None:
        subject = load_subject(told(), ROOT)
        assert tokens_per_sample(subject) is None
        assert not has_unequal_lengths(subject)

    def test_data_of_one_sample(self) -> None:
        ones = of_lengths(12, 12)
        assert tokens_per_sample(replace(ones, train=Sentences(12))) == 12

    def test_a_stream_is_not_read_to_its_end(self) -> None:
        given = of_lengths(*[12] * 40)
        sentences, read = given.train, list[int]()

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                for index in range(40):
                    read.append(index)
                    yield sentences[index]

        stream = StreamDataset(Stream(), 40, key="data.train", length_key="data.length", seed=0)
        assert tokens_per_sample(replace(given, train=stream)) == 12
        assert read == list(range(8 * given.job.batch_size))

    def test_data_that_can_be_read_as_whole_minibatches_only(self) -> None:
        subject = of_lengths(12, 12)

        class Whole(Sentences):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                raise ValueError("no sample alone")

        assert tokens_per_sample(replace(subject, train=Whole(12, 12))) == 12
