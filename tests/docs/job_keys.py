"""The tables of docs/job-file.md, made from the job's model: `python -m tests.docs.job_keys` rewrites them.

A table of keys stands behind a marker `<!-- keys: PATH -->`. Keys, types, defaults and meanings come from the model's
fields and their docstrings, so that they are said once. What goes together with each weight policy stands behind
`<!-- policies -->`; it comes from `values.policies`.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hetpipe.job.early import EarlyStoppingSection
from hetpipe.job.elastic import (
    ActivateLine,
    AddLine,
    BarrierLine,
    DropLine,
    ElasticSection,
    FreezeLine,
    MemoryLine,
    MoveLine,
    WavesLine,
)
from hetpipe.job.file import Job
from hetpipe.job.freezing import FreezePoint, FreezeSection
from hetpipe.job.log import LogSection, MlflowSection, WandbSection
from hetpipe.job.patience import PatienceSection
from hetpipe.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    DeviceEmulation,
    EnvironmentSection,
    EvaluateSection,
    LayerCounts,
    LossTerm,
    ParameterServersSection,
    Reference,
    SyncSection,
    WorkersSection,
)
from hetpipe.job.survive import SurviveSection, duration_text
from hetpipe.job.training import (
    GradientsSection,
    LrScheduleSpec,
    OptimizerSpec,
    ParameterGroup,
    PredictionSection,
)
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy
from hetpipe.values.sync import SYNC_KINDS
from tests.docs.pages import ROOT, with_table

PAGE = ROOT / "docs" / "job-file.md"

#: What every job must say.
SMALLEST: Mapping[str, Any] = {
    "model": "model:build",
    "loss": "torch.nn.functional:cross_entropy",
    "data": {"train": "model:train_data"},
    "optimizer": {"name": "SGD"},
    "epochs": 1,
}

#: Marker's path → model of the section.
SECTIONS: Mapping[str, type[BaseModel]] = {
    "job": Job,
    "loss": LossTerm,
    "data": DataSection,
    "optimizer": OptimizerSpec,
    "optimizer.groups": ParameterGroup,
    "lr_schedule": LrScheduleSpec,
    "gradients": GradientsSection,
    "workers": WorkersSection,
    "sync": SyncSection,
    "prediction": PredictionSection,
    "parameter_servers": ParameterServersSection,
    "cluster": ClusterSection,
    "cluster.devices": DeviceEmulation,
    "survive": SurviveSection,
    "patience": PatienceSection,
    "elastic": ElasticSection,
    "elastic.script.move": MoveLine,
    "elastic.script.memory": MemoryLine,
    "elastic.script.waves": WavesLine,
    "elastic.script.drop": DropLine,
    "elastic.script.add": AddLine,
    "elastic.script.freeze": FreezeLine,
    "elastic.script.activate": ActivateLine,
    "elastic.script.barrier": BarrierLine,
    "freeze": FreezeSection,
    "freeze.schedule": FreezePoint,
    "environment": EnvironmentSection,
    "evaluate": EvaluateSection,
    "early_stopping": EarlyStoppingSection,
    "checkpoint": CheckpointSection,
    "log": LogSection,
    "log.wandb": WandbSection,
    "log.mlflow": MlflowSection,
}

_TABLE = re.compile(r"(<!-- keys: (\S+) -->\n)((?:\|.*\n)*)")

#: Sections that the smallest job has none of.
_LEFT_OUT = (
    "early_stopping",
    "loss",
    "optimizer.groups",
    "lr_schedule",
    "cluster.devices",
    "elastic.script.move",
    "elastic.script.memory",
    "elastic.script.waves",
    "elastic.script.drop",
    "elastic.script.add",
    "elastic.script.freeze",
    "elastic.script.activate",
    "elastic.script.barrier",
    "log.wandb",
    "log.mlflow",
    "freeze.schedule",
)

#: Exactly one of these is given.
_EITHER = {"epochs": "one of `epochs` and `minibatches`", "minibatches": "one of `epochs` and `minibatches`"}


def table(path: str) -> str:
    """The table of one section."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in SECTIONS[path].model_fields.items():
        cells = [f"`{name}`", _type_text(field), _default_text(path, name, field), _meaning(name, field)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """The page with fresh tables."""
    text = with_table(text, "policies", policies_table())
    return _TABLE.sub(lambda found: found[1] + table(found[2]), text)


def policies_table() -> str:
    """What goes together with each weight policy."""
    titles = ("`weights`", "`schedule`, `auto` first", "least N", "`accumulate`", "`clip`", "`sync`")
    rows = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    rows += ["| " + " | ".join([f"`{weights}`", *_goes_with(weights)]) + " |" for weights in WEIGHT_POLICIES]
    return "\n".join(rows) + "\n"


def _goes_with(weights: WeightPolicy) -> Iterator[str]:
    whole_waves = POLICIES[weights].one_update_per_wave
    yield ", ".join(f"`{schedule}`" for schedule in POLICIES[weights].schedules)
    yield "K" if POLICIES[weights].least_minibatches_per_wave(2) > 1 else "1"
    yield "the whole wave" if whole_waves else "divides N"
    yield "`global`, `stage`" if POLICIES[weights].clips_globally else "`stage`"
    kinds = [kind for kind in SYNC_KINDS.values() if whole_waves or not kind.averages_gradients]
    yield ", ".join(f"`{kind.name}`" for kind in kinds)


def marked(text: str) -> list[str]:
    """The paths of the page's markers, in order."""
    return [found[2] for found in _TABLE.finditer(text)]


def _meaning(name: str, field: FieldInfo) -> str:
    if field.description is None:
        return f"[below](#{name})"
    return " ".join(field.description.split()).replace("|", "\\|")


def _default_text(path: str, name: str, field: FieldInfo) -> str:
    if path == "job" and name in _EITHER:
        return _EITHER[name]
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if path not in _LEFT_OUT:
        # Some defaults follow from other keys: as they are in the smallest job.
        default = getattr(_section(path), name)
    if isinstance(default, BaseModel):
        return "as below"
    return _value_text(default)


def _section(path: str) -> Any:
    job = Job(**SMALLEST)
    return job if path == "job" else getattr(job, path)


def _value_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, timedelta):
        return f"`{duration_text(value)}`"
    return "none" if value in ((), {}) else f"`{value}`"


