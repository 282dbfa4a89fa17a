"""`python -m hetpipe.launch PROGRAM ARGUMENT…`: runs a program that reports its phases from the start.

Lines are written to the descriptor of `--report-fd`, if that is among the arguments, else to standard output. A fork
server (`hetpipe.forking.fork_server`) runs the same programs in the processes it forks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from hetpipe.phases import begin_phases

_REPORT_FD = "--report-fd"

#: The programs: name → `module:function`; the function reads `sys.argv` and returns when the program ends.
PROGRAMS: Mapping[str, str] = {
    "hetpipe": "hetpipe.cli.main:main",
    "hetpipe.server.agent.inspect_process": "hetpipe.server.agent.inspect_process:program",
    "hetpipe.server.agent.link_process": "hetpipe.server.agent.link_process:program",
    "hetpipe.server.agent.stage_process": "hetpipe.server.agent.stage_process:program",
}


def main(arguments: Sequence[str]) -> None:
    """Run the program named by the first argument."""
    program, *rest = arguments
    if program not in PROGRAMS:
        sys.exit(f"{program} is not a program of hetpipe; name one of these: {', '.join(sorted(PROGRAMS))}")
    run(program, rest, PROGRAMS)


def run(program: str, arguments: Sequence[str], programs: Mapping[str, str]) -> None:
    """Run a program of `programs` in this process, reporting its phases."""
    descriptor = int(arguments[arguments.index(_REPORT_FD) + 1]) if _REPORT_FD in arguments else sys.stdout.fileno()
    begin_phases(descriptor, "importing torch and hetpipe")
    import hetpipe.wire  # noqa: F401 - first, for what it says to gRPC's own library

    sys.argv = [program, *arguments]
    entry(programs[program])()


def entry(name: str) -> Callable[[], object]:
    """Load the function that a value of `PROGRAMS` refers to."""
    module, _, function = name.partition(":")
    found: Callable[[], object] = getattr(import_module(module), function)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
