"""Predicted against measured: 16 emulated devices on 4 nodes, as real processes, under each allocation and bound.

What is compared is the steady state, by the simulator's own definition: of each virtual worker from the end of its
middle wave to the end of its last but one. Emulated links do not contend, so the simulator is told the same.

Here the processes of all nodes share two cores, so carrying a wave to the shards and back costs more than its bytes on
links: tens of milliseconds of software, and with D = 0 these decide which of two rhythms a pipeline falls into. They
are measured as a link would be, in a short run of its own, and told to the simulator (`exchange_seconds`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks import unequal
from benchmarks.protocol import train
from benchmarks.sizes import sized
from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs
from hetpipe.decide.simulator.documents import simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.result import ActivityKind, SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import Document, read_document
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile

DocumentT = TypeVar("DocumentT", bound=Document)

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS

NUM_WAVES = sized(24, 8)
#: Of the run that measures what an exchange takes besides its bytes' time on links.
NUM_CALIBRATION_WAVES = sized(10, 4)
MINIBATCHES_PER_WAVE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    allocation: str
    staleness: int
    straggler: str | None = None
    """A device that takes twice as long as its profile says."""
    num_waves: int = NUM_WAVES

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.allocation}, D = {self.staleness}" + (f", {self.straggler} twice as slow" * bool(self.straggler))

    @property
    def stragglers(self) -> dict[str, float]:
        """As in a job file."""
        return {} if self.straggler is None else {self.straggler: 2.0}

    def job(self) -> dict[str, Any]:
        """The job file."""
        return {
            "name": "prediction",
            "model": "benchmarks.unequal:model",
            "loss": "torch.nn.functional:mse_loss",
            "data": {"train": "benchmarks.unequal:data"},
            "batch_size": unequal.BATCH_SIZE,
            "minibatches": self.num_waves * MINIBATCHES_PER_WAVE,
            "optimizer": {"name": "SGD", "lr": 0.001},
            "workers": {"stages": "auto", "allocation": self.allocation},
            "sync": {"kind": "wsp", "D": self.staleness, "minibatches_per_wave": MINIBATCHES_PER_WAVE},
            "parameter_servers": {"count": 4, "placement": "balanced"},
            "cluster": {
                "file": unequal.cluster(),
                "profile": unequal.profile(),
                "emulate": True,
                "emulate_links": True,
                "stragglers": self.stragglers,
            },
        }


ALL_CASES = (
    *(Case(allocation, staleness) for allocation in ("NP", "ED", "HD") for staleness in (0, 4)),
    *(Case("ED", staleness, straggler="n2/1") for staleness in (0, 4)),
)
CASES = sized(ALL_CASES, ALL_CASES[3:4])


@dataclass(frozen=True, slots=True)
class Found:
    """What one configuration should do and did; waiting as a share of the time, mean over the virtual workers."""

    predicted_samples_per_second: float
    measured_samples_per_second: float
    predicted_waiting: float
    measured_waiting: float


#: What took part in an exchange: whether it was a push, its wave or clock, and its start and end in seconds.
_Transfer = tuple[bool, int, float, float]


def exchange_seconds() -> float:
    """How much longer than on links alone a round trip to the shards takes on this machine.

    From the start of the last push of a wave to the end of its last pull: the median over the clocks of a short run
    with D = 0, where everybody pulls at once, less what the simulator says of the same plan.
    """
    case = Case("NP", 0, num_waves=NUM_CALIBRATION_WAVES)
    run_dir, _, _ = train(case.job())
    simulated = _simulated(read_document(PlanDocument, run_dir / "forecast.json"), case, 0.0)
    return beyond_links(json.loads((run_dir / "trace.json").read_text())["traceEvents"], simulated)


def beyond_links(trace: Iterable[Mapping[str, Any]], simulated: SimulationResult) -> float:
    """How many seconds longer a round trip to the shards took in a run than in its simulation, in the median."""
    return max(0.0, median(_round_trips(_traced(trace))) - median(_round_trips(_transfers(simulated))))


def _traced(trace: Iterable[Mapping[str, Any]]) -> Iterator[_Transfer]:
    for event in trace:
        if event["ph"] == "X" and event["name"] in {"push", "pull"}:
            is_push, start = event["name"] == "push", event["ts"] / 1e6
            yield is_push, event["args"]["wave" if is_push else "clock"], start, start + event["dur"] / 1e6


def _transfers(simulated: SimulationResult) -> Iterator[_Transfer]:
    for done in simulated.activities:
        if done.kind in {ActivityKind.PUSH, ActivityKind.PULL}:
            is_push = done.kind is ActivityKind.PUSH
            yield is_push, done.number, done.start_ticks / _TICKS_PER_SECOND, done.end_ticks / _TICKS_PER_SECOND


def _round_trips(transfers: Iterable[_Transfer]) -> list[float]:
    """Of each clock, seconds from the start of the last push of its wave to the end of the last pull."""
    pushed: dict[int, float] = {}
    pulled: dict[int, float] = {}
    for is_push, number, start, end in transfers:
        if is_push:
            pushed[number + 1] = max(start, pushed.get(number + 1, start))
        else:
            pulled[number] = max(end, pulled.get(number, end))
    return [pulled[clock] - pushed[clock] for clock in sorted(pushed.keys() & pulled.keys())]


def measure(case: Case, exchange: float) -> Found:
    """Train for real, and simulate the plan that the coordinator made.

    Args:
        case: what is trained.
        exchange: `exchange_seconds` of this machine.
    """
    run_dir, _, _ = train(case.job())
    document = read_document(PlanDocument, run_dir / "forecast.json")
    simulated = _simulated(document, case, exchange)
    workers = range(len(document.virtual_workers))
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    rates = [_rate(run_dir / "history" / f"vw-{vw}-stage-0.jsonl") for vw in workers]
    return Found(
        predicted_samples_per_second=simulated.samples_per_second,
        measured_samples_per_second=unequal.BATCH_SIZE * sum(rates),
        predicted_waiting=fmean([seconds / simulated.seconds for seconds in simulated.waiting_seconds]),
        measured_waiting=fmean([_waiting(trace, vw) for vw in workers]),
    )


def _simulated(document: PlanDocument, case: Case, exchange: float) -> SimulationResult:
    costs = Costs(_document(Profile, unequal.profile()), _document(Cluster, unequal.cluster()))
    options = SimulationOptions(
        staleness=case.staleness,
        minibatches=case.num_waves * MINIBATCHES_PER_WAVE,
        stragglers={DeviceId(device): factor for device, factor in case.stragglers.items()},
        staggered=True,
        contention=False,
        exchange_seconds=exchange,
    )
    return simulate(simulated_plan(document, costs), costs, options, with_activities=True)


def _document(kind: type[DocumentT], values: dict[str, Any]) -> DocumentT:
    return kind.model_validate_json(json.dumps(values))


def _rate(history: Path) -> float:
    """Minibatches per second of a virtual worker in its steady state, from the steps of its first stage."""
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    steps = [line["t"] for line in lines if line["event"] == "step"]
    first, last = (wave * MINIBATCHES_PER_WAVE - 1 for wave in (NUM_WAVES // 2, NUM_WAVES - 1))
    return float((last - first) / (steps[last] - steps[first]))


def _waiting(trace: list[dict[str, Any]], vw: int) -> float:
    """The share of its time that a virtual worker's first stage waited for a clock to be published.

    As in the simulator, a minibatch must have needed the clock; the wait for the others at the very end is left out.
    """
    events = [event for event in trace if event["ph"] == "X" and (event["pid"], event["tid"]) == (vw, 0)]
    computed = [event for event in events if "p" in event["args"]]
    waited = [e["dur"] for e in events if e["name"] == "wait" and "needs and" in e["args"]["reason"]]
    end = max(event["ts"] + event["dur"] for event in computed)
    return float(sum(waited) / (end - min(event["ts"] for event in computed)))


def figures(found: Found) -> dict[str, Any]:
    """One configuration, for people."""
    return {
        "predicted samples/s": round(found.predicted_samples_per_second, 2),
        "measured samples/s": round(found.measured_samples_per_second, 2),
        "predicted / measured": round(found.predicted_samples_per_second / found.measured_samples_per_second, 3),
        "predicted waiting": round(found.predicted_waiting, 3),
        "measured waiting": round(found.measured_waiting, 3),
    }


if __name__ == "__main__":
    wanted = sys.argv[1:]
    longer = exchange_seconds()
    sys.stdout.write(f"a round trip takes {1000 * longer:.0f} ms longer here than on links alone\n")
    for one in CASES:
        if not wanted or one.name in wanted:
            sys.stdout.write(json.dumps({one.name: figures(measure(one, longer))}) + "\n")
            sys.stdout.flush()
