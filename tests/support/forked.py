"""Several short programs in one interpreter, which imports their modules once and forks for each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]

#: The programs end as those of a fork server.
_FORKING = """
import importlib, json, os, sys
from hetpipe.fork_server import run_to_end
folder, imports, codes = json.loads(sys.argv[1])
for name in imports:
    importlib.import_module(name)
statuses = []
for number, code in enumerate(codes):
    child = os.fork()
    if child == 0:
        for descriptor in (1, 2):
            file = os.open(f"{folder}/{number}.{descriptor}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, descriptor)
        sys.argv[1:] = []
        run_to_end(lambda: exec(code, {"__name__": "__main__"}))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


def run_forked(
    codes: Sequence[str],
    *,
    imports: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 60.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run each code as the main module of a process of its own, one after the other, in the folder of the project.

    Args:
        codes: what each runs.
        imports: modules that they all find imported; nothing of it may have started a thread.
        environment: the whole environment; None: that of this process.
        timeout_seconds: of all together.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _FORKING, json.dumps([folder, imports, codes])]
        parent = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout_seconds
        )
        assert parent.returncode == 0, parent.stderr
        return [
            subprocess.CompletedProcess(
                code,
                status,
                Path(folder, f"{number}.1").read_text(encoding="utf-8"),
                Path(folder, f"{number}.2").read_text(encoding="utf-8"),
            )
            for number, (code, status) in enumerate(zip(codes, json.loads(parent.stdout), strict=True))
        ]
