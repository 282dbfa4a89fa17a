"""The HetPipe paper's cluster, emulated: hetpipe's ways to use it beside PyTorch's DistributedDataParallel.

Every contender trains the small model of `benchmarks.paper` in real processes, on the same number of samples, with the
same step per minibatch: updates are summed, averages have the learning rate times the number of minibatches averaged.
Each is simulated as well. Rates and seconds are those of the cluster: divided by the factor by which time is slowed.

As emulated links do not, simulated links do not share bandwidth; what sharing would cost is said by the simulator
(`shared links`). Waves are simulated with what a round trip to the shards takes on this machine besides its bytes' time
on links, measured in that run (see `benchmarks.prediction`): with D = 0 it decides which of two rhythms a pipeline has.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import data_parallel, paper
from benchmarks.prediction import beyond_links
from benchmarks.protocol import train
from benchmarks.sizes import sized
from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.shard_bytes import PlacedParameters
from hetpipe.decide.simulator.documents import simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.prediction import Emulation, predicted
from hetpipe.decide.simulator.result import ActivityKind, SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.document import read_document
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.values.run import LinkTime

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS
_MICROSECONDS = 1e6

#: Of one minibatch.
LEARNING_RATE = 0.005
#: Samples over which a loss is averaged.
_LOSS_SAMPLES = 1024
#: Minibatches of a wave of pipelines that average their gradients: two per stage.
_ALL_REDUCE_WAVE = sized(8, 4)

_ALLOCATIONS = sized(("NP", "ED", "HD", "auto"), ("auto",))
_BOUNDS = sized((0, 4, 32), (0,))
MODELS = sized(tuple(paper.MODELS), ("vgg19",))

#: What the paper reports against data parallelism with all-reduce on its cluster.
PAPER_RATIOS = {"vgg19": 1.8, "resnet152": 1.4}


@dataclass(frozen=True, slots=True)
class Point:
    """A mean loss over some samples that ended at a time, in seconds of the cluster."""

    seconds: float
    loss: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One contender. Rates in samples per second, times in seconds, both of the cluster; shares of time below 1."""

    simulated: float
    measured: float
    predicted: float | None = None
    """What its plan promises of a long run; None without a plan."""
    shared_links: float | None = None
    """The same simulation if links share bandwidth; None without one."""
    simulated_waiting: float | None = None
    """Share of the time in which first stages wait for a clock, mean over virtual workers; None without clocks."""
    waiting: float | None = None
    simulated_idle: float | None = None
    """Share of the time in which devices do not compute, mean over those in use."""
    idle: float | None = None
    processor: float
    """Processor time per second of emulated computation; of runs of hetpipe with startup and planning."""
    exchange: float | None = None
    """Seconds of this machine in a round trip to the shards besides its bytes' time on links; None without shards."""
    workers: str
    """For people."""
    losses: tuple[Point, ...]

    @property
    def simulated_of_measured(self) -> float:
        """The simulator's error: 1 for none."""
        return self.simulated / self.measured


def measure(model: str) -> Iterator[tuple[str, Found]]:
    """The contenders for one of `MODELS`, one after the other."""
    for name, contender in _contenders(model).items():
        yield name, contender()


def round_of_ratios(model: str) -> dict[str, float]:
    """One round of the contenders for one of `MODELS` with no bound but D = 0: ratios of measured speeds, and more."""
    found = {name: run() for name, run in _contenders(model).items() if "D = " not in name or "D = 0" in name}
    rates = {name: one.measured for name, one in found.items()}
    best = "auto, D = 0"
    ratios = {f"{best} / {name}": rates[best] / rate for name, rate in rates.items() if name != best}
    if (proportional := "NP, D = 0, proportional") in rates:
        ratios[f"{proportional} / NP, D = 0"] = rates[proportional] / rates["NP, D = 0"]
    ratios |= {f"{name}, simulated / measured": one.simulated_of_measured for name, one in found.items()}
    return ratios | {"processor seconds per emulated second, most": max(one.processor for one in found.values())}


