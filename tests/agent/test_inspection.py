"""What an inspection reports and measures, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.agent.inspection import carry_out, inspect_job
from hetpipe.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.errors import CallableError
from hetpipe.profiler import profiling
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.spec.job import Job
from hetpipe.spec.measurement import ProfileStep
from hetpipe.testing.fake_clock import FakeClock
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT

JOB = small_job(data={"train": "tests.models:data32", "eval": "tests.models:more32"})


def carried_out(folder: Path, *, of: Job = JOB, **changes: Any) -> tuple[InspectionAnswer, list[ProfileStep]]:
    values: dict[str, Any] = {"with_model": True, "measure": (), **changes}
    order = InspectionOrder(job=of.model_dump(mode="json"), import_path=str(ROOT), cache_folder=str(folder), **values)
    steps: list[ProfileStep] = []
    return carry_out(order, FakeClock(), steps.append), steps


def profiled(folder: Path) -> ProfileAnswer:
    """What `hetpipe profile` finds, and leaves in the cache."""
    order = ProfileOrder(
        job=JOB.model_dump(mode="json"), import_path=str(ROOT), cache_folder=str(folder), with_cpu=True, repeats=1
    )
    return profiling.carry_out(order, FakeClock(), lambda _: None)


def test_the_model_alone(tmp_path: Path) -> None:
    answer, steps = carried_out(tmp_path)
    assert answer == InspectionAnswer(inspect_job(JOB, ROOT))
    assert answer.model is not None
    assert [layer.activation_elements for layer in answer.model.layers] == [28, 28, 24, 24, 12]
    assert (answer.model.train_samples, answer.model.eval_samples) == (46, 301)
    assert steps == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_profiled_before_is_not_measured_again(tmp_path: Path) -> None:
    cpu = next(found for found in profiled(tmp_path).measurements if found.device_type == "cpu")
    answer, steps = carried_out(tmp_path, with_model=False, measure=("cpu",))
    assert answer == InspectionAnswer(None, (cpu,))
    assert steps == []


def test_types_that_are_not_here_are_not_answered(tmp_path: Path) -> None:
    profiled(tmp_path)
    answer, _ = carried_out(tmp_path, measure=("cpu", "TITAN_V"))
    assert answer.model is not None
    assert [found.device_type for found in answer.measurements] == ["cpu"]


def test_mistakes_in_what_is_not_measured_are_found_first(tmp_path: Path) -> None:
    of = small_job(metrics={"accuracy": "tests.models:no_metric"})
    with pytest.raises(CallableError, match="no_metric"):
        carried_out(tmp_path, of=of, measure=("cpu",))
    assert list(tmp_path.iterdir()) == []
