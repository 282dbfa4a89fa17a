"""`hetpipe init --from`: a job and data for a model of Hugging Face or timm, as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.start.own_model import TASKS, model_files
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from hetpipe.job.schema import schema_text


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def saved(folder: Path, **config: object) -> Path:
    """A folder as `save_pretrained` leaves it, as far as `init` looks."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_for_a_name_of_the_hub(task: str) -> None:
    result = invoke("init", "mine", "--from", "hf:some-body/a-model.v1", "--task", task)
    assert result.exit_code == 0, result.output
    assert "made up" in result.output
    assert Path("mine/job.schema.json").read_text(encoding="utf-8") == schema_text("job")
    job = load_job(Path("mine/job.yaml"))
    assert job.name == "a-model.v1"
    assert job.model.call == f"transformers:{TASKS[task].auto_class}.from_pretrained"  # type: ignore[union-attr]
    assert job.model.args["pretrained_model_name_or_path"] == "some-body/a-model.v1"  # type: ignore[union-attr]
    assert (job.data.collate_fn is not None) is TASKS[task].collates
    compile(Path("mine/data.py").read_text(encoding="utf-8"), "data.py", "exec")


def test_what_is_written_for_timm() -> None:
    assert invoke("init", "mine", "--from", "timm:resnet18.a1_in1k").exit_code == 0
    job = load_job(Path("mine/job.yaml"))
    assert job.model.args == {"model_name": "resnet18.a1_in1k", "pretrained": True, "num_classes": 4}  # type: ignore[union-attr]
    assert job.loss == "torch.nn.functional:cross_entropy"
    assert "input_size" in Path("mine/data.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("GPT2LMHeadModel", "causal-lm"),
        ("LlamaForCausalLM", "causal-lm"),
        ("BertForMaskedLM", "masked-lm"),
        ("ViTForImageClassification", "image-classification"),
        ("T5ForConditionalGeneration", "seq2seq"),
    ],
)
def test_the_task_of_a_folder_is_that_of_its_configuration(architecture: str, task: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", architectures=[architecture])
    written = yaml.safe_load(model_files("hf:model", None, tmp_path)["job.yaml"])
    assert written["model"]["call"] == f"transformers:{TASKS[task].auto_class}.from_pretrained"
    assert written["model"]["args"]["pretrained_model_name_or_path"] == str(tmp_path / "model")


def test_a_folder_without_weights_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "images", architectures=["ViTForImageClassification"])
    words = f"{tmp_path / 'images'} has no weights, which job.yaml starts from; save some there: model.save_pretrained("
    assert words in invoke("init", "one", "--from", "hf:images").output.replace("\n", "")
    (tmp_path / "images" / "model.safetensors").touch()
    assert "no weights" not in invoke("init", "two", "--from", "hf:images").output
    assert "no weights" not in invoke("init", "three", "--from", "timm:resnet18").output


def test_a_folder_without_a_tokenizer_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "model", architectures=["BertForSequenceClassification"])
    words = f"{tmp_path / 'model'} has no tokenizer, which data.py needs; save one there: tokenizer.save_pretrained("
    assert words in invoke("init", "one", "--from", "hf:model").output.replace("\n", "")
    (tmp_path / "model" / "tokenizer.json").touch()
    assert "tokenizer" not in invoke("init", "two", "--from", "hf:model").output
    saved(tmp_path / "images", architectures=["ViTForImageClassification"])
    assert "tokenizer" not in invoke("init", "three", "--from", "hf:images").output


def test_names_of_folders_are_quoted(tmp_path: Path) -> None:
    folder = saved(tmp_path / 'it\'s "quoted" """: {x} #', architectures=["BertForMaskedLM"])
    written = model_files(f"hf:{folder.name}", None, tmp_path)
    assert yaml.safe_load(written["job.yaml"])["model"]["args"]["pretrained_model_name_or_path"] == str(folder)
    names: dict[str, object] = {}
    head, _, _ = written["data.py"].partition("LENGTH =")
    exec(head.replace("from transformers", "from unittest.mock import Mock as AutoTokenizer #"), names)
    assert names["MODEL"] == str(folder)


@pytest.mark.parametrize(
    ("source", "task", "words"),
    [
        ("gpt2", None, "--from 'gpt2' names no model; write --from hf:NAME"),
        ("keras:x", None, "--from 'keras:x' names no model"),
        ("hf:", None, "--from 'hf:' names no model"),
        ("hf:gpt2", None, "--from hf:gpt2 needs --task, as its configuration is not at hand; give --task causal-lm, "),
        ("hf:gpt2", "causal_lm", "--task 'causal_lm' is unknown; did you mean `causal-lm`?"),
        ("hf:no/such/folder", "causal-lm", "no/such/folder is no folder, and 'no/such/folder' is no name of the hub"),
        ("timm:ResNet 18", None, "is no name of a model of timm"),
        ("timm:resnet18", "causal-lm", "--task causal-lm does not go with --from timm:resnet18"),
        ("hf:empty", None, "empty/config.json cannot be read: No such file or directory"),
        ("hf:old", None, "old/config.json names no class in `architectures`; give --task"),
        ("hf:torn", None, "torn/config.json names no class in `architectures`; give --task"),
        ("hf:other", None, "other has a WhisperForAudioXVector, for which there is no template; give --task"),
    ],
)
def test_what_cannot_be_used(source: str, task: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "old", model_type="gpt2")
    saved(tmp_path / "torn").joinpath("config.json").write_text("{", encoding="utf-8")
    saved(tmp_path / "other", architectures=["WhisperForAudioXVector"])
    with pytest.raises(UserError) as caught:
        model_files(source, task, tmp_path)
    assert words in str(caught.value)


def test_a_task_without_a_model() -> None:
    result = invoke("init", "mine", "--task", "seq2seq")
    assert result.exit_code == 2
    assert "--task is given without --from" in result.output
    assert not Path("mine").exists()