def _contenders(model: str) -> dict[str, Callable[[], Found]]:
    profile = paper.profile(paper.MODELS[model]())
    contenders: dict[str, Callable[[], Found]] = {
        "DistributedDataParallel": partial(_data_parallel, model, profile),
        "all-reduce pipelines, ED": partial(_all_reduce, model, profile),
    }
    for staleness in _BOUNDS:
        for allocation in _ALLOCATIONS:
            contenders[f"{allocation}, D = {staleness}"] = partial(_waves, model, profile, allocation, staleness)
    for staleness in sized((0, 4), ()):
        name = f"NP, D = {staleness}, proportional"
        contenders[name] = partial(_waves, model, profile, "NP", staleness, per_wave="proportional")
    return contenders


def table(found: Mapping[str, Found]) -> dict[str, dict[str, Any]]:
    """Everything but the losses, and the time to the lowest loss that all of them reach."""
    target = max(min(loss for _, loss in smoothed(one.losses)) for one in found.values())
    rows = {}
    for name, one in found.items():
        row = {key: value for key, value in asdict(one).items() if key != "losses"}
        row["simulated / measured"] = one.simulated_of_measured
        row[f"seconds to a loss of {target:.3f}"] = next(at for at, loss in smoothed(one.losses) if loss <= target)
        rows[name] = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    return rows


def curves(found: Mapping[str, Found]) -> dict[str, list[tuple[float, float]]]:
    """Seconds and loss of each."""
    return {name: [(round(at, 2), round(loss, 3)) for at, loss in smoothed(one.losses)] for name, one in found.items()}


