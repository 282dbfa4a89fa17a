"""`python -m hetpipe.launch MODULE ARGUMENT…`: runs a module as a program that tells its phases from the beginning on.

The lines go to the descriptor of `--report-fd`, if that is among the arguments, else to standard output.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from hetpipe.phases import begin_phases

_REPORT_FD = "--report-fd"

#: What can be run.
PROGRAMS = frozenset(
    {
        "hetpipe",
        "hetpipe.server.agent.inspect_process",
        "hetpipe.server.agent.link_process",
        "hetpipe.server.agent.stage_process",
    }
)


def main(arguments: Sequence[str]) -> None:
    """Run the module that `arguments` begin with."""
    module, *rest = arguments
    if module not in PROGRAMS:
        sys.exit(f"{module} is no program of hetpipe; name one of these: {', '.join(sorted(PROGRAMS))}")
    descriptor = int(rest[rest.index(_REPORT_FD) + 1]) if _REPORT_FD in rest else sys.stdout.fileno()
    begin_phases(descriptor, "importing torch and hetpipe")
    import hetpipe.wire  # noqa: F401 - first, for what it says to gRPC's own library

    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
