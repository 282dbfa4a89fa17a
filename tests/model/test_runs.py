"""Models that were not written for hetpipe are proven, and their tied weights train to the bits of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.checker import check_run
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.profiler.subject import load_subject
from hetpipe.server.agent.inspection import prove_subject
from hetpipe.values.policies import WeightPolicy, policies_where
from tests.model import zoo
from tests.numerics.compare import ROOT, assert_same_bits, plan_of, trained
from tests.pairwise import every_nth
from tests.reference.executor import ReferenceRun, run_reference
from tests.support.in_process import InProcessRun, run_in_process

#: Model → data, loss by its name in the zoo (None: the model's own).
MODELS: dict[str, tuple[str, str | None]] = {
    "gpt2": ("tokens", None),
    "t5": ("tokens", None),
    "resnet18": ("images", "cross_entropy"),
    "u_net": ("images", "cross_entropy"),
}

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def job_of(name: str, *, stages: int, weights: str = "wave", kind: str = "wsp", workers: int = 2) -> Job:
    data, loss = MODELS[name]
    sync: dict[str, Any] = {"kind": kind, "minibatches_per_wave": 2 if weights == "wave" else 4}
    if kind == "wsp":
        sync.update(D=1, deterministic=True)
    return Job(
        name="any",
        model=f"tests.model.zoo:{name}",
        loss=None if loss is None else f"tests.model.zoo:{loss}",
        data={"train": f"tests.model.zoo:{data}"},
        batch_size=2,
        minibatches=6 if weights == "wave" else 8,
        seed=3,
        optimizer={"name": "SGD", **MOMENTUM},
        weights=weights,
        workers={"count": workers, "stages": stages},
        sync=sync,
        parameter_servers={"count": 2} if kind == "wsp" else {},
        patience={"last_checkpoint": "1s"},
    )


@pytest.mark.parametrize("name", ["t5", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_the_proof_holds(name: str) -> None:
    subject = load_subject(job_of(name, stages=2), ROOT)
    report = prove_subject(subject, ROOT, SYSTEM_CLOCK)
    assert report.equality == "bits"
    assert not report.notices, "every cut does for masked and for unmasked minibatches"
    assert len(subject.chain) > 10


class Mixed(nn.Module):
    """One weight in four uses, two of them recomputed: the second stage computes with what came from the first one."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.tied = nn.Linear(32, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, zoo.CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        value = image.mean((1, 2))
        for index, norm in enumerate(self.norms):
            if index % 2:
                value = value + checkpoint(self.tied, norm(value), use_reentrant=self.use_reentrant).tanh()
            else:
                value = value + self.drop(self.tied(norm(value)).tanh())
        result: Tensor = self.head(value)
        return result


def mixed() -> nn.Module:
    return Mixed()


def mixed_reentrant() -> nn.Module:
    return Mixed(use_reentrant=True)


def tied_entries() -> nn.Module:
    """A chain but for a weight that two of its entries share."""
    tied = nn.Linear(32, 32)
    entries = (nn.Flatten(), nn.Linear(3 * 32 * 32, 32), tied, nn.Tanh(), nn.Linear(32, 32), tied)
    return nn.Sequential(*entries, nn.Dropout(0.2), nn.Linear(32, zoo.CLASSES))


class Averaged(nn.Sequential):
    """A chain but for what its own forward does before and between the entries."""

    def forward(self, image: Tensor) -> Tensor:
        first, second, last = self
        value = first(image.mean((1, 2)))
        result: Tensor = last(value + second(value))
        return result


def averaged() -> nn.Module:
    return Averaged(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, zoo.CLASSES))


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *every_nth(2, (("mixed", weights) for weights in policies_where(lambda policy: policy.predicts is None))),
        ("tied_entries", "wave"),
        ("averaged", "wave"),
    ],
)
def test_ties_train_to_the_bits_of_the_reference_under_every_policy_that_splits_them(
    name: str, weights: WeightPolicy, stages: int, tmp_path: Path
) -> None:
    assert_trains(name, weights, stages, tmp_path)


