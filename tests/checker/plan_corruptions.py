"""What can be wrong where layers move between the stages of a virtual worker (`plan-versions.md` §5)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetpipe.checker import Kind
from tests.checker.corruption import CLOCK_SHARD, FIRST_STAGE, LAST_STAGE, Corruption, find, record, register, remove
from tests.checker.scenario import Scenario
from tests.checker.simulator import Histories

PLAN_CORRUPTIONS: dict[str, Corruption] = {}
_corruption = partial(register, PLAN_CORRUPTIONS)

#: The stages of worker 0 begin with three of six layers each; the first has five from clock 2, and two from clock 4 on.
#: Waves of 2 minibatches: p = 5 … 8 belong to version 1.
MOVED = Scenario(moves=((2, 0, (0, 5, 6)), (4, 0, (0, 2, 6))), num_samples=40)
REJOINS = replace(MOVED, moves=((2, 0, (0, 5, 6)), (3, 1, (0, 1, 6))), evict_at=1)


def _set_version(histories: Histories, p: int, version: int, *files: str) -> None:
    """Change the plan version of the forward and the backward of minibatch p of worker 0 on some stages."""
    for file in files:
        for event in ("forward", "backward"):
            record(histories, file, event=event, p=p)["version"] = version


@_corruption(MOVED, Kind.PLAN_VERSION)
def computed_by_the_plan_before(histories: Histories) -> None:
    """All of minibatch 5 as if nothing had moved."""
    _set_version(histories, 5, 0, FIRST_STAGE, LAST_STAGE)


@_corruption(MOVED, Kind.PLAN_VERSION)
def computed_by_the_plan_to_come(histories: Histories) -> None:
    _set_version(histories, 4, 1, FIRST_STAGE, LAST_STAGE)


@_corruption(MOVED, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def layers_computed_by_nobody(histories: Histories) -> None:
    """The first stage has given its layers away, the last one has not got them."""
    _set_version(histories, 9, 1, LAST_STAGE)


@_corruption(MOVED, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def layers_computed_twice(histories: Histories) -> None:
    _set_version(histories, 6, 0, LAST_STAGE)


@_corruption(MOVED, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def backward_by_another_plan(histories: Histories) -> None:
    """The forward ran where the layers are, the backward of one stage where they were."""
    record(histories, FIRST_STAGE, event="backward", p=7)["version"] = 0


@_corruption(MOVED, Kind.PLAN_VERSION, Kind.NO_SLICES, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def move_nobody_decided(histories: Histories) -> None:
    """Stages and shards act on a plan that the clock shard never recorded."""
    remove(histories, CLOCK_SHARD, event="plan", vw=0, version=2)


@_corruption(MOVED, Kind.PLAN, Kind.PLAN_VERSION)
def version_fell(histories: Histories) -> None:
    """The second move has the number of the first."""
    record(histories, CLOCK_SHARD, event="plan", vw=0, version=2)["version"] = 1


@_corruption(MOVED, Kind.PLAN, Kind.PLAN_VERSION, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def plan_lacks_a_layer(histories: Histories) -> None:
    """The last layer belongs to no stage."""
    record(histories, CLOCK_SHARD, event="plan", vw=0, version=1)["bounds"] = [0, 4, 5]


@_corruption(MOVED, Kind.PLAN, Kind.PLAN_VERSION, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def move_between_barriers(histories: Histories) -> None:
    """No barrier is at clock 3."""
    record(histories, CLOCK_SHARD, event="plan", vw=0, version=1)["clock"] = 3


@_corruption(MOVED, Kind.SLICE_NOT_OWNED)
def slice_of_a_layer_that_moved(histories: Histories) -> None:
    """The last stage stages a slice that went to the first, in place of its own."""
    record(histories, "parameter_server-1.jsonl", event="staged", vw=0, stage=1, wave=2)["slices"] = [1]


@_corruption(MOVED, Kind.SLICE_NOT_OWNED)
def slice_nobody_has(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="staged", vw=0, stage=0, wave=0)["slices"] = [0, 7]


@_corruption(REJOINS, Kind.OLD_INCARNATION, Kind.PLAN_VERSION, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def move_of_a_life_that_is_over(histories: Histories) -> None:
    """Layers of an evicted incarnation move, not those of the next one."""
    position = find(histories, CLOCK_SHARD, event="plan", vw=1, version=1)
    histories[CLOCK_SHARD][position]["incarnation"] = 0


#: Layers of stages that move: the first has three, five from p = 5 and two from p = 9 on.
POLICIES = replace(
    MOVED,
    policies=(
        ("p", 3, 0, (0, "layer5"), "swap"),
        ("clock", 2, 0, (0, 3), "recompute"),
        ("p", 7, 0, (2,), "recompute"),
        ("p", 3, 1, (0,), "swap"),
    ),
)


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policy_of_the_script_left_out(histories: Histories) -> None:
    remove(histories, FIRST_STAGE, event="memory", p=3)


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policies_of_a_moved_layer_lost(histories: Histories) -> None:
    """The stage has got layers, and says no more about them."""
    remove(histories, LAST_STAGE, event="memory", p=9)


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policy_a_wave_late(histories: Histories) -> None:
    record(histories, "stage-1-0-0.jsonl", event="memory", p=3)["p"] = 5


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policy_changed_within_a_wave(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="memory", p=3)["p"] = 4


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policy_that_the_script_does_not_have(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="memory", p=3)["policies"] = ["swap", "swap", "keep"]


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policy_that_is_none(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="memory", p=1)["policies"] = ["keep", "lose", "keep"]


@_corruption(POLICIES, Kind.MEMORY_POLICY)
def policies_of_another_cut(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="memory", p=1)["policies"] = ["keep", "keep"]


@_corruption(replace(POLICIES, weights="predict", policies=POLICIES.policies[1:2]), Kind.MEMORY_POLICY)
def predicted_weights_recomputed_between_barriers(histories: Histories) -> None:
    """No barrier is at clock 1, where p = 3 begins."""
    record(histories, FIRST_STAGE, event="memory", p=5)["p"] = 3


#: Worker 0 has five layers on its first stage from wave 2 on, without a barrier.
LIVE = Scenario(live=((2, 0, (0, 5, 6)),), num_samples=40)


@_corruption(LIVE, Kind.PLAN_VERSION)
def live_computed_by_the_plan_before(histories: Histories) -> None:
    """All of the first minibatch after a live move as if nothing had moved."""
    _set_version(histories, 5, 0, FIRST_STAGE, LAST_STAGE)


@_corruption(LIVE, Kind.PLAN_VERSION)
def live_computed_by_the_plan_to_come(histories: Histories) -> None:
    _set_version(histories, 4, 1, FIRST_STAGE, LAST_STAGE)


@_corruption(LIVE, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def live_layers_computed_twice(histories: Histories) -> None:
    """The stage that gave layers away goes on with them."""
    _set_version(histories, 6, 0, LAST_STAGE)


@_corruption(LIVE, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def live_backward_by_the_plan_before(histories: Histories) -> None:
    record(histories, FIRST_STAGE, event="backward", p=5)["version"] = 0


@_corruption(LIVE, Kind.PLAN_VERSION, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def live_move_nobody_announced(histories: Histories) -> None:
    remove(histories, CLOCK_SHARD, event="plan", vw=0, version=1)


@_corruption(LIVE, Kind.PLAN)
def live_move_without_its_sign(histories: Histories) -> None:
    """A version that begins where there is no barrier."""
    del record(histories, CLOCK_SHARD, event="plan", vw=0, version=1)["live"]


@_corruption(LIVE, Kind.PLAN, Kind.PLAN_VERSION)
def live_move_to_an_older_version(histories: Histories) -> None:
    plan = record(histories, CLOCK_SHARD, event="plan", vw=0, version=1)
    before = record(histories, CLOCK_SHARD, event="plan", vw=0, version=0)
    plan["version"], before["version"] = 1, 1


@_corruption(LIVE, Kind.LAYER_COVERAGE, Kind.PLAN_VERSION)
def live_layers_computed_by_nobody(histories: Histories) -> None:
    """The stage that gets layers goes on without them."""
    _set_version(histories, 6, 0, FIRST_STAGE)


@_corruption(LIVE, Kind.PLAN)
def live_move_in_a_wave_already_committed(histories: Histories) -> None:
    """It is announced for a wave that the virtual worker has committed before."""
    lines = histories[CLOCK_SHARD]
    plan = find(histories, CLOCK_SHARD, event="plan", vw=0, version=1)
    announced = lines.pop(plan)
    lines.insert(find(histories, CLOCK_SHARD, event="commit", vw=0, wave=2), announced)


@_corruption(LIVE, Kind.PLAN, Kind.PLAN_VERSION, Kind.SLICE_NOT_OWNED, Kind.COMMITTED_UNSTAGED)
def live_move_that_loses_a_layer(histories: Histories) -> None:
    record(histories, CLOCK_SHARD, event="plan", vw=0, version=1)["bounds"] = [0, 5, 5]
