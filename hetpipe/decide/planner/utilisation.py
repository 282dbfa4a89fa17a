"""What of the devices' peak a plan uses, as a whole and in each stage. Pure; the definition is `spec.utilisation`'s."""

from __future__ import annotations

from hetpipe.values.cluster import Cluster
from hetpipe.values.plan import ModelWork
from hetpipe.values.plan_document import PlanDocument, PlannedStage, PlannedWorker
from hetpipe.values.profile import Profile
from hetpipe.values.utilisation import model_speed, peak_of_types


def with_utilisation(plan: PlanDocument, profile: Profile, cluster: Cluster) -> PlanDocument:
    """`plan` with tokens/s and MFU at the predicted speed, also of each stage.

    A stage computes its layers for every sample of its virtual worker. Under a bound all virtual workers close their
    waves at one pace in the long run, so each trains as many samples as any other; without one, each at its own speed.
    Idle devices do not count, as those that a run does not use do not.
    """
    rate, dtype = plan.predicted.samples_per_second, profile.compute_dtype
    if plan.staleness is None:
        together = sum(worker.samples_per_second for worker in plan.virtual_workers)
        shares = [worker.samples_per_second / together if together else 0.0 for worker in plan.virtual_workers]
    else:
        shares = [1.0 / len(plan.virtual_workers)] * len(plan.virtual_workers)

    def work(first: int, last: int) -> ModelWork | None:
        flops = profile.model_flops(first, last)
        return None if flops is None else ModelWork(profile.tokens_per_sample, flops / profile.batch_size)

    def stage_with(stage: PlannedStage, samples_per_second: float) -> PlannedStage:
        peak = peak_of_types([stage.type], cluster.device_types, dtype)
        speed = model_speed(samples_per_second, work(*stage.layers), peak)
        return stage.model_copy(update={"model_flops_utilisation": speed.model_flops_utilisation})

    def worker_with(worker: PlannedWorker, share: float) -> PlannedWorker:
        return worker.model_copy(update={"stages": tuple(stage_with(stage, rate * share) for stage in worker.stages)})

    kinds = [stage.type for worker in plan.virtual_workers for stage in worker.stages]
    whole = profile.model_flops(0, len(profile.layers))
    all_work = ModelWork(profile.tokens_per_sample, None if not whole else whole / profile.batch_size)
    speed = model_speed(rate, all_work, peak_of_types(kinds, cluster.device_types, dtype))
    reason = speed.model_flops_utilisation_reason
    if whole is None:
        reason = "the profile has no FLOPs of its layers; make it again with this version of `hetpipe profile`"
    predicted = plan.predicted.model_copy(
        update={
            "tokens_per_second": speed.tokens_per_second,
            "model_flops_utilisation": speed.model_flops_utilisation,
            "model_flops_utilisation_reason": reason,
        }
    )
    workers = tuple(worker_with(*each) for each in zip(plan.virtual_workers, shares, strict=True))
    return plan.model_copy(update={"predicted": predicted, "virtual_workers": workers})
