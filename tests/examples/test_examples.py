"""The examples' own code: jobs that load, models that are chains, data that is what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.digits import model as digits
from examples.moved_digits import data as moved_data
from examples.moved_digits import model as moved
from examples.text import data as text_data
from examples.text import model as text
from hetpipe.decide.planner.partition import equal_cost_cut, layer_cost
from hetpipe.job.file import load_job
from hetpipe.pipeline.callables import build_datasets, build_model, call_loss, call_metric, load_loss, load_metrics
from hetpipe.pipeline.chain import chain_of
from hetpipe.pipeline.optimizer_choice import check_optimizer_arguments
from hetpipe.values.policies import WEIGHT_POLICIES
from hetpipe.values.run import RatioSums
from tests.support.inspection import inspect_job

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "hetpipe" / "cli" / "templates"
MAX_JOB_LINES = 25

JOBS = [
    (ROOT / "examples" / "digits" / "job.yaml", ROOT),
    (ROOT / "examples" / "moved_digits" / "job.yaml", ROOT),
    (ROOT / "examples" / "text" / "job.yaml", ROOT),
    (TEMPLATES / "job.yaml", TEMPLATES),
]


@pytest.fixture
def restored_imports() -> Iterator[None]:
    """Forgets what the test imports, so that a module `model` of one folder hides no other."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "model":
            del sys.modules[name]


