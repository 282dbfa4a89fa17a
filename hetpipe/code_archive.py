"""Pack the Python files below a folder into an archive with a digest, and unpack it on a node without them.

An archive is a zip file from a client that may submit jobs, and is untrusted: its digest and the names, kinds, number
and sizes of its entries are validated before anything is written.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from hetpipe.errors import UserError
from hetpipe.values.bounds import MAX_CODE_BYTES, MAX_PATH_CHARACTERS
from hetpipe.values.events import CodeArchive

#: Limits of an unpacked archive.
MAX_UNPACKED_BYTES = 16 << 20
MAX_FILES = 2_000

_SUFFIX = ".py"

#: Excluded folders, in addition to hidden ones.
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "runs"})
_ENVIRONMENT = "pyvenv.cfg"

#: The earliest time of the zip format; a fixed time makes archives of equal files identical.
_TIME = (1980, 1, 1, 0, 0, 0)

_PART = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})


def digest_of(archive: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(archive).hexdigest()


def pack(folder: Path) -> CodeArchive:
    """Pack the Python files below `folder`, except in hidden folders, virtual environments and `runs`, and links.

    Raises:
        UserError: there are none, or too many.
    """
    packed, num_files, num_bytes = BytesIO(), 0, 0
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _sources(folder):
            content = path.read_bytes()
            num_files, num_bytes = num_files + 1, num_bytes + len(content)
            if num_files > MAX_FILES or num_bytes > MAX_UNPACKED_BYTES:
                raise UserError(_too_large(folder, f"more than {MAX_FILES} files, or {MAX_UNPACKED_BYTES >> 20} MiB"))
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    if not num_files:
        raise UserError(f"--send-code: there is no Python file below {folder}; submit from the folder of the code")
    whole = packed.getvalue()
    if len(whole) > MAX_CODE_BYTES:
        raise UserError(_too_large(folder, f"{len(whole)} bytes when packed, and at most {MAX_CODE_BYTES}"))
    return CodeArchive(digest_of(whole), whole)


def _too_large(folder: Path, how: str) -> str:
    return (
        f"--send-code: the Python files below {folder} are {how} can be sent; submit from a folder with the code of "
        "the job only, or put the code on every node and leave the option out"
    )


def _sources(folder: Path) -> Iterator[Path]:
    """The files to pack, in order."""
    for place, folders, files in os.walk(folder):
        kept = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        folders[:] = [name for name in kept if not (Path(place) / name / _ENVIRONMENT).exists()]
        for name in sorted(files):
            path = Path(place) / name
            if name.endswith(_SUFFIX) and path.is_file() and not path.is_symlink():
                yield path


def unpack(code: CodeArchive, digest: str, folder: Path) -> None:
    """Write the files of an archive below a new, empty folder.

    Raises:
        UserError: its digest differs, or an entry is not allowed; nothing was written.
        OSError: the folder cannot be written.
    """
    if len(code.archive) > MAX_CODE_BYTES or digest_of(code.archive) != digest:
        raise UserError(f"the code that was sent along with the job has another digest than {digest}; submit it again")
    try:
        with zipfile.ZipFile(BytesIO(code.archive)) as archive:
            contents = dict(_entries(archive))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise UserError(_refused(f"it is no archive: {error}")) from error
    for name in contents:
        parts = name.split("/")
        if inner := next((above for above in _above(parts) if above in contents), None):
            raise UserError(_refused(f"{inner!r} is both a file and a folder"))
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("xb") as file:
            file.write(content)


def _above(parts: list[str]) -> Iterator[str]:
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _entries(archive: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    """Validated names and contents.

    Raises:
        UserError: one is refused.
    """
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise UserError(_refused(f"it has {len(entries)} files, and at most {MAX_FILES} are taken"))
    names: set[str] = set()
    room = MAX_UNPACKED_BYTES
    for entry in entries:
        _check_name(entry)
        if entry.filename in names:
            raise UserError(_refused(f"{entry.filename!r} is in it twice"))
        names.add(entry.filename)
        with archive.open(entry) as file:
            content = file.read(room + 1)  # regardless of the size that it states
        room -= len(content)
        if room < 0:
            raise UserError(_refused(f"its files have more than {MAX_UNPACKED_BYTES >> 20} MiB"))
        yield entry.filename, content


def _check_name(entry: zipfile.ZipInfo) -> None:
    """Refuse what is not a plain Python file below the folder.

    Raises:
        UserError: it is not.
    """
    # The name as stored in the file; `filename` ends at a NUL character.
    name = entry.orig_filename
    parts = name.split("/")
    is_plain = all(_PART.fullmatch(part) and part not in {".", ".."} for part in parts)
    if not is_plain or len(name) > MAX_PATH_CHARACTERS or entry.filename != name:
        raise UserError(_refused(f"{name!r:.200} is no path below the folder of the code"))
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in {0, stat.S_IFREG} or not name.endswith(_SUFFIX):
        raise UserError(_refused(f"{name!r:.200} is no plain Python file"))
    if entry.flag_bits & 1 or entry.compress_type not in _METHODS:
        raise UserError(_refused(f"{name!r:.200} is encrypted, or compressed by another method than deflate"))


def _refused(why: str) -> str:
    return f"the code that was sent along with the job is refused: {why}; submit it with hetpipe submit --send-code"
