"""A public class of the packages that hold weights, links and storage has a name of its own."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.docs.pages import ROOT

#: Packages that are held to it, against all others.
_PACKAGES = ("checkpoint", "link", "pipeline", "server/shard", "storage", "weights")

#: Judges the rest, and shares nothing with it, on purpose.
_INDEPENDENT = "checker"

_PUBLIC_CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)


def test_each_has_a_name_of_its_own() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "hetpipe").rglob("*.py")):
        name = str(path.relative_to(ROOT / "hetpipe"))
        if name.startswith((f"{_INDEPENDENT}/", "proto/", "vendor/")):
            continue
        for match in _PUBLIC_CLASS.finditer(path.read_text(encoding="utf-8")):
            where[match[1]].append(name)
    several = {
        name: files
        for name, files in where.items()
        if len(files) > 1 and any(file.startswith(_PACKAGES) for file in files)
    }
    assert not several, several
