"""Jobs whose layers move while minibatches are in flight, without a barrier (plan-versions.md §9)."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.job.elastic import ElasticSection
from hetpipe.job.freezing import FreezeSection
from hetpipe.job.sections import EvaluateSection, SyncSection
from hetpipe.job.training import GradientsSection
from hetpipe.values.policies import POLICIES, Policy, WeightPolicy, policies_where
from hetpipe.values.precision import Precision
from hetpipe.values.suggest import join_names


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What confines the moves of a job to barriers."""

    cause: str
    """Part of a sentence."""
    remedy: str
    """What to change, as an order; empty: nothing helps."""

    def __str__(self) -> str:
        """`CAUSE; REMEDY`."""
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause


def obstacle_to_live_moves(
    weights: WeightPolicy,
    sync: SyncSection,
    gradients: GradientsSection,
    precision: Precision,
    evaluate: EvaluateSection,
    freeze: FreezeSection,
    elastic: ElasticSection,
) -> Obstacle | None:
    """Why layers of a job move at barriers only; None: they also do between them.

    They do where the weights of a minibatch do not depend on the cut, and where all stages know the clock of each
    minibatch that computes on weights of both versions.
    """
    policy, of_time = POLICIES[weights], sync.traits.has_shards and not sync.deterministic
    names = join_names(policies_where(lambda one: one.clips_globally))
    obstacles = (
        (
            not policy.clips_globally,
            f"under weights: {weights} versions depend on the stage",
            f"use weights: {names}",
        ),
        (sync.traits.averages_gradients, f"under {sync.kind} all virtual workers are cut alike at once", ""),
        (
            of_time and _switches_meanwhile(policy),
            f"under weights: {weights} the clock changes during a move, and depends on the time",
            "set `sync.deterministic: true`",
        ),
        (
            gradients.max_norm is not None and gradients.clip == "stage",
            "the norm of a stage's gradient depends on its layers",
            "use `gradients.clip: global`",
        ),
        (precision == "fp16", "a loss scale belongs to whole waves of one cut under fp16", "use bf16 or fp32"),
        (
            evaluate.every_waves is not None,
            "evaluations within an epoch use the layers of one cut",
            "remove `evaluate.every_waves`",
        ),
        (freeze != FreezeSection(), "`freeze` and moves between barriers are not combined", ""),
        (elastic.activates, "inactive layers and moves between barriers are not combined", ""),
    )
    return next((Obstacle(cause, remedy) for is_one, cause, remedy in obstacles if is_one), None)


def _switches_meanwhile(policy: Policy) -> bool:
    """Whether the clock in use may change at a minibatch whose weights the version before the move computes."""
    return policy.one_update_per_wave and policy.waves_behind > 0
