"""Code that is sent along with jobs: what is packed, and that nothing of a hostile archive is written."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from hetpipe import code_archive
from hetpipe.code_archive import MAX_FILES, digest_of, pack, unpack
from hetpipe.errors import UserError
from hetpipe.values.bounds import MAX_CODE_BYTES
from hetpipe.values.events import CodeArchive


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.py").write_text(text)
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_python_files_arrive_as_they_were_and_equal_ones_have_one_digest(tmp_path: Path) -> None:
    source = write(tmp_path / "source", model="a = 1\n", package__part="b = 2\n")
    write(source, **{".git__hook": "", "runs__run": ""})
    (source / "weights.bin").write_bytes(b"0" * 100)
    (source / ".venv").mkdir()
    environment = write(source / "environment", lib="")
    (environment / "pyvenv.cfg").touch()
    (source / "link.py").symlink_to("/etc/passwd")
    code = pack(source)
    assert code == pack(source)
    assert code.digest == digest_of(code.archive)
    unpack(code, code.digest, tmp_path / "target")
    assert files_of(tmp_path / "target") == {
        "model.py": "a = 1\n",
        "package/part.py": "b = 2\n",
    }
    write(source, model="a = 2\n")
    assert pack(source).digest != code.digest


def test_what_is_too_large_to_send_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--send-code: there is no Python file below .*; submit from the folder"):
        pack(tmp_path)
    write(tmp_path, a="1", b="2", c="3")
    monkeypatch.setattr(code_archive, "MAX_FILES", 2)
    with pytest.raises(UserError, match=r"are more than 2 files, or 16 MiB can be sent; submit from a folder with"):
        pack(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(code_archive, "MAX_CODE_BYTES", 100)
    with pytest.raises(UserError, match=r"\d+ bytes when packed, and at most 100 can be sent"):
        pack(tmp_path)


def archive_of(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return packed.getvalue()


def linked() -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("link.py")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


def hidden_name() -> bytes:
    """Zip readers end names at a NUL character."""
    return archive_of(("innocent.py", b"")).replace(b"innocent.py", b"innoc\0nt.py")


def damaged() -> bytes:
    """Whole but for one byte of the content."""
    whole = bytearray(archive_of(("a.py", b"a = 1\n")))
    whole[whole.index(b"a.py") + 6] ^= 0xFF
    return bytes(whole)


def lies_about_its_size() -> bytes:
    """Says that it unpacks to nothing."""
    honest = archive_of(("a.py", bytes(1000)))
    return honest.replace((1000).to_bytes(4, "little"), (0).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: archive_of(("../outside.py", b"")), "'../outside.py' is no path below the folder"),
        (lambda: archive_of(("a/../../outside.py", b"")), "is no path below the folder"),
        (lambda: archive_of(("/etc/outside.py", b"")), "'/etc/outside.py' is no path below the folder"),
        (lambda: archive_of(("a\\..\\outside.py", b"")), "is no path below the folder"),
        (lambda: archive_of(("a//b.py", b"")), "is no path below the folder"),
        (lambda: archive_of(("./a.py", b"")), "is no path below the folder"),
        (lambda: archive_of(("a/", b"")), "'a/' is no path below the folder"),
        (lambda: archive_of((linked(), b"/etc/passwd")), "'link.py' is no plain Python file"),
        (lambda: archive_of(("a.so", b"")), "'a.so' is no plain Python file"),
        (lambda: archive_of(("a.py", b""), ("a.py/b.py", b"")), "'a.py' is both a file and a folder"),
        (lambda: archive_of(*((f"{i}.py", b"") for i in range(MAX_FILES + 1))), "it has 2001 files, and at most 2000"),
        (lambda: archive_of(("good.py", b"1"), ("bomb.py", bytes(17 << 20))), "its files have more than 16 MiB"),
        (lies_about_its_size, "it is no archive"),
        (lambda: b"PK no zip", "it is no archive"),
        (lambda: archive_of(("a.py", b"1"))[:-30], "it is no archive"),
        (damaged, "it is no archive"),
        (hidden_name, "is no path below the folder"),
    ],
    ids=range(17),
)
def test_a_hostile_archive_is_refused_and_nothing_is_written(
    make: Callable[[], bytes], message: str, tmp_path: Path
) -> None:
    archive, target = make(), tmp_path / "in" / "target"
    with pytest.raises(UserError) as caught:
        unpack(CodeArchive(digest_of(archive), archive), digest_of(archive), target)
    assert message in str(caught.value)
    assert str(caught.value).startswith("the code that was sent along with the job is refused: ")
    assert not list(tmp_path.rglob("*"))


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        archive = archive_of(("a.py", b"1"), ("a.py", b"2"))
    with pytest.raises(UserError, match="is in it twice"):
        unpack(CodeArchive(digest_of(archive), archive), digest_of(archive), tmp_path / "target")


def test_content_without_the_digest_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    """Whatever digest it claims to have."""
    good, other = archive_of(("a.py", b"1")), archive_of(("a.py", b"2"))
    with pytest.raises(UserError, match=f"has another digest than {digest_of(good)}"):
        unpack(CodeArchive(digest_of(good), other), digest_of(good), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_one_that_is_too_large_is_not_even_hashed(tmp_path: Path) -> None:
    large = bytes(MAX_CODE_BYTES + 1)
    with pytest.raises(UserError, match="has another digest"):
        unpack(CodeArchive(digest_of(large), large), digest_of(large), tmp_path / "target")
