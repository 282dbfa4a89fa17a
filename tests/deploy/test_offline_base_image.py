"""`scripts/offline-base-image`, with a debootstrap and a docker that only write down what they get."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKES = {
    "id": "echo 0",
    "debootstrap": 'for word; do case "$word" in /*) mkdir -p "$word/etc/apt" "$word/etc/ssl/certs";; esac; done',
    "docker": 'for image; do :; done; [ "$1" = import ] && cat > "$SENT/${image%%:*}.tar"',
}


@pytest.mark.processes
def test_the_build_image_knows_where_packages_are_and_takes_no_constraint_file_along(tmp_path: Path) -> None:
    """A setting that names a file of this machine breaks every pip in the image."""
    (tmp_path / "bin").mkdir()
    for name, script in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a-1-py3-none-any.whl").touch()
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        f"[global]\nconstraint = {tmp_path}/constraints.txt\nfind-links = {wheels}\nprefix = {tmp_path}\n"
        "extra-index-url = file:///here/simple\nindex-url = http://mirror.example/simple\n"
    )
    (tmp_path / "constraints.txt").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [ROOT / "scripts" / "offline-base-image", "--force"],
        env={
            **environment,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SENT": str(tmp_path),
            "PIP_CONFIG_FILE": str(configuration),
        },
        check=True,
        capture_output=True,
        timeout=60,
    )
    with tarfile.open(tmp_path / "hetpipe-offline-build.tar") as image:
        settings = image.extractfile("./etc/pip.conf")
        assert settings is not None
        told = dict(line.split(" = ") for line in settings.read().decode().splitlines()[1:])
        assert f".{wheels}/a-1-py3-none-any.whl" in image.getnames()
    told.pop("cert", None)
    assert told == {"index-url": "http://mirror.example/simple", "find-links": str(wheels)}
    with tarfile.open(tmp_path / "hetpipe-offline-base.tar") as image:
        assert "./etc/pip.conf" not in image.getnames(), "what belongs to this machine is in the build image only"
