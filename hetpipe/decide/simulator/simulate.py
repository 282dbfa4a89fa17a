"""Simulation of a whole plan: stages, links, shards and the gate.

The decisions are the runtime's own: `schedule` decides what a stage computes next and how many minibatches may be in
flight, `decide.sync.gate` when a minibatch may start and with which clock. Only commits, publications and the order of
updates are a model of the decision log (`clocks`), compared with it by a test.

As in the runtime, transfers overlap with computation. The planner's closed form instead counts a stage's receiving
transfers as its own time; it bounds and ranks plans, the simulation predicts them. Control messages, the optimizer's
steps and reading data are not simulated.
"""

from __future__ import annotations

from functools import partial

from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs, ticks
from hetpipe.decide.planner.options import schedule_for
from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.simulator.clocks import Clocks
from hetpipe.decide.simulator.decisions import answers
from hetpipe.decide.simulator.durations import Durations
from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.flow import Flow
from hetpipe.decide.simulator.network import Network
from hetpipe.decide.simulator.options import SimulationOptions, check_options
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity, SimulationResult
from hetpipe.decide.simulator.stage import Stage, StagePlace, Worker
from hetpipe.decide.simulator.traffic import FlowSpec, Traffic, cross_node_bytes_per_minibatch, flows_of
from hetpipe.decide.sync.division import shares
from hetpipe.decide.sync.gate import Gate
from hetpipe.errors import PlanError
from hetpipe.values.sync import SyncSpec

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS

#: A shorter run has no steady state between filling and draining.
_LEAST_WAVES = 4

_MOVES = {
    Traffic.ACTIVATIONS: ActivityKind.ACTIVATIONS,
    Traffic.GRADIENTS: ActivityKind.GRADIENTS,
    Traffic.PUSH: ActivityKind.PUSH,
    Traffic.PULL: ActivityKind.PULL,
}


def simulate(
    plan: SimulatedPlan, costs: Costs, options: SimulationOptions, *, with_activities: bool = False
) -> SimulationResult:
    """Run `plan` in simulated time. Deterministic.

    Args:
        plan: the simulated plan.
        costs: the profile and the cluster.
        options: options of the simulation.
        with_activities: whether to record all activities, which takes memory in proportion to their number.

    Raises:
        PlanError: the options are invalid, or all times are zero.
    """
    check_options(plan, options)
    return _Simulation(plan, costs, options, with_activities=with_activities).run()


