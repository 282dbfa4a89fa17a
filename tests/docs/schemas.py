"""JSON Schemas of the public files, made from their models: `python -m tests.docs.schemas` rewrites `docs/schemas`.

Types, bounds and meanings come from the models' fields and their docstrings, so that they are said once. What only
several keys together show (`Document.contradictions`) a schema cannot say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from hetpipe.job.elastic import ElasticSection
from hetpipe.job.sections import Memory
from hetpipe.values.cluster import Cluster
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "schemas"

#: File name → what it describes: a document, a section of a job, or the value of one of its keys.
DOCUMENTS: Mapping[str, Any] = {
    "profile": Profile,
    "cluster": Cluster,
    "plan": PlanDocument,
    "elastic": ElasticSection,
    "memory": Memory,
}


class _Untitled(GenerateJsonSchema):
    """Without the titles that only repeat the names of the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def path_of(name: str) -> Path:
    """The file of one schema."""
    return FOLDER / f"{name}.json"


def schema_text(name: str) -> str:
    """The content of one file."""
    schema = TypeAdapter(DOCUMENTS[name]).json_schema(schema_generator=_Untitled)
    dialect = {"$schema": GenerateJsonSchema.schema_dialect}
    return json.dumps({**dialect, **_unwrapped(schema)}, indent=2, ensure_ascii=False) + "\n"


def _unwrapped(value: Any) -> Any:
    """Descriptions as one line each; in the sources they are wrapped."""
    if isinstance(value, dict):
        return {key: _unwrapped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_unwrapped(entry) for entry in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def undescribed(kind: Any) -> list[str]:
    """The keys of a document, at any depth, whose field has no docstring."""
    found = []
    for owner, properties in _objects(TypeAdapter(kind).json_schema()):
        found += [f"{owner}.{key}" for key, schema in properties.items() if "description" not in schema]
    return found


def _objects(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    described = {"": schema, **schema.get("$defs", {})}
    return [(name, entry["properties"]) for name, entry in described.items() if "properties" in entry]


def main() -> int:
    """Rewrite the files; the exit status."""
    FOLDER.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        path_of(name).write_text(schema_text(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
