"""Result of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import ActivePhase


class ActivityKind(Enum):
    """Kind of an activity in simulated time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ACTIVATIONS = "activations"
    """Transfer to the next stage."""
    GRADIENTS = "gradients"
    """Transfer to the previous stage."""
    PUSH = "push"
    PULL = "pull"
    PUBLISH = "publish"
    """Takes no time."""


@dataclass(frozen=True, slots=True)
class SimulatedActivity:
    """One activity."""

    kind: ActivityKind
    vw: int | None
    """None for a publish."""
    stage: int | None
    """For a transfer between stages, the sender."""
    shard: int | None
    """For pushes and pulls only."""
    number: int
    """The minibatch; for a push the wave, for a pull and a publish the clock."""
    start_ticks: int
    end_ticks: int


@dataclass(frozen=True, slots=True)
class Phase:
    """The part of a run in which the same layers are frozen, and the same virtual workers train."""

    clock: int
    """Its first clock."""
    frozen: int
    """F."""
    layers: int
    """The first so many layers of the model are frozen."""
    samples_per_second: float
    """From barrier to barrier, with the filling and draining of pipelines."""
    seconds: float
    stages: tuple[int, ...]
    """Of each virtual worker."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulation. Virtual workers are in the order of the plan."""

    samples_per_second: float
    """In the steady state: for each virtual worker from the end of its middle wave to the end of its last but one,
    after filling and before draining; summed over the virtual workers. For a run of under 4 waves, of the whole run."""
    worker_samples_per_second: tuple[float, ...]
    """The summands."""
    pulls_per_wave: tuple[tuple[float, ...], ...]
    """Of each stage of each virtual worker; 1 unless weights are pulled only when D requires it."""
    waiting_seconds: tuple[float, ...]
    """For each virtual worker's first stage: time in which the clock required by its next minibatch was not published.
    """
    idle_seconds: tuple[float, ...]
    """Mean over each virtual worker's stages: time without work, up to the stage's last gradient."""
    max_clock_distance: int
    """Maximum lead in committed waves of one virtual worker over another."""
    clock_distance_histogram: Mapping[int, int]
    """c_v − W* → number of minibatches started with it: own waves committed minus the published clock in use."""
    cross_node_bytes_per_minibatch: float
    """All bytes that leave a node, each counted once; see `traffic`."""
    utilisation: Mapping[DeviceId, float]
    """Share of the whole run in which each device of the plan computed."""
    seconds: float
    """Simulated time, from the first forward to the last publish."""
    num_events: int
    """Number of discrete events."""
    activities: tuple[SimulatedActivity, ...] = ()
    """In the order of their ends; only if requested."""
    phases: tuple[Phase, ...] = ()
    """Of a run whose layers freeze at given clocks; the other fields are those of the same run without freezing."""
    active_phases: tuple[ActivePhase, ...] = ()
    """Of a run whose active layers change at given clocks; the other fields are those with all layers active."""
