"""`hetpipe certs init`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cli.operate.certs.authority import Authority, check_installed
from hetpipe.cli.options import Json
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Create a private certificate authority. Its key signs all certificates and stays in that folder."""

    folder: Authority
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Create an authority.

    Raises:
        UserError: the folder cannot be used, or the extra is not installed.
    """
    check_installed()
    from hetpipe.certs.folders import init_authority  # of the extra

    folder = options.folder
    init_authority(folder)
    output.answer(
        {"folder": str(folder.absolute())},
        f"created an authority in {folder}; keep ca-key.pem secret: it can impersonate every process",
        f"next, for each process: hetpipe certs issue {folder} coordinator",
    )
    return ExitStatus.OK
