"""What a comparison trains, and what it refuses before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetpipe.comparison.trials import policies_of, trials_of
from hetpipe.errors import JobError, UserError
from tests.comparison.comparisons import Asked, trials, write_job


def test_all_policies_with_one_seed_before_the_next(tmp_path: Path) -> None:
    found = trials(tmp_path, "wave, flush", seeds=2)
    assert [(one.weights, one.seed) for one in found] == [("wave", 3), ("flush", 3), ("wave", 4), ("flush", 4)]
    assert [(one.job.weights, one.job.seed) for one in found] == [(one.weights, one.seed) for one in found]
    assert str(found[1]) == "flush, seed 3"


def test_policies_differ_in_nothing_else(tmp_path: Path) -> None:
    wave, flush = trials(tmp_path, seeds=1)
    changed = {"weights": "wave"}
    assert flush.job.model_copy(update=changed) == wave.job


def test_settings_for_all_and_for_one(tmp_path: Path) -> None:
    asked = Asked("wave,flush", 1, ["seed=7", "optimizer.lr=0.2"], ["flush:optimizer.lr=0.8"])
    wave, flush = trials_of(write_job(tmp_path), asked)
    assert (wave.seed, flush.seed) == (7, 7)
    assert (wave.job.optimizer.arguments["lr"], flush.job.optimizer.arguments["lr"]) == (0.2, 0.8)


def test_values_of_keys(tmp_path: Path) -> None:
    asked = Asked(None, 1, vary=["sync.minibatches_per_wave=2,4", "optimizer.lr=1e-3,0.2"])
    found = trials_of(write_job(tmp_path, weights="flush"), asked)
    assert [str(one) for one in found] == [
        f"flush, sync.minibatches_per_wave={waves}, optimizer.lr={rate}, seed 3"
        for waves in (2, 4)
        for rate in ("1e-3", 0.2)
    ]
    assert [(one.job.minibatches_per_wave, one.job.optimizer.arguments["lr"]) for one in found] == [
        (2, 0.001),
        (2, 0.2),
        (4, 0.001),
        (4, 0.2),
    ]
    assert len({one.job_digest for one in found}) == 4
    both = trials_of(write_job(tmp_path), Asked("wave,flush", 1, vary=["sync.minibatches_per_wave=2,2"]))
    assert [one.label for one in both] == ["wave, sync.minibatches_per_wave=2", "flush, sync.minibatches_per_wave=2"]
    assert len(trials_of(write_job(tmp_path), Asked(None, 1))) == 5, "without values all policies"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sync.D", "give a key and its values: sync.D=0,4"),
        ("=1,2", "give a key and its values"),
        ("sync.D=", "give a key and its values"),
        ("sync.D=[1,2", "give a key and its values"),
        ("weights=wave,flush", "give policies by --weights wave,flush"),
    ],
)
def test_values_that_are_none(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        trials_of(write_job(tmp_path), Asked(None, 1, vary=[text]))


def test_a_value_that_cannot_be_used_is_told_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        trials_of(write_job(tmp_path), Asked("wave", 1, vary=["batch_size=4,-1"]))
    (sentence,) = refused.value.problems
    assert sentence.startswith("under wave, batch_size=-1: batch_size:")


def test_equal_jobs_have_equal_digests(tmp_path: Path) -> None:
    first, second = trials(tmp_path), trials(tmp_path)
    assert [one.job_digest for one in first] == [one.job_digest for one in second]
    assert len({one.job_digest for one in first}) == 4
    assert trials(tmp_path, epochs=3)[0].job_digest != first[0].job_digest


def test_all_refusals_are_told_at_once_with_their_policies(tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        trials(tmp_path, "wave,stash,predict,spectrain", optimizer={"name": "Adagrad", "lr": 0.1})
    assert [problem.split(" is ")[0] for problem in refused.value.problems] == [
        "under predict: optimizer.name:",
        "under spectrain: weights:",
    ]
    with pytest.raises(JobError) as too_few:
        trials(tmp_path, "wave,stash,double_buffer,flush", sync={"minibatches_per_wave": 1})
    assert [problem.split(":")[0] for problem in too_few.value.problems] == ["under stash", "under double_buffer"]


def test_a_mistake_of_the_job_is_not_blamed_on_policies(tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        trials(tmp_path, "wave,flush", optimizer={"name": "SGD", "lr": 0.1, "momentumm": 0.9})
    (sentence,) = refused.value.problems
    assert sentence.startswith("optimizer.momentumm: SGD has no such argument")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked("wave,stach", 1), "--weights 'stach' is unknown; did you mean `stash`"),
        (Asked(" , ", 1), "--weights names no policy; choose among wave, stash"),
        (Asked("wave", 0), "--seeds is 0; give 1 or more"),
        (Asked("wave", 1, (), ["optimizer.lr=0.1"]), "give a policy and a setting: flush:optimizer.lr=0.1"),
        (Asked("wave", 1, (), ["flush:optimizer.lr=0.1"]), "flush is not compared; add it to --weights"),
    ],
)
def test_options_that_cannot_be_used(asked: Asked, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        trials_of(write_job(tmp_path), asked)


def test_each_policy_once() -> None:
    assert policies_of("wave,flush, wave,") == ("wave", "flush")