@pytest.mark.parametrize(("path", "import_path"), JOBS, ids=["digits", "moved_digits", "text", "template"])
@pytest.mark.usefixtures("restored_imports")
def test_a_job_and_its_code_fit_together(path: Path, import_path: Path) -> None:
    job = load_job(path)
    check_optimizer_arguments(job.optimizer)
    model = build_model(job, import_path)
    assert len(chain_of(model)) >= 4
    train, evaluation = build_datasets(job, import_path)
    assert evaluation is not None
    inputs, targets = torch.utils.data.default_collate([train[i] for i in range(job.batch_size)])
    function = load_loss(job, import_path)
    assert function is not None
    loss = call_loss(function, model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
    assert all(parameter.grad is not None for parameter in model.parameters())
    for name, metric in load_metrics(job, import_path).items():
        value = call_metric(name, metric, model(inputs), targets)
        assert 0 <= (value.value if isinstance(value, RatioSums) else value) <= 1


@pytest.mark.parametrize("name", ["digits", "moved_digits", "text"])
def test_job_files_are_short(name: str) -> None:
    assert len((ROOT / "examples" / name / "job.yaml").read_text().splitlines()) <= MAX_JOB_LINES


class TestDigits:
    def test_the_job_is_the_demo(self) -> None:
        job = load_job(ROOT / "examples" / "digits" / "job.yaml")
        assert (job.workers.count, job.workers.stages, job.parameter_servers.count) == (2, 2, 2)
        assert len({device.slowdown for device in job.emulated_devices()}) > 1
        assert job.optimizer.arguments["momentum"]

    @pytest.mark.parametrize("stages", [1, 2, 3, 4])
    def test_any_number_of_stages(self, stages: int) -> None:
        job = load_job(ROOT / "examples" / "digits" / "job.yaml", {"workers": {"stages": stages}})
        assert len(job.emulated_devices()) == 2 * stages
        assert job.sync.minibatches_per_wave == 4

    def test_the_split_is_fixed_stratified_and_complete(self) -> None:
        train, evaluation = digits.train_data(), digits.eval_data()
        assert (len(train), len(evaluation)) == (1442, 355)
        counts = torch.bincount(evaluation.tensors[1], minlength=10)
        assert counts.min() >= 34
        assert counts.max() <= 36
        assert torch.equal(train.tensors[0], digits.train_data().tensors[0])

    def test_samples(self) -> None:
        image, label = digits.train_data()[0]
        assert (image.dtype, tuple(image.shape)) == (torch.float32, (digits.NUM_PIXELS,))
        assert (label.dtype, label.ndim) == (torch.int64, 0)

    def test_every_fifth_of_each_class(self) -> None:
        labels = torch.tensor([0] * 6 + [1] * 4 + [0] * 4 + [1])
        assert digits.is_for_evaluation(labels).nonzero().flatten().tolist() == [4, 13, 14]


class TestMovedDigits:
    @pytest.mark.parametrize("weights", WEIGHT_POLICIES)
    def test_every_policy_can_train_it(self, weights: str) -> None:
        job = load_job(ROOT / "examples" / "moved_digits" / "job.yaml", {"weights": weights})
        assert (job.num_workers, job.num_devices, job.sync.minibatches_per_wave) == (1, 4, 4)

    def test_samples(self) -> None:
        train, evaluation = moved_data.train_data(), moved_data.eval_data()
        assert (len(train), len(evaluation)) == (3 * 1442, 2 * 355)
        image, label = train[0]
        assert (image.dtype, tuple(image.shape)) == (torch.float32, (1, moved.SIZE, moved.SIZE))
        assert (label.dtype, label.ndim) == (torch.int64, 0)

    def test_every_process_has_the_same_samples_whatever_its_random_state(self) -> None:
        torch.manual_seed(1)
        first = moved_data.train_data().tensors
        torch.manual_seed(2)
        assert all(torch.equal(a, b) for a, b in zip(first, moved_data.train_data().tensors, strict=True))

    def test_variants_of_an_original_have_its_label_and_another_place(self) -> None:
        images, labels = moved_data.train_data().tensors
        assert torch.equal(labels[:1442], digits.train_data().tensors[1])
        assert torch.equal(labels[:1442], labels[1442:2884])
        different = (images[:1442] - images[1442:2884]).abs().amax(dim=(1, 2, 3))
        assert different.min() > 0.1

    def test_digits_stay_in_the_picture_on_a_flat_background(self) -> None:
        images = moved_data.train_data().tensors[0]
        corners = images[:, 0, :: moved.SIZE - 1, :: moved.SIZE - 1]
        background = -digits.PIXEL_MEAN / digits.PIXEL_SCALE
        assert (corners - background).abs().mean() < 0.2
        assert torch.isclose(images.min(), torch.tensor(background))

    def test_a_digit_that_is_not_moved_is_only_enlarged(self) -> None:
        image = torch.full((1, 8, 8), -digits.PIXEL_MEAN / digits.PIXEL_SCALE)
        image[0, 2, 5] = 2.0
        still = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
        drawn = moved_data.draw(image, still)
        assert divmod(int(drawn.argmax()), moved.SIZE) in {(row, column) for row in (4, 5) for column in (10, 11)}

    def test_a_map_moves_the_middle_by_its_draw(self) -> None:
        maps = moved_data.affine_maps(200, seed=5)
        turns, shifts = maps[:, :, :2], maps[:, :, 2:]
        scales = torch.linalg.det(turns).rsqrt()
        assert 0.75 <= scales.min() < 0.8
        assert 0.95 < scales.max() <= 1.0
        middles = torch.linalg.solve(turns, -shifts)
        assert middles.abs().max() <= 2 * moved_data.MOST_MOVED_SHARE

    def test_four_stages_get_two_layers_each(self) -> None:
        job = load_job(ROOT / "examples" / "moved_digits" / "job.yaml")
        costs = [layer_cost(layer) for layer in inspect_job(job, ROOT).layers]
        assert equal_cost_cut(costs, 4) == (2, 2, 2, 2)

    def test_shapes_along_the_chain(self) -> None:
        values = torch.zeros(3, 1, moved.SIZE, moved.SIZE)
        shapes = []
        for layer in moved.build():
            values = layer(values)
            shapes.append(tuple(values.shape[1:]))
        assert shapes[0] == (32, 16, 16)
        assert shapes[2] == (64, 8, 8)
        assert shapes[-2:] == [(128, 4, 4), (moved.NUM_CLASSES,)]


class TestText:
    def test_the_chain_is_the_model(self) -> None:
        torch.manual_seed(0)
        model = text.build()
        layers = model.layers()
        assert len(layers) == text.NUM_BLOCKS + 2
        values = torch.randint(text.NUM_BYTE_VALUES, (2, text.CONTEXT))
        expected = model(values)
        for layer in layers:
            values = layer(values)
        assert torch.equal(values, expected)
        assert expected.shape == (2, text.CONTEXT, text.NUM_BYTE_VALUES)

    def test_no_byte_sees_the_future(self) -> None:
        model = text.build()
        first = torch.randint(text.NUM_BYTE_VALUES, (1, text.CONTEXT))
        second = first.clone()
        second[0, 40:] = 0
        torch.testing.assert_close(model(first)[:, :40], model(second)[:, :40])

    def test_a_fresh_model_knows_nothing(self) -> None:
        torch.manual_seed(0)
        values = torch.randint(text.NUM_BYTE_VALUES, (4, text.CONTEXT))
        assert text.loss(text.build()(values), values).item() == pytest.approx(5.55, abs=0.5)

    def test_samples_are_shifted_by_one_and_do_not_overlap(self) -> None:
        content = bytes(range(200))
        data = text_data.Text(content)
        assert len(data) == 3
        assert data[1][0].tolist() == list(content[64:128])
        assert data[1][1].tolist() == list(content[65:129])
        with pytest.raises(IndexError, match="sample 3 of 3"):
            data[3]

    @pytest.mark.parametrize(("num_bytes", "num_samples"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
    def test_number_of_samples(self, num_bytes: int, num_samples: int) -> None:
        assert len(text_data.Text(b"x" * num_bytes)) == num_samples

    def test_the_parts_make_the_whole(self) -> None:
        whole = text_data.read_text()
        assert len(whole) > 100_000
        parts = len(text_data.train_data()) + len(text_data.eval_data())
        assert parts == pytest.approx(len(whole) / text.CONTEXT, abs=2)

    def test_a_file_of_ones_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = tmp_path / "input.txt"
        own.write_bytes(b"abcd" * 1000)
        monkeypatch.setattr(text_data, "INPUT_FILE", own)
        assert bytes(text_data.train_data()[0][0][:4].tolist()) == b"abcd"
        own.write_bytes(b"too short")
        with pytest.raises(
            ValueError, match=r"the text has 9 bytes, of which 1 are for evaluation; give it at least 1320"
        ):
            text_data.train_data()


@pytest.mark.usefixtures("restored_imports")
def test_the_template_learns() -> None:
    job = load_job(TEMPLATES / "job.yaml")
    model = build_model(job, TEMPLATES)
    assert isinstance(model, nn.Sequential)
    train, evaluation = build_datasets(job, TEMPLATES)
    assert evaluation is not None
    inputs, targets = torch.utils.data.default_collate([train[i] for i in range(len(train))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        optimizer.step()
    inputs, targets = torch.utils.data.default_collate([evaluation[i] for i in range(len(evaluation))])
    assert (model(inputs).argmax(-1) == targets).float().mean() > 0.9
