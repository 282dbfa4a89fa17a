"""The job's key `init_from`: all weights of another run, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetpipe.checkpoint.export import export_weights, read_trained_state
from hetpipe.errors import UserError
from hetpipe.pipeline.callables import build_model
from hetpipe.pipeline.initial_weights import load_initial_weights
from tests.cli.fakes import small_job

RECORDED = Path(__file__).parents[1] / "recorded" / "0.1-finished"


def other_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}


def equal(model: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(state[name], tensors[name]) for name in state)


def test_the_model_is_built_with_them_and_draws_the_same_random_numbers(tmp_path: Path) -> None:
    plain = build_model(small_job(), tmp_path)
    drawn = torch.rand(4)
    tensors = other_weights(plain)
    save_file(tensors, tmp_path / "first.safetensors")
    model = build_model(small_job(init_from="first.safetensors"), tmp_path)
    assert equal(model, tensors)
    assert torch.equal(torch.rand(4), drawn)


def model_of_the_recorded_run() -> nn.Module:
    """A module with the names and shapes of the recorded run."""
    root = nn.Module()
    for name, tensor in read_trained_state(RECORDED).tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_buffer(last, torch.zeros_like(tensor))
    return root


def test_a_run_one_of_its_checkpoints_and_its_export_are_the_same(tmp_path: Path) -> None:
    trained = read_trained_state(RECORDED)
    export_weights(RECORDED, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == trained.tensors.keys()
    for source in (str(RECORDED), trained.checkpoint, "model.safetensors"):
        model = model_of_the_recorded_run()
        load_initial_weights(model, source, tmp_path)
        assert equal(model, trained.tensors), source


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = other_weights(build_model(small_job(), tmp_path))
    first, second, *_ = tensors
    wrong = {**tensors, second: torch.zeros(3, 1), "more": torch.zeros(1)}
    del wrong[first]
    save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(UserError) as caught:
        build_model(small_job(init_from="wrong.safetensors"), tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith("init_from: wrong.safetensors does not fit the model: ")
    for words in (f"it lacks {first};", "the model has no more;", f"{second} is 3×1 there and "):
        assert words in sentence


@pytest.mark.parametrize("source", ["missing", "empty", "text.safetensors", "half"])
def test_what_cannot_be_read_is_a_sentence(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=f"init_from: {source} cannot be read: .*; give the folder or URL of a run"):
        build_model(small_job(init_from=source), tmp_path)
