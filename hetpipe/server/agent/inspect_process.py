"""`python -m hetpipe.server.agent.inspect_process`: imports the user's code once, before anything is planned."""

from __future__ import annotations

import json
from typing import NoReturn

from hetpipe.server.agent.child_main import ReportPipe, answer_once, run_child


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Execute the `InspectionOrder` of the first line; returns the exit status."""
    import torch

    from hetpipe.clock import SYSTEM_CLOCK
    from hetpipe.server.agent.inspection import carry_out
    from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
    from hetpipe.values import wire
    from hetpipe.values.measurement import ProfileStep
    from hetpipe.weights.allocator import settle_memory

    def report_step(step: ProfileStep) -> None:
        pipe.write(json.dumps({"step": wire.plain(ProfileStep, step)}))

    # Like stage processes.
    torch.set_num_threads(1)
    settle_memory(one_heap=True)

    def inspect() -> object:
        order: InspectionOrder = wire.from_json(InspectionOrder, first_line)
        return wire.plain(InspectionAnswer, carry_out(order, SYSTEM_CLOCK, report_step))

    return answer_once(pipe, inspect)


def program() -> NoReturn:
    """Run this process; see `hetpipe.launch`."""
    run_child(main)


if __name__ == "__main__":
    program()
