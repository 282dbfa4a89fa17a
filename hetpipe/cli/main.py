"""The program `hetpipe`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetpipe.server import SERVICES, serve


def main() -> None:
    """Run the command line; never returns."""
    with fork_server_for(sys.argv[1:]):
        import hetpipe.wire  # noqa: F401 - first, as it configures gRPC

        status = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would flush again at its exit, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


@contextmanager
def fork_server_for(arguments: Sequence[str]) -> Iterator[None]:
    """Start the fork server of a command that needs one, before anything else: it imports torch concurrently."""
    if not starts_services(arguments):
        yield
        return
    from hetpipe.forking.environment import SERVICE_ENVIRONMENT
    from hetpipe.forking.fork_server import own_fork_server

    fork_server = own_fork_server({**os.environ, **SERVICE_ENVIRONMENT})
    fork_server.begin()
    try:
        yield
    finally:
        fork_server.close()


def starts_services(arguments: Sequence[str]) -> bool:
    """Whether a command probably starts the services of a job on this machine, judging by its arguments.

    >>> starts_services(["train", "job.yaml"]), starts_services(["train", "job.yaml", "--coordinator", "node-1:7000"])
    (True, False)
    """
    elsewhere = ("--coordinator", "--help", "-h")
    return bool(arguments) and arguments[0] in {"train", "demo"} and not any(a.startswith(elsewhere) for a in arguments)


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["serve", service, *options] if service in SERVICES:
            # Services run for long, and do not import the command line.
            return serve(service, options)
        case ["health", *options]:
            # Probes run every few seconds, and importing the command line would cost half a second of CPU time each.
            from hetpipe.cli.operate.health import main as health

            return health(options)
    from hetpipe.cli.app import run

    return run(arguments)


if __name__ == "__main__":
    main()
