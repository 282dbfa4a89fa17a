"""What a user can get wrong with a model of any kind: a sentence each, with key, value, place and fix."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.model.cut_model import CutModel
from hetpipe.pipeline.callables import CollatedDataset, build_model, load_callable
from hetpipe.pipeline.data import Batch, read_batch
from hetpipe.pipeline.layering import layers_of, on_output
from hetpipe.profiler.subject import Subject, load_subject
from hetpipe.server.agent.inspection import inspect_subject, prove_subject
from tests.numerics.compare import ROOT
from tests.support.in_process import InProcessRun, run_in_process

HERE = re.escape(__file__)
WIDTH = 4


class Pairs:
    """Samples of a model with one input."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(index)), torch.tensor(1.0)


def pairs() -> Pairs:
    return Pairs()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).square().mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(value).tanh())
        return result


class Masked(Plain):
    """Needs two arguments."""

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(value * mask)


class Narrow(Plain):
    """Takes inputs of another width."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value[:, 1:])


class Branching(Plain):
    """Its whole forward depends on the data."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        if value.mean() > 0:  # the line that is named
            return value.relu()
        result: Tensor = self.second(value)
        return result


class Containing(Plain):
    """One module of it depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(self.inner(value))


class Spectral(Plain):
    """Complex values between its modules."""

    def forward(self, value: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(value).tanh(), dim=1)
        filtered = torch.fft.irfft(spectrum * 0.5, n=WIDTH, dim=1)
        result: Tensor = self.second(filtered)
        return result


class ComplexWeight(Plain):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(value, dim=1) * self.filter, n=WIDTH, dim=1))


class Guard(nn.Module):
    """Raises in some minibatch after the first ones: as soon as there is a sample above 11."""

    def forward(self, value: Tensor) -> Tensor:
        if float(value.max()) > 11.0:
            raise ValueError("no sample above 11")  # the line that is named
        return value


class FailingLater(Plain):
    """Raises in a later minibatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(self.guard(value))


class FailingAtOnce(Plain):
    """Counts its forwards, and raises from the second minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise IndexError("all states are used up")
        return super().forward(value)


class Switching(nn.Module):
    """Needs a value behind a cut only where no mask is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = self.first(self.embedding(ids))
        value: Tensor = self.third(self.second(kept.tanh()).tanh())
        if bool((mask > 0).all()):  # the line that decides
            value = value + kept
        return value


class Masks(Pairs):
    """Masks without a zero for the first samples; then all are zero."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"ids": torch.tensor(index % 9), "mask": torch.tensor(int(index < 8))}


class Unmasked(Masks):
    """The other way round."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"ids": torch.tensor(index % 9), "mask": torch.tensor(int(index >= 8))}


def masks() -> Masks:
    return Masks()


def unmasked() -> Unmasked:
    return Unmasked()


def mean(output: Tensor, batch: Any) -> Tensor:
    result: Tensor = output.mean() + 0.0 * batch["ids"].sum()
    return result


def switching(data: str, stages: int) -> Job:
    changes = {"loss": "tests.model.test_bad_input:mean", "data": {"train": f"tests.model.test_bad_input:{data}"}}
    return job_of("Switching", stages=stages, **changes)


