"""A tiny WSP machine that writes clean histories: random order of events, exact rules.

It is written from the paper's own definitions (s_local, s_global) rather than from the closed forms that the checker
uses, so that the two judge each other. Nothing here is fast or general; every rule is as plain as `wsp.md` says it.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .scenario import Record, Scenario

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
    through: int
    hop: int = 0


@dataclass(slots=True)
class _Worker:
    vw: int
    num_stages: int
    incarnation: int = 0
    next_p: int = 1
    complete: int = 0
    """Every minibatch up to this one has stepped on every stage."""
    clock: int = 0
    blocks: deque[list[int]] = field(default_factory=deque)
    items: list[_Item] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Wave → its samples."""
    staged: int = 0
    committed: int = 0


class _Machine:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.histories: Histories = {}
        self.t = 0.0
        start = scenario.start
        self.published = self.floor = start.clock
        self.epoch = start.epoch
        self.used = set(start.used)
        self.dealt_minibatches = start.minibatches
        self.barrier, self.words = start.clock, ""
        self.workers = {vw: _Worker(vw, num) for vw, num in enumerate(scenario.num_stages)}
        self.absent: list[_Worker] = []
        self.to_apply: list[deque[tuple[int, int, int]]] = [deque() for _ in range(scenario.num_shards)]
        self.ended = False
        self.evicted = self.stopped = False

    # -- the run --

    def run(self) -> Histories:
        self.decide("publish", clock=self.published)
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
            if before is None or before.hop > item.hop:
                actions.append(partial(self.advance, worker, item))
        if worker.staged < self.barrier and self.is_whole(worker):
            actions.append(partial(self.stage, worker))
        staleness = self.scenario.staleness
        if worker.committed < worker.staged and (staleness is None or self.published >= worker.committed - staleness):
            actions.append(partial(self.commit, worker))
        return actions

    # -- formulas, from the definitions --

    def required_clock(self, p: int) -> int:
        num, staleness = self.scenario.minibatches_per_wave, self.scenario.staleness
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

    def local_through(self, p: int) -> int:
        num = self.scenario.minibatches_per_wave
        wave = (p - 1) // num
        through = {"wave": p - num, "flush": wave * num, "double_buffer": (wave - 1) * num}[self.scenario.weights]
        return max(through, self.floor * num)

    def choose_clock(self, worker: _Worker) -> int:
        """The clock that the next minibatch would use; may be one that is not published yet."""
        p, num = worker.next_p, self.scenario.minibatches_per_wave
        switch = p % num == 0 if self.scenario.weights == "wave" else (p - 1) % num == 0
        if p != self.floor * num + 1 and not switch:
            return worker.clock
        required = self.required_clock(p)
        if self.scenario.deterministic:
            return required
        return max(required, min(self.published, self.local_through(p) // num))

    # -- one virtual worker --

    def may_start(self, worker: _Worker) -> bool:
        if not worker.blocks or worker.next_p > self.barrier * self.scenario.minibatches_per_wave:
            return False
        return worker.complete >= self.local_through(worker.next_p) and self.choose_clock(worker) <= self.published

    def start(self, worker: _Worker) -> None:
        p = worker.next_p
        clock = self.choose_clock(worker)
        if clock != worker.clock or p == self.floor * self.scenario.minibatches_per_wave + 1:
            self.pull(worker, clock)
        worker.clock = clock
        worker.next_p += 1
        worker.samples.setdefault((p - 1) // self.scenario.minibatches_per_wave, []).extend(worker.blocks.popleft())
        item = _Item(p, clock, self.local_through(p))
        worker.items.append(item)
        self.advance(worker, item)

    def advance(self, worker: _Worker, item: _Item) -> None:
        last = 2 * worker.num_stages - 1
        stage = min(item.hop, last - item.hop)
        where: Record = {"vw": worker.vw, "incarnation": worker.incarnation, "stage": stage, "p": item.p}
        event = "forward" if item.hop < worker.num_stages else "backward"
        file = f"stage-{worker.vw}-{worker.incarnation}-{stage}.jsonl"
        self.write(file, worker.vw, event, **where, clock=item.clock, local_through=item.through)
        if event == "backward" and self.steps_after(worker, item.p):
            self.write(file, worker.vw, "step", **where)
        item.hop += 1
        if item.hop > last:
            worker.items.remove(item)
            worker.complete = item.p

    def steps_after(self, worker: _Worker, p: int) -> bool:
        num = self.scenario.minibatches_per_wave
        is_last = p % num == 0 or (p == worker.next_p - 1 and not worker.blocks)
        return self.scenario.weights == "wave" or is_last

    def pull(self, worker: _Worker, clock: int) -> None:
        for stage in range(worker.num_stages):
            for shard in range(self.scenario.num_shards):
                if self.scenario.slices_on(worker.vw, stage, shard):
                    file = f"stage-{worker.vw}-{worker.incarnation}-{stage}.jsonl"
                    self.write(file, worker.vw, "pull", shard=shard, vw=worker.vw, stage=stage, clock=clock)

    def is_whole(self, worker: _Worker) -> bool:
        """The next wave to stage is done: full, or nothing is left to fill it."""
        full = worker.complete >= (worker.staged + 1) * self.scenario.minibatches_per_wave
        return full or (not worker.blocks and not worker.items)

    def stage(self, worker: _Worker) -> None:
        wave = worker.staged
        worker.staged += 1
        if wave not in worker.samples:
            return
        for stage in range(worker.num_stages):
            for shard in range(self.scenario.num_shards):
                slices = self.scenario.slices_on(worker.vw, stage, shard)
                if slices:
                    who: Record = {"vw": worker.vw, "incarnation": worker.incarnation, "stage": stage}
                    file = f"parameter_server-{shard}.jsonl"
                    self.write(file, shard, "staged", **who, wave=wave, shard=shard, slices=slices)

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
        if self.scenario.evict_at == worker.committed and worker.vw == len(self.scenario.num_stages) - 1:
            self.evict(worker)

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
                self.decide("join", vw=worker.vw, incarnation=worker.incarnation, clock=self.barrier)
            self.absent.clear()
        self.decide("publish", clock=self.published)
        if self.published == self.barrier:
            self.enter_interval()
        elif self.scenario.stop_at is not None and self.published >= self.scenario.stop_at and not self.stopped:
            self.stopped = True
            self.set_barrier(self.unplanned_clock(), "checkpoint+stop")

    def evict(self, worker: _Worker) -> None:
        if self.evicted or not worker.blocks:
            return  # without work left behind, the barrier would have to end the epoch after all
        self.evicted = True
        del self.workers[worker.vw]
        self.absent.append(worker)
        self.decide("evict", vw=worker.vw, incarnation=worker.incarnation, clock=worker.committed)
        self.set_barrier(self.unplanned_clock(), "join")

    def unplanned_clock(self) -> int:
        committed = max(worker.committed for worker in (*self.workers.values(), *self.absent))
        if self.scenario.staleness is None:
            return self.barrier
        ahead = self.scenario.staleness + (1 if self.scenario.weights == "flush" else 2)
        return min(self.barrier, max(committed, self.published + ahead))

    def set_barrier(self, clock: int, reason: str) -> None:
        self.barrier, self.words = clock, reason
        self.decide("barrier", clock=clock, reason=reason)
        for worker in self.workers.values():
            worker.staged = min(worker.staged, clock)

    # -- barriers --

    def enter_interval(self) -> None:
        """All start from w^(c): close the epoch where it ended, deal what is left of the data, set the next barrier."""
        if "epoch" in self.words:
            self.epoch += 1
            self.used.clear()
        if "end" in self.words or "stop" in self.words:
            self.ended = True
            return
        num = self.scenario.minibatches_per_wave
        self.floor = clock = self.published
        for worker in self.workers.values():
            worker.next_p, worker.complete, worker.staged, worker.committed = clock * num + 1, clock * num, clock, clock
            worker.clock, worker.items, worker.samples = clock, [], {}
        longest, words = self.deal()
        barrier = clock + -(-longest // num)
        every = self.scenario.checkpoint_every
        checkpoint = barrier if every is None else (clock // every + 1) * every
        if checkpoint < barrier:
            self.set_barrier(checkpoint, "checkpoint")
        else:
            self.set_barrier(barrier, "+".join(["checkpoint", *words] if checkpoint == barrier and every else words))

    def deal(self) -> tuple[int, list[str]]:
        """Deal blocks round-robin; minibatches of the longest deal, and the reasons of the barrier behind it."""
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
        for turn, vw in enumerate(members):
            self.workers[vw].blocks = deque(blocks[turn :: len(members)])
        return -(-len(blocks) // len(members)), words

    def committed_minibatches(self) -> int:
        commits = [line for line in self.histories.get("parameter_server-0.jsonl", []) if line["event"] == "commit"]
        done = sum(-(-int(str(line["samples"])) // self.scenario.batch_size) for line in commits)
        return self.scenario.start.minibatches + done

    # -- writing --

    def decide(self, event: str, **fields: object) -> None:
        self.write("parameter_server-0.jsonl", 0, event, **fields)

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
