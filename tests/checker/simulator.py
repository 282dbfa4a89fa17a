"""A tiny training machine that writes clean histories: random order of events, exact rules.

It is written from the papers' own definitions (s_local, s_global; "the newest weights of the stage", in an order that
stages really keep) rather than from the closed forms that the checker uses, so that the two judge each other. Nothing
here is fast or general; every rule is as plain as `wsp.md` and `policies.md` say it.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from tests.checker.scenario import NUM_LAYERS, Record, Scenario, bounds_of

Action = Callable[[], None]

#: File name → records, each file in its own order.
Histories = dict[str, list[Record]]


def simulate(scenario: Scenario) -> Histories:
    """The whole history of a run."""
    return _Machine(scenario).run()


def as_lines(histories: Histories) -> dict[str, list[str]]:
    """The history as a process writes it."""
    return {
        file: [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
        for file, records in histories.items()
    }


@dataclass(slots=True)
class _Item:
    """A minibatch on its way through the pipeline: hops 0 … K - 1 are forwards, K … 2K - 1 backwards."""

    p: int
    clock: int
    through: dict[int, int] = field(default_factory=dict)
    """Stage → the last own minibatch in the weights of the forward there."""
    hop: int = 0


@dataclass(slots=True)
class _Stage:
    forwarded: int
    backwarded: int
    updates: list[int]
    """The last minibatch of every update made here, rising; the barrier's stands for all before it."""
    owes: int | None = None
    """The last minibatch of an update that waits for the gradients of the other replicas."""


@dataclass(slots=True)
class _Worker:
    vw: int
    num_stages: int
    bounds: tuple[int, ...]
    version: int = 0
    stages: list[_Stage] = field(default_factory=list)
    incarnation: int = 0
    next_p: int = 1
    complete: int = 0
    """Every minibatch up to this one is through the whole pipeline."""
    last_p: int = 0
    """The last minibatch of what was dealt."""
    clock: int = 0
    blocks: deque[list[int]] = field(default_factory=deque)
    items: list[_Item] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Wave → its samples."""
    staged: int = 0
    committed: int = 0

    def stage_of(self, item: _Item) -> int:
        """Where the item's next hop is."""
        return min(item.hop, 2 * self.num_stages - 1 - item.hop)


