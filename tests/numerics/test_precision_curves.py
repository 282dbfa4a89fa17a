"""`precision: bf16` trains as plain PyTorch under autocast does, and sends half the bytes; on two jobs of the examples.

That every bit is the one of the reference executor is shown by `test_precision`; here the yardstick is not ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hetpipe.checker import check_run
from hetpipe.job.file import Job, load_job
from hetpipe.link.in_process import InProcessLink
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.link.wire import encode
from hetpipe.pipeline.callables import build_datasets, build_model, load_loss
from hetpipe.values.policies import POLICIES
from tests.support.in_process import InProcessRun, run_in_process

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1_200)]

ROOT = Path(__file__).resolve().parents[2]

SEEDS = (0, 1, 2)

#: The curve of a run has so many points, each the mean loss of a tenth of its minibatches.
POINTS = 10

#: Example → changes of its job. Delayed weights cost WSP some progress in any precision, the less the smaller delays
#: and steps are, so the first job has small ones; the second one has no delay, but one update per four minibatches.
JOBS: Mapping[str, dict[str, Any]] = {
    "digits": {"epochs": 8, "optimizer": {"lr": 0.0005}, "sync": {"D": 0, "minibatches_per_wave": 2}},
    "moved_digits": {"epochs": 2},
}


@dataclass
class Traffic:
    """Bytes of the frames that stages sent, as network links write them."""

    sent: dict[FrameKind, int] = field(default_factory=dict)

    def count(self, frame: Frame) -> None:
        outgoing = encode(frame)
        num_bytes = len(outgoing.first) + sum(tensor.nbytes for tensor in outgoing.following)
        self.sent[frame.kind] = self.sent.get(frame.kind, 0) + num_bytes


def job_of(name: str, **changes: Any) -> Job:
    return load_job(ROOT / "examples" / name / "job.yaml", JOBS[name] | changes)


def points(losses: Sequence[float]) -> list[float]:
    """The curve; what is left over at the end has no part in it."""
    size = len(losses) // POINTS
    return [sum(losses[at * size : (at + 1) * size]) / size for at in range(POINTS)]


def curve(job: Job, folder: Path) -> list[float]:
    """Of a run of hetpipe; the waves of its virtual workers are taken in turns."""
    run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, writes_metrics=True))
    report = check_run(folder, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    files = [path.read_text().splitlines() for path in sorted((folder / "metrics").glob("vw-*.jsonl"))]
    waves = sorted((json.loads(line) for line in chain(*files)), key=lambda line: int(line["wave"]))
    return points([wave["loss"] for wave in waves])


def plain_curve(job: Job) -> list[float]:
    """Of the loop that people write, with torch's autocast."""
    per_update = job.sync.minibatches_per_wave if POLICIES[job.weights].one_update_per_wave else 1
    assert isinstance(per_update, int)
    assert job.epochs is not None
    train: Any
    train, _ = build_datasets(job, ROOT)
    torch.manual_seed(job.seed)
    model, loss = build_model(job, ROOT), load_loss(job, ROOT)
    assert loss is not None
    arguments: Any = job.optimizer.arguments
    optimizer = torch.optim.SGD(model.parameters(), **arguments)
    losses = []
    loader = DataLoader(train, job.batch_size * per_update, shuffle=True)
    for inputs, target in chain.from_iterable(islice((iter(loader) for _ in count()), job.epochs)):
        with torch.autocast("cpu", torch.bfloat16):
            value: Any = loss(model(inputs), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return points(losses)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    found, send = Traffic(), InProcessLink.send

    def counted(own: InProcessLink, frame: Frame, *, deadline_seconds: float) -> None:
        found.count(frame)
        send(own, frame, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(InProcessLink, "send", counted)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_losses_lie_within_the_spread_of_seeds_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    """The mean of as many seeds of hetpipe is no farther from the mean of theirs than they are from each other."""
    jobs = [job_of(name, precision="bf16", seed=seed) for seed in SEEDS]
    ours = [curve(job, tmp_path / str(job.seed)) for job in jobs]
    plain = [plain_curve(job) for job in jobs]
    outside = {
        at: (mean(found), values)
        for at, (found, values) in enumerate(zip(zip(*ours, strict=True), zip(*plain, strict=True), strict=True))
        if abs(mean(found) - mean(values)) > max(values) - min(values)
    }
    assert not outside
    assert all(found[-1] < 0.5 * found[0] for found in ours), "they learn, so the curves say something"


@pytest.mark.parametrize("name", JOBS)
def test_half_as_many_bytes_are_sent(name: str, tmp_path: Path, traffic: Traffic) -> None:
    """All that crosses the cuts of these jobs is computed in bfloat16; headers are as long as before."""
    found = {}
    for precision in ("fp32", "bf16"):
        traffic.sent = {}
        run_in_process(
            InProcessRun(
                job=job_of(name, precision=precision, epochs=None, minibatches=8),
                run_dir=tmp_path / precision,
                import_path=ROOT,
            )
        )
        found[precision] = traffic.sent
    for kind in (FrameKind.FORWARD, FrameKind.BACKWARD):
        assert found["bf16"][kind] / found["fp32"][kind] == pytest.approx(0.5, abs=0.02)
