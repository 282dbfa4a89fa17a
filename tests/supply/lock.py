"""`scripts/lock`: what pyproject.toml wants, resolved and written down with hashes.

`requirements.lock` pins every package but torch and torchvision by version and by the SHA-256 of each wheel of the
release, as the package index tells them, so pip installs these bytes, wherever it takes them from.
`requirements-torch.lock` and `requirements-torchvision.lock` pin these two by version alone: one version of them has
other wheels on other indexes (CPU, CUDA). What they need everywhere is in the hashed file; what only some wheels of
torch need (those of CUDA) they pin themselves.

Sections let the image install a part: `build` makes hetpipe's own wheel, `run` is what it needs besides to run with its
small extras, `models` is the extra of the same name, `development` is the rest. What needs torch is in the last two, so
these are installed with `--no-deps`. Source distributions are left out: they would be built by code that no hash pins.

Each group of `[dependency-groups]` is what one target needs besides, and has a hashed lock of its own, which only that
target installs; packages that both locks have, they have in the same version.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = "requirements.lock"
TORCH_LOCK = "requirements-torch.lock"
TORCHVISION_LOCK = "requirements-torchvision.lock"

TORCH, TORCHVISION = "torch", "torchvision"
#: Package that is pinned by version alone → its lock.
BY_VERSION = {TORCH: TORCH_LOCK, TORCHVISION: TORCHVISION_LOCK}

BUILD, RUN, MODELS, DEVELOPMENT = SECTIONS = ("build", "run", "models", "development")

#: Extra of pyproject.toml → its section; those that are not named here belong to `run`.
_SECTION_OF_EXTRA = {
    "models": MODELS,
    "dev": DEVELOPMENT,
    **dict.fromkeys(("mlflow", "tensorboard", "wandb"), DEVELOPMENT),
}

#: Where `make setup` and `make test` have been run from this lock.
TRIED = ("CPython 3.11 on Linux x86_64",)

_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
_OLDEST_GLIBC_MINOR, _NEWEST_GLIBC_MINOR = 5, 28
_MACOS = (14, 0)

#: Target → its platform tags, best first, and what markers see of it.
_PLATFORMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    **{
        f"Linux {machine}": (
            (
                *(
                    f"manylinux_2_{minor}_{machine}"
                    for minor in range(_NEWEST_GLIBC_MINOR, _OLDEST_GLIBC_MINOR - 1, -1)
                ),
                *(f"{legacy}_{machine}" for legacy in ("manylinux2014", "manylinux2010", "manylinux1", "linux")),
            ),
            {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine, "os_name": "posix"},
        )
        for machine in ("x86_64", "aarch64")
    },
    "macOS arm64": (
        tuple(mac_platforms(_MACOS, "arm64")),
        {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"},
    ),
}

#: What markers see of a Python and its platform.
Environment = dict[str, str]

_JSON_PAGE = "application/vnd.pypi.simple.v1+json"
_PAGE_SECONDS = 60
_RESOLVE_SECONDS = 1_800

#: Rounds of looking for packages that only another platform or Python needs; each round finds what the last one's need.
_MAX_ROUNDS = 5


class LockError(Exception):
    """The lock cannot be made; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One package of the hashed lock."""

    name: str
    version: str
    section: str
    hashes: tuple[str, ...]
    marker: str = ""
    """Where it is needed, as an environment marker; empty: everywhere."""

    def __str__(self) -> str:
        pin = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in self.hashes)])


@dataclass(frozen=True, slots=True)
class Project:
    """What pyproject.toml asks for."""

    sections: Mapping[str, tuple[Requirement, ...]]

    @property
    def all(self) -> Iterator[Requirement]:
        for requirements in self.sections.values():
            yield from requirements

    @classmethod
    def of(cls, text: str) -> Project:
        """Read pyproject.toml."""
        whole = tomllib.loads(text)
        extras: dict[str, list[str]] = whole["project"]["optional-dependencies"]
        wanted: dict[str, list[str]] = {section: [] for section in SECTIONS}
        wanted[BUILD] += whole["build-system"]["requires"]
        wanted[RUN] += whole["project"]["dependencies"]
        for extra in sorted(extras):
            wanted[_SECTION_OF_EXTRA.get(extra, RUN)] += extras[extra]
        return cls({section: tuple(map(Requirement, texts)) for section, texts in wanted.items()})


def groups_of(text: str) -> dict[str, tuple[Requirement, ...]]:
    """The dependency groups of pyproject.toml."""
    return {name: tuple(map(Requirement, texts)) for name, texts in tomllib.loads(text)["dependency-groups"].items()}


def lock_of(group: str) -> str:
    """The file with the lock of a group."""
    return f"requirements-{group}.lock"


def parse(text: str) -> list[Entry]:
    """The entries of a hashed lock; those of a group have no section.

    Raises:
        ValueError: a line is none that `render` writes.
    """
    entries, section = [], ""
    for line in re.sub(r" \\\n\s*", " ", text).splitlines():
        if heading := re.fullmatch(r"# \[(\w+)\].*", line):
            section = heading[1]
        elif line and not line.startswith("#"):
            pin, *hashes = re.split(r"\s+--hash=sha256:", line)
            requirement = Requirement(pin)
            name, _, version = str(requirement.specifier).rpartition("==")
            if name or not version:
                raise ValueError(f"not pinned by ==: {pin}")
            marker = str(requirement.marker or "")
            entries.append(Entry(requirement.name, version, section, tuple(hashes), marker))
    return entries


def render(entries: Iterable[Entry], header: str) -> str:
    """The text of `requirements.lock`; `parse` reads it."""
    parts = [header]
    titles = {
        BUILD: "what makes hetpipe's wheel",
        RUN: "what hetpipe needs besides to run, with all extras but models; and what torch needs",
        MODELS: "what the extra models brings, but torchvision",
        DEVELOPMENT: "what only its development needs",
    }
    by_section: dict[str, list[Entry]] = {section: [] for section in SECTIONS}
    for entry in sorted(entries, key=lambda entry: entry.name):
        by_section[entry.section].append(entry)
    for section, members in by_section.items():
        parts += [f"# [{section}] {titles[section]}", *map(str, members)]
    return "\n".join(parts) + "\n"


def render_group(entries: Iterable[Entry], group: str) -> str:
    """The text of the lock of a group."""
    head = f"""\
