"""Families of models, unmodified: cut anywhere they have the uncut model's bits, and train to the reference's.

`make families` runs all of them, `make test` some.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpipe.checker import check_run
from hetpipe.checkpoint.export import export_weights
from hetpipe.job.file import Job
from hetpipe.pipeline.callables import build_model
from hetpipe.pipeline.data import read_batch
from hetpipe.values.ids import Clock
from tests.docs.pages import table_after
from tests.model.families import FAMILIES
from tests.model.harness import Made, Subject, assert_cut_anywhere, differences
from tests.numerics.compare import ROOT, assert_same_bits, trained
from tests.reference.executor import ReferenceRun, run_reference
from tests.support.in_process import InProcessRun, run_in_process

#: In `make test`: the weight policy and the stages it trains with there; all else is in `make families` and
#: `make exhaustive`.
ALWAYS = {"GPT-2": ("double_buffer", 4), "U-Net": ("wave", 2), "nn.Transformer": ("flush", 2)}

STAGES = (1, 2, 4)
WAVES = 3

#: Weight policy → how it is trained here: a kind of synchronisation, virtual workers, minibatches per wave.
POLICIES = {"wave": ("wsp", 2, 2), "flush": ("none", 1, 4), "double_buffer": ("none", 1, 4)}

BATCH_SIZE = 2
SEED = 3


def each() -> list[Any]:
    """Every family at every cut, marked; and those of `make test`, at some."""
    at_every_cut = [pytest.param(name, 1000, marks=pytest.mark.exhaustive) for name in FAMILIES]
    return [*(pytest.param(name, 12) for name in ALWAYS), *at_every_cut]


def each_policy() -> list[Any]:
    """Every family under every policy, those marked that `make test` leaves out; and the stages."""
    in_test = [pytest.param(name, weights, (stages,)) for name, (weights, stages) in ALWAYS.items()]
    return in_test + [
        pytest.param(name, weights, STAGES, marks=pytest.mark.exhaustive) for name in FAMILIES for weights in POLICIES
    ]


def job_of(name: str, *, weights: str = "wave", stages: int = 1) -> Job:
    family = FAMILIES[name]
    kind, workers, wave = POLICIES[weights]
    sync: dict[str, Any] = {"kind": kind, "minibatches_per_wave": wave}
    if kind == "wsp":
        sync.update(D=1, deterministic=True)
    return Job(
        name="family",
        model=family.model,
        loss=None if family.loss is None else f"tests.model.zoo:{family.loss}",
        data={"train": f"tests.model.families:{family.data}"},
        batch_size=BATCH_SIZE,
        minibatches=WAVES * wave,
        seed=SEED,
        optimizer=dict(family.optimizer),
        weights=weights,
        workers={"count": workers, "stages": stages},
        sync=sync,
        parameter_servers={"count": 2} if kind == "wsp" else {},
        patience={"last_checkpoint": "1s"},
    )


def builder_of(name: str) -> Callable[[], nn.Module]:
    job = job_of(name)
    return lambda: build_model(job, ROOT)


def reference_of(name: str, weights: str) -> ReferenceRun:
    family = FAMILIES[name]
    kind, workers, wave = POLICIES[weights]
    return ReferenceRun(
        model=builder_of(name),
        loss=family.loss_function,
        train=family.train,
        batch_size=BATCH_SIZE,
        seed=SEED,
        optimizer=family.optimizer["name"],
        arguments={key: value for key, value in family.optimizer.items() if key != "name"},
        num_virtual_workers=workers,
        minibatches_per_wave=wave,
        staleness=1,
        total_minibatches=WAVES * wave * workers,
        weights=weights,
        sync="wsp" if kind == "wsp" else "none",
    )


def subject_of(name: str) -> tuple[Subject, Made]:
    """The family on one minibatch of three samples."""
    family = FAMILIES[name]
    batch = read_batch(family.train, range(3))
    made: Made = batch.inputs if batch.keys is None else dict(zip(batch.keys, batch.inputs, strict=True))
    own = family.loss_function
    loss: Callable[[Any], Tensor] | None = None if own is None else lambda output: own(output, batch.target)
    return Subject(builder_of(name), made, loss=loss), made


#: peft looks up in transformers what that has renamed.
_RENAMED = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


@pytest.mark.filterwarnings(_RENAMED)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "most_cuts"), each())
def test_a_family_has_the_uncut_models_bits_at_every_cut(name: str, most_cuts: int) -> None:
    """Outputs, loss, all gradients and buffers: unseeded; seeded as stages are; and cut at borders, and at all."""
    subject, made = subject_of(name)
    assert not differences(subject.uncut(made), subject.watched(made))
    whole = subject.stages((), made)
    assert not [place for place, output in enumerate(whole.outputs) if output is None], "outputs of one stage"
    assert not differences(subject.uncut_with_the_seeds_of_stages(made), whole)
    assert assert_cut_anywhere(subject, made, at_most=most_cuts) > 20


@pytest.mark.filterwarnings(_RENAMED)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "weights", "stages_of_runs"), each_policy(), ids=str)
def test_a_family_trains_to_the_bits_of_the_reference(
    name: str, weights: str, stages_of_runs: tuple[int, ...], tmp_path: Path
) -> None:
    """Three waves; what is exported loads strictly into the user's model, and is what was trained."""
    expected = run_reference(reference_of(name, weights))
    fresh = builder_of(name)()
    frozen = {place: p.detach() for place, p in fresh.named_parameters() if not p.requires_grad}
    assert [
        place
        for place, first in expected.barriers[Clock(0)].weights.items()
        if not first.equal(expected.weights[place])
    ]
    for stages in stages_of_runs:
        folder = tmp_path / str(stages)
        job = job_of(name, weights=weights, stages=stages)
        result = run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, stall_seconds=60.0))
        assert {len(worker.stages) for worker in result.plan.virtual_workers} == {stages}
        assert not (report := check_run(folder, require_complete=True)).violations, "\n".join(report.lines())
        found = trained(folder)
        assert not [place for place, weight in frozen.items() if not torch.equal(found.pop(place), weight)]
        assert_same_bits(found, expected)
    out = tmp_path / "model.safetensors"
    export_weights(folder, out)
    load_strictly(fresh, out)
    loaded = fresh.state_dict()
    assert not [place for place, weight in expected.weights.items() if not torch.equal(loaded[place], weight)]


def test_the_page_lists_the_families() -> None:
    rows = table_after(ROOT / "docs" / "semantics" / "models.md", "## Tested families")
    assert [row[0] for row in rows] == list(FAMILIES)


def load_strictly(model: nn.Module, file: Path) -> None:
    """Load what was exported, a tied weight by each of its names, and no buffer that is not persistent."""
    tensors = load_file(file)
    state = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, weight in state.items():
        first = names.setdefault(id(weight), name)
        if name not in tensors and first in tensors:
            tensors[name] = tensors[first]
    for name in {name for name, _ in model.named_buffers()} - state.keys():
        tensors.pop(name, None)
    model.load_state_dict(tensors, strict=True)
