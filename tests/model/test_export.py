"""What a run has trained goes back to where its model came from: strictly, under all names, to the bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpipe.checkpoint.export import export_weights
from hetpipe.errors import CallableError, CheckpointError, UserError
from hetpipe.job.file import Job
from hetpipe.pipeline.hugging_face import export_hugging_face
from tests.model import zoo
from tests.model.test_runs import job_of, mixed_job
from tests.numerics.compare import ROOT, trained
from tests.support.in_process import InProcessRun, run_in_process


class Aliased(nn.Module):
    """A weight and a buffer with two names each, and a buffer that no `state_dict` has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.head, self.norm = nn.Linear(32, zoo.CLASSES), nn.BatchNorm1d(32)
        scale = torch.linspace(0.5, 1.5, 32)
        self.register_buffer("scale", scale)
        self.second.register_buffer("scale", scale)
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, 32), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        value = self.first(image.mean((1, 2))).tanh() * self.scale
        result: Tensor = self.head(self.norm(self.second(value)) + self.offset)
        return result


def aliased() -> nn.Module:
    return Aliased()


def train(job: Job, folder: Path) -> dict[str, Tensor]:
    run_in_process(InProcessRun(job=job, run_dir=folder, import_path=ROOT, stall_seconds=60.0))
    return trained(folder)


def test_the_file_has_every_name_of_a_tied_weight_and_loads_strictly(tmp_path: Path) -> None:
    job = mixed_job("mixed", weights="wave", stages=2).model_copy(update={"model": "tests.model.test_export:aliased"})
    found = train(job, tmp_path / "run")
    exported = export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    model = aliased()
    assert exported.num_tensors == len(model.state_dict())
    loaded = load_file(tmp_path / "out.safetensors")
    assert not model.load_state_dict(loaded, strict=True).missing_keys
    assert torch.equal(loaded["second.weight"], found["first.weight"])
    assert torch.equal(loaded["second.scale"], found["scale"])
    assert not torch.equal(loaded["first.weight"], aliased().state_dict()["first.weight"])
    assert isinstance(model, Aliased)
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_a_hugging_face_model_is_read_by_from_pretrained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = job_of(name, stages=2)
    found = train(job, tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    export_hugging_face(job, ROOT, tmp_path / "run", out)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        written = set(file.keys())
    assert {"config.json", "model.safetensors", "generation_config.json"} <= {path.name for path in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    expected: Any = getattr(zoo, name)()
    transformers = importlib.import_module("transformers")
    kind = transformers.AutoModelForCausalLM if name == "gpt2" else transformers.AutoModelForSeq2SeqLM
    model, report = kind.from_pretrained(out, output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
    assert type(model) is type(expected)
    named = dict(model.named_parameters())
    assert len(written) <= len(named) + len(dict(model.named_buffers())), "ties are written once"
    assert not [key for key, value in named.items() if not torch.equal(value, found[key])]
    # And under all names into what the job's callable returns.
    export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    expected.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)


def test_what_cannot_be_exported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = mixed_job("mixed", weights="wave", stages=2)
    train(job, tmp_path / "run")
    told = r"^model: `tests\.model\.test_runs:mixed` returns a Mixed, which is not a Hugging Face model: it has no "
    with pytest.raises(UserError, match=told + "save_pretrained; .*--to safetensors"):
        export_hugging_face(job, ROOT, tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match=r"already exists; name a new folder"):
        export_hugging_face(job, ROOT, tmp_path / "run", tmp_path / "run")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export_hugging_face(job, ROOT, tmp_path / "no-run", tmp_path / "out")
    other = job.model_copy(update={"model": "tests.model.test_export:saving"})
    with pytest.raises(
        CheckpointError, match=r"does not fit the model that .* returns here: it has .*; export in the folder"
    ):
        export_hugging_face(other, ROOT, tmp_path / "run", tmp_path / "out")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    missing = job.model_copy(update={"model": "transformers:AutoModel"})
    with pytest.raises(
        CallableError, match=r"^model: `transformers` is part of the package `transformers`, which is not inst"
    ):
        export_hugging_face(missing, ROOT, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Saving(Aliased):
    def save_pretrained(self, folder: Path) -> None:
        raise OSError(28, "No space left on device")


def saving() -> nn.Module:
    return Saving()


def test_a_folder_that_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    job = mixed_job("mixed", weights="wave", stages=2).model_copy(update={"model": "tests.model.test_export:saving"})
    train(job, tmp_path / "run")
    with pytest.raises(UserError, match=r"^cannot write .*out: OSError: .*No space left on device"):
        export_hugging_face(job, ROOT, tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