class Replacing(Plain):
    """Becomes another one in its first forward, as BigBird does with short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: nn.Module = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        if isinstance(self.mixed, nn.Bilinear):
            self.mixed = nn.Linear(WIDTH, WIDTH)
        result: Tensor = self.mixed(value)
        return result


class Unrepeatable(Plain):
    """Seeds torch from the clock, as Reformer does."""

    def forward(self, value: Tensor) -> Tensor:
        torch.seed()
        return nn.functional.dropout(super().forward(value))


class Lossless(Plain):
    """As Hugging Face's models are without labels."""

    def forward(self, value: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": None, "logits": super().forward(value)}


def job_of(model: str, *, stages: int = 1, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": f"tests.model.test_bad_input:{model}",
        "loss": "tests.model.test_bad_input:loss",
        "data": {"train": "tests.model.test_bad_input:pairs"},
        "batch_size": 2,
        "minibatches": 8,
        "optimizer": {"name": "SGD", "lr": 0.01},
        "workers": {"count": 1, "stages": stages},
        "sync": {"kind": "none", "minibatches_per_wave": 2},
    }
    return Job(**{**values, **changes})


def subject_of(model: str, **changes: Any) -> Subject:
    return load_subject(job_of(model, **changes), ROOT)


def batch_of(**inputs: Tensor) -> Batch:
    return Batch(tuple(inputs.values()), inputs, 2, tuple(inputs))


ROWS = torch.ones(2, WIDTH)


def test_no_module_at_all() -> None:
    told = r"^model: `tests\.model\.test_bad_input:pairs\(\)` returned an object of type Pairs; it "
    told += r"must return a torch\.nn\."
    with pytest.raises(CallableError, match=told):
        build_model(job_of("pairs"), ROOT)


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    told = r"^model: `timm` is part of the package `timm`, which is not installed; install "
    told += r"it on every node: pip "
    with pytest.raises(CallableError, match=told):
        load_callable("timm:create_model", tmp_path)
    told = r"^model: `tests\.model\.test_bad_input:with_timm\(\)` raised ModuleNotFoundError: .*timm.* "
    with pytest.raises(CallableError, match=told + rf"\({HERE} line \d+\); install it on every node: pip install"):
        build_model(job_of("with_timm"), ROOT)


def with_timm() -> nn.Module:
    """Imports a package only where the model is built."""
    model: nn.Module = importlib.import_module("timm").create_model("resnet18")
    return model


def test_a_forward_that_needs_an_argument_which_the_batch_lacks() -> None:
    told = r"^data\.train: samples are mappings of value, but Masked\.forward needs `mask` as well "
    told += rf"\({HERE} line \d+\); give "
    with pytest.raises(CallableError, match=told + "every sample an entry `mask`, or the argument a default$"):
        layers_of(Masked(), batch_of(value=ROWS), loss)
    told = (
        rf"^data\.train: samples have 1 input, but Masked\.forward takes value, mask \({HERE} line \d+\); return pairs "
    )
    with pytest.raises(CallableError, match=told):
        layers_of(Masked(), Batch((ROWS,), ROWS, 2), loss)


def test_a_batch_with_an_entry_that_the_model_does_not_take() -> None:
    told = rf"^data\.train: samples have an entry `other`, which Plain\.forward does not take \({HERE} "
    told += r"line \d+\): it takes "
    with pytest.raises(CallableError, match=told + "value; leave it out of the samples"):
        layers_of(Plain(), batch_of(value=ROWS, other=ROWS), loss)


def test_a_batch_on_which_the_model_fails() -> None:
    told = r"^model: Narrow's forward failed on a minibatch of value \[2, 4\]: RuntimeError: mat1 and mat2 .*"
    with pytest.raises(
        CallableError, match=told + rf"\({HERE} line \d+\); call the model on these samples of `data\.train`"
    ):
        layers_of(Narrow(), batch_of(value=ROWS), loss)


def test_an_output_whose_loss_is_none() -> None:
    with pytest.raises(
        CallableError, match=r"\(dict\) has `loss: None`.*add its `labels` to every sample of `data\.train`"
    ):
        layers_of(Lossless(), batch_of(value=ROWS), None)


def test_a_model_that_depends_on_the_data_as_a_whole_trains_in_one_stage_and_says_why() -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "if value.mean() > 0" in text)
    why = rf"the forward of the model reads a number that depends on weights, .* \({HERE} line {line}\)"
    subject = subject_of("Branching")
    assert len(subject.chain) == 1
    (notice,) = prove_subject(subject, ROOT, SYSTEM_CLOCK).notices
    assert re.fullmatch(rf"The model cannot be cut: {why}, so it trains in one stage per virtual worker", notice)
    told = rf"^workers\.stages: gives a virtual worker 2 stages, but the model cannot be cut: {why}; "
    told += r"train the model with `work"
    with pytest.raises(CallableError, match=told):
        prove_subject(subject_of("Branching", stages=2), ROOT, SYSTEM_CLOCK)


def test_a_module_that_depends_on_the_data_is_named() -> None:
    subject = subject_of("Containing")
    assert len(subject.chain) > 1
    (notice,) = prove_subject(subject, ROOT, SYSTEM_CLOCK).notices
    assert re.match(rf"A module runs whole, on one stage: the forward of inner reads .* \({HERE} line \d+\)", notice)


@pytest.mark.parametrize("data", ["masks", "unmasked"])
def test_a_branch_on_the_inputs_is_cut_where_every_answer_can_be(data: str, tmp_path: Path) -> None:
    assert not prove_subject(load_subject(switching(data, 2), ROOT), ROOT, SYSTEM_CLOCK).notices
    run_in_process(InProcessRun(job=switching(data, 2), run_dir=tmp_path, import_path=ROOT, stall_seconds=60.0))


def test_a_branch_of_which_one_answer_was_recorded_is_refused_with_the_line_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpipe.model.cut_model._MOST_QUESTIONS", 0)
    text = Path(__file__).read_text().splitlines()
    line = next(n for n, each in enumerate(text, 1) if "# the line that decides" in each)
    told = (
        r"^model: .* train the model with `workers: {stages: 1}`; "
        rf"the model's integer inputs decide that \({HERE} line {line}\)$"
    )
    with pytest.raises(CallableError, match=told):
        run_in_process(
            InProcessRun(job=switching("unmasked", 4), run_dir=tmp_path / "4", import_path=ROOT, stall_seconds=60.0)
        )
    job = switching("unmasked", 1)
    run_in_process(InProcessRun(job=job, run_dir=tmp_path / "1", import_path=ROOT, stall_seconds=60.0))


