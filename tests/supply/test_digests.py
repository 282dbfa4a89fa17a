"""`make digests`: with a docker that only answers, and, where dockerd runs, against a registry on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.supply import digests
from tests.supply.digests import PLACES, DigestError, named, resolve

ROOT = Path(__file__).parents[2]


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Of the files in which images are named, those of today, with tags alone."""
    for place in PLACES:
        path = tmp_path / "checkout" / place.file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / place.file).read_text(encoding="utf-8")
        for image in named(ROOT):
            text = (
                text.replace(f"@{image.digest}", "").replace(f", digest: {image.digest}", "") if image.digest else text
            )
        path.write_text(text, encoding="utf-8")
    return tmp_path / "checkout"


def fake_docker(folder: Path, answers: dict[str, list[str]]) -> str:
    """A docker that has pulled what is in `answers`, tag → its RepoDigests, and reaches no registry for the rest."""
    path = folder / "docker"
    cases = "".join(f"  {tag}) answer='{json.dumps(told)}';;\n" for tag, told in answers.items())
    path.write_text(
        '#!/bin/sh\nfor tag; do :; done\ncase "$tag" in\n'
        + cases
        + "  *) echo 'Using default tag' >&2; echo 'dial tcp: no such host' >&2; exit 1;;\nesac\n"
        'if [ "$1" = image ]; then echo "$answer"; fi\n'
    )
    path.chmod(0o755)
    return str(path)


def test_every_image_of_others_is_named_with_a_version_and_redis_is_the_same_everywhere() -> None:
    tags = {image.place.file: image.tag for image in named(ROOT)}
    assert tags.pop("Dockerfile").startswith("python:3.")
    assert len(set(tags.values())) == 1, tags
    assert len({image.digest for image in named(ROOT) if image.tag.startswith("redis:")}) == 1


def test_digests_are_written_wherever_an_image_is_named(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, redis = (image.tag for image in named(checkout)[:2])
    for letter in "ab":  # a second time, they are renewed
        docker = fake_docker(
            tmp_path,
            {
                python: [f"mirror.example/python@{digest('f')}", f"python@{digest(letter)}"],
                redis: [f"docker.io/library/redis@{digest(letter)}"],
            },
        )
        assert digests.main(["--root", str(checkout), "--docker", docker]) == 0
        assert {image.digest for image in named(checkout)} == {digest(letter)}
        assert capsys.readouterr().out.endswith(f"written: {', '.join(place.file for place in PLACES)}\n")
    assert digests.main(["--root", str(checkout), "--docker", docker]) == 0
    assert capsys.readouterr().out.endswith("nothing changed\n")
    compose = yaml.safe_load((checkout / "docker-compose.yml").read_text())
    assert compose["services"]["redis"]["image"] == f"${{HETPIPE_REDIS_IMAGE:-{redis}@{digest('b')}}}"
    images = yaml.safe_load((checkout / "k8s/base/kustomization.yaml").read_text())["images"]
    assert images[1] == {"name": "redis", "newTag": redis.partition(":")[2], "digest": digest("b")}
    assert f"ARG BASE_IMAGE={python}@{digest('b')}\n" in (checkout / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            None,
            "no digest for {python}: dial tcp: no such host; nothing was changed; run make digests where dockerd runs",
        ),
        ([], "no digest for {python}: docker has an image of that name which no registry gave it;"),
        ([f"python@{digest('a')}"], "no digest for redis:"),
    ],
)
def test_without_a_registry_nothing_is_written(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: list[str] | None, sentence: str
) -> None:
    python = named(checkout)[0].tag
    before = {place.file: (checkout / place.file).read_text() for place in PLACES}
    docker = fake_docker(tmp_path, {} if answer is None else {python: answer})
    assert digests.main(["--root", str(checkout), "--docker", docker]) == 1
    assert capsys.readouterr().err.startswith(sentence.format(python=python))
    assert {place.file: (checkout / place.file).read_text() for place in PLACES} == before


def test_a_machine_without_docker_is_told_what_to_do() -> None:
    with pytest.raises(DigestError, match="run make digests where dockerd runs"):
        resolve("redis:7", docker="no-such-docker")


class Registry(BaseHTTPRequestHandler):
    """As much of a registry as `docker pull` asks for: one image of one layer, under every name and tag but `none`."""

    _layer_tar = io.BytesIO()
    with tarfile.open(fileobj=_layer_tar, mode="w") as _tar:
        _tar.addfile(tarfile.TarInfo("a-file"))
    layer = gzip.compress(_layer_tar.getvalue(), mtime=0)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(_layer_tar.getvalue()).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(config),
                "digest": f"sha256:{hashlib.sha256(config).hexdigest()}",
            },
            "layers": [
                {
                    "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                    "size": len(layer),
                    "digest": f"sha256:{hashlib.sha256(layer).hexdigest()}",
                }
            ],
        }
    ).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, content = "application/octet-stream", b"{}"
        if "/manifests/" in self.path:
            kind, content = "application/vnd.docker.distribution.manifest.v2+json", self.manifest
        for blob in (self.layer, self.config):
            if self.path.endswith(f"/blobs/sha256:{hashlib.sha256(blob).hexdigest()}"):
                content = blob
        self.send_response(404 if self.path.endswith("/manifests/none") else 200)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.processes
@pytest.mark.skipif(not docker_answers(), reason="no dockerd: digests are not resolved against a registry")
def test_a_registry_is_asked_for_the_digest(registry: str) -> None:
    """With the real docker, which takes a registry on loopback without TLS."""
    tag = f"{registry}/redis:7.4.2-bookworm"
    try:
        assert resolve(tag) == Registry.digest
        with pytest.raises(DigestError, match=f"no digest for {registry}/redis:none: .*; nothing was changed"):
            resolve(f"{registry}/redis:none")
    finally:
        subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)
