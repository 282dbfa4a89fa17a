"""`make digests`: pin the images that others make by digest, wherever hetpipe names one.

A tag can be given to other bytes tomorrow, a digest cannot. What a tag means today only a registry can say, so the
repository holds tags until somebody who reaches one runs this: `docker pull` of each tag, and the digest of what came
is written behind the tag in `Dockerfile`, `docker-compose.yml`, `k8s/base` and what `hetpipe up` starts. Digests of
earlier runs are renewed. If one tag cannot be resolved, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_TAGGED = r"(?P<name>[\w./:-]+):(?P<tag>[\w][\w.-]*)"
_DIGEST = r"(?P<digest>sha256:[0-9a-f]{64})"

_PULL_SECONDS = 900
_INSPECT_SECONDS = 60


class DigestError(Exception):
    """Digests cannot be resolved or written; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an image is named."""

    file: str
    pattern: str
    """Of one line, with the groups name, tag and, where there is one, digest."""
    template: str
    """The line with a digest."""


PLACES = (
    Place("Dockerfile", rf"^ARG BASE_IMAGE={_TAGGED}(?:@{_DIGEST})?$", "ARG BASE_IMAGE={name}:{tag}@{digest}"),
    Place(
        "docker-compose.yml",
        rf"(?<=\$\{{HETPIPE_REDIS_IMAGE:-){_TAGGED}(?:@{_DIGEST})?(?=\}})",
        "{name}:{tag}@{digest}",
    ),
    Place(
        "k8s/base/kustomization.yaml",
        rf"\{{name: (?P<name>redis), newTag: (?P<tag>[\w.-]+)(?:, digest: {_DIGEST})?\}}",
        "{{name: {name}, newTag: {tag}, digest: {digest}}}",
    ),
    Place(
        "hetpipe/deploy/topology.py",
        rf'^REDIS_IMAGE = "{_TAGGED}(?:@{_DIGEST})?"$',
        'REDIS_IMAGE = "{name}:{tag}@{digest}"',
    ),
)


@dataclass(frozen=True, slots=True)
class Named:
    """An image as a place names it."""

    place: Place
    tag: str
    """Name and tag."""
    digest: str
    """Empty if there is none yet."""


def named(root: Path) -> list[Named]:
    """The images that are pulled from registries, in each place.

    Raises:
        DigestError: a place does not name its image as it should.
    """
    found = []
    for place in PLACES:
        matches = list(re.finditer(place.pattern, (root / place.file).read_text(encoding="utf-8"), re.MULTILINE))
        if len(matches) != 1:
            raise DigestError(f"{place.file} names {len(matches)} images where there should be one: {place.pattern}")
        groups = matches[0].groupdict()
        found.append(Named(place, f"{groups['name']}:{groups['tag']}", groups["digest"] or ""))
    return found


def resolve(tag: str, docker: str = "docker") -> str:
    """The digest that a registry has for a tag.

    Raises:
        DigestError: no registry answers, or it has no such tag.
    """
    hint = "nothing was changed; run make digests where dockerd runs and reaches the registry, until then tags are used"
    try:
        _run([docker, "pull", "--quiet", tag], _PULL_SECONDS)
        told = _run([docker, "image", "inspect", "--format", "{{json .RepoDigests}}", tag], _INSPECT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise DigestError(f"no digest for {tag}: {lines[-1] if lines else error}; {hint}") from error
    name = tag.rpartition(":")[0]
    for digested in json.loads(told) or ():
        repository, _, digest = digested.partition("@")
        if repository.removeprefix("docker.io/").removeprefix("library/") == name and re.fullmatch(_DIGEST, digest):
            return str(digest)
    raise DigestError(f"no digest for {tag}: docker has an image of that name which no registry gave it; {hint}")


def write(root: Path, digests: Mapping[str, str]) -> list[str]:
    """Write digests behind the tags; the files that changed."""
    changed = []
    for image in named(root):
        path = root / image.place.file
        name, _, tag = image.tag.rpartition(":")
        text = path.read_text(encoding="utf-8")
        line = image.place.template.format(name=name, tag=tag, digest=digests[image.tag])
        new = re.sub(image.place.pattern, lambda _, line=line: line, text, flags=re.MULTILINE)  # type: ignore[misc]
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(image.place.file)
    return changed


def _run(command: Sequence[str], seconds: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve and write; the exit status."""
    parser = argparse.ArgumentParser(prog="make digests", description="Pin the images that others make by digest.")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to write to (this one)")
    parser.add_argument("--docker", default="docker", help="program to ask (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        digests = {tag: resolve(tag, options.docker) for tag in dict.fromkeys(i.tag for i in named(options.root))}
        changed = write(options.root, digests)
    except (DigestError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{tag}@{digest}\n" for tag, digest in digests.items()))
    sys.stdout.write(f"written: {', '.join(changed)}\n" if changed else "nothing changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
