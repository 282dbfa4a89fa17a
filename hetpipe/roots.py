"""The root folders for the paths in jobs: one for their code, one for their runs.

The submitter of a job chooses its paths. A root bounds them: a path is resolved, symbolic links and
`..` included, before it is compared, so that it cannot escape. Both are enforced wherever other machines reach the
process, and default to the folder it was started in.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import UserError

CODE_OPTION = "--code-root"
RUN_OPTION = "--run-root"


@dataclass(frozen=True, slots=True)
class Root:
    """One folder, or a few. Make it with `root_of`."""

    folders: tuple[Path, ...]
    """Where they lead: absolute, without links."""
    option: str
    """By which it was given, for the sentence."""

    def check(self, path: str, what: str) -> None:
        """Reject a path outside the root.

        Args:
            path: as the job names it.
            what: begins the sentence.

        Raises:
            UserError: it does, or leads nowhere.
        """
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{what} {path!r:.200} cannot be followed ({error}); name another folder") from error
        if not Path(path).is_absolute() or not any(real.is_relative_to(folder) for folder in self.folders):
            leads = "" if str(real) == path else f", which leads to {real},"
            raise UserError(
                f"{what} {path}{leads} is not below {' or '.join(map(str, self.folders))}, where it has to be here; "
                f"use a folder there, or have this process started with another {self.option}"
            )


@dataclass(frozen=True, slots=True)
class Roots:
    """Both roots of a process; None: no bound."""

    code: Root | None = None
    runs: Root | None = None

    def check_code(self, path: str) -> None:
        """Reject a folder of code outside its root. Raises `UserError`."""
        if self.code is not None:
            self.code.check(path, "the folder of code")

    def check_run(self, run_dir: str, restore: str | None = None) -> None:
        """Reject a folder of a run, or a checkpoint to resume from, outside its root. Raises `UserError`."""
        if self.runs is not None:
            self.runs.check(run_dir, "the folder of the run")
            if restore is not None:
                self.runs.check(restore, "the checkpoint")


def add_root_options(parser: argparse.ArgumentParser, *, with_code: bool) -> None:
    """The options of a service that accesses paths in jobs."""
    usual = (
        "may be given again; default: the folder this is started in, or no bound where only this machine reaches --host"
    )
    if with_code:
        what = "import the code of jobs from nowhere but below DIR"
        parser.add_argument(CODE_OPTION, type=Path, action="append", metavar="DIR", help=f"{what} ({usual})")
    what = "read and write runs of jobs nowhere but below DIR"
    parser.add_argument(RUN_OPTION, type=Path, action="append", metavar="DIR", help=f"{what} ({usual})")


def roots_of(options: argparse.Namespace, *, is_reached: bool) -> Roots:
    """The roots of a service, by its options.

    Args:
        options: parsed by a parser with `add_root_options`.
        is_reached: whether other machines reach the service.

    Raises:
        UserError: a root is no folder, or is needed and the service was started in `/`.
    """
    with_code = hasattr(options, "code_root")
    return Roots(
        root_of(options.code_root, CODE_OPTION, is_needed=is_reached) if with_code else None,
        root_of(options.run_root, RUN_OPTION, is_needed=is_reached),
    )


def root_of(given: Sequence[Path] | None, option: str, *, is_needed: bool) -> Root | None:
    """The given root, or the working folder where one is required.

    Raises:
        UserError: it is no folder, or it is required and would be `/` by default.
    """
    if given is None and not is_needed:
        return None
    if given is None and Path.cwd() == Path.cwd().parent:
        raise UserError(
            f"other machines reach this process, which was started in {Path.cwd()}, so say below which folder jobs may "
            f"name theirs: {option} DIR, or {option} / if you trust everyone who can submit jobs with every file"
        )
    return Root(tuple(_real(folder, option) for folder in given or (Path.cwd(),)), option)


def _real(folder: Path, option: str) -> Path:
    try:
        real = folder.resolve(strict=True)
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}; name a folder that is there") from error
    if not real.is_dir():
        raise UserError(f"{option} {folder} is no folder")
    return real
