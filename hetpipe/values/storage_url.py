"""URLs of object stores: validation, and the layout of a run's objects below one. Pure.

`docs/semantics/object-storage.md` has the layout.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from hetpipe.values.ids import Clock
from hetpipe.values.rewinds import REWIND, first_folder

#: The schemes a job may name, each with the package that serves it beside fsspec.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "file": ""}

#: Longest URL.
MAX_URL_CHARACTERS = 1_024

_CHECKPOINTS = "checkpoints"
_PATH = re.compile(r"[A-Za-z0-9._/=+@ -]*", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_CLOCK = re.compile(r"clock-(\d{8,18})", re.ASCII)


def is_url(where: str) -> bool:
    """Whether a text is a URL rather than a path.

    >>> is_url("s3://bucket/runs"), is_url("runs/digits")
    (True, False)
    """
    return "://" in where


def checked_url(url: str) -> str:
    """The URL without trailing slashes.

    Raises:
        ValueError: it is not the URL of a supported object store, or it contains credentials or options.

    >>> checked_url("s3://bucket/runs/")
    's3://bucket/runs'
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{_shown(url)} is not the URL of an object store; it must begin with one of {known}")
    if len(url) > MAX_URL_CHARACTERS:
        raise ValueError(f"is a URL of {len(url)} characters; the limit is {MAX_URL_CHARACTERS}")
    bucket, _, path = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:
        raise ValueError(
            f"{_shown(url)} has more than a place in it; credentials and options belong to the environment of each "
            "node's processes"
        )
    if scheme == "file":
        if bucket:
            raise ValueError(f"{_shown(url)} names a host; write a folder as file:///folder")
        if not path.strip("/"):
            raise ValueError(f"{_shown(url)} names no folder; write it as file:///folder")
    elif not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{_shown(url)} names no bucket; write {scheme}://BUCKET/PREFIX")
    if not _PATH.fullmatch(path) or any(part in {".", ".."} for part in path.split("/")) or "//" in path:
        raise ValueError(
            f"{_shown(url)} has a path that stores read differently; use letters, digits, dots, dashes and underscores "
            "between single slashes"
        )
    return url.rstrip("/")


def _shown(url: str) -> str:
    """The URL for a message, with a possible password removed."""
    parts = urlsplit(url) if url.isprintable() else None
    if parts is None or not parts.scheme:
        return f"{url!r:.100}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]


def is_below(url: str, root: str) -> bool:
    """Whether a checked URL is `root`, another checked URL, or below it.

    >>> is_below("s3://b/runs/a", "s3://b/runs"), is_below("s3://b/runs-2", "s3://b/runs")
    (True, False)
    """
    return url == root or url.startswith(f"{root}/")


def file_path(url: str) -> str | None:
    """The folder that a `file:` URL means; None for any other URL.

    >>> file_path("file:///data/store"), file_path("s3://bucket")
    ('/data/store', None)
    """
    return url.removeprefix("file://") if url.startswith("file://") else None


# -- a run's objects ---------------------------------------------------------------------------------------------------


def run_url(storage: str, run_dir: str) -> str:
    """The URL of the objects of the run in `run_dir`; those of a rewind are below those of its run.

    >>> run_url("s3://b/p", "/runs/digits-1"), run_url("s3://b/p", "/runs/digits-1/rewind-2")
    ('s3://b/p/digits-1', 's3://b/p/digits-1/rewind-2')
    """
    first = first_folder(run_dir)
    own = f"{storage}/{PurePosixPath(first).name}"
    return own if first == run_dir else f"{own}/{PurePosixPath(run_dir).name}"


def place_of_run(run_dir: str, storage: str | None) -> str:
    """The location of a run's checkpoints: its URL, or without a storage its folder."""
    return run_dir if storage is None else run_url(storage, run_dir)


def checkpoint_key(clock: Clock) -> str:
    """The key prefix of a checkpoint's objects, relative to the run's URL.

    >>> checkpoint_key(Clock(12))
    'checkpoints/clock-00000012'
    """
    return f"{_CHECKPOINTS}/clock-{clock:08d}"


def split_checkpoint(url: str) -> tuple[str, Clock] | None:
    """Split a checkpoint's URL into the run's URL and the clock; None if it is not one of a checkpoint.

    >>> split_checkpoint("s3://b/digits/rewind-1/checkpoints/clock-00000012")
    ('s3://b/digits/rewind-1', 12)
    """
    run, _, name = url.rpartition(f"/{_CHECKPOINTS}/")
    match = _CLOCK.fullmatch(name)
    return (run, Clock(int(match[1]))) if run and match else None


def part_key(name: str, sha256: str) -> str:
    """The key of a checkpoint's part, relative to the checkpoint; contains the digest, so no part replaces another.

    >>> part_key("shard-0.safetensors", "ab" * 32)[:12]
    'shard-0.abab'
    """
    return f"{name.removesuffix('.safetensors')}.{sha256}.safetensors"


def split_part(key: str) -> tuple[str, str] | None:
    """The name and the digest of the part with this key; None for other objects.

    >>> split_part(part_key("shard-0.safetensors", "ab" * 32))[0]
    'shard-0.safetensors'
    """
    match = re.fullmatch(r"([a-z0-9-]{1,64})\.([0-9a-f]{64})\.safetensors", key)
    return (f"{match[1]}.safetensors", match[2]) if match else None


def rewind_number(name: str) -> int | None:
    """The number of the rewind whose folder has this name; None for other names."""
    match = REWIND.fullmatch(name)
    return int(match[1]) if match else None


def run_of_checkpoint(checkpoint: str | None) -> str:
    """The folder of the run that has written a checkpoint; empty without one, and for one in an object store.

    >>> run_of_checkpoint("/runs/digits/rewind-2/checkpoints/clock-00000012")
    '/runs/digits'
    """
    return "" if checkpoint is None or is_url(checkpoint) else first_folder(str(Path(checkpoint).parent.parent))
