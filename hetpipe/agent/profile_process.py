"""`python -m hetpipe.agent.profile_process`: imports the user's code and measures it on this machine's devices."""

from __future__ import annotations

import json
import traceback

from hetpipe.agent.child_main import ReportPipe, run_child


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Carry out the `ProfileOrder` of the first line; the exit status."""
    import torch

    from hetpipe.clock import SYSTEM_CLOCK
    from hetpipe.errors import HetpipeError, JobError
    from hetpipe.profiler.order import ProfileAnswer, ProfileOrder, ProfileStep
    from hetpipe.profiler.profiling import carry_out
    from hetpipe.spec import wire
    from hetpipe.weights.allocator import keep_freed_memory

    def tell(step: ProfileStep) -> None:
        pipe.write(json.dumps({"step": wire.plain(ProfileStep, step)}))

    # As stage processes do.
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        answer = carry_out(wire.from_json(ProfileOrder, first_line), SYSTEM_CLOCK, tell)
    except HetpipeError as error:
        problems = list(error.problems) if isinstance(error, JobError) else [str(error)]
        pipe.write(json.dumps({"error": type(error).__name__, "problems": problems}))
        return 1
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is told as one sentence
        traceback.print_exc()
        pipe.write(json.dumps({"error": type(error).__name__, "problems": [f"{type(error).__name__}: {error}"]}))
        return 1
    pipe.write(json.dumps({"ok": wire.plain(ProfileAnswer, answer)}))
    return 0


if __name__ == "__main__":
    run_child(main)
