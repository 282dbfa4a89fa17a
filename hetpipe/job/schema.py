"""JSON Schemas of a job file, of its sections, and of the documents it names, for editors and other programs.

Types, bounds and meanings come from the models' fields and their docstrings, so that they are said once. What only
several keys together show (`job.rules`, `Document.contradictions`) a schema cannot say: a file that it accepts may
still be refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from hetpipe.job.elastic import ElasticSection
from hetpipe.job.model import Job
from hetpipe.job.sections import Memory
from hetpipe.values.cluster import Cluster
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile

#: Name → what its schema describes: a document, a section of a job, or the value of one of its keys.
DESCRIBED: Mapping[str, Any] = {
    "job": Job,
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


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one of `DESCRIBED`, in draft 2020-12 of JSON Schema."""
    schema = TypeAdapter(DESCRIBED[name]).json_schema(schema_generator=_Untitled)
    unwrapped: dict[str, Any] = _unwrapped(schema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **unwrapped}


def schema_text(name: str) -> str:
    """`schema_of`, as the text of a file."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def _unwrapped(value: Any) -> Any:
    """Descriptions as one line each; in the sources they are wrapped."""
    if isinstance(value, dict):
        return {key: _unwrapped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_unwrapped(entry) for entry in value]
    return " ".join(value.split()) if isinstance(value, str) else value
