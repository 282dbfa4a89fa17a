"""`python -m hetpipe.agent.inspect_process`: imports the user's code once, before anything is planned."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from hetpipe.agent.child_main import ReportPipe, run_child


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Inspect the job of the first line; the exit status."""
    import torch

    from hetpipe.agent.inspection import inspect_job
    from hetpipe.errors import HetpipeError, JobError
    from hetpipe.spec import wire
    from hetpipe.spec.job import Job
    from hetpipe.spec.plan import ModelReport

    torch.set_num_threads(1)
    try:
        request = json.loads(first_line)
        report = inspect_job(Job.model_validate(request["job"]), Path(request["import_path"]))
    except HetpipeError as error:
        problems = list(error.problems) if isinstance(error, JobError) else [str(error)]
        pipe.write(json.dumps({"error": type(error).__name__, "problems": problems}))
        return 1
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is told as one sentence
        traceback.print_exc()
        pipe.write(json.dumps({"error": type(error).__name__, "problems": [f"{type(error).__name__}: {error}"]}))
        return 1
    pipe.write(json.dumps({"ok": wire.plain(ModelReport, report)}))
    return 0


if __name__ == "__main__":
    run_child(main)
