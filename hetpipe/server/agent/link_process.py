"""`python -m hetpipe.server.agent.link_process`: one end of a measured link, or copies to this node's devices."""

from __future__ import annotations

import json
from typing import NoReturn

from hetpipe.server.agent.child_main import ReportPipe, answer_once, run_child


def main(pipe: ReportPipe, first_line: bytes) -> int:
    """Execute the `LinkOrder` of the first line; returns the exit status."""
    import os

    import torch

    from hetpipe.clock import SYSTEM_CLOCK
    from hetpipe.profiler.link_measuring import carry_out_links
    from hetpipe.profiler.link_order import LinkAnswer, LinkOrder
    from hetpipe.values import wire
    from hetpipe.weights.allocator import settle_memory
    from hetpipe.wire.tls import tls_from_environment

    def report_address(address: str) -> None:
        pipe.write(json.dumps({"address": address}))

    # Like stage processes.
    torch.set_num_threads(1)
    settle_memory(one_heap=True)

    def measure() -> object:
        order: LinkOrder = wire.from_json(LinkOrder, first_line)
        return wire.plain(
            LinkAnswer, carry_out_links(order, SYSTEM_CLOCK, report_address, tls=tls_from_environment(os.environ))
        )

    return answer_once(pipe, measure)


def program() -> NoReturn:
    """Run this process; see `hetpipe.launch`."""
    run_child(main)


if __name__ == "__main__":
    program()
