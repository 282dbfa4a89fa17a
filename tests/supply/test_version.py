"""One version everywhere, and what a release writes."""

from __future__ import annotations

import datetime as dt

import pytest

import hetpipe
from tests.supply.version import CHANGELOG, ROOT, current, differing, main, mentions, released, replaced


def test_the_version_is_read_from_the_package() -> None:
    assert current() == hetpipe.__version__


def test_every_file_names_the_version_of_the_package() -> None:
    assert differing(ROOT, current()) == []


def test_another_version_would_be_noticed_in_each_kind_of_file() -> None:
    files = {line.partition(":")[0] for line in differing(ROOT, "9.9.9")}
    assert {
        "hetpipe/__init__.py",
        "Dockerfile",
        "docker-compose.yml",
        "k8s/base/kustomization.yaml",
        "docs/docker.md",
    } <= files


@pytest.mark.parametrize(
    "line",
    [
        '__version__ = "1.2.3"',
        "ARG VERSION=1.2.3",
        "docker build --tag hetpipe:1.2.3-cpu .  # or --tag hetpipe:1.2.3-cuda",
        "  - {name: hetpipe, newTag: 1.2.3-cpu}",
    ],
)
def test_a_mention_is_found_and_replaced(line: str) -> None:
    assert {version for _, version in mentions(line)} == {"1.2.3"}
    assert replaced(f"{line}\nother 1.2.3\n", "2.0.0rc1") == f"{line.replace('1.2.3', '2.0.0rc1')}\nother 1.2.3\n"


@pytest.mark.parametrize(
    "line", ["redis:7.4.2-bookworm", 'torch = "2.9.0"', "hetpipe 0.1.0 said", "{name: redis, newTag: 7.4.2-cpu}"]
)
def test_versions_of_others_are_left_alone(line: str) -> None:
    assert list(mentions(line)) == []


def test_a_release_moves_what_was_unreleased_under_its_heading() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- this\n\n## [0.1.0] - 2026-01-01\n"
    assert released(text, "0.2.0", dt.date(2026, 2, 3)) == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Added\n\n- this\n\n## [0.1.0] - 2026-01-01\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n\n- old\n", "nothing to release"),
        ("- old\n", "nothing to release"),
        ("## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-01-01\n", "already has a heading for 0.2.0"),
    ],
)
def test_what_cannot_be_released_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        released(text, "0.2.0", dt.date(2026, 2, 3))


def test_a_version_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / CHANGELOG).read_text(encoding="utf-8")
    assert main(["--set", "two"]) == 1
    assert "'two' is not of the form X.Y.Z" in capsys.readouterr().err
    assert (ROOT / CHANGELOG).read_text(encoding="utf-8") == before


def test_the_check_passes_and_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == f"{hetpipe.__version__}\n"
