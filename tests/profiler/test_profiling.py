"""A whole order, carried out in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.profiler.profiling import carry_out, devices_here
from hetpipe.values.measurement import ProfileStep
from tests.cli.fakes import small_job
from tests.numerics.compare import ROOT
from tests.support.fake_clock import FakeClock


def order(folder: Path, job: Job | None = None) -> ProfileOrder:
    return ProfileOrder(
        job=(job or small_job()).model_dump(mode="json"),
        import_path=str(ROOT),
        cache_folder=str(folder),
        with_cpu=True,
        repeats=1,
    )


def carried_out(asked: ProfileOrder, clock: FakeClock) -> tuple[ProfileAnswer, list[ProfileStep]]:
    steps: list[ProfileStep] = []
    return carry_out(asked, clock, steps.append), steps


def test_measures_once_and_then_remembers(tmp_path: Path) -> None:
    clock = FakeClock()
    first, steps = carried_out(order(tmp_path), clock)
    cpu = next(found for found in first.measurements if found.device_type == "cpu")
    assert first.cached == ()
    assert [layer.name for layer in cpu.layers] == ["0", "1", "2", "3", "4"]
    assert [step.done for step in steps] == list(range(len(steps)))
    assert steps[-1].total == len(steps) == 5 * len(first.measurements)

    clock.advance(60.0)
    again, no_steps = carried_out(order(tmp_path), clock)
    assert again.measurements == first.measurements
    assert again.cached == tuple(found.device_type for found in first.measurements)
    assert no_steps == []


def test_measures_again_when_asked_to(tmp_path: Path) -> None:
    clock = FakeClock()
    first, _ = carried_out(order(tmp_path), clock)
    clock.advance(60.0)
    fresh, _ = carried_out(replace(order(tmp_path), fresh=True), clock)
    assert fresh.cached == ()
    assert fresh.measurements[0].measured_at == first.measurements[0].measured_at + 60.0
    # And the cache has the newer one from then on.
    assert carried_out(order(tmp_path), clock)[0].measurements == fresh.measurements


def test_measures_again_when_more_samples_are_wanted(tmp_path: Path) -> None:
    clock = FakeClock()
    first, _ = carried_out(order(tmp_path), clock)
    assert first.measurements[0].repeats == 1
    more, _ = carried_out(replace(order(tmp_path), repeats=2), clock)
    assert more.cached == ()
    assert more.measurements[0].repeats == 2
    fewer, _ = carried_out(order(tmp_path), clock)
    assert fewer.cached


def test_another_batch_size_is_another_measurement(tmp_path: Path) -> None:
    clock = FakeClock()
    small, _ = carried_out(order(tmp_path), clock)
    large, _ = carried_out(order(tmp_path, small_job(batch_size=8)), clock)
    assert large.cached == ()
    assert large.measurements[0].input_bytes == 2 * small.measurements[0].input_bytes


def test_code_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CallableError, match="did you mean `mlp32`"):
        carried_out(order(tmp_path, small_job(model="tests.models:mlp33")), FakeClock())


def test_the_cpu_is_there_when_asked_for() -> None:
    assert devices_here(with_cpu=True)["cpu"].type == "cpu"
    assert devices_here(with_cpu=False)
