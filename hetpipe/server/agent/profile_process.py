"""`python -m hetpipe.server.agent.profile_process`: imports and measures the user's model on this machine."""

from __future__ import annotations

import json
from typing import NoReturn

from hetpipe.server.agent.child_main import ReportPipe, answer_once, run_child


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Execute the `ProfileOrder` of the first line; returns the exit status."""
    import torch

    from hetpipe.clock import SYSTEM_CLOCK
    from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
    from hetpipe.profiler.profiling import carry_out
    from hetpipe.values import wire
    from hetpipe.values.measurement import ProfileStep
    from hetpipe.weights.allocator import settle_memory

    def report_step(step: ProfileStep) -> None:
        pipe.write(json.dumps({"step": wire.plain(ProfileStep, step)}))

    # Like stage processes.
    torch.set_num_threads(1)
    settle_memory(one_heap=True)

    def measure() -> object:
        return wire.plain(ProfileAnswer, carry_out(wire.from_json(ProfileOrder, first_line), SYSTEM_CLOCK, report_step))

    return answer_once(pipe, measure)


def program() -> NoReturn:
    """Run this process; see `hetpipe.launch`."""
    run_child(main)


if __name__ == "__main__":
    program()
