"""What `hetpipe compare` trains: one job under several weight policies, with several seeds.

The seed determines the order of samples and the initial weights: trials with the same seed differ in the policy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hetpipe.errors import JobError, UserError
from hetpipe.job.file import Job, load_job
from hetpipe.job.model import MAX_SEED
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.suggest import did_you_mean


class TrialSettings(Protocol):
    """Options that say what is trained, as they were typed."""

    @property
    def weights(self) -> str:
        """Names of policies with commas between them."""

    @property
    def seeds(self) -> int:
        """How many, counted up from the job's own."""

    @property
    def settings(self) -> Sequence[str]:
        """`path=value` texts, for every policy."""

    @property
    def own_settings(self) -> Sequence[str]:
        """`POLICY:path=value` texts, for one policy each."""


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
        """Equal for equal jobs."""
        return hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()


@dataclass(slots=True)
class _Refusals:
    """Sentences, and the policies that each one is about."""

    asked: Sequence[WeightPolicy]
    about: dict[str, list[WeightPolicy]] = field(default_factory=dict)

    def add(self, weights: WeightPolicy, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.about.setdefault(sentence, []).append(weights)

    def lines(self) -> list[str]:
        """What is wrong under every policy is the job's own mistake, and is told as such."""
        return [
            sentence if len(policies) == len(self.asked) else f"under {', '.join(policies)}: {sentence}"
            for sentence, policies in self.about.items()
        ]


def trials_of(source: Path, asked: TrialSettings) -> tuple[Trial, ...]:
    """Every run of the comparison, all policies with one seed before the next seed.

    Args:
        source: the job file.
        asked: policies, seeds, and changes to the job.

    Raises:
        UserError: a policy is not known, or the number of seeds is none.
        JobError: with everything that is refused under any of the policies, before anything starts.
    """
    policies = policies_of(asked.weights)
    own = _by_policy(asked.own_settings, policies)
    if asked.seeds < 1:
        raise UserError(f"--seeds is {asked.seeds}; give 1 or more")
    refusals = _Refusals(policies)
    jobs: dict[WeightPolicy, Job] = {}
    for weights in policies:
        try:
            jobs[weights] = _job_under(weights, source, (*asked.settings, *own.get(weights, ())))
        except JobError as error:
            refusals.add(weights, error.problems)
    if refusals.about:
        raise JobError(refusals.lines())
    return tuple(
        Trial(weights, seed, load_job(job, {"seed": seed}))
        for number in range(asked.seeds)
        for weights, job in jobs.items()
        for seed in [(job.seed + number) % (MAX_SEED + 1)]
    )


def policies_of(text: str) -> tuple[WeightPolicy, ...]:
    """The value of `--weights`, each policy once.

    Raises:
        UserError: one is not known, or none is named.

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
    raise UserError(f"--weights knows no {name!r}; {did_you_mean(name, WEIGHT_POLICIES)}")


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


def _job_under(weights: WeightPolicy, source: Path, settings: Sequence[str]) -> Job:
    # torch takes a while to import
    from hetpipe.pipeline.optimizer_choice import check_optimizer_arguments
    from hetpipe.weights.prediction import check_predictable

    job = load_job(source, [*settings, f"weights={weights}"])
    if not job.optimizer.is_own:  # the user's code is imported by agents only
        check_predictable(check_optimizer_arguments(job.optimizer), job.optimizer.name, job.weights)
    return job
