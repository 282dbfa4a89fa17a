"""Runs of `hetpipe compare`: one job under several weight policies or values of its keys, with several seeds.

The seed determines sample order and initial weights: trials with the same seed differ in the policy and in these values
only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import yaml

from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job, load_job
from hetpipe.job.model import MAX_SEED
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.suggest import did_you_mean


class TrialSettings(Protocol):
    """Unparsed options that define the trials."""

    @property
    def weights(self) -> str | None:
        """Comma-separated policy names; None: `COMPARED`, or where keys vary that of the job."""

    @property
    def vary(self) -> Sequence[str]:
        """`path=value,value`: keys with the values to compare; of several all combinations."""

    @property
    def seeds(self) -> int:
        """Number of seeds, counted up from the job's own."""

    @property
    def settings(self) -> Sequence[str]:
        """`path=value` overrides for every policy."""

    @property
    def own_settings(self) -> Sequence[str]:
        """`POLICY:path=value` overrides for one policy each."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a comparison."""

    weights: WeightPolicy
    seed: int
    job: Job
    values: str = ""
    """Of the keys that vary, as `sync.D=4, optimizer.lr=0.1`; empty if none do."""

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def label(self) -> str:
        """Its row of the comparison."""
        return label_of(self.weights, self.values)

    @property
    def job_digest(self) -> str:
        """Digest of the job's content."""
        return hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()


def label_of(weights: WeightPolicy, values: str) -> str:
    """The name of a row of the comparison.

    >>> label_of("wave", ""), label_of("wave", "sync.D=4")
    ('wave', 'wave, sync.D=4')
    """
    return f"{weights}, {values}" if values else weights


@dataclass(slots=True)
class _Refusals:
    """Error messages, with the rows of the comparison each applies to."""

    num_rows: int
    about: dict[str, list[str]] = field(default_factory=dict)

    def add(self, label: str, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.about.setdefault(sentence, []).append(label)

    def lines(self) -> list[str]:
        """Formatted messages; an error in every row is reported as the job's own."""
        return [
            sentence if len(labels) == self.num_rows else f"under {'; '.join(labels)}: {sentence}"
            for sentence, labels in self.about.items()
        ]


def trials_of(source: Path | Job, requested: TrialSettings) -> tuple[Trial, ...]:
    """All runs of the comparison: every row with one seed before the next seed.

    Args:
        source: the job, or its file.
        requested: policies, values of keys, seeds, and overrides of the job.

    Raises:
        UserError: a policy is unknown, values are given in another form, or the number of seeds is invalid.
        JobError: all problems under any of the policies and values, before anything starts.
    """
    combinations = combinations_of(requested.vary)
    if requested.weights is None and requested.vary:
        policies: tuple[WeightPolicy, ...] = (load_job(source, requested.settings).weights,)
    else:
        policies = policies_of(COMPARED if requested.weights is None else requested.weights)
    own = _by_policy(requested.own_settings, policies)
    if requested.seeds < 1:
        raise UserError(f"--seeds is {requested.seeds}; give 1 or more")
    rows = [(weights, values) for weights in policies for values in combinations]
    refusals = _Refusals(len(rows))
    jobs: dict[tuple[WeightPolicy, str], Job] = {}
    for weights, values in rows:
        shown = ", ".join(values)
        try:
            jobs[weights, shown] = _job_under(weights, source, (*requested.settings, *values, *own.get(weights, ())))
        except JobError as error:
            refusals.add(label_of(weights, shown), error.problems)
    if refusals.about:
        raise JobError(refusals.lines())
    return tuple(
        Trial(weights, seed, load_job(job, {"seed": seed}), shown)
        for number in range(requested.seeds)
        for (weights, shown), job in jobs.items()
        for seed in [(job.seed + number) % (MAX_SEED + 1)]
    )


def combinations_of(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """All combinations of the values of `--vary`, as settings; one without any settings if nothing varies.

    Raises:
        UserError: a text is no key with values.

    >>> combinations_of(["sync.D=0,4", "optimizer.lr=0.1"])
    (('sync.D=0', 'optimizer.lr=0.1'), ('sync.D=4', 'optimizer.lr=0.1'))
    """
    return tuple(itertools.product(*map(_settings_of, texts)))


def _settings_of(text: str) -> tuple[str, ...]:
    path, equals, listed = text.partition("=")
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError:
        values = None
    if not path.strip() or not equals or not values:
        raise UserError(f"--vary is {text!r}; give a key and its values: sync.D=0,4")
    if path.strip() == "weights":
        raise UserError(f"--vary {text}: give policies by --weights {listed}")
    shown = (value if isinstance(value, str) else json.dumps(value) for value in values)
    return tuple(dict.fromkeys(f"{path.strip()}={value}" for value in shown))


#: The policies that are compared unless others are requested, as in `--weights`.
COMPARED: Final = "wave,stash,double_buffer,flush,predict"


def policies_of(text: str) -> tuple[WeightPolicy, ...]:
    """Parse the value of `--weights`; duplicates are dropped.

    Raises:
        UserError: a name is unknown, or there is none.

    >>> policies_of("flush, stash,flush")
    ('flush', 'stash')
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise UserError(f"--weights names no policy; choose among {', '.join(WEIGHT_POLICIES)}")
    return tuple(dict.fromkeys(_known(name) for name in names))


def _known(name: str) -> WeightPolicy:
    for policy in WEIGHT_POLICIES:
        if name == policy:
            return policy
    raise UserError(f"--weights {name!r} is unknown; {did_you_mean(name, WEIGHT_POLICIES)}")


def _by_policy(texts: Sequence[str], policies: Sequence[WeightPolicy]) -> Mapping[WeightPolicy, list[str]]:
    found: dict[WeightPolicy, list[str]] = {}
    for text in texts:
        name, colon, setting = text.partition(":")
        if not colon or "=" in name:
            raise UserError(f"--set-for is {text!r}; give a policy and a setting: flush:optimizer.lr=0.1")
        policy = _known(name.strip())
        if policy not in policies:
            raise UserError(f"--set-for {text}: {policy} is not compared; add it to --weights, or leave this out")
        found.setdefault(policy, []).append(setting)
    return found


def _job_under(weights: WeightPolicy, source: Path | Job, settings: Sequence[str]) -> Job:
    # torch is slow to import
    from hetpipe.pipeline.optimizer_choice import check_optimizer_arguments
    from hetpipe.weights.prediction import check_predictable

    job = load_job(source, [*settings, f"weights={weights}"])
    if not job.optimizer.is_own:  # the user's code is imported by agents only
        check_predictable(check_optimizer_arguments(job.optimizer), job.optimizer.name, job.weights)
    return job