def verdict(model: str, found: Mapping[str, Found], nodes: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Hetpipe against data parallelism beside the paper, and how `auto` compares with the contenders of its D.

    Args:
        model: of `MODELS`.
        found: its contenders.
        nodes: its `whimpy_nodes`; data parallelism may be faster without some.
    """
    baseline, best = found["DistributedDataParallel"], found["auto, D = 0"]
    said: dict[str, Any] = {
        "the paper's ratio to data parallelism": PAPER_RATIOS[model],
        "ours, auto, D = 0, measured": round(best.measured / baseline.measured, 3),
        "simulated": round(best.simulated / baseline.simulated, 3),
    }
    if best.shared_links is not None:
        said["simulated, with links that share bandwidth"] = round(best.shared_links / baseline.simulated, 3)
    planned = choose_plan(paper.profile(paper.MODELS[model]()), paper.cluster(), PlanOptions(), predict=predicted)
    fastest = max(row["DistributedDataParallel"] for row in nodes.values())
    said["simulated, planned for links that share bandwidth"] = round(
        paper.SECONDS * planned.predicted.samples_per_second / baseline.simulated, 3
    )
    said["simulated, data parallelism on the nodes on which it is fastest"] = round(best.simulated / fastest, 3)
    for staleness in _BOUNDS:
        auto = found[f"auto, D = {staleness}"]
        others = [one for name, one in found.items() if f"D = {staleness}" in name.split(", ") and one is not auto]
        if others:
            promised = max(one.predicted or 0.0 for one in others)
            said[f"auto / the fastest other, D = {staleness}"] = {
                "predicted": round((auto.predicted or 0.0) / promised, 3),
                "measured": round(auto.measured / max(one.measured for one in others), 3),
            }
    return said


def whimpy_nodes(model: str) -> dict[str, dict[str, float]]:
    """Simulated samples per second with the nodes of the paper's cluster added one by one."""
    profile, rates = paper.profile(paper.MODELS[model]()), {}
    played = partial(predicted, played=Emulation({}, with_links=True))
    for num_nodes in range(1, sized(len(paper.NODES), 2) + 1):
        nodes = paper.NODES[:num_nodes]
        cluster = paper.cluster(*nodes)
        costs = Costs(profile, cluster)
        ring = data_parallel.ring_of(costs)
        step = data_parallel.simulated_seconds(costs, ring)
        plan = choose_plan(profile, cluster, PlanOptions(allocation="auto"), predict=played)
        rates[" ".join(nodes)] = {
            "auto, D = 0": round(paper.SECONDS * plan.predicted.samples_per_second, 1),
            "DistributedDataParallel": round(paper.SECONDS * len(ring.devices) * paper.BATCH_SIZE / step, 1),
            "its devices": len(ring.devices),
        }
    return rates


# -- data parallelism ------------------------------------------------------------------------------------------------


def _data_parallel(model: str, profile: Profile) -> Found:
    costs = Costs(profile, paper.cluster())
    ring = data_parallel.ring_of(costs)
    num = len(ring.devices)
    step = data_parallel.simulated_seconds(costs, ring)
    trained = data_parallel.measure(model, costs, num_steps=paper.NUM_MINIBATCHES // num, rate=LEARNING_RATE)
    ends = [max(each) for each in zip(*(one.ends for one in trained), strict=True)]
    measured = _step_seconds(ends)
    kinds = [costs.cluster.devices[device] for device in ring.devices]
    busy = fmean(costs.compute[kind][-1] for kind in kinds) / _TICKS_PER_SECOND
    losses = [fmean(each) for each in zip(*(one.losses for one in trained), strict=True)]
    samples = num * paper.BATCH_SIZE
    return Found(
        simulated=paper.SECONDS * samples / step,
        measured=paper.SECONDS * samples / measured,
        simulated_idle=1 - busy / step,
        idle=1 - busy / measured,
        processor=sum(one.processor_seconds for one in trained) / (len(ends) * num * busy),
        workers=f"{num} devices",
        losses=tuple(Point(end / paper.SECONDS, loss, samples) for end, loss in zip(ends, losses, strict=True)),
    )


def _step_seconds(ends: Sequence[float]) -> float:
    """Of steps that end at these moments."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


# -- pipelines that average their gradients --------------------------------------------------------------------------


def _all_reduce(model: str, profile: Profile) -> Found:
    """Equal pipelines, with the cut of ED for pipelines that drain after every update."""
    whole = paper.cluster()
    options = PlanOptions(allocation="ED", weights="flush", minibatches_per_wave=_ALL_REDUCE_WAVE)
    document = choose_plan(profile, whole, options, predict=predicted)
    stages = document.virtual_workers[0].stages
    num, counts = len(document.virtual_workers), [last - first for first, last in (stage.layers for stage in stages)]
    cluster = paper.taken_apart(["".join(whole.devices[stage.device] for stage in stages)] * num)
    job = _job(model) | {
        "weights": "flush",
        "optimizer": {"name": "SGD", "lr": LEARNING_RATE * _ALL_REDUCE_WAVE * num},
        "workers": {"stages": [counts] * num},
        "sync": {"kind": "allreduce", "minibatches_per_wave": _ALL_REDUCE_WAVE},
        "cluster": _emulated(profile, cluster.model_dump(mode="json", exclude_none=True)),
    }
    run = _train(job)
    ends = [at for at, _, _ in run.waves(0)]
    wave = _step_seconds(ends)
    samples = num * _ALL_REDUCE_WAVE * paper.BATCH_SIZE
    simulated = _all_reduce_seconds(document, Costs(profile, whole))
    return Found(
        simulated=paper.SECONDS * samples / simulated,
        measured=paper.SECONDS * samples / wave,
        idle=run.idle(),
        processor=run.processor(),
        workers=_described(document),
        losses=run.losses(num),
    )


def _all_reduce_seconds(document: PlanDocument, costs: Costs) -> float:
    """A wave: a pipeline fills and drains, then each stage averages its gradients with the same stage of the others.

    A stage begins the next wave once it has; so the wave is as long as that of the stage which is last to be ready for
    the minibatch that then arrives.
    """
    plan = simulated_plan(document, costs)
    alone = replace(
        plan,
        workers=plan.workers[:1],
        minibatches_per_wave=plan.minibatches_per_wave[:1],
        placed=PlacedParameters((), (), costs.num_layers),
    )
    options = SimulationOptions(staleness=0, minibatches=_ALL_REDUCE_WAVE, weights="flush", contention=False)
    result = simulate(alone, costs, options, with_activities=True)
    link = costs.cluster.links.intra_node
    ring = LinkTime(link.latency_seconds, link.effective_bytes_per_second)
    ready = []
    for index, stage in enumerate(plan.workers[0]):
        begun, ended = _span(result, 0, index)
        num_bytes = costs.parameter_bytes[stage.last] - costs.parameter_bytes[stage.first]
        ready.append(ended + ring.ring_seconds(num_bytes, len(plan.workers)) - begun)
    return max(ready)


# -- waves -----------------------------------------------------------------------------------------------------------


def _waves(model: str, profile: Profile, allocation: str, staleness: int, *, per_wave: str = "auto") -> Found:
    cluster = paper.cluster()
    job = _job(model) | {
        "optimizer": {"name": "SGD", "lr": LEARNING_RATE},
        "workers": {"stages": "auto", "allocation": allocation},
        "sync": {"kind": "wsp", "D": staleness, "minibatches_per_wave": per_wave},
        "parameter_servers": {"count": len(cluster.nodes)},
        "cluster": _emulated(profile, cluster.model_dump(mode="json", exclude_none=True)),
    }
    return _judged(_train(job), Costs(profile, cluster), staleness)


def _judged(run: _Run, costs: Costs, staleness: int) -> Found:
    """A finished run beside the simulation of its plan."""
    document = read_document(PlanDocument, run.folder / "forecast.json")
    workers = range(len(document.virtual_workers))
    options = SimulationOptions(
        staleness=staleness,
        minibatches=paper.NUM_MINIBATCHES // len(workers),
        staggered=True,
        contention=False,
    )
    plan = simulated_plan(document, costs)
    exchange = beyond_links(run.trace, simulate(plan, costs, options, with_activities=True))
    options = replace(options, exchange_seconds=exchange)
    result = simulate(plan, costs, options, with_activities=True)
    shared = simulate(plan, costs, replace(options, contention=True))
    stages = [(vw, stage) for vw in workers for stage in range(len(document.virtual_workers[vw].stages))]
    waited = [seconds / _span(result, vw, 0)[1] for vw, seconds in enumerate(result.waiting_seconds)]
    return Found(
        simulated=paper.SECONDS * result.samples_per_second,
        measured=paper.SECONDS * paper.BATCH_SIZE * sum(run.rate(vw, document.waves[vw]) for vw in workers),
        predicted=paper.SECONDS * document.predicted.samples_per_second,
        shared_links=paper.SECONDS * shared.samples_per_second,
        simulated_waiting=fmean(waited),
        waiting=fmean([run.waiting(vw) for vw in workers]),
        simulated_idle=fmean([_idle(result, vw, stage) for vw, stage in stages]),
        idle=run.idle(),
        processor=run.processor(),
        exchange=exchange,
        workers=_described(document),
        losses=run.losses(len(workers)),
    )


def _computations(result: SimulationResult, vw: int, stage: int) -> Iterator[tuple[float, float]]:
    for one in result.activities:
        if (one.vw, one.stage) == (vw, stage) and one.kind in {ActivityKind.FORWARD, ActivityKind.BACKWARD}:
            yield one.start_ticks / _TICKS_PER_SECOND, one.end_ticks / _TICKS_PER_SECOND


def _span(result: SimulationResult, vw: int, stage: int) -> tuple[float, float]:
    """The first start and the last end of a stage's computations."""
    done = list(_computations(result, vw, stage))
    return done[0][0], done[-1][1]


def _idle(result: SimulationResult, vw: int, stage: int) -> float:
    """The share of a stage's time without computation, from the first forward of its virtual worker."""
    done = list(_computations(result, vw, stage))
    return 1 - sum(end - start for start, end in done) / (done[-1][1] - _span(result, vw, 0)[0])


# -- runs of hetpipe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run."""

    folder: Path
    trace: list[dict[str, Any]]
    processor_seconds: float

    def processor(self) -> float:
        """Processor time per second of emulated computation."""
        return _MICROSECONDS * self.processor_seconds / fsum(float(event["dur"]) for event in self._computations())

    def rate(self, vw: int, per_wave: int) -> float:
        """Minibatches per second in the steady state, as in `SimulationResult.samples_per_second`."""
        steps = [line["t"] for line in self._history(vw) if line["event"] == "step"]
        waves = len(steps) // per_wave
        first, last = (0, len(steps) - 1)
        if waves >= 4:
            first, last = waves // 2 * per_wave - 1, (waves - 1) * per_wave - 1
        return float((last - first) / (steps[last] - steps[first]))

    def waiting(self, vw: int) -> float:
        """The share of its time in which a virtual worker's first stage waited for a clock that a minibatch needed."""
        events = [event for event in self.trace if (event["pid"], event["tid"]) == (vw, 0)]
        waited = [e["dur"] for e in events if e["name"] == "wait" and "needs and" in e["args"]["reason"]]
        computed = [event for event in events if "p" in event["args"]]
        return float(sum(waited) / (_end(computed) - min(event["ts"] for event in computed)))

    def idle(self) -> float:
        """The share of time without computation, mean over stages."""
        computed: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for event in self._computations():
            computed.setdefault((event["pid"], event["tid"]), []).append(event)
        begun = {vw: min(event["ts"] for event in computed[vw, 0]) for vw, _ in computed}
        return fmean(
            [1 - sum(e["dur"] for e in events) / (_end(events) - begun[vw]) for (vw, _), events in computed.items()]
        )

    def waves(self, vw: int) -> list[tuple[float, float, int]]:
        """End, mean loss and samples of each wave."""
        lines = map(json.loads, (self.folder / "metrics" / f"vw-{vw}.jsonl").read_text().splitlines())
        return [(line["t"], line["loss"], line["samples"]) for line in lines]

    def losses(self, num_workers: int) -> tuple[Point, ...]:
        """Of all waves."""
        begun = min(next(self._history(vw))["t"] for vw in range(num_workers))
        waves = sorted(wave for vw in range(num_workers) for wave in self.waves(vw))
        return tuple(Point((at - begun) / paper.SECONDS, loss, samples) for at, loss, samples in waves)

    def _computations(self) -> Iterator[dict[str, Any]]:
        return (event for event in self.trace if event["name"][0] in "FB" and "p" in event["args"])

    def _history(self, vw: int) -> Iterator[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "history" / f"vw-{vw}-stage-0.jsonl").read_text().splitlines())
        return (line for line in lines if line["event"] in {"forward", "step"})


def _train(job: dict[str, Any]) -> _Run:
    before = _processor_seconds()
    folder, _, _ = train(job)
    return _run(folder, _processor_seconds() - before)


def _run(folder: Path, processor_seconds: float) -> _Run:
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return _Run(folder, [event for event in trace if event["ph"] == "X"], processor_seconds)


def _job(model: str) -> dict[str, Any]:
    return {
        "name": "headline",
        "model": f"benchmarks.paper:{model}",
        "loss": "benchmarks.paper:loss",
        "data": {"train": "benchmarks.paper:data"},
        "batch_size": paper.BATCH_SIZE,
        "epochs": 1,
    }


def _emulated(profile: Profile, cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": cluster,
        "profile": profile.model_dump(mode="json", exclude_none=True),
        "emulate": True,
        "emulate_links": True,
    }


def _described(document: PlanDocument) -> str:
    """For people: the types of each virtual worker, and its N.

    >>> _grouped(["VQ", "VQ", "R"])
    '2 × VQ, R'
    """
    kinds = ["".join(stage.type for stage in worker.stages) for worker in document.virtual_workers]
    return f"{_grouped(kinds)}; N = {_grouped([str(n) for n in document.waves])}"


def _grouped(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if times == 1 else f"{times} × {name}" for name, times in counts.items())


def smoothed(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Time and mean loss over the last `_LOSS_SAMPLES` samples, from when there are so many."""
    window: list[Point] = []
    found = []
    for point in points:
        window.append(point)
        while sum(one.samples for one in window[1:]) >= _LOSS_SAMPLES:
            window.pop(0)
        weight = sum(one.samples for one in window)
        if weight >= _LOSS_SAMPLES:
            found.append((point.seconds, sum(one.loss * one.samples for one in window) / weight))
    return found


def _end(events: Iterable[Mapping[str, Any]]) -> float:
    return max(float(event["ts"] + event["dur"]) for event in events)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
