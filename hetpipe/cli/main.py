"""The program `hetpipe`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hetpipe.server import SERVICES, serve


def main() -> None:
    """Run the command line; never returns."""
    import hetpipe.wire  # noqa: F401 - first, for what it says to gRPC's own library

    status = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would try to flush again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["serve", service, *options] if service in SERVICES:
            # Services live long, and import nothing of the command line.
            return serve(service, options)
        case ["health", *options]:
            # Probes ask for ever: half a second of a processor each time is too much.
            from hetpipe.cli.operate.health import main as health

            return health(options)
    from hetpipe.cli.app import run

    return run(arguments)


if __name__ == "__main__":
    main()
