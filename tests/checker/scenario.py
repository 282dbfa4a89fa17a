"""What a simulated run is given: its job, plan and facts as the files of a run folder hold them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

#: One line of a history.
Record = dict[str, object]

#: Layers of the simulated model; one slice each, dealt round-robin to the shards.
NUM_LAYERS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The barrier a run starts from."""

    clock: int = 0
    epoch: int = 0
    used: tuple[int, ...] = ()
    minibatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A small run. The defaults are the shipped clean history: two workers, two stages, two shards, N = 2, D = 1."""

    num_stages: tuple[int, ...] = (2, 2)
    num_shards: int = 2
    minibatches_per_wave: int = 2
    waves: tuple[int, ...] = ()
    """N of each worker; empty: `minibatches_per_wave` for all."""
    dealt_as: tuple[int, ...] = ()
    """Deal minibatches as for waves of these sizes, which is wrong; empty: as for those of the run."""
    staleness: int | None = 1
    """D, or None for D = ∞."""
    sync: str = "wsp"
    """`wsp` (with no D: `asp`), or `none` or `allreduce`, which have one shard without slices."""
    deterministic: bool = True
    pull: str = "every_wave"
    weights: str = "wave"
    schedule: str = "auto"
    accumulate: int = 1
    num_samples: int = 29
    batch_size: int = 2
    epochs: int | None = 1
    minibatches: int | None = None
    checkpoint_every: int | None = 3
    evict_at: int | None = None
    """Evict the last worker once it has committed so many waves; it joins again at the next barrier."""
    drain_at: int | None = None
    """Ask the last worker to leave once it has committed so many waves; it joins again at the barrier after that."""
    returns_with: int | None = None
    """The stages that it then has; None: as many as before."""
    moves: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(clock, worker, bounds of its stages from there on); then histories have `plan` lines and versions."""
    live: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(wave, worker, bounds of its stages from there on), without a barrier; at most one of a worker in a segment."""
    frozen: tuple[tuple[int, int], ...] = ()
    """(completed epochs, layers that are frozen from there on, each with its parameters)."""
    alpha: str | None = None
    """Where norms have decided that: α; the least ones are those of the last layer."""
    inactive: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(clock, layers that are inactive from there on), in order of time; clock 0 is the start."""
    fresh: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(clock of one of these, layers that are built anew there)."""
    policies: tuple[tuple[str, int, int, tuple[int | str, ...], str], ...] = ()
    """(`clock` or `p`, its number, worker, layers, their memory policy from there on), in order of time."""
    stop_at: int | None = None
    """Ask for a stop once this clock is published."""
    hosts: tuple[str, ...] = ("n0",)
    """Virtual worker or shard i runs on host i modulo their number; their monotonic clocks differ."""
    start: Resumed = field(default_factory=Resumed)
    seed: int = 7

    @property
    def has_shards(self) -> bool:
        """Whether shards hold the weights."""
        return self.sync == "wsp"

    def num_of(self, vw: int) -> int:
        """N of a worker."""
        return self.waves[vw] if self.waves else self.minibatches_per_wave

    def minibatches_per_update(self, vw: int) -> int:
        """A, or N for the policies that update once per wave."""
        return self.num_of(vw) if self.weights in ("flush", "double_buffer") else self.accumulate

    def frozen_in(self, epoch: int) -> int:
        """Frozen layers in a pass over the data, counted from 0."""
        return max((frozen for at, frozen in self.frozen if at <= epoch), default=0)

    def slices_on(self, bounds: tuple[int, ...], stage: int, shard: int, idle: Collection[int] = ()) -> list[int]:
        """The slices of a stage on a shard but those of `idle` layers, as indices among the shard's."""
        layers = range(*bounds[stage : stage + 2]) if self.has_shards else ()
        return [layer // self.num_shards for layer in layers if layer % self.num_shards == shard and layer not in idle]

    def files(self) -> dict[str, Record]:
        """job.json, plan.json and facts.json; keys that no checker needs are left out."""
        sync: Record = {
            "kind": "asp" if self.has_shards and self.staleness is None else self.sync,
            "D": self.staleness,
            "minibatches_per_wave": list(self.waves) or self.minibatches_per_wave,
            "combine": "sum",
            "deterministic": self.deterministic,
        }
        if self.pull != "every_wave":
            sync["pull"] = self.pull
        schedule = [{"epoch": epoch, "layers": layers} for epoch, layers in self.frozen if epoch]
        decided: Record = {"schedule": schedule} if self.alpha is None else {"every": "epoch", "alpha": self.alpha}
        job: Record = {
            "name": "simulated",
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "minibatches": self.minibatches,
            "sync": sync,
            "weights": self.weights,
            "schedule": self.schedule,
            "gradients": {"accumulate": self.accumulate},
            **({"freeze": {"layers": self.frozen_in(0), **decided}} if self.frozen else {}),
            "workers": {"count": len(self.num_stages)},
            "parameter_servers": {"count": self.num_shards},
        }
        facts: Record = {
            "num_samples": self.num_samples,
            "eval_samples": None,
            "start": {
                "clock": self.start.clock,
                "epoch": self.start.epoch,
                "used": list(self.start.used),
                "minibatches": self.start.minibatches,
            },
        }
        if self.policies:
            job["elastic"] = {
                "script": [
                    {"at": {key: number}, "do": "memory", "vw": vw, "layers": list(layers), "policy": policy}
                    for key, number, vw, layers, policy in self.policies
                ]
            }
        if self.inactive:
            at_start, *later = self.inactive
            job["elastic"] = {
                "active": self._active(at_start[1]),
                "script": [
                    {
                        "at": {"clock": clock},
                        "do": "activate",
                        "active": self._active(layers),
                        "fresh": list(dict(self.fresh).get(clock, ())),
                    }
                    for clock, layers in later
                ],
            }
        if self.policies or self.inactive:
            facts["layers"] = [f"layer{index}" for index in range(NUM_LAYERS)]
        return {"job.json": job, "plan.json": self._plan(), "facts.json": facts}

    def _active(self, inactive: tuple[int, ...]) -> list[int | str]:
        """All other layers, the first by its name."""
        first, *others = (layer for layer in range(NUM_LAYERS) if layer not in inactive)
        return [f"layer{first}", *others]

    def _plan(self) -> Record:
        workers = [
            {"index": vw, "stages": [_stage(stage, num_stages) for stage in range(num_stages)]}
            for vw, num_stages in enumerate(self.num_stages)
        ]
        layers = range(NUM_LAYERS if self.has_shards else 0)
        slices = [{"layer": layer, "shard": layer % self.num_shards} for layer in layers]
        return {
            "job_id": "j0",
            "term": 1,
            "virtual_workers": workers,
            "slices": slices,
            "num_shards": self.num_shards,
            **({"freeze_levels": list(range(NUM_LAYERS))} if self.frozen else {}),
        }


def layers_of(stage: int, num_stages: int) -> range:
    """The layers of one stage: nearly equal cuts."""
    return range(stage * NUM_LAYERS // num_stages, (stage + 1) * NUM_LAYERS // num_stages)


def bounds_of(num_stages: int) -> tuple[int, ...]:
    """The cut of a worker that nobody moved."""
    return (*(layers_of(stage, num_stages).start for stage in range(num_stages)), NUM_LAYERS)


def _stage(stage: int, num_stages: int) -> Record:
    layers = layers_of(stage, num_stages)
    return {"first_layer": layers.start, "last_layer": layers.stop}


def write_run(folder: Path, scenario: Scenario, history: dict[str, list[str]]) -> None:
    """Write a run folder: the three files and `history` (file name → lines, each with its newline)."""
    (folder / "history").mkdir(parents=True, exist_ok=True)
    for name, content in scenario.files().items():
        (folder / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")
    for name, lines in history.items():
        (folder / "history" / name).write_text("".join(lines))
