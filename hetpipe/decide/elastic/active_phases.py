"""How fast a plan is while some layers are inactive (docs/semantics/dynamic-models.md). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.decide.elastic.plan_files import basis_of
from hetpipe.decide.elastic.replanning import activation_cuts
from hetpipe.decide.planner.active_profile import active_profile
from hetpipe.decide.simulator.documents import costs_of, simulated_plan, with_cuts
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.activation import Activation
from hetpipe.values.cluster import Cluster
from hetpipe.values.plan_document import ActivePhase, PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.values.sync import layer_counts


def active_phases(
    document: PlanDocument,
    profile: Profile,
    cluster: Cluster,
    how: SimulationOptions,
    activations: Sequence[Activation],
    *,
    recut: bool,
) -> tuple[ActivePhase, ...]:
    """The phases of a run, in order.

    Inactive layers take no time. What memory policies add to the time of a stage, and what is pushed, stay those of all
    layers.

    Args:
        document: the plan.
        profile: of the model.
        cluster: with the plan's devices.
        how: the simulation of each phase.
        activations: in order of their clocks; none: no phases.
        recut: whether layers move where others become active (`elastic.recut`).

    Raises:
        PlanError: the plan does not match the profile and the cluster.
    """
    plan = simulated_plan(document, costs_of(document, profile, cluster))
    basis, workers = basis_of(document, profile, cluster)
    moves = activation_cuts(basis, workers, activations, alike=not document.has_shards) if recut else ()
    bounds: dict[int, tuple[int, ...]] = {worker.index: worker.bounds for worker in workers}
    found = []
    for activation in activations:
        moved: dict[int, tuple[int, ...]] = {cut.vw: cut.bounds for cut in moves if cut.clock == activation.clock}
        bounds |= moved
        plan = with_cuts(plan, moved)
        costs = costs_of(document, active_profile(profile, activation.inactive), cluster)
        cuts = tuple(map(layer_counts, bounds.values()))
        found.append(
            ActivePhase(
                clock=activation.clock,
                inactive=activation.inactive,
                samples_per_second=simulate(plan, costs, how).samples_per_second,
                cuts=cuts,
            )
        )
    return tuple(found)
