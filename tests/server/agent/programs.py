"""Child programs for the tests of the agent: they behave as the job's import path says."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path

from hetpipe.server.agent.children import Programs
from hetpipe.server.agent.inspection_order import InspectionAnswer
from hetpipe.values.wire import plain
from tests.profiler.builders import measurement
from tests.server.coordinator.builders import model

_COMMON = """
import json, os, signal, sys, threading, time
order = json.loads(sys.stdin.readline())
out = int(sys.argv[sys.argv.index("--report-fd") + 1])
def tell(value):
    os.write(out, (json.dumps(value) + "\\n").encode())
def wait_for_eof():
    sys.stdin.read()
    os._exit(7)
behaviour = order["import_path"].strip("/")
"""

_STAGE = """
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell({"kind": "ready", "pid": os.getpid()})
if behaviour == "done":
    tell({"kind": "evaluation", "clock": 3, "epoch": 1, "samples": 5, "sums": {"loss": 2.5}})
    tell({"kind": "done", "clock": 3, "reason": "end"})
elif behaviour == "leave":
    while not os.path.exists(order["run_dir"] + "/leave"):
        time.sleep(0.01)
    tell({"kind": "done", "clock": 3, "reason": "drain"})
elif behaviour == "fail":
    print("a traceback")
    print("ValueError: the last words")
    sys.exit(3)
elif behaviour == "cut":
    for times in (1, 2):
        condition = {"kind": "history_incomplete", "who": "stage 0", "sentence": "no room", "times": times}
        tell({"kind": "conditions", "conditions": [condition]})
    wait_for_eof()
elif behaviour == "babble":
    tell("no report")
    os.write(out, b"half a line")
else:
    wait_for_eof()
"""

_INSPECTION = """
if behaviour == "unimportable":
    tell({"error": "JobError", "problems": ["model: no module named 'model'", "loss: the same"]})
elif behaviour == "dies":
    os.kill(os.getpid(), 9)
else:
    for done in range(2 if order["measure"] else 0):
        tell({"step": {"device_type": order["measure"][0], "layer": "a", "done": done, "total": 2}})
    tell({"ok": json.loads(ANSWER)})
"""


def fake_programs(folder: Path) -> Programs:
    """Programs that start fast and need no torch."""
    answer = json.dumps(plain(InspectionAnswer, InspectionAnswer(model(), (measurement("cpu"),))))
    (folder / "stage.py").write_text(_COMMON + _STAGE)
    (folder / "inspection.py").write_text(_COMMON + f"ANSWER = {answer!r}\n" + _INSPECTION)
    python = (sys.executable, "-S", "-E")
    return Programs(stage=(*python, str(folder / "stage.py")), inspection=(*python, str(folder / "inspection.py")))


def environment() -> Mapping[str, str]:
    """What children inherit."""
    return {"PATH": os.environ["PATH"]}


def ends(pid: int, *, timeout_seconds: float = 10.0) -> bool:
    """True once the process is gone, or is a zombie; False when it still runs after the timeout."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], timeout_seconds)
        return bool(readable)
    finally:
        os.close(descriptor)