# Tested versions of what make {group} needs besides, with the hashes of every wheel of each release. scripts/lock
# writes this file from the group {group} of pyproject.toml.
#
#   pip install --require-hashes --no-deps --only-binary=:all: --requirement {lock_of(group)}
#"""
    return "\n".join([head, *map(str, sorted(entries, key=lambda entry: entry.name))]) + "\n"


def version_in(text: str, name: str) -> str:
    """The version in the lock of a package that is pinned by version alone.

    Raises:
        ValueError: it pins something else than `name`, or not by version.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pinned = re.fullmatch(rf"{name}==([\w.!]+)", lines[0]) if len(lines) == 1 else None
    if pinned is None:
        raise ValueError(f"{BY_VERSION[name]} must hold one line {name}==VERSION, without a local version such as +cpu")
    return pinned[1]


def locked_versions(root: Path = ROOT) -> dict[str, str]:
    """Package that is pinned by version alone → its version.

    Raises:
        ValueError: a lock of them pins something else, or not by version.
    """
    return {name: version_in((root / file).read_text(encoding="utf-8"), name) for name, file in BY_VERSION.items()}


def disagreements(project: Project, entries: Sequence[Entry], by_version: Mapping[str, str]) -> list[str]:
    """What pyproject.toml and the locks do not agree in, as sentences; also what installed packages ask for beyond it.

    Of installed packages, those count that are installed in the locked version: what they need must be locked, too.

    Args:
        project: what is wanted.
        entries: of the hashed lock.
        by_version: the versions in the other locks.
    """
    locked = {entry.name: entry for entry in entries}
    found = [f"{entry.name} is locked twice" for entry in entries if locked[entry.name] is not entry]
    found += [f"{entry.name} has no hash" for entry in entries if not entry.hashes]
    found += [
        f"{entry.name}: {digest} is no SHA-256"
        for entry in entries
        for digest in entry.hashes
        if not re.fullmatch(r"[0-9a-f]{64}", digest)
    ]
    found += [
        f"{name} is in {LOCK}, where pip wants one hash for all indexes; it belongs into {file}"
        for name, file in BY_VERSION.items()
        if name in locked
    ]
    versions = {**{entry.name: entry.version for entry in entries}, **by_version}
    for section, requirements in project.sections.items():
        for requirement in requirements:
            found += _against(requirement, f"pyproject.toml ({section})", versions)
            entry = locked.get(canonicalize_name(requirement.name))
            if entry and SECTIONS.index(entry.section) > SECTIONS.index(section):
                found.append(f"{entry.name} is wanted for {section}, and locked under {entry.section}")
    environment = _here()
    for name, wanted in installed(entries, by_version):
        for requirement in wanted:
            if requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""}):
                found += _against(requirement, name, versions)
    return found


def group_disagreements(
    group: str, wanted: Iterable[Requirement], entries: Sequence[Entry], main: Sequence[Entry]
) -> list[str]:
    """What a dependency group, its lock and `requirements.lock` do not agree in, as sentences.

    Args:
        group: name.
        wanted: its requirements.
        entries: of its lock.
        main: of `requirements.lock`.
    """
    versions = {entry.name: entry.version for entry in entries}
    found = [f"{entry.name} has no hash" for entry in entries if not entry.hashes]
    for requirement in wanted:
        found += _against(requirement, f"pyproject.toml (group {group})", versions)
    return found + [
        f"{entry.name} is locked as {entry.version}, and as {versions[entry.name]} for {group}"
        for entry in main
        if versions.get(entry.name, entry.version) != entry.version
    ]


def _here() -> Environment:
    return cast("Environment", default_environment())


def _against(requirement: Requirement, who: str, versions: Mapping[str, str]) -> list[str]:
    version = versions.get(canonicalize_name(requirement.name))
    if version is None:
        return [f"{who} wants {requirement}, which is not locked"]
    if not requirement.specifier.contains(version, prereleases=True):
        return [f"{who} wants {requirement}, and {version} is locked"]
    return []


def installed(entries: Iterable[Entry], by_version: Mapping[str, str]) -> Iterator[tuple[str, list[Requirement]]]:
    """Each package that is installed as it is locked, and what it asks for wherever it runs."""
    for name, version in (*by_version.items(), *((entry.name, entry.version) for entry in entries)):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(found.version).public == version:
            yield name, _needs(name, found.requires or ())


def _needs(name: str, texts: Iterable[str]) -> list[Requirement]:
    """What a package asks for: of torch, what all of its wheels ask for."""
    wanted = map(Requirement, texts)
    return [need for need in wanted if name != TORCH or not re.search(r"platform|extra", str(need.marker or ""))]


@dataclass(slots=True)
class Resolution:
    """What pip chose: of each package the version, what it asks for, and the hash of the file."""

    versions: dict[str, str] = field(default_factory=dict)
    needs: dict[str, list[Requirement]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, report: Mapping[str, Any]) -> None:
        """Take over a report of `pip install --dry-run --report`, but what stands in for torch once torch is known."""
        for install in report["install"]:
            name = canonicalize_name(install["metadata"]["name"])
            if name == TORCH and TORCH in self.versions:
                continue
            self.versions[name] = Version(install["metadata"]["version"]).public
            self.needs[name] = _needs(name, install["metadata"].get("requires_dist", ()))
            self.digests[name] = install["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")


@dataclass(slots=True)
class Closure:
    """What some requirements lead to, in some environments."""

    reached: dict[str, set[str]] = field(default_factory=dict)
    """Package → the markers under which it is asked for; the empty one where nothing is asked first."""
    everywhere: set[str] = field(default_factory=set)
    """Those of them that every environment needs."""
    missing: dict[str, Requirement] = field(default_factory=dict)
    """What an environment needs and nobody resolved."""


def closure(roots: Iterable[Requirement], resolution: Resolution, environments: Sequence[Environment]) -> Closure:
    """Follow `roots` through what the resolved packages ask for."""
    found = Closure()
    roots = tuple(roots)
    for index, environment in enumerate(environments):
        here: set[str] = set()
        seen: set[tuple[str, str]] = set()
        queue = [(root, "") for root in roots]
        while queue:
            requirement, extra = queue.pop()
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            if name not in resolution.versions:
                found.missing[name] = requirement
                continue
            marker = str(requirement.marker or "")
            found.reached.setdefault(name, set()).add("" if "extra" in marker else marker)
            here.add(name)
            for wanted in ("", *requirement.extras):
                if (name, wanted) not in seen:
                    seen.add((name, wanted))
                    queue += [(need, wanted) for need in resolution.needs[name]]
        found.everywhere = here if index == 0 else found.everywhere & here
    return found


def targets() -> dict[str, tuple[Environment, frozenset[Tag]]]:
    """Where the lock is meant for: name → what markers see, and which wheels fit."""
    found = {}
    for major, minor in _PYTHONS:
        for platform, (tags, seen) in _PLATFORMS.items():
            full = f"{major}.{minor}.0"
            python = {"python_version": f"{major}.{minor}", "python_full_version": full, "implementation_version": full}
            environment = {**_here(), **seen, **python}
            fitting = frozenset(
                (
                    *cpython_tags((major, minor), platforms=tags),
                    *compatible_tags((major, minor), f"cp{major}{minor}", tags),
                )
            )
            found[f"CPython {major}.{minor} on {platform}"] = (environment, fitting)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/lock", description="Resolve what pyproject.toml wants into the lock."
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where lock and pyproject.toml differ"
    )
    parser.add_argument(
        "--upgrade", nargs="*", metavar="NAME", help="take the newest of these packages, or of all; else versions stay"
    )
    options = parser.parse_args(arguments)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = Project.of(text)
    try:
        if options.check:
            _check(project)
        else:
            _write(project, options.upgrade)
        for group, wanted in groups_of(text).items():
            if options.check:
                _check_group(group, wanted)
            else:
                write_group(group, wanted, () if options.upgrade is None else options.upgrade or None)
    except (LockError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _check(project: Project) -> None:
    entries = parse((ROOT / LOCK).read_text(encoding="utf-8"))
    if found := disagreements(project, entries, locked_versions()):
        raise LockError("\n".join([*found, f"{LOCK} is not what pyproject.toml wants: run scripts/lock"]))


def _check_group(group: str, wanted: Sequence[Requirement]) -> None:
    entries, main = (parse((ROOT / file).read_text(encoding="utf-8")) for file in (lock_of(group), LOCK))
    if found := group_disagreements(group, wanted, entries, main):
        raise LockError("\n".join([*found, f"{lock_of(group)} is not what pyproject.toml wants: run scripts/lock"]))


def write_group(group: str, wanted: Sequence[Requirement], upgrade: Sequence[str] | None = ()) -> None:
    """Resolve a dependency group into its lock, with the versions of `requirements.lock` where it has them.

    Args:
        group: name.
        wanted: its requirements.
        upgrade: packages of which the newest version is taken; None: of all that `requirements.lock` does not have.

    Raises:
        LockError: they cannot be resolved; the text says why.
    """
    path = ROOT / lock_of(group)
    own = parse(path.read_text(encoding="utf-8")) if path.exists() and upgrade is not None else []
    main = parse((ROOT / LOCK).read_text(encoding="utf-8"))
    kept = {entry.name: entry.version for entry in own if entry.name not in set(upgrade or ())}
    kept |= {entry.name: entry.version for entry in main}
    resolution, environments = Resolution(), [environment for environment, _ in targets().values()]
    more: dict[str, Requirement] = {}
    for _ in range(_MAX_ROUNDS):
        texts = [*map(str, wanted), *(str(_unconditional(need)) for need in more.values())]
        resolution.add(_resolve(texts, [f"{name}=={version}" for name, version in kept.items()]))
        found = closure(wanted, resolution, environments)
        if not found.missing:
            break
        more |= found.missing
    else:
        raise LockError(f"{', '.join(found.missing)}: still missing after {_MAX_ROUNDS} rounds")
    entries = [
        Entry(
            name,
            resolution.versions[name],
            "",
            tuple(sorted(_wheels(name, resolution.versions[name]).values())),
            _marker(name, found),
        )
        for name in sorted(found.reached)
    ]
    path.write_text(render_group(entries, group), encoding="utf-8")
    sys.stdout.write(f"wrote {path.name}: {len(entries)} packages\n")


def _write(project: Project, upgrade: Sequence[str] | None) -> None:
    pins = _pins(upgrade)
    resolution = Resolution()
    (torch,) = (requirement for requirement in project.all if canonicalize_name(requirement.name) == TORCH)
    # Without what it needs: those of its wheels that pip would choose here may need gigabytes of CUDA.
    resolution.add(_resolve([pins.get(TORCH, str(torch))], [], "--no-deps"))
    torch_pin = f"{TORCH}=={resolution.versions[TORCH]}"
    environments = [environment for environment, _ in targets().values()]
    more: dict[str, Requirement] = {}
    for _ in range(_MAX_ROUNDS):
        wanted = [*project.all, *resolution.needs[TORCH], *map(_unconditional, more.values())]
        texts = [str(need) for need in wanted if canonicalize_name(need.name) != TORCH]
        own = [pin for name, pin in pins.items() if name != TORCH]
        resolution.add(_resolve(texts, own, stand_in_for=torch_pin))
        found = closure(project.all, resolution, environments)
        if not found.missing:
            break
        more |= found.missing
    else:
        raise LockError(f"{', '.join(found.missing)}: still missing after {_MAX_ROUNDS} rounds")
    hashes, wheels = {}, {}
    for name in sorted(found.reached.keys() - BY_VERSION.keys()):
        wheels[name] = _wheels(name, resolution.versions[name])
        hashes[name] = tuple(sorted(wheels[name].values()))
        if resolution.digests[name] not in hashes[name]:
            raise LockError(
                f"the file of {name} {resolution.versions[name]} that pip found here is not one that the index has; "
                "try again without the other places that pip's configuration names"
            )
    sections: dict[str, str] = {}
    for section, requirements in project.sections.items():
        for name in closure(requirements, resolution, environments).reached:
            sections.setdefault(name, section)
    entries = [
        Entry(name, resolution.versions[name], sections[name], hashes[name], _marker(name, found)) for name in hashes
    ]
    (ROOT / LOCK).write_text(render(entries, _header(wheels, entries)), encoding="utf-8")
    for name, file in BY_VERSION.items():
        text = f"{_VERSION_HEADERS[name]}{name}=={resolution.versions[name]}\n"
        (ROOT / file).write_text(text, encoding="utf-8")
    versions = ", ".join(f"{file}: {resolution.versions[name]}" for name, file in BY_VERSION.items())
    sys.stdout.write(f"wrote {LOCK}: {len(entries)} packages, {versions}\n")


def _pins(upgrade: Sequence[str] | None) -> dict[str, str]:
    """Package → the pin that stays."""
    if upgrade is not None and not upgrade:
        return {}
    entries = parse((ROOT / LOCK).read_text(encoding="utf-8"))
    pins: dict[str, str] = {canonicalize_name(entry.name): f"{entry.name}=={entry.version}" for entry in entries}
    pins |= {name: f"{name}=={version}" for name, version in locked_versions().items()}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    of_groups = {
        entry.name for group in groups_of(text) for entry in parse((ROOT / lock_of(group)).read_text(encoding="utf-8"))
    }
    if unknown := {canonicalize_name(name) for name in upgrade or ()} - pins.keys() - of_groups:
        raise LockError(
            f"{', '.join(sorted(unknown))}: not in the lock; --upgrade alone takes the newest of everything"
        )
    return {name: pin for name, pin in pins.items() if name not in set(map(canonicalize_name, upgrade or ()))}


def _unconditional(requirement: Requirement) -> Requirement:
    wanted = Requirement(str(requirement))
    wanted.marker = None
    return wanted


def stand_in(pin: str, folder: Path) -> str:
    """A constraint that has pip take a wheel of nothing, made in `folder`, for the package that `pin` pins.

    What asks for that package then gets this version of it, and no index is asked for wheels of gigabytes.
    """
    name, _, version = pin.partition("==")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name} @ {path.as_uri()}"


def _resolve(
    wanted: Iterable[str], pins: Iterable[str], *options: str, stand_in_for: str | None = None
) -> dict[str, Any]:
    """Have pip choose versions, with the indexes of its configuration and the constraints of nobody but us.

    Args:
        wanted: requirements.
        pins: constraints.
        options: more of pip's.
        stand_in_for: NAME==VERSION of a package that is not looked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "pins.txt")
        extra = () if stand_in_for is None else (stand_in(stand_in_for, Path(folder)),)
        constraints.write_text("\n".join((*pins, *extra)), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
        command += ["--only-binary=:all:", "--report", str(report), "--constraint", str(constraints), *options, *wanted]
        environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_RESOLVE_SECONDS, check=False
        )
        if done.returncode:
            raise LockError(
                f"{done.stderr[-4000:]}pip finds no versions for all that pyproject.toml wants; where a locked version "
                "is in the way, say scripts/lock --upgrade NAME"
            )
        return cast("dict[str, Any]", json.loads(report.read_text(encoding="utf-8")))