def test_complex_values_cross_no_cut() -> None:
    subject = subject_of("Spectral", stages=2)
    cut = subject.chain[0].cut
    assert cut is not None
    assert [each.label for each in cut.survey.cuts if "is of type complex64, which cannot cross cuts" in each.reason]
    assert len(subject.chain) > 1
    assert prove_subject(subject, ROOT, SYSTEM_CLOCK).equality == "bits"


def test_a_complex_parameter() -> None:
    told = r"^model: filter is of type complex64, which links and shards do not support; .*; keep its "
    told += r"real and its imaginary part"
    with pytest.raises(CallableError, match=told):
        inspect_subject(subject_of("ComplexWeight"), ROOT)


class Bagged(nn.Module):
    """Embeds with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.linear(self.bag(value.long().clamp(0, 8)))
        return result


class Graph(Plain):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).to_sparse())


def compiled() -> nn.Module:
    model = Plain()
    model.first.compile(backend="eager")
    return model


def scripted() -> nn.Module:
    model: nn.Module = torch.jit.script(Plain())
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Bagged", r"the gradient of bag\.weight is sparse, .*; build its module .* with `sparse=False`$"),
        ("Graph", r"edges is sparse \(torch\.sparse_coo\), which links and checkpoints do not support; register its"),
        ("compiled", r"module first is compiled by torch\.compile, .*; return the model uncompiled$"),
        ("scripted", r"is a RecursiveScriptModule, .*; return the module that was scripted or traced, and script "),
    ],
)
def test_what_is_sparse_or_compiled_is_refused_by_name(model: str, told: str) -> None:
    with pytest.raises(CallableError, match=rf"^model: {told}"):
        prove_subject(subject_of(model), ROOT, SYSTEM_CLOCK)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_job_with_one_stage_is_proven_as_one_stage(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs between stages only does not refuse it, least of all with the advice to use one stage."""
    flags = CutModel.gradient_flags
    monkeypatch.setattr(CutModel, "gradient_flags", lambda self, layer: (False,) * len(flags(self, layer)))
    subject = subject_of("Plain", stages=stages)
    assert len(subject.chain) > 1
    if stages == 1:
        assert prove_subject(subject, ROOT, SYSTEM_CLOCK).equality == "bits"
        return
    with pytest.raises(CallableError, match=r"compared with the model as one stage; train the model with `workers: "):
        prove_subject(subject, ROOT, SYSTEM_CLOCK)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_raises_in_a_later_minibatch_only(stages: int, tmp_path: Path) -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ValueError" in text)
    told = (
        r"model: the forward of minibatch \d on .* failed, although the model ran on the minibatch on which it was "
        r"cut: "
    )
    told += rf"ValueError: no sample above 11 \({HERE} line {line}\); it keeps state between minibatches or depends on"
    with pytest.raises(CallableError, match=told):
        run_in_process(
            InProcessRun(
                job=job_of("FailingLater", stages=stages), run_dir=tmp_path, import_path=ROOT, stall_seconds=60.0
            )
        )


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "Replacing",
            r"^model: its forward replaces mixed \(Bilinear\) by another module, .* run the model once on a ",
        ),
        ("Unrepeatable", r"^model: on one minibatch under one seed, two instances of it give the losses .*seed\(\)"),
    ],
)
def test_a_model_whose_forward_nobody_can_repeat(model: str, told: str) -> None:
    with pytest.raises(CallableError, match=told):
        prove_subject(subject_of(model), ROOT, SYSTEM_CLOCK)


def test_a_model_that_raises_in_its_second_forward_is_refused_before_training() -> None:
    with pytest.raises(CallableError, match=r"model: .* failed.*IndexError: all states are used up \(.* line \d+\); "):
        prove_subject(subject_of("FailingAtOnce"), ROOT, SYSTEM_CLOCK)


def test_lists_of_boxes_without_a_collate_fn() -> None:
    class Boxes:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"image": ROWS, "targets": {"boxes": torch.zeros(index + 1, 4)}}

    told = r"^data\.train: samples 0 and 1 cannot be stacked into one minibatch: the entry targets of "
    told += r"one is a dict of boxes: of shape \[1, 4\].*a `data\.collate_fn` that pads a minibatch or makes lists"
    with pytest.raises(CallableError, match=told):
        read_batch(Boxes(), range(2))


def test_an_entry_that_cannot_be_packed() -> None:
    class Objects:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return index

    told = r"^data\.collate_fn: given samples 0, 1 of data\.train, it returned a mapping whose entry targets is of "
    told += r"type list and has an object other than a dense tensor, .*: convert it to them$"
    with pytest.raises(CallableError, match=told):
        read_batch(CollatedDataset(Objects(), lambda samples: {"targets": [object() for _ in samples]}), range(2))


def test_every_model_here_is_all_right_but_for_what_it_is_for() -> None:
    chain = layers_of(Plain(), Batch((ROWS,), torch.ones(2), 2), loss)
    assert len(chain) > 1
    assert on_output(chain, loss) is not loss
