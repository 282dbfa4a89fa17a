"""(c) Protocol overhead and (d) memory: a real run of 4 virtual workers × 4 stages whose devices are emulated.

Every stage takes 50 ms per minibatch without using a core, so the ideal rate of a pipeline is 20 minibatches per second
whatever the machine. All 23 processes of the run share this machine's cores; what is missing to the ideal is what
hetpipe costs. Rates are taken from the run's own history, between the filled pipeline and its end.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.sizes import sized
from benchmarks.sleeper import STAGE_SECONDS, Sleeper, keep_time, loss
from hetpipe.clock import SYSTEM_CLOCK

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKERS = sized(4, 2)
NUM_STAGES = sized(4, 2)
#: Minibatches at either end that do not count: the pipeline fills and drains.
MARGIN = sized(40, 4)

#: What a process is, by the words of its command line.
ROLES = {
    "hetpipe.server.agent.stage_process": "stage",
    "serve\0parameter-server": "parameter server",
    "serve\0coordinator": "coordinator",
    "serve\0agent": "agent",
}

JOB: dict[str, Any] = {
    "name": "protocol",
    "model": "benchmarks.sleeper:model",
    "loss": "benchmarks.sleeper:loss",
    "data": {"train": "benchmarks.sleeper:data"},
    "batch_size": 1,
    "minibatches": sized(400, 64),
    "optimizer": {"name": "SGD", "lr": 0.001},
    "workers": {"count": NUM_WORKERS, "stages": NUM_STAGES},
    "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": 16},
    "parameter_servers": {"count": 2},
}


def rate(history: Path, margin: int = MARGIN) -> float:
    """Minibatches per second of one virtual worker, from the steps of its first stage."""
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    steps = [line["t"] for line in lines if line["event"] == "step"][margin:-margin]
    return float((len(steps) - 1) / (steps[-1] - steps[0]))


def _plain_stage(start: Any, seconds: float, rates: Any) -> None:
    torch.set_num_threads(1)
    layer = Sleeper()
    keep_time()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
    value = torch.ones(1, 64)
    start.wait()
    began = SYSTEM_CLOCK.monotonic()
    minibatches = 0
    while SYSTEM_CLOCK.monotonic() < began + seconds:
        optimizer.zero_grad()
        loss(layer(value), value).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        optimizer.step()
        minibatches += 1
    rates.put(minibatches / (SYSTEM_CLOCK.monotonic() - began))


def plain_rate(seconds: float = sized(8.0, 0.5)) -> float:
    """Mean minibatches per second of as many emulated stages in bare PyTorch loops, each on its own.

    What this machine can do without any protocol: sleeps end late, and a processor that slept is slow at first.
    """
    spawn = multiprocessing.get_context("spawn")
    start, rates = spawn.Barrier(NUM_WORKERS * NUM_STAGES), spawn.Queue()
    stages = [spawn.Process(target=_plain_stage, args=(start, seconds, rates)) for _ in range(start.parties)]
    for stage in stages:
        stage.start()
    found: list[float] = [rates.get() for _ in stages]
    for stage in stages:
        stage.join()
    return sum(found) / len(found)


def peak_resident_bytes(process: Path) -> int:
    """Peak resident memory (VmHWM) of a process, by its folder in `/proc`; 0 if it is a zombie."""
    lines = (process / "status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


class PeakMemory(threading.Thread):
    """Samples the peak resident memory of a run's processes, by role."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.peak_bytes: dict[str, int] = {}

    def run(self) -> None:
        """Look twice a second."""
        while not self._done.wait(0.5):
            for process in Path("/proc").glob("[0-9]*"):
                self._look(process)

    def _look(self, process: Path) -> None:
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            peak = peak_resident_bytes(process)
        except OSError:
            return
        role = next((role for module, role in ROLES.items() if module in command), None)
        if role is not None:
            self.peak_bytes[role] = max(self.peak_bytes.get(role, 0), peak)

    def finish(self) -> dict[str, int]:
        """The peaks, in bytes."""
        self._done.set()
        self.join()
        return self.peak_bytes


def train(job: dict[str, Any]) -> tuple[Path, dict[str, Any], dict[str, int]]:
    """Run a job with the real command line; returns its folder, its result and the peaks of memory."""
    folder = Path(tempfile.mkdtemp(prefix="hetpipe-bench-"))
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    memory = PeakMemory()
    memory.start()
    command = [
        str(Path(sys.executable).with_name("hetpipe")),
        "train",
        str(path),
        "--json",
        "--run-dir",
        str(folder / "run"),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return folder / "run", json.loads(done.stdout.strip().splitlines()[-1]), memory.finish()


def measure() -> dict[str, Any]:
    """One run; the fraction of the ideal rate per virtual worker and together, and the peaks of memory."""
    started = SYSTEM_CLOCK.monotonic()
    folder, result, memory = train(JOB)
    rates = [rate(folder / "history" / f"vw-{vw}-stage-0.jsonl") for vw in range(NUM_WORKERS)]
    ideal = 1.0 / STAGE_SECONDS
    plain = plain_rate()
    return {
        "ideal minibatches per second and worker": ideal,
        "of ideal, per worker": [round(found / ideal, 3) for found in rates],
        "of ideal": round(sum(rates) / (NUM_WORKERS * ideal), 3),
        "plain loops, of ideal": round(plain / ideal, 3),
        "of plain loops": round(sum(rates) / (NUM_WORKERS * plain), 3),
        "violations": result["staleness"]["violations"],
        "peak resident MiB": {role: round(peak / 2**20) for role, peak in sorted(memory.items())},
        "wall seconds": round(SYSTEM_CLOCK.monotonic() - started, 1),
    }


if __name__ == "__main__":
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        sys.stdout.write(json.dumps(measure()) + "\n")
        sys.stdout.flush()
