"""One version: read from `hetpipe/__init__.py`, compared with and written to the files that cannot read it from there.

pyproject.toml reads it when a wheel is built. Tags of images in manifests, the Dockerfile's label and commands in the
docs are text for other programs and for people: `MENTIONS` finds them in whatever git tracks.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The only place from which the version is read.
SOURCE = "hetpipe/__init__.py"

CHANGELOG = "CHANGELOG.md"

#: A release, or a candidate of one (PEP 440 without what hetpipe does not use).
VERSION = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")

#: What precedes and what follows a version of hetpipe.
MENTIONS = tuple(
    re.compile(rf"(?P<before>{before})(?P<version>{VERSION.pattern})(?P<after>{after})", re.MULTILINE)
    for before, after in (
        (r'^__version__ = "', r'"$'),
        (r"^ARG VERSION=", r"$"),
        (r"\bhetpipe:", r"-(?:cpu|cuda)\b"),
        (r"\bname: hetpipe, newTag: ", r"-(?:cpu|cuda)\b"),
    )
)


def current(root: Path = ROOT) -> str:
    """The version of this source.

    Raises:
        ValueError: the file does not state one.
    """
    text = (root / SOURCE).read_text(encoding="utf-8")
    for _, version in mentions(text):
        return version
    raise ValueError(f'{SOURCE} has no line `__version__ = "X.Y.Z"`')


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and versions that a text names as hetpipe's."""
    for pattern in MENTIONS:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match["version"]


def differing(root: Path, version: str) -> list[str]:
    """`FILE:LINE: VERSION` for every mention of another version than `version`."""
    return [
        f"{path.relative_to(root)}:{number}: {found}"
        for path in _tracked(root)
        for number, found in mentions(path.read_text(encoding="utf-8"))
        if found != version
    ]


def replaced(text: str, version: str) -> str:
    """The text with `version` wherever it names one of hetpipe."""
    for pattern in MENTIONS:
        text = pattern.sub(rf"\g<before>{version}\g<after>", text)
    return text


def released(changelog: str, version: str, day: dt.date) -> str:
    """The changelog with what was unreleased under a heading of its own.

    Raises:
        ValueError: nothing is unreleased, or the version has a heading already.
    """
    heading = "## [Unreleased]\n"
    _, found, rest = changelog.partition(heading)
    if not found or not rest.partition("\n## [")[0].strip():
        raise ValueError(f"{CHANGELOG} has nothing under {heading.strip()!r}: there is nothing to release")
    if f"\n## [{version}]" in changelog:
        raise ValueError(f"{CHANGELOG} already has a heading for {version}: take the next version")
    return changelog.replace(heading, f"{heading}\n## [{version}] - {day.isoformat()}\n", 1)


def _tracked(root: Path) -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        path = root / name
        if path.is_file() and not name.startswith("tests/") and name != CHANGELOG:
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `scripts/version`."""
    parser = argparse.ArgumentParser(
        prog="scripts/version", description="hetpipe's version; without options, prints it"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="fail where a file names another version")
    group.add_argument(
        "--set", metavar="X.Y.Z", help="write a new version everywhere, and a heading into the changelog"
    )
    options = parser.parse_args(arguments)
    try:
        if options.set is not None:
            return _set(ROOT, options.set)
        version = current()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not options.check:
        sys.stdout.write(f"{version}\n")
        return 0
    wrong = differing(ROOT, version)
    sys.stderr.writelines(
        f"{line}, but {SOURCE} says {version}: run scripts/version --set {version}\n" for line in wrong
    )
    return 1 if wrong else 0


def _set(root: Path, version: str) -> int:
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is not of the form X.Y.Z or X.Y.ZrcN")
    changelog = root / CHANGELOG
    text = released(changelog.read_text(encoding="utf-8"), version, dt.datetime.now(dt.UTC).date())
    changelog.write_text(text, encoding="utf-8")
    for path in _tracked(root):
        old = path.read_text(encoding="utf-8")
        new = replaced(old, version)
        if new != old:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(root)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
