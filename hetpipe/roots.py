"""Root folders for paths in jobs: one for code, one for runs; and roots for the URLs of object stores.

Paths are chosen by the submitter of a job; a root bounds them. A path is resolved, including symbolic links and `..`,
before the comparison, so that it cannot escape. Both roots are enforced wherever other machines can reach the process,
and default to the folder in which it was started. An object store is used with the credentials of the process, so there
jobs may name only URLs below a root, of which there is none by default; a `file:` URL is a path like any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import UserError
from hetpipe.values.storage_url import checked_url, file_path, is_below, is_url

CODE_OPTION = "--code-root"
RUN_OPTION = "--run-root"
STORAGE_OPTION = "--storage-root"


@dataclass(frozen=True, slots=True)
class Root:
    """One or several root folders. Created by `root_of`."""

    folders: tuple[Path, ...]
    """The resolved folders: absolute, without links."""
    option: str
    """The option that set them, for messages."""

    def check(self, path: str, what: str) -> None:
        """Reject a path outside the root.

        Args:
            path: the path in the job.
            what: description of the path; begins the message.

        Raises:
            UserError: the path is outside the root, or cannot be resolved.
        """
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{what} {path!r:.200} cannot be resolved ({error}); name another folder") from error
        if not Path(path).is_absolute() or not any(real.is_relative_to(folder) for folder in self.folders):
            leads = "" if str(real) == path else f", which leads to {real},"
            raise UserError(
                f"{what} {path}{leads} is not below {' or '.join(map(str, self.folders))}, as required here; "
                f"use a folder there, or have this process started with another {self.option}"
            )


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of a process; None for no bound."""

    code: Root | None = None
    runs: Root | None = None
    storage: tuple[str, ...] | None = None
    """Checked URLs."""

    def check_code(self, path: str) -> None:
        """Reject a folder of code outside its root. Raises `UserError`."""
        if self.code is not None:
            self.code.check(path, "the folder of code")

    def check_run(self, run_dir: str, restore: str | None = None, storage: str | None = None) -> None:
        """Reject a folder of a run, a checkpoint to resume from, or an object store, outside its root.

        Raises:
            UserError: it is outside.
        """
        if self.runs is not None:
            self.runs.check(run_dir, "the folder of the run")
        if storage is not None:
            self._check_url(storage, "storage")
        if restore is not None and is_url(restore):
            self._check_url(restore, "the checkpoint")
        elif restore is not None and self.runs is not None:
            self.runs.check(restore, "the checkpoint")

    def check_initial_weights(self, source: object, import_path: str) -> None:
        """Reject the `init_from` of a job's document outside the root of runs.

        Args:
            source: not validated yet; None: the job has none.
            import_path: folder of a relative path.

        Raises:
            UserError: it is outside, or is not text.
        """
        if source is None:
            return
        if not isinstance(source, str):
            raise UserError(f"init_from: {source!r:.100} is no run, checkpoint or file; write it as text")
        if is_url(source):
            self._check_url(source, "init_from")
        elif self.runs is not None:
            self.runs.check(str(Path(import_path) / source), "init_from")

    def _check_url(self, url: str, what: str) -> None:
        try:
            url = checked_url(url)
        except ValueError as error:
            raise UserError(f"{what}: {error}") from error
        path = file_path(url)
        if path is not None and self.runs is not None:
            self.runs.check(path, f"{what} {url}: the folder")
        if path is None and self.storage is not None and not any(is_below(url, root) for root in self.storage):
            below = " or ".join(self.storage)
            permitted = f"is not below {below}, as required here" if below else "is permitted by nobody here"
            raise UserError(
                f"{what} {url} {permitted}; use a place there, or have this process started with {STORAGE_OPTION} URL, "
                "below which jobs may then use the store with the credentials of this process"
            )


def add_root_options(parser: argparse.ArgumentParser, *, with_code: bool) -> None:
    """Add the options of a service that accesses paths in jobs."""
    usual = "repeatable; default: the folder this is started in, or no bound if only this machine can reach --host"
    if with_code:
        what = "import code of jobs only from below DIR"
        parser.add_argument(CODE_OPTION, type=Path, action="append", metavar="DIR", help=f"{what} ({usual})")
    what = "read and write runs of jobs only below DIR"
    parser.add_argument(RUN_OPTION, type=Path, action="append", metavar="DIR", help=f"{what} ({usual})")
    parser.add_argument(
        STORAGE_OPTION,
        action="append",
        metavar="URL",
        help="let jobs keep checkpoints in an object store below URL, for example s3://bucket/runs, with the "
        "credentials of this process (repeatable; default: nowhere, or no bound if only this machine can reach --host)",
    )


def roots_of(options: argparse.Namespace, *, is_reached: bool) -> Roots:
    """Roots of a service according to its options.

    Args:
        options: parsed by a parser with `add_root_options`.
        is_reached: whether other machines can reach the service.

    Raises:
        UserError: a root is not a folder, or is required and the service was started in `/`.
    """
    with_code = hasattr(options, "code_root")
    return Roots(
        root_of(options.code_root, CODE_OPTION, is_needed=is_reached) if with_code else None,
        root_of(options.run_root, RUN_OPTION, is_needed=is_reached),
        _storage_roots(options.storage_root, is_needed=is_reached),
    )


def _storage_roots(given: Sequence[str] | None, *, is_needed: bool) -> tuple[str, ...] | None:
    if given is None:
        return () if is_needed else None
    try:
        return tuple(checked_url(url) for url in given)
    except ValueError as error:
        raise UserError(f"{STORAGE_OPTION}: {error}") from error


def root_of(given: Sequence[Path] | None, option: str, *, is_needed: bool) -> Root | None:
    """The given root, or the working folder if one is required.

    Raises:
        UserError: it is not a folder, or it is required and defaults to `/`.
    """
    if given is None and not is_needed:
        return None
    if given is None and Path.cwd() == Path.cwd().parent:
        raise UserError(
            f"other machines can reach this process, which was started in {Path.cwd()}, so set the folder below which "
            f"jobs may use paths: {option} DIR, or {option} / if you trust everyone who can submit jobs with every file"
        )
    return Root(tuple(_real(folder, option) for folder in given or (Path.cwd(),)), option)


def _real(folder: Path, option: str) -> Path:
    try:
        real = folder.resolve(strict=True)
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}; name an existing folder") from error
    if not real.is_dir():
        raise UserError(f"{option} {folder} is not a folder")
    return real