def _type_text(field: FieldInfo) -> str:
    if _is_reference(field.metadata):
        return "`module:callable`"
    return _annotation_text(field.annotation, _bound_text(field.metadata))


def _bound_text(metadata: typing.Iterable[object]) -> str:
    """The lower bound that `metadata` sets, as it follows a type, or nothing."""
    for entry in metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">")):
            if getattr(entry, attribute, None) is not None:
                return f" {sign} {getattr(entry, attribute)}"
    return ""


def _is_reference(metadata: typing.Iterable[object]) -> bool:
    return any(entry in typing.get_args(Reference)[1:] for entry in metadata)


def _annotation_text(annotation: Any, bound: str = "") -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        text = _annotated_text(annotation, bound)
    elif origin is typing.Literal:
        text = ", ".join(f"`{choice}`" for choice in arguments)
    elif origin in (typing.Union, types.UnionType):
        texts = (_annotation_text(entry, bound) for entry in arguments if entry is not types.NoneType)
        text = ", or ".join(dict.fromkeys(texts))
    elif origin is tuple:
        text = f"list of {_plural(_annotation_text(arguments[0]))}"
    elif origin is dict:
        text = f"name → {_annotation_text(arguments[1])}"
    else:
        text = _plain_text(annotation, bound)
    return text


def _annotated_text(annotation: Any, bound: str) -> str:
    inner, *metadata = typing.get_args(annotation)
    if annotation == LayerCounts:
        return "list of integers ≥ 1"
    if _is_reference(metadata):
        return "`module:callable`"
    return _annotation_text(inner, _bound_text(_flat(metadata)) or bound)


def _flat(metadata: typing.Iterable[object]) -> list[object]:
    return [part for entry in metadata for part in (entry, *getattr(entry, "metadata", ()))]


def _plain_text(annotation: Any, bound: str) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names: Mapping[Any, str] = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "text",
        timedelta: "duration",
    }
    return names[annotation] + bound


def _plural(text: str) -> str:
    for one, many in (("list of", "lists of"), ("section", "sections"), ("integer", "integers")):
        if text.startswith(one):
            return text.replace(one, many, 1)
    return text


def main() -> int:
    """Rewrite the page; the exit status."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
