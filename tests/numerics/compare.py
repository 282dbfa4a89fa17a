"""Runs a job in this process over in-process links and shards, and compares it with the reference executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hetpipe.checker import check_run
from hetpipe.checkpoint.format import CheckpointReader
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.decide.elastic.script import most_minibatches_per_wave
from hetpipe.decide.planner.partition import plan_job
from hetpipe.decide.schedule.in_flight import weight_buffers
from hetpipe.job.file import Job
from hetpipe.values.ids import AgentId, JobId, Term
from hetpipe.values.plan import Plan
from hetpipe.values.policies import POLICIES, WeightPolicy
from hetpipe.values.precision import Precision
from hetpipe.values.run import AgentDevice, AgentInfo
from tests import models
from tests.reference.executor import ReferenceResult, ReferenceRun
from tests.support.in_process import InProcessResult, InProcessRun, run_in_process
from tests.support.inspection import inspect_once

ROOT = Path(__file__).resolve().parents[2]

SGD: dict[str, Any] = {"name": "SGD", "lr": 0.1}
MOMENTUM: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 0.01}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the matrix."""

    workers: int = 2
    stages: int | list[list[int]] = 2
    wave: int = 2
    waves: tuple[int, ...] = ()
    """N_v of each worker; empty: `wave` for all."""
    staleness: int = 1
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(MOMENTUM))
    model: str = "mlp32"
    data: str = "more32"
    batch_size: int = 2
    epochs: int | None = None
    minibatches: int | None = None
    every_waves: int | None = None
    combine: str = "sum"
    schedule: str = "auto"
    deterministic: bool = True
    pull: str = "every_wave"
    compress_pushes: str = "none"
    kind: str = "wsp"
    loss: Any = "loss"
    metrics: Any = ()
    servers: int = 2
    weights: WeightPolicy = "wave"
    accumulate: int = 1
    max_norm: float | None = None
    clip: Literal["global", "stage"] = "global"
    precision: Precision = "fp32"
    lr_schedule: dict[str, Any] | None = None
    groups: tuple[dict[str, Any], ...] = ()
    mean_over: str = "samples"
    init_from: str | None = None
    """Of the job; the reference's model then needs the same weights."""
    evaluate: dict[str, Any] | None = None
    """Of the job; then the training data are evaluated on, also at the ends of epochs."""
    moves: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(clock, worker, layers of each of its stages from there on)."""
    live: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(first minibatch of a wave, worker, layers of each of its stages from there on, without a barrier)."""
    reads: dict[str, Any] = field(default_factory=dict)
    """Further keys of `data`."""
    memory: Any = "keep"
    resized: tuple[tuple[int, int | tuple[int, ...]], ...] = ()
    """(clock, N, or N_v of each worker, from there on)."""
    members: tuple[tuple[int, str, int], ...] = ()
    """(clock, `drop` or `add`, worker)."""
    added: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...] = ()
    """(clock, worker, layers of each of its stages, their devices): workers that only the script adds."""
    freeze: dict[str, Any] = field(default_factory=dict)
    freezes: tuple[tuple[int, int], ...] = ()
    """(clock, frozen layers with parameters from there on), by the script."""
    active: tuple[int | str, ...] | None = None
    """The layers that are active from the start."""
    activates: tuple[tuple[int, tuple[int | str, ...]], ...] = ()
    """(clock, layers that are active from there on), by the script."""
    fresh: tuple[tuple[int, tuple[int | str, ...]], ...] = ()
    """(clock of one of `activates`, layers that are built anew there)."""
    extra_barriers: tuple[int, ...] = ()
    """Clocks at which nothing changes, by the script."""
    elastic: dict[str, Any] = field(default_factory=dict)
    """Further keys of `elastic`, and a script in place of that of the others."""
    policies: tuple[tuple[dict[str, int], int, tuple[int | str, ...], str], ...] = ()
    """(moment, worker, layers, their memory policy from there on)."""

    @property
    def has_shards(self) -> bool:
        return self.kind not in ("none", "allreduce")

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...] | None:
        """Layers of each stage, as the planner cuts the model."""
        if isinstance(self.stages, list):
            return (*(tuple(counts) for counts in self.stages), *(counts for _, _, counts, _ in self.added))
        plan = plan_of(self.job())
        return tuple(tuple(s.last_layer - s.first_layer for s in vw.stages) for vw in plan.virtual_workers)

    def job(self) -> Job:
        return self._job

    @cached_property
    def _job(self) -> Job:
        sync: dict[str, Any] = {"kind": self.kind, "minibatches_per_wave": self.waves or self.wave}
        if self.has_shards:
            sync.update(combine=self.combine, deterministic=self.deterministic)
        if self.kind == "wsp":
            sync.update(D=self.staleness, pull=self.pull, compress_pushes=self.compress_pushes)
        gradients: dict[str, Any] = {} if self.accumulate == 1 else {"accumulate": self.accumulate}
        if self.max_norm is not None:
            gradients.update(max_norm=self.max_norm, clip=self.clip)
        servers = {"count": self.servers} if self.has_shards else {}
        return Job(
            name="case",
            model=f"tests.models:{self.model}",
            loss=f"tests.models:{self.loss}" if isinstance(self.loss, str) and ":" not in self.loss else self.loss,
            metrics=self.metrics,
            data={"train": f"tests.models:{self.data}", **self.reads}
            | ({} if self.evaluate is None else {"eval": f"tests.models:{self.data}"}),
            evaluate=self.evaluate or {},
            batch_size=self.batch_size,
            epochs=self.epochs,
            minibatches=self.minibatches,
            seed=3,
            mean_over=self.mean_over,
            init_from=self.init_from,
            optimizer={**self.optimizer, **({"groups": self.groups} if self.groups else {})},
            weights=self.weights,
            gradients=gradients,
            precision=self.precision,
            memory=self.memory,
            freeze=self.freeze,
            lr_schedule=self.lr_schedule,
            workers={"count": self.workers, "stages": self.stages},
            sync=sync,
            patience={"last_checkpoint": "1s"},
            schedule=self.schedule,
            parameter_servers=servers,
            elastic={"script": self._script, "active": self.active, **self.elastic},
            checkpoint={"every_waves": self.every_waves, "keep": 3},
        )

    @property
    def _script(self) -> tuple[dict[str, Any], ...]:
        """The lines of `moves`, `policies` and `freezes`, in order of time."""
        lines: list[dict[str, Any]] = [
            *({"at": {"clock": at}, "do": "move", "vw": vw, "stages": counts} for at, vw, counts in self.moves),
            *({"at": {"p": p}, "do": "move", "vw": vw, "stages": counts} for p, vw, counts in self.live),
            *(
                {"at": at, "do": "memory", "vw": vw, "layers": layers, "policy": policy}
                for at, vw, layers, policy in self.policies
            ),
            *({"at": {"clock": at}, "do": verb, "vw": vw} for at, verb, vw in self.members),
            *(
                {"at": {"clock": at}, "do": "add", "vw": vw, "stages": counts, "devices": devices}
                for at, vw, counts, devices in self.added
            ),
            *({"at": {"clock": at}, "do": "waves", "minibatches_per_wave": n} for at, n in self.resized),
            *({"at": {"clock": at}, "do": "freeze", "layers": layers} for at, layers in self.freezes),
            *(
                {"at": {"clock": at}, "do": "activate", "active": layers, "fresh": dict(self.fresh).get(at)}
                for at, layers in self.activates
            ),
            *({"at": {"clock": at}, "do": "barrier"} for at in self.extra_barriers),
        ]
        return tuple(sorted(lines, key=lambda line: line["at"].get("clock", (line["at"].get("p", 1) - 1) // self.wave)))

    @property
    def _membership(self) -> dict[int, tuple[int, ...]]:
        """Clock → workers from there on."""
        lines = sorted([*self.members, *((at, "add", vw) for at, vw, *_ in self.added)], key=lambda line: line[0])
        first = {vw: verb for _, verb, vw in reversed(lines)}
        everybody = self.workers + len(self.added)
        present = {vw for vw in range(everybody) if first.get(vw) != "add"}
        found = {0: tuple(sorted(present))} if len(present) < everybody else {}
        for at, verb, vw in lines:
            (present.discard if verb == "drop" else present.add)(vw)
            found[at] = tuple(sorted(present))
        return found

    @property
    def _taken_over(self) -> dict[int, dict[int, int]]:
        """Clock → worker that the script adds → the one that it drops there, and that had its first device."""
        ends = [0, *accumulate(len(self.depths[vw]) for vw in range(self.workers))] if self.depths else []
        owned = {vw: set(range(*ends[vw : vw + 2])) for vw in range(self.workers)}
        owned |= {vw: set(devices) for _, vw, _, devices in self.added}
        found: dict[int, dict[int, int]] = {}
        for at, vw, _, devices in self.added:
            left = [other for clock, verb, other in self.members if (clock, verb) == (at, "drop")]
            for other in left:
                if devices[0] in owned[other]:
                    found.setdefault(at, {})[vw] = other
        return found

    def reference(self, **changes: Any) -> ReferenceRun:
        values: dict[str, Any] = {
            "model": getattr(models, self.model),
            "loss": models.loss,
            "train": getattr(models, self.data)(),
            "batch_size": self.batch_size,
            "seed": 3,
            "optimizer": self.optimizer["name"],
            "arguments": {key: value for key, value in self.optimizer.items() if key != "name"},
            "num_virtual_workers": self.workers + len(self.added),
            "minibatches_per_wave": self.waves or self.wave,
            "staleness": self.staleness,
            "pull": self.pull,
            "compress_pushes": self.compress_pushes,
            "combine": self.combine,
            "epochs": self.epochs,
            "total_minibatches": None if self.minibatches is None else self.minibatches * self.workers,
            "checkpoint_every_waves": self.every_waves,
            "weights": self.weights,
            "stages": self.depths,
            "plans": {
                clock: {vw: counts for at, vw, counts in self.moves if at == clock} for clock, _, _ in self.moves
            },
            "waves": dict(self.resized),
            "membership": self._membership,
            "taken_over": self._taken_over,
            "extra_barriers": (*self.extra_barriers, *(at["clock"] for at, *_ in self.policies if "clock" in at)),
            "sync": self.kind if not self.has_shards else "wsp",
            "accumulate": self.accumulate,
            "max_norm": self.max_norm,
            "clip": self.clip,
            "weigh": None if self.mean_over == "samples" else models.num_labelled,
            "precision": self.precision,
            "groups": [
                (group["parameters"], {k: v for k, v in group.items() if k != "parameters"}) for group in self.groups
            ],
            "lr_schedule": None if self.lr_schedule is None else partial(scheduled, self.lr_schedule),
        }
        values.update(changes)
        return ReferenceRun(**values)


def run(case: Case, folder: Path, **options: Any) -> InProcessResult:
    """Run the case; the history checker finds nothing, and no stage had more weight buffers than the planner counts."""
    values: dict[str, Any] = {"delay_seconds": 0.002, "delay_seed": 1, "stall_seconds": 60.0}
    values.update(options)
    result = run_in_process(
        InProcessRun(job=case.job(), run_dir=folder, import_path=ROOT, shares_inspection=True, **values)
    )
    report = check_run(folder, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    for (vw, stage), peak in result.peak_buffers_at_rest.items():
        expected = weight_buffers(
            stage=stage,
            num_stages=len(result.plan.virtual_workers[vw].stages),
            minibatches_per_wave=most_minibatches_per_wave(case.job(), result.plan, vw),
            weights="wave" if POLICIES[case.weights].predicts is not None else case.weights,
        )
        expected = 1 if POLICIES[case.weights].predicts is not None else expected
        # While layers move, the clock of later minibatches is in use beside that of earlier ones.
        assert peak <= expected + 2 * case.has_shards + bool(case.live), (vw, stage, peak)
    return result


def scheduled(schedule: dict[str, Any], optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule, as torch itself builds it."""
    arguments = {key: value for key, value in schedule.items() if key != "name"}
    built: torch.optim.lr_scheduler.LRScheduler = getattr(torch.optim.lr_scheduler, schedule["name"])(
        optimizer, **arguments
    )
    return built


def plan_of(job: Job) -> Plan:
    """The plan of a job on local devices."""
    devices = tuple(AgentDevice(f"n0/{i}", "cpu", 0, "cpu") for i in range(job.num_devices))
    agent = AgentInfo(AgentId("n0"), "127.0.0.1", 0, devices)
    return plan_job(job, inspect_once(job, ROOT), [agent], Term(1), JobId("case"))


def trained(folder: Path) -> dict[str, Tensor]:
    """Weights and buffers of the newest checkpoint, by the model's names."""
    reader = CheckpointReader(sorted(newest_checkpoint(folder).glob("*.safetensors")))
    keys = [*reader.keys("weights/"), *reader.keys("buffers/")]
    return {key.split("/", 1)[1]: reader.tensor(key) for key in keys}


def assert_same_bits(found: dict[str, Tensor], expected: ReferenceResult) -> None:
    """Weights and buffers are equal, bit for bit."""
    wanted = {**expected.weights, **expected.buffers}
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if not torch.equal(found[name], value.cpu())]
    assert not different, different
