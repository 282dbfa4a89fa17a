"""The program `hetpipe`."""

from __future__ import annotations

import os
import sys

#: What the extra `cli` installs.
_EXTRA = frozenset({"typer", "rich"})


def main() -> None:
    """Run the command line; never returns."""
    import hetpipe.rpc  # noqa: F401 - first, for what it says to gRPC's own library

    try:
        from hetpipe.cli.app import run  # its packages may be absent
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(f"error: the command line needs {error.name}; install it with: pip install 'hetpipe[cli]'\n")
        sys.exit(1)
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would try to flush again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


if __name__ == "__main__":
    main()