class _Machine:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.staleness = scenario.staleness if scenario.has_shards else None
        self.random = random.Random(scenario.seed)
        self.histories: Histories = {}
        self.t = 0.0
        start = scenario.start
        self.published = self.floor = start.clock
        self.epoch = start.epoch
        self.used = set(start.used)
        self.dealt_minibatches = start.minibatches
        self.barrier, self.words = start.clock, ""
        self.workers = {vw: _Worker(vw, num, bounds_of(num)) for vw, num in enumerate(scenario.num_stages)}
        self.absent: list[_Worker] = []
        self.to_apply: list[deque[tuple[int, int, int]]] = [deque() for _ in range(scenario.num_shards)]
        self.ended = False
        self.evicted = self.stopped = self.drained = False
        self.frozen = 0
        self.inactive: tuple[int, ...] = ()
        #: Who is to leave at the next barrier.
        self.leaving: list[_Worker] = []

    # -- the run --

    def run(self) -> Histories:
        self.decide("publish", clock=self.published)
        if self.has_plans:
            for worker in self.workers.values():
                self.decide("join", **self.joined(worker), num_stages=worker.num_stages)
                self.decide_plan(worker)
        self.enter_interval()
        while not self.ended:
            actions = [action for worker in self.workers.values() for action in self.actions_of(worker)]
            actions += [partial(self.apply, shard) for shard, todo in enumerate(self.to_apply) if todo]
            if self.may_publish():
                actions.append(self.publish)
            self.random.choice(actions)()
        return self.histories

    def actions_of(self, worker: _Worker) -> list[Action]:
        actions: list[Action] = []
        if self.may_start(worker):
            actions.append(partial(self.start, worker))
        for item, before in zip(worker.items, [None, *worker.items], strict=False):
            if (before is None or before.hop > item.hop) and self.is_due(worker, item):
                actions.append(partial(self.advance, worker, item))
        for index, stage in enumerate(worker.stages):
            if stage.owes is not None and self.replicas_are_through(worker, index, stage.owes):
                actions.append(partial(self.update, worker, index, stage.owes))
        if worker.staged < self.barrier and self.is_whole(worker):
            actions.append(partial(self.stage, worker))
        in_time = self.staleness is None or self.published >= worker.committed - self.staleness
        if worker.committed < worker.staged and in_time:
            actions.append(partial(self.commit, worker))
        return actions

    # -- formulas, from the definitions --

    def num_of(self, worker: _Worker) -> int:
        """N_v."""
        return self.scenario.num_of(worker.vw)

    def required_clock(self, worker: _Worker, p: int) -> int:
        num, staleness = self.num_of(worker), self.staleness
        if staleness is None:
            return self.floor
        wave = (p - 1) // num
        if self.scenario.weights == "flush":
            return max(self.floor, wave - staleness)
        if self.scenario.weights == "double_buffer":
            return max(self.floor, wave - 1 - staleness)
        s_local = num - 1
        s_global = (staleness + 1) * (s_local + 1) + s_local - 1
        clock = self.floor
        while clock * num < p - (s_global + 1):
            clock += 1
        return clock

    def local_through(self, worker: _Worker, stage: _Stage, p: int) -> int:
        """The last own minibatch in the weights with which `p` starts at a stage now."""
        if self.scenario.weights == "wave":  # s_local = N - 1 of the newest are left out
            return max((made for made in stage.updates if made <= p - self.num_of(worker)), default=stage.updates[0])
        if self.scenario.weights == "double_buffer":  # W(t - 1): the wave before p's own is left out
            before = ((p - 1) // self.num_of(worker) - 1) * self.num_of(worker)
            return max((made for made in stage.updates if made <= before), default=stage.updates[0])
        return stage.updates[-1]

    def choose_clock(self, worker: _Worker) -> int:
        """The clock that the next minibatch would use; may be one that is not published yet."""
        p, num = worker.next_p, self.num_of(worker)
        at_wave_start = self.scenario.weights in ("flush", "double_buffer")
        switch = (p - 1) % num == 0 if at_wave_start else p % num == 0
        if p != self.floor * num + 1 and not switch:
            return worker.clock
        required = self.required_clock(worker, p)
        newest = self.local_through(worker, worker.stages[0], p) // num
        if self.scenario.pull == "required":
            if worker.clock >= required:
                return worker.clock
            if self.scenario.deterministic:
                return newest
        elif self.scenario.deterministic or not self.scenario.has_shards:
            return required
        return max(required, min(self.published, newest))

    # -- the order of a stage --

    def may_forward(self, worker: _Worker, index: int) -> bool:
        stage = worker.stages[index]
        return stage.owes is None and stage.forwarded - stage.backwarded < self.room(worker, index)

    def may_backward(self, worker: _Worker, index: int) -> bool:
        stage = worker.stages[index]
        if stage.owes is not None:
            return False
        if stage.forwarded == worker.next_p - 1 and self.is_all_started(worker):
            return True
        if self.scenario.schedule == "gpipe":
            return stage.forwarded % self.num_of(worker) == 0
        if self.scenario.weights in ("wave", "flush"):
            return True
        return stage.forwarded - stage.backwarded == self.room(worker, index)

    def room(self, worker: _Worker, index: int) -> int:
        """How many minibatches may be in flight at a stage."""
        if self.scenario.weights == "wave" or self.scenario.schedule == "gpipe":
            return self.num_of(worker)
        room = worker.num_stages - index
        return min(room, self.num_of(worker)) if self.scenario.weights == "flush" else room

    def is_all_started(self, worker: _Worker) -> bool:
        return not worker.blocks or worker.next_p > self.barrier * self.num_of(worker)

    def is_due(self, worker: _Worker, item: _Item) -> bool:
        allowed = self.may_forward if item.hop < worker.num_stages else self.may_backward
        return allowed(worker, worker.stage_of(item))

    def replicas_are_through(self, worker: _Worker, index: int, p: int) -> bool:
        """Whether every replica has the gradients of p's wave at a stage; some have a short wave, or none."""
        wave = -(-p // self.num_of(worker))
        return all(
            other.stages[index].backwarded >= min(wave * self.num_of(other), other.last_p)
            for other in self.workers.values()
        )

    # -- one virtual worker --

    def may_start(self, worker: _Worker) -> bool:
        if self.is_all_started(worker) or not self.may_forward(worker, 0):
            return False
        p = worker.next_p
        waits_for = {
            "wave": p - self.num_of(worker),
            "flush": (p - 1) // self.num_of(worker) * self.num_of(worker),
        }.get(self.scenario.weights, 0)
        return worker.complete >= waits_for and self.choose_clock(worker) <= self.published

    def start(self, worker: _Worker) -> None:
        p = worker.next_p
        clock = self.choose_clock(worker)
        if clock != worker.clock or p == self.floor * self.num_of(worker) + 1:
            self.pull(worker, clock)
        worker.clock = clock
        worker.next_p += 1
        worker.samples.setdefault((p - 1) // self.num_of(worker), []).extend(worker.blocks.popleft())
        item = _Item(p, clock)
        worker.items.append(item)
        self.advance(worker, item)

    def advance(self, worker: _Worker, item: _Item) -> None:
        index = worker.stage_of(item)
        stage = worker.stages[index]
        if item.hop < worker.num_stages:
            event = "forward"
            stage.forwarded = item.p
            if self.scenario.policies and (item.p - 1) % self.num_of(worker) == 0:
                self.begin_wave(worker, index, item.p)
            # Vertical sync: every stage takes what the first stage had.
            is_stamped = self.scenario.weights == "vertical" and index > 0
            through = item.through[index] = item.through[0] if is_stamped else self.local_through(worker, stage, item.p)
        else:
            event = "backward"
            stage.backwarded = item.p
            predicts = self.scenario.weights in ("predict", "spectrain")
            through = stage.updates[-1] if predicts else item.through[index]
        version = {"version": self.plan_in(worker, (item.p - 1) // self.num_of(worker))[0]} if self.has_plans else {}
        if event == "forward" or not self.is_frozen(worker, index):
            own = {**version, **self.own_frozen, **self.own_inactive(worker, index)}
            self.write_of(worker, index, event, p=item.p, clock=item.clock, local_through=through, **own)
        if event == "backward" and self.updates_after(worker, item.p):
            if self.scenario.sync == "allreduce":
                stage.owes = item.p
            else:
                self.update(worker, index, item.p)
        item.hop += 1
        if item.hop == 2 * worker.num_stages:
            worker.items.remove(item)
            worker.complete = item.p

    def updates_after(self, worker: _Worker, p: int) -> bool:
        is_last = p == worker.next_p - 1 and self.is_all_started(worker)
        return p % self.scenario.minibatches_per_update(worker.vw) == 0 or is_last

    def update(self, worker: _Worker, index: int, p: int) -> None:
        worker.stages[index].owes = None
        worker.stages[index].updates.append(p)
        if not self.is_frozen(worker, index):
            self.write_of(worker, index, "step", p=p, **self.own_frozen, **self.own_inactive(worker, index))

    @property
    def own_frozen(self) -> Record:
        """What every line of a stage has."""
        return {"frozen": self.frozen} if self.scenario.frozen else {}

    def own_inactive(self, worker: _Worker, index: int) -> Record:
        """The layers that a stage leaves out."""
        own = [layer for layer in self.inactive if worker.bounds[index] <= layer < worker.bounds[index + 1]]
        return {"inactive": own} if own else {}

    def is_frozen(self, worker: _Worker, index: int) -> bool:
        """Whether a stage has frozen layers alone."""
        return worker.bounds[index + 1] <= self.frozen

    def pull(self, worker: _Worker, clock: int) -> None:
        for stage in range(worker.num_stages):
            for shard in range(self.scenario.num_shards):
                if self.scenario.slices_on(worker.bounds, stage, shard):
                    file = f"stage-{worker.vw}-{worker.incarnation}-{stage}.jsonl"
                    self.write(file, worker.vw, "pull", shard=shard, vw=worker.vw, stage=stage, clock=clock)

    def is_whole(self, worker: _Worker) -> bool:
        """The next wave to stage is done: full, or nothing is left to fill it."""
        if any(stage.owes is not None for stage in worker.stages):
            return False
        full = worker.complete >= (worker.staged + 1) * self.num_of(worker)
        return full or (not worker.blocks and not worker.items)

    def stage(self, worker: _Worker) -> None:
        wave = worker.staged
        worker.staged += 1
        if wave not in worker.samples:
            return
        for stage in range(worker.num_stages):
            for shard in range(self.scenario.num_shards):
                idle = (*range(self.frozen), *self.inactive)
                slices = self.scenario.slices_on(self.plan_in(worker, wave)[1], stage, shard, idle)
                if slices:
                    who: Record = {"vw": worker.vw, "incarnation": worker.incarnation, "stage": stage}
                    file = f"parameter_server-{shard}.jsonl"
                    self.write(
                        file,
                        shard,
                        "staged",
                        **who,
                        wave=wave,
                        shard=shard,
                        slices=slices if self.names_slices else len(slices),
                    )

    # -- shards --

    def commit(self, worker: _Worker) -> None:
        wave = worker.committed
        worker.committed += 1
        indices = worker.samples.get(wave, [])
        self.used.update(indices)
        self.decide("commit", vw=worker.vw, incarnation=worker.incarnation, wave=wave, samples=len(indices))
        self.decide("used", vw=worker.vw, wave=wave, epoch=self.epoch, indices=indices)
        for todo in self.to_apply:
            todo.append((worker.vw, worker.incarnation, wave))
        if worker.vw == len(self.scenario.num_stages) - 1:
            if self.scenario.evict_at == worker.committed:
                self.evict(worker)
            if self.scenario.drain_at == worker.committed and worker.vw in self.workers:
                self.drain(worker)

    def apply(self, shard: int) -> None:
        vw, incarnation, wave = self.to_apply[shard].popleft()
        file = f"parameter_server-{shard}.jsonl"
        self.write(file, shard, "apply", shard=shard, vw=vw, incarnation=incarnation, wave=wave)

    def may_publish(self) -> bool:
        applied = all(wave > self.published for todo in self.to_apply for _, _, wave in todo)
        return applied and all(worker.committed > self.published for worker in self.workers.values())

    def publish(self) -> None:
        self.published += 1
        if self.published == self.barrier:
            for worker in self.absent:
                worker.incarnation += 1
                worker.committed = self.barrier
                self.workers[worker.vw] = worker
                stages = {"num_stages": worker.num_stages} if self.drained else {}
                self.decide("join", **self.joined(worker), **stages)
                if self.has_plans:
                    self.decide_plan(worker)
            self.absent.clear()
        self.decide("publish", clock=self.published)
        if self.published == self.barrier:
            self.leave()
            self.enter_interval()
        elif self.scenario.stop_at is not None and self.published >= self.scenario.stop_at and not self.stopped:
            self.stopped = True
            self.set_barrier(self.unplanned_clock(), "checkpoint+stop")

    def joined(self, worker: _Worker) -> Record:
        """The fields of a join at the barrier."""
        own = {"minibatches_per_wave": self.num_of(worker)} if self.scenario.waves else {}
        return {"vw": worker.vw, "incarnation": worker.incarnation, "clock": self.barrier, **own}

    @property
    def has_plans(self) -> bool:
        return bool(self.scenario.moves or self.scenario.live)

    def plan_in(self, worker: _Worker, wave: int) -> tuple[int, tuple[int, ...]]:
        """Version and bounds of a worker's plan in a wave of the current segment."""
        for at, vw, bounds in self.scenario.live:
            if vw == worker.vw and self.floor < at <= wave:
                return worker.version + 1, bounds
        return worker.version, worker.bounds

    def announce_moves(self) -> None:
        for at, vw, bounds in self.scenario.live:
            if self.floor < at < self.barrier and vw in self.workers:
                worker = self.workers[vw]
                life = {"vw": vw, "incarnation": worker.incarnation}
                self.decide("plan", **life, clock=at, version=worker.version + 1, bounds=list(bounds), live=True)

    def decide_plan(self, worker: _Worker) -> None:
        life = {"vw": worker.vw, "incarnation": worker.incarnation}
        self.decide("plan", **life, clock=self.barrier, version=worker.version, bounds=list(worker.bounds))

    def evict(self, worker: _Worker) -> None:
        if self.evicted or not worker.blocks:
            return  # without work left behind, the barrier would have to end the epoch after all
        self.evicted = True
        del self.workers[worker.vw]
        self.absent.append(worker)
        self.decide("evict", vw=worker.vw, incarnation=worker.incarnation, clock=worker.committed)
        self.set_barrier(self.unplanned_clock(), "join")

    def drain(self, worker: _Worker) -> None:
        if self.drained:
            return
        self.drained = True
        self.leaving.append(worker)
        clock = self.unplanned_clock()
        self.set_barrier(clock, f"{self.words}+drain" if clock == self.barrier else "drain")

    def leave(self) -> None:
        if {"end", "stop"} & set(self.words.split("+")):
            return
        for worker in self.leaving:
            del self.workers[worker.vw]
            self.absent.append(worker)
            self.decide("leave", vw=worker.vw, incarnation=worker.incarnation, clock=self.published)
            worker.num_stages = self.scenario.returns_with or worker.num_stages
            worker.bounds = bounds_of(worker.num_stages)
        self.leaving.clear()

    def unplanned_clock(self) -> int:
        committed = max(worker.committed for worker in (*self.workers.values(), *self.absent))
        if self.staleness is None:
            return self.barrier
        ahead = self.staleness + (1 if self.scenario.weights == "flush" else 2)
        return min(self.barrier, max(committed, self.published + ahead))

    def set_barrier(self, clock: int, reason: str) -> None:
        self.barrier, self.words = clock, reason
        self.decide("barrier", clock=clock, reason=reason)
        for worker in self.workers.values():
            worker.staged = min(worker.staged, clock)

    @property
    def names_slices(self) -> bool:
        """Whether lines list slices, instead of counting them."""
        return bool(self.has_plans or self.scenario.frozen or self.scenario.inactive)

    # -- barriers --

    def freeze(self, *, is_over: bool) -> None:
        """Freeze the layers that are due at this barrier."""
        if self.scenario.alpha is not None and "epoch" in self.words and not is_over:
            layers = list(range(self.frozen, NUM_LAYERS))
            for vw in self.workers:
                squares = [*[2.0 + layer for layer in layers[:-1]], 0.5]
                self.decide("norms", clock=self.published, vw=vw, layers=layers, squares=squares)
        self.frozen = self.frozen if is_over else self.scenario.frozen_in(self.epoch)
        if self.frozen:
            self.decide("freeze", clock=self.published, frozen=self.frozen, layers=self.frozen)

    def activate(self, clock: int) -> None:
        """Change the active layers as is due at the barrier at `clock`."""
        self.inactive = dict(self.scenario.inactive).get(clock, self.inactive)
        if self.scenario.inactive:
            fresh = dict(self.scenario.fresh).get(clock, ())
            anew = {"fresh": list(fresh)} if fresh else {}
            self.decide("activate", clock=clock, inactive=list(self.inactive), **anew)

    def build_anew(self, clock: int) -> None:
        """Build layers as is due at the barrier at `clock`."""
        fresh = dict(self.scenario.fresh).get(clock, ())
        for worker in self.workers.values():
            for index in range(worker.num_stages):
                own = [layer for layer in fresh if worker.bounds[index] <= layer < worker.bounds[index + 1]]
                if own:
                    digests = [f"{layer:032x}" for layer in own]
                    self.write_of(worker, index, "fresh", clock=clock, layers=own, digests=digests)

    def enter_interval(self) -> None:
        """All start from w^(c): close the epoch where it ended, deal what is left of the data, set the next barrier."""
        if "epoch" in self.words:
            self.epoch += 1
            self.used.clear()
        is_over = bool({"end", "stop"} & set(self.words.split("+")))
        self.freeze(is_over=is_over)
        if is_over:
            self.ended = True
            return
        before, clock = self.floor, self.published
        self.floor = clock
        self.activate(clock)
        for at, vw, bounds in self.scenario.live:
            if before < at < clock:
                self.workers[vw].bounds, self.workers[vw].version = bounds, self.workers[vw].version + 1
        for at, vw, bounds in self.scenario.moves:
            if at == clock:
                self.workers[vw].bounds, self.workers[vw].version = bounds, self.workers[vw].version + 1
                self.decide_plan(self.workers[vw])
        self.build_anew(clock)
        for worker in self.workers.values():
            done = clock * self.num_of(worker)
            worker.next_p, worker.complete, worker.staged, worker.committed = done + 1, done, clock, clock
            worker.clock, worker.items, worker.samples = clock, [], {}
            worker.stages = [_Stage(done, done, [done]) for _ in range(worker.num_stages)]
        waves, words = self.deal()
        barrier = clock + waves
        every = self.scenario.checkpoint_every
        checkpoint = barrier if every is None else (clock // every + 1) * every
        changes = [*(at for at, _, _ in self.scenario.moves), *(at for at, _ in self.scenario.inactive)]
        moves = min((at for at in changes if clock < at < min(barrier, checkpoint)), default=None)
        if moves is not None:
            self.set_barrier(moves, "plan")
        elif checkpoint < barrier:
            self.set_barrier(checkpoint, "checkpoint")
        else:
            self.set_barrier(barrier, "+".join(["checkpoint", *words] if checkpoint == barrier and every else words))
        self.announce_moves()

    def deal(self) -> tuple[int, list[str]]:
        """Deal blocks wave by wave, by completion; how many waves they make, and the reasons of their barrier."""
        scenario = self.scenario
        left = [index for index in range(scenario.num_samples) if index not in self.used]
        self.random.shuffle(left)
        blocks = [left[first : first + scenario.batch_size] for first in range(0, len(left), scenario.batch_size)]
        words = ["epoch"]
        if scenario.minibatches is not None:
            rest = scenario.minibatches * len(scenario.num_stages) - self.committed_minibatches()
            words = ["epoch"] if rest >= len(blocks) else []
            blocks = blocks[:rest]
            words += ["end"] if rest == len(blocks) else []
        elif self.epoch + 1 == scenario.epochs:
            words += ["end"]
        members = sorted(self.workers)
        dealt = {vw: scenario.dealt_as[vw] if scenario.dealt_as else scenario.num_of(vw) for vw in members}
        turns = [vw for _, vw in sorted((Fraction(j + 1, num), vw) for vw, num in dealt.items() for j in range(num))]
        for vw in members:
            worker, num = self.workers[vw], len(turns)
            worker.blocks = deque(block for at, block in enumerate(blocks) if turns[at % num] == vw)
            worker.last_p = self.published * self.num_of(worker) + len(worker.blocks)
        waves = max(-(-len(worker.blocks) // self.num_of(worker)) for worker in self.workers.values())
        return waves, words

    def committed_minibatches(self) -> int:
        commits = [line for line in self.histories.get("parameter_server-0.jsonl", []) if line["event"] == "commit"]
        done = sum(-(-int(str(line["samples"])) // self.scenario.batch_size) for line in commits)
        return self.scenario.start.minibatches + done

    # -- writing --

    def decide(self, event: str, **fields: object) -> None:
        self.write("parameter_server-0.jsonl", 0, event, **fields)

    def begin_wave(self, worker: _Worker, index: int, p: int) -> None:
        """Write the memory policies of a stage's layers, where they are others than before."""
        policies = []
        for layer in range(*worker.bounds[index : index + 2]):
            policies.append("keep")
            for key, number, vw, layers, policy in self.scenario.policies:
                is_due = number <= (p if key == "p" else (p - 1) // self.num_of(worker))
                if vw == worker.vw and is_due and (layer in layers or f"layer{layer}" in layers):
                    policies[-1] = policy
        file = f"stage-{worker.vw}-{worker.incarnation}-{index}.jsonl"
        told = [line["policies"] for line in self.histories.get(file, ()) if line["event"] == "memory"]
        if not told or told[-1] != policies:
            self.write_of(worker, index, "memory", p=p, policies=policies)

    def write_of(self, worker: _Worker, index: int, event: str, **fields: object) -> None:
        """A line of one stage."""
        file = f"stage-{worker.vw}-{worker.incarnation}-{index}.jsonl"
        who: Record = {"vw": worker.vw, "incarnation": worker.incarnation, "stage": index}
        self.write(file, worker.vw, event, **who, **fields)

    def write(self, file: str, place: int, event: str, **fields: object) -> None:
        self.t += self.random.choice((0.0, 0.001, 0.002))
        hosts = self.scenario.hosts
        host = hosts[place % len(hosts)]
        record: Record = {
            "t": round(self.t + 1000.0 * ((place + 1) % len(hosts)), 3),
            "host": host,
            "pid": 100 + sum(map(ord, file)),
            "role": file.partition("-")[0],
            "term": 1,
            "event": event,
        }
        self.histories.setdefault(file, []).append({**record, **fields})
