"""A minibatch that is replayed has the bits of the run: its gradients make the step that the run has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.export import read_checkpoint_state
from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.errors import UserError
from hetpipe.observe.metrics import metrics_path
from hetpipe.runs.replay import Replayed, replay_minibatch
from hetpipe.values.ids import Clock
from tests.models import dropout_batch_norm
from tests.numerics.compare import ROOT, Case, run, trained

LR = 0.1
ALONE: dict[str, Any] = {
    "workers": 1, "kind": "none", "servers": 1, "wave": 1, "model": "dropout_batch_norm", "data": "data32",
    "batch_size": 4, "epochs": None, "optimizer": {"name": "SGD", "lr": LR}, "every_waves": 1,
}  # fmt: skip


def stepped(weights: dict[str, torch.Tensor], replayed: Replayed) -> dict[str, torch.Tensor]:
    """The weights after a step of SGD with the gradients."""
    gradients = {name: gradient for name, gradient in replayed.gradients.items() if gradient is not None}
    return {name: weights[name].add(gradient, alpha=-LR) for name, gradient in gradients.items()}


def replay(case: Case, folder: Path, p: int, vw: int = 0) -> Replayed:
    return replay_minibatch(folder, case.job(), ROOT, vw=vw, p=p)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_gradients_are_those_of_the_run(stages: int, tmp_path: Path) -> None:
    """With dropout, whose masks depend on the minibatch and the layer."""
    case = Case(**ALONE, stages=stages, minibatches=3)
    run(case, tmp_path)
    before = read_checkpoint_state(str(checkpoint_dir(tmp_path, Clock(2)))).tensors
    replayed = replay(case, tmp_path, 3)
    assert replayed.clock == 2
    after = stepped(before, replayed)
    found = trained(tmp_path)
    assert after.keys() == dict(dropout_batch_norm().named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in after.items())
    assert any(not torch.equal(before[name], found[name]) for name in after)


@pytest.mark.parametrize("freeze", [{"layers": 1}, {"schedule": [{"epoch": 1, "layers": 1}]}])
def test_frozen_layers_are_those_of_the_run(freeze: dict[str, Any], tmp_path: Path) -> None:
    """Of four layers the first three are frozen with F = 1, as the two behind the first have no parameters."""
    case = Case(**ALONE, freeze=freeze, minibatches=14)
    run(case, tmp_path, writes_metrics=True)
    losses = [json.loads(line)["loss"] for line in metrics_path(tmp_path, 0).read_text().splitlines()]
    for p in (1, 12, 13, 14):
        replayed = replay(case, tmp_path, p)
        assert replayed.loss == losses[p - 1]
        frozen = p > 12 or "layers" in freeze
        assert any(gradient is not None for name, gradient in replayed.gradients.items() if name[0] == "0") != frozen


@pytest.mark.parametrize("vw", [0, 1])
def test_the_losses_are_those_of_a_run_with_parameter_servers(vw: int, tmp_path: Path) -> None:
    case = Case(model="dropout_batch_norm", data="data32", batch_size=4, epochs=1, wave=1, every_waves=2)
    run(case, tmp_path, writes_metrics=True)
    lines = map(json.loads, metrics_path(tmp_path, vw).read_text().splitlines())
    by_wave = {line["p"]: line["loss"] for line in lines}
    for p, clock in ((1, 0), (3, 2), (5, 4)):
        replayed = replay(case, tmp_path, p, vw)
        assert (replayed.clock, replayed.loss) == (clock, by_wave[p])


def test_the_samples_are_those_of_the_history(tmp_path: Path) -> None:
    """As after the loss of a virtual worker, which has its samples dealt anew."""
    case = Case(**ALONE, minibatches=3)
    run(case, tmp_path)
    path = tmp_path / "history" / "shard-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["event"] == "used" and line["wave"] == 2:
            assert replay(case, tmp_path, 3).indices == tuple(line["indices"])
            line["indices"] = [1, 2, 3, 4]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert replay(case, tmp_path, 3).indices == (1, 2, 3, 4)
    path.unlink()
    assert replay(case, tmp_path, 3).indices != (1, 2, 3, 4)


def test_the_first_minibatch_needs_no_checkpoint(tmp_path: Path) -> None:
    case = Case(**ALONE, minibatches=1)
    run(case, tmp_path)
    replayed = replay(case, tmp_path, 1)
    assert replayed.clock == 0
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert replay(case, tmp_path, 1).loss == replayed.loss
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("weights", ["wave", "vertical"])
def test_any_minibatch_of_a_deterministic_run_has_its_loss(weights: Any, tmp_path: Path) -> None:
    """Waves of one minibatch: the metrics have the loss of each. Some follow a checkpoint, most are computed anew."""
    optimizer = {"name": "SGD", "lr": LR, "momentum": 0.9}
    case = Case(
        model="dropout_batch_norm", data="data32", batch_size=4, epochs=1, wave=2 if weights == "vertical" else 1,
        every_waves=4, staleness=1, weights=weights, optimizer=optimizer,
    )  # fmt: skip
    run(case, tmp_path, writes_metrics=True)
    for vw in (0, 1):
        waves = list(map(json.loads, metrics_path(tmp_path, vw).read_text().splitlines()))
        wave = waves[-1]
        of_wave = [replay(case, tmp_path, wave["p"] - back, vw) for back in range(wave["minibatches"])]
        sizes = [len(one.indices) for one in of_wave]
        mean = sum(one.loss * size for one, size in zip(of_wave, sizes, strict=True)) / sum(sizes)
        assert mean == pytest.approx(wave["loss"], rel=0 if len(sizes) == 1 else 1e-6)


def test_the_gradients_of_a_repeated_run_are_those_after_its_checkpoint(tmp_path: Path) -> None:
    """The same with the checkpoint and, once it is lost, over the barrier at which it was made."""
    case = Case(**{**ALONE, "every_waves": 3}, stages=2, minibatches=4)
    run(case, tmp_path, writes_metrics=True)
    torch.set_num_threads(2)
    try:
        known = replay(case, tmp_path, 4)
        (tmp_path / "checkpoints").rename(tmp_path / "lost")
        again = replay(case, tmp_path, 4)
        assert torch.get_num_threads() == 2, "those of the caller are as they were"
    finally:
        torch.set_num_threads(1)
    assert (again.loss, again.clock, again.indices) == (known.loss, 3, known.indices)
    assert again.gradients.keys() == known.gradients.keys()
    for name, gradient in known.gradients.items():
        other = again.gradients[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other)


def test_a_run_that_is_not_what_it_was_is_not_replayed(tmp_path: Path) -> None:
    case = Case(**{**ALONE, "every_waves": 4}, minibatches=4)
    run(case, tmp_path, writes_metrics=True)
    path = metrics_path(tmp_path, 0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"loss":', '"loss":1'), *lines[2:], ""]))
    with pytest.raises(UserError, match=r"the loss .* in wave 1 of virtual worker 0 instead of 1.*its code or data"):
        replay(case, tmp_path, 4)
    replay(case, tmp_path, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": "predict"}, "under weights: predict forward and backward use different predictions"),
        ({"kind": "wsp", "deterministic": False}, "time decided which weights it fetched"),
    ],
)
def test_what_only_the_run_had_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    optimizer = {"name": "SGD", "lr": LR, "momentum": 0.9}
    is_deterministic = changes.pop("deterministic", True)
    case = Case(**{**ALONE, "wave": 4, "minibatches": 9, "optimizer": optimizer, **changes})
    run(case, tmp_path, writes_metrics=True)
    for folder in list((tmp_path / "checkpoints").iterdir()):
        if folder.name != "clock-00000001":
            folder.rename(tmp_path / folder.name)
    job = case.job()
    job = job.model_copy(update={"sync": job.sync.model_copy(update={"deterministic": is_deterministic})})
    with pytest.raises(UserError) as caught:
        replay_minibatch(tmp_path, job, ROOT, vw=0, p=9)
    assert f"and the run cannot be repeated: {reason}" in str(caught.value)
    assert "(the first weights) and 5" in str(caught.value)
    assert replay(case, tmp_path, 5).clock == 1
    with pytest.raises(UserError, match="there is no virtual worker 1; the run has 1"):
        replay(case, tmp_path, 1, vw=1)
    with pytest.raises(UserError, match="has not committed minibatch 10 in this run; these can be replayed: 1"):
        replay(case, tmp_path, 10)
