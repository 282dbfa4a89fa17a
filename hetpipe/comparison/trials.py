"""Runs of `hetpipe compare`: one job under several weight policies, with several seeds.

The seed determines sample order and initial weights: trials with the same seed differ in the policy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job, load_job
from hetpipe.job.model import MAX_SEED
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.suggest import did_you_mean


class TrialSettings(Protocol):
    """Unparsed options that define the trials."""

    @property
    def weights(self) -> str:
        """Comma-separated policy names."""

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

    def __str__(self) -> str:
        return f"{self.weights}, seed {self.seed}"

    @property
    def job_digest(self) -> str:
        """Digest of the job's content."""
        return hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()


@dataclass(slots=True)
class _Refusals:
    """Error messages, with the policies each applies to."""

    requested: Sequence[WeightPolicy]
    about: dict[str, list[WeightPolicy]] = field(default_factory=dict)

    def add(self, weights: WeightPolicy, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.about.setdefault(sentence, []).append(weights)

    def lines(self) -> list[str]:
        """Formatted messages; an error under every policy is reported as the job's own."""
        return [
            sentence if len(policies) == len(self.requested) else f"under {', '.join(policies)}: {sentence}"
            for sentence, policies in self.about.items()
        ]


def trials_of(source: Path | Job, requested: TrialSettings) -> tuple[Trial, ...]:
    """All runs of the comparison: every policy with one seed before the next seed.

    Args:
        source: the job, or its file.
        requested: policies, seeds, and overrides of the job.

    Raises:
        UserError: a policy is unknown, or the number of seeds is invalid.
        JobError: all problems under any of the policies, before anything starts.
    """
    policies = policies_of(requested.weights)
    own = _by_policy(requested.own_settings, policies)
    if requested.seeds < 1:
        raise UserError(f"--seeds is {requested.seeds}; give 1 or more")
    refusals = _Refusals(policies)
    jobs: dict[WeightPolicy, Job] = {}
    for weights in policies:
        try:
            jobs[weights] = _job_under(weights, source, (*requested.settings, *own.get(weights, ())))
        except JobError as error:
            refusals.add(weights, error.problems)
    if refusals.about:
        raise JobError(refusals.lines())
    return tuple(
        Trial(weights, seed, load_job(job, {"seed": seed}))
        for number in range(requested.seeds)
        for weights, job in jobs.items()
        for seed in [(job.seed + number) % (MAX_SEED + 1)]
    )


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
