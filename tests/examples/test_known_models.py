"""The examples of models people know: each job as it is, with fewer and smaller minibatches, learns in a pipeline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from safetensors.torch import save_file

from examples import plot_loss
from examples.bert import data as bert
from examples.gpt2 import data as gpt2
from examples.resnet import data as resnet
from examples.t5 import data as t5
from examples.vit import data as vit
from hetpipe.checker import check_run
from hetpipe.decide.lifecycle.evaluations import whole
from hetpipe.job.file import Job, load_job
from hetpipe.pipeline.callables import build_model
from hetpipe.values.run import StageEvaluation, StageProgress
from tests.support.in_process import InProcessRun, run_in_process

ROOT = Path(__file__).parents[2]
NAMES = ("gpt2", "lora", "bert", "resnet", "t5")
MAX_JOB_LINES = 25

#: Fewer samples: what is read of the data of an example, from its start.
SMALL = 64

#: Example → changes of its job, and the metric of its evaluation with what it is to lie below or above.
SIZES: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "gpt2": ({"minibatches": 12, "batch_size": 4}, "perplexity", 1.0, 200.0),
    "lora": ({"minibatches": 18, "batch_size": 4}, "perplexity", 1.0, 200.0),
    "bert": ({}, "accuracy", 0.6, 1.0),
    "resnet": ({"minibatches": 80, "batch_size": 16, "lr_schedule": None}, "accuracy", 0.2, 1.0),
    "t5": ({"minibatches": 24, "batch_size": 8}, "perplexity", 1.0, 60.0),
}


def job_of(name: str) -> Job:
    return load_job(ROOT / "examples" / name / "job.yaml", SIZES[name][0])


def few(data: Any) -> Any:
    return torch.utils.data.Subset(data, range(min(SMALL, len(data))))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bert, gpt2, resnet, t5):
        all_of_it = module.eval_data
        monkeypatch.setattr(module, "eval_data", lambda all_of_it=all_of_it: few(all_of_it()))
    job, (_, metric, least, most) = job_of(name), SIZES[name]
    result = run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT, writes_metrics=True))
    report = check_run(tmp_path, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    progress = [one for _, _, one in result.reports if isinstance(one, StageProgress) and one.loss is not None]
    parts = {vw: one for vw, _, one in result.reports if isinstance(one, StageEvaluation)}
    values, first_loss = whole(parts).values, progress[-1].first_loss
    assert first_loss is not None and values["loss"] is not None
    assert values["loss"] < first_loss
    assert least <= values[metric] <= most


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "picture"), [("vit/job", "loss.svg"), ("bert/fine_tune", "fine_tune.svg")])
def test_layers_freeze_while_it_is_fine_tuned(
    name: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From weights at random; one of the two passes has frozen layers."""
    for module in (bert, vit):
        for data in ("train_data", "eval_data"):
            all_of_it = getattr(module, data)
            monkeypatch.setattr(module, data, lambda all_of_it=all_of_it: few(all_of_it()))
    weights = tmp_path / "start.safetensors"
    job = load_job(ROOT / "examples" / f"{name}.yaml", {"epochs": 2, "batch_size": 8, "init_from": str(weights)})
    save_file(build_model(job.model_copy(update={"init_from": None}), ROOT).state_dict(), weights)
    run_in_process(InProcessRun(job=job, run_dir=tmp_path / "run", import_path=ROOT))
    report = check_run(tmp_path / "run", require_complete=True)
    assert report.ok, "\n".join(report.lines())
    assert '"event":"freeze"' in (tmp_path / "run" / "history" / "shard-0.jsonl").read_text()
    folder = (ROOT / "examples" / name).parent
    readme = (folder / "README.md").read_text()
    assert f"hetpipe train examples/{name}.yaml\n" in readme
    assert f"]({picture})" in readme
    assert ET.parse(folder / picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", NAMES)
def test_every_example_has_its_pages(name: str) -> None:
    folder = ROOT / "examples" / name
    assert len((folder / "job.yaml").read_text().splitlines()) <= MAX_JOB_LINES
    readme = (folder / "README.md").read_text()
    assert f"hetpipe train examples/{name}/job.yaml\n" in readme
    assert f"hetpipe plan examples/{name}/job.yaml --why --html plan.html" in readme
    assert ET.parse(folder / "loss.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "[plan.html](plan.html)" in readme
    page = (folder / "plan.html").read_text()
    assert f"<title>{load_job(folder / 'job.yaml').model}: " in page
    index = (ROOT / "examples" / "README.md").read_text()
    assert re.search(rf"^\| \[{name}\]\({name}/README\.md\) \|", index, re.MULTILINE)


class TestData:
    def test_lines_of_text_and_code(self) -> None:
        train, evaluation = bert.train_data(), bert.eval_data()
        assert (len(train), len(evaluation)) == (3600, 400)
        assert not {text for text, _ in train} & {text for text, _ in evaluation}
        assert (sum(label for _, label in train), sum(label for _, label in evaluation)) == (1800, 200)
        assert all(bert.MIN_BYTES <= len(text) <= bert.MAX_BYTES for text, _ in train)

    def test_lines_are_padded_to_the_longest(self) -> None:
        batch = bert.pad([(b"abc", 0), (b"a", 1)])
        assert batch["input_ids"].tolist() == [[1, 97, 98, 99], [1, 97, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
        assert batch["labels"].tolist() == [0, 1]

    def test_minibatches_have_lines_of_like_length(self) -> None:
        lines = bert.train_data()
        order = list(bert.by_length(lines))
        assert sorted(order) == list(range(3600))
        minibatches = [order[start : start + 32] for start in range(0, len(order), 32)]
        lengths = [[len(lines[index][0]) for index in one] for one in minibatches]
        spreads = [max(one) - min(one) for one in lengths]
        assert sum(spreads) / len(spreads) < 10 < bert.MAX_BYTES - bert.MIN_BYTES

    def test_words_are_spelled_backwards(self) -> None:
        batch = t5.backwards(["abc", "de"])
        assert batch["input_ids"].tolist() == [[97, 98, 99, 1], [100, 101, 1, 0]]
        assert batch["labels"].tolist() == [[99, 98, 97, 1], [101, 100, 1, -100]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]

    def test_words_are_different_ones(self) -> None:
        words = [*t5.train_data(), *t5.eval_data()]
        assert len(set(words)) == len(words) > 2000
        assert all(t5.MIN_LETTERS <= len(word) <= t5.MAX_LETTERS for word in words)

    def test_images_keep_their_colour(self) -> None:
        images = resnet.train_data()
        image, label = images[3]
        assert (image.shape, image.dtype, int(label)) == ((3, 32, 32), torch.float32, int(images[3][1]))
        assert torch.equal(image, images[3][0])
        assert len(images) == 3 * 1442
        with pytest.raises(IndexError, match="image 4326 of 4326"):
            images[4326]

    def test_labels_are_the_inputs(self) -> None:
        sample = gpt2.eval_data()[0]
        assert torch.equal(sample["input_ids"], sample["labels"])
        assert len(gpt2.train_data()) > len(gpt2.eval_data()) > 100


class TestPicture:
    def test_the_line_and_the_dots(self) -> None:
        drawn = ET.fromstring(plot_loss.draw("a < b", [(1, 4.0), (50, 2.0), (100, 1.0)], [(100, 1.5)]))
        line = next(element for element in drawn if element.tag.endswith("polyline"))
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert points[0][1] == plot_loss.TOP and points[-1] == (620.0, 275.0)
        assert points[0] < points[1] < points[2]
        assert sum(element.tag.endswith("circle") for element in drawn) == 1

    def test_a_constant_loss(self) -> None:
        assert "<polyline" in plot_loss.draw("flat", [(1, 2.0), (2, 2.0)], [])

    def test_a_run_without_losses(self, tmp_path: Path) -> None:
        assert "has no losses yet" in plot_loss.main([str(tmp_path), "x.svg"])
        assert plot_loss.main([]).startswith("usage:")
