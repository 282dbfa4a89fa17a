"""The files of `docs/schemas`: `python -m tests.docs.schemas` rewrites them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hetpipe.job.schema import DESCRIBED, schema_text
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "schemas"


def path_of(name: str) -> Path:
    """The file of one schema."""
    return FOLDER / f"{name}.json"


def undescribed(kind: Any) -> list[str]:
    """The keys of a document, at any depth, for which neither the field nor the section in it has a docstring."""
    whole = TypeAdapter(kind).json_schema()
    sections = whole.get("$defs", {})

    def is_described(schema: Mapping[str, Any]) -> bool:
        referred = schema.get("$ref", "").rpartition("/")[2]
        inner = [sections[referred]] if referred else schema.get("anyOf", [])
        return "description" in schema or any(is_described(entry) for entry in inner)

    found = []
    for owner, properties in _objects(whole):
        found += [f"{owner}.{key}" for key, schema in properties.items() if not is_described(schema)]
    return found


def _objects(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    described = {"": schema, **schema.get("$defs", {})}
    return [(name, entry["properties"]) for name, entry in described.items() if "properties" in entry]


def main() -> int:
    """Rewrite the files; the exit status."""
    FOLDER.mkdir(exist_ok=True)
    for name in DESCRIBED:
        path_of(name).write_text(schema_text(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