class _Simulation:
    """One run; single use."""

    def __init__(self, plan: SimulatedPlan, costs: Costs, options: SimulationOptions, *, with_activities: bool) -> None:
        self._plan = plan
        self._costs = costs
        self._options = options
        self._log: list[SimulatedActivity] | None = [] if with_activities else None
        self._engine = Engine()
        self._to_advance: list[Stage] = []
        self._gates = [
            Gate(
                SyncSpec(
                    n,
                    options.staleness,
                    deterministic=options.deterministic,
                    weights=options.weights,
                    pull=options.pull,
                )
            )
            for n in plan.minibatches_per_wave
        ]
        self._clocks = Clocks(
            self._engine,
            self._gates[0],  # what it decides counts waves, so it does not depend on N
            num_stages=[len(stages) for stages in plan.workers],
            # Every virtual worker pushes the whole model, so each of its waves takes a shard the same time.
            apply_ticks=[
                ticks(1000 * sums[-1] / options.apply_bytes_per_second) for sums in plan.placed.pulled.by_shard
            ],
            exchange_ticks=ticks(1000 * options.exchange_seconds),
            on_publish=self._published,
        )
        self._stagger_ticks = self._slowest_ticks() if options.staggered else 0
        self._workers = [
            Worker(index, share) for index, share in enumerate(shares(options.minibatches, plan.minibatches_per_wave))
        ]
        self._stages = [
            [self._stage(worker, index) for index in range(len(plan.workers[worker.index]))] for worker in self._workers
        ]
        self._connect()

    def run(self) -> SimulationResult:
        self._engine.run(self._settle)
        makespan = self._engine.now
        unfinished = [stage for stages in self._stages for stage in stages if not stage.is_done]
        assert not unfinished, f"{len(unfinished)} stages wait forever"
        if not makespan:
            raise PlanError("no layer of this plan takes any time; give the layers times above 0")
        batch_size, pulls_per_wave = self._costs.profile.batch_size, self._pulls_per_wave()
        rates = tuple(map(self._rate, self._workers))
        return SimulationResult(
            samples_per_second=batch_size * sum(rates),
            worker_samples_per_second=tuple(batch_size * rate for rate in rates),
            pulls_per_wave=pulls_per_wave,
            waiting_seconds=tuple(stages[0].waiting_ticks / _TICKS_PER_SECOND for stages in self._stages),
            idle_seconds=tuple(
                sum(stage.idle_ticks for stage in stages) / len(stages) / _TICKS_PER_SECOND for stages in self._stages
            ),
            max_clock_distance=self._clocks.max_distance,
            clock_distance_histogram=self._histogram(),
            cross_node_bytes_per_minibatch=cross_node_bytes_per_minibatch(
                self._plan, self._costs, pulls_per_wave=pulls_per_wave
            ),
            utilisation={
                planned.device: stage.busy_ticks / makespan
                for planned_stages, stages in zip(self._plan.workers, self._stages, strict=True)
                for planned, stage in zip(planned_stages, stages, strict=True)
            },
            seconds=makespan / _TICKS_PER_SECOND,
            num_events=self._engine.num_events,
            activities=tuple(self._log or ()),
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """End of an instant: commit and publish, then let the stages decide."""
        if self._clocks.is_changed:
            self._clocks.settle()
        to_advance = self._to_advance
        if to_advance:
            for stage in to_advance:
                stage.advance()
            to_advance.clear()

    def _published(self, clock: int) -> None:
        if self._log is not None:
            now = self._engine.now
            self._log.append(SimulatedActivity(ActivityKind.PUBLISH, None, None, None, clock, now, now))
        for stages in self._stages:
            for stage in stages:
                stage.notify()

    # -- building ----------------------------------------------------------------------------------------------------

    def _stage(self, worker: Worker, index: int) -> Stage:
        options = self._options
        stages = self._plan.workers[worker.index]
        planned = stages[index]
        prefix = self._costs.forward[planned.kind]
        forward = prefix[planned.last] - prefix[planned.first]
        both = self._compute_ticks(planned)
        factor = self._slowdown(planned)
        schedule = schedule_for(options.weights, options.schedule)
        limit = in_flight(
            stage=index,
            num_stages=len(stages),
            minibatches_per_wave=self._plan.minibatches_per_wave[worker.index],
            weights=options.weights,
            schedule=schedule,
        )
        place = StagePlace(
            index=index,
            num_stages=len(stages),
            limit=limit,
            answers=answers(order_for(options.weights, schedule), limit),
            durations=Durations(
                round(forward * factor),
                round((both - forward) * factor),
                jitter_cv=options.jitter_cv,
                seed=f"{options.seed}/{worker.index}/{index}",
            ),
            log=None if self._log is None else partial(self._computed, worker.index, index),
            start_ticks=worker.index * self._stagger_ticks // len(self._workers),
        )
        return Stage(self._engine, self._clocks, self._gates[worker.index], worker, place, self._to_advance)

    def _compute_ticks(self, planned: SimulatedStage) -> int:
        return self._costs.computed_ticks(planned)

    def _slowdown(self, planned: SimulatedStage) -> float:
        return self._options.stragglers.get(planned.device, 1.0)

    def _slowest_ticks(self) -> int:
        """The time per minibatch of the slowest stage."""
        stages = [planned for stages in self._plan.workers for planned in stages]
        return max(round(self._compute_ticks(planned) * self._slowdown(planned)) for planned in stages)

    def _connect(self) -> None:
        network = Network(
            self._costs.cluster,
            contention=self._options.contention,
            local_shards=self._options.local_shards,
        )
        flows: dict[tuple[Traffic, int, int], Flow] = {}
        for worker, stages in zip(self._workers, self._stages, strict=True):
            for index, stage in enumerate(stages):
                flows[Traffic.PUSH, worker.index, index] = Flow(self._engine, partial(self._staged, worker.index))
                flows[Traffic.PULL, worker.index, index] = Flow(self._engine, stage.receive_weights)
                if index + 1 < len(stages):
                    flows[Traffic.ACTIVATIONS, worker.index, index] = Flow(
                        self._engine, stages[index + 1].receive_activations
                    )
                    flows[Traffic.GRADIENTS, worker.index, index + 1] = Flow(self._engine, stage.receive_gradients)
        for spec in flows_of(self._plan, self._costs):
            log = None if self._log is None else partial(self._moved, spec)
            flows[spec.traffic, spec.vw, spec.stage].add(network.part(spec), log)
        for vw, stages in enumerate(self._stages):
            for index, stage in enumerate(stages):
                stage.connect(
                    downstream=flows.get((Traffic.ACTIVATIONS, vw, index)),
                    upstream=flows.get((Traffic.GRADIENTS, vw, index)),
                    push=flows[Traffic.PUSH, vw, index],
                    pull=flows[Traffic.PULL, vw, index],
                )

    def _staged(self, vw: int, wave: int) -> None:
        self._clocks.staged(vw, wave)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _computed(self, vw: int, stage: int, kind: ActivityKind, p: int, start: int, end: int) -> None:
        assert self._log is not None
        self._log.append(SimulatedActivity(kind, vw, stage, None, p, start, end))

    def _moved(self, spec: FlowSpec, number: int, start: int, end: int) -> None:
        assert self._log is not None
        kind = _MOVES[spec.traffic]
        self._log.append(SimulatedActivity(kind, spec.vw, spec.stage, spec.shard, number, start, end))

    def _rate(self, worker: Worker) -> float:
        """Minibatches per second of a virtual worker in its steady state."""
        n = self._plan.minibatches_per_wave[worker.index]
        ends = worker.wave_ends
        first, last = len(ends) // 2 - 1, len(ends) - 2
        if len(ends) < _LEAST_WAVES or ends[last] == ends[first]:
            return _TICKS_PER_SECOND * worker.num_minibatches / ends[-1]
        return _TICKS_PER_SECOND * n * (last - first) / (ends[last] - ends[first])

    def _pulls_per_wave(self) -> tuple[tuple[float, ...], ...]:
        """With `pull: required` those that happened: a later stage may fetch ahead what the first does not choose."""
        if self._options.pull == "every_wave":
            return tuple((1.0,) * len(stages) for stages in self._stages)
        return tuple(
            tuple(stage.num_pulls / -(-worker.num_minibatches // n) for stage in self._stages[worker.index])
            for worker, n in zip(self._workers, self._plan.minibatches_per_wave, strict=True)
        )

    def _histogram(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for worker in self._workers:
            for distance, count in worker.histogram.items():
                total[distance] = total.get(distance, 0) + count
        return dict(sorted(total.items()))