def assert_trains(name: str, weights: WeightPolicy, stages: int, tmp_path: Path) -> None:
    """Two virtual workers train it to the bits of the reference."""
    job = mixed_job(name, weights=weights, stages=stages)
    run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT, stall_seconds=60.0))
    assert not (report := check_run(tmp_path, require_complete=True)).violations, "\n".join(report.lines())
    plan = plan_of(job)
    reference = ReferenceRun(
        model=globals()[name],
        loss=zoo.cross_entropy,
        train=zoo.images(),
        batch_size=2,
        seed=3,
        optimizer="SGD",
        arguments=MOMENTUM,
        num_virtual_workers=2,
        minibatches_per_wave=4,
        staleness=1,
        total_minibatches=16,
        weights=weights,
        stages=tuple(tuple(s.last_layer - s.first_layer for s in vw.stages) for vw in plan.virtual_workers),
    )
    assert_same_bits(trained(tmp_path), run_reference(reference))


class Dropping(nn.Module):
    """LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(3 * 32 * 32, 8), nn.Linear(8, zoo.CLASSES)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, image: Tensor) -> Tensor:
        value = self.entry(image.flatten(1)).tanh()
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.4:
                continue
            value = nn.functional.dropout(layer(value).tanh() + value, 0.1, self.training)
        result: Tensor = self.head(value)
        return result


def dropping() -> nn.Module:
    return Dropping()


def test_layers_that_are_skipped_at_random_train_to_the_bits_of_the_reference(tmp_path: Path) -> None:
    assert_trains("dropping", "wave", 3, tmp_path)


#: Models of this module.
OWN = {"mixed", "dropping"}

MIXED_MEMORY = {"head": "keep", "norms.[13]": "keep", "*": "recompute"}


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param("mixed", "recompute", marks=pytest.mark.exhaustive),
        ("mixed", MIXED_MEMORY),
        ("dropping", "recompute"),
        pytest.param("gpt2", MIXED_MEMORY, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "recompute", marks=pytest.mark.exhaustive),
    ],
)
def test_recomputed_layers_of_a_cut_model_train_to_the_same_bits(name: str, memory: Any, tmp_path: Path) -> None:
    """Runs begin and end where the model could be cut; weights that are tied across them count as before."""
    values = (mixed_job(name, weights="stash", stages=2) if name in OWN else job_of(name, stages=2)).model_dump()
    for each in ("keep", memory if name in OWN else {"*ln_*": "recompute", "*mlp.act*": "recompute"}):
        job = Job(**{**values, "memory": each})
        folder = tmp_path / str(each == "keep")
        run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, stall_seconds=60.0))
    kept, again = trained(tmp_path / "True"), trained(tmp_path / "False")
    assert not [key for key, value in kept.items() if not torch.equal(value, again[key])]


def mixed_job(name: str, *, weights: WeightPolicy, stages: int) -> Job:
    return Job(
        name="any",
        model=f"tests.model.test_runs:{name}",
        loss="tests.model.zoo:cross_entropy",
        data={"train": "tests.model.zoo:images"},
        batch_size=2,
        minibatches=2 * max(4, stages),
        seed=3,
        optimizer={"name": "SGD", **MOMENTUM},
        weights=weights,
        workers={"count": 2, "stages": stages},
        sync={"kind": "wsp", "minibatches_per_wave": max(4, stages), "D": 1, "deterministic": True},
        parameter_servers={"count": 2},
        patience={"last_checkpoint": "1s"},
    )


@pytest.mark.parametrize("weights", policies_where(lambda policy: policy.predicts is not None))
def test_ties_stay_on_one_stage_where_weights_are_predicted(weights: WeightPolicy) -> None:
    told = r"^workers\.stages: gives a virtual worker 6 stages, but the model has \d layers between its cuts; under "
    told += rf"`weights: {weights}` tied weights stay on one stage: use wave, .* or flush, or give it at most \d$"
    subject = load_subject(mixed_job("mixed", weights=weights, stages=6), ROOT)
    owners = {name: layer.index for layer in subject.chain for name in layer.parameters.values()}
    cut = subject.chain[0].cut
    assert cut is not None
    reasons = [each.reason for each in cut.survey.cuts]
    assert [each for each in reasons if "parameter tied.weight is used before and after it" in each], reasons
    assert not [name for border in range(1, len(subject.chain)) for name in cut.value_names(border) if "param" in name]
    assert owners["tied.weight"] == owners["norms.3.weight"], "all uses are in one layer"
    with pytest.raises(CallableError, match=told):
        prove_subject(subject, ROOT, SYSTEM_CLOCK)
