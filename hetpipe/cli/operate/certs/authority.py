"""Shared code of the commands of `hetpipe certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.errors import UserError

Authority = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")]


def check_installed() -> None:
    """Check that the extra `tls` is installed.

    Raises:
        UserError: it is not installed.
    """
    try:
        import cryptography  # noqa: F401 - availability check
    except ImportError as error:
        raise UserError("certificates need the extra `tls`: pip install 'hetpipe[tls]'") from error