def _wheels(name: str, version: str) -> dict[str, str]:
    """The wheels of a release and their hashes, as the index tells them."""
    request = urllib.request.Request(f"{_index_url()}/{name}/", headers={"Accept": _JSON_PAGE})
    try:
        with urllib.request.urlopen(request, timeout=_PAGE_SECONDS) as answer:
            kind, page = answer.headers.get("Content-Type", ""), answer.read()
    except OSError as error:
        raise LockError(f"the package index does not answer for {name}: {error}; pip's index-url names it") from error
    if _JSON_PAGE not in kind:
        raise LockError("the package index tells no hashes in JSON; let pip's index-url name one that does")
    files: list[dict[str, Any]] = json.loads(page)["files"]
    found = {}
    for file in files:
        try:
            _, found_version, _, _ = parse_wheel_filename(file["filename"])
        except InvalidWheelFilename:
            continue
        if found_version == Version(version):
            if file.get("yanked"):
                raise LockError(f"{name} {version} was withdrawn by its authors: scripts/lock --upgrade {name}")
            found[file["filename"]] = file["hashes"]["sha256"]
    if not found:
        raise LockError(f"the package index has no wheel of {name} {version}")
    return found


@functools.cache
def _index_url() -> str:
    """The index that pip uses by its configuration; its own default is asked of pip, too."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url.rstrip("/")
    for key in ("install.index-url", "global.index-url"):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", key], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().rstrip("/")
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _marker(name: str, found: Closure) -> str:
    """Where a package is needed; empty for everywhere, and where that cannot be said in one marker."""
    markers = found.reached[name]
    if name in found.everywhere or "" in markers:
        return ""
    return " or ".join(sorted(markers))


def _header(wheels: Mapping[str, Mapping[str, str]], entries: Sequence[Entry]) -> str:
    complete = []
    for target, (environment, fitting) in targets().items():
        needed = [e.name for e in entries if not e.marker or Marker(e.marker).evaluate(environment)]
        without = [name for name in needed if not any(_fits(wheel, fitting) for wheel in wheels[name])]
        if without:
            sys.stderr.write(f"{target}: no wheel of {', '.join(without)}\n")
        else:
            complete.append(target)
    return (
        "# Tested versions of all that make setup and the image install, but torch and torchvision, with the hashes\n"
        "# of every wheel of each release, as the package index tells them. scripts/lock writes this file from\n"
        "# pyproject.toml. It is whole, and torch, which some of it needs, has its own lock: hence --no-deps.\n"
        "#\n"
        "#   pip install --require-hashes --no-deps --only-binary=:all: --requirement requirements.lock\n"
        "#\n"
        "# Every package has a wheel for:\n"
        + "".join(f"#   {target}{'' if target in TRIED else ' (untried)'}\n" for target in complete)
    )


def _fits(wheel: str, fitting: frozenset[Tag]) -> bool:
    return not fitting.isdisjoint(parse_wheel_filename(wheel)[3])


_VERSION_HEADERS = {
    TORCH: f"""\
# torch by version, without hashes: one version has other wheels on other indexes (CPU, CUDA). Written by scripts/lock.
# It is installed after {LOCK}, which holds what all of its wheels need.
""",
    TORCHVISION: f"""\
# torchvision by version, without hashes, as torch: of the extra `models`. Written by scripts/lock. It is installed with
# --no-deps, so that it brings no other torch along; {LOCK} holds what else it needs.
""",
}


if __name__ == "__main__":
    sys.exit(main())
