"""User code can fail in many ways; each becomes one sentence that names the key, the place and the fix."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.pipeline import metrics
from hetpipe.pipeline.callables import (
    CollatedDataset,
    EpochOrder,
    MapDataset,
    WeightedLosses,
    _own_weight,
    build_datasets,
    build_model,
    call_loss,
    call_metric,
    epoch_order,
    load_callable,
    load_loss,
    load_metrics,
    load_minibatch_weight,
)
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.layering import layers_of
from hetpipe.pipeline.metrics import Ratio
from hetpipe.pipeline.streams import StreamDataset
from hetpipe.values.run import RatioSums

USER_CODE = """
import sys
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

NUMBER = 3
instance = nn.Linear(2, 2)

class Holder:
    class Inner(nn.Module):
        pass
    @staticmethod
    def build():
        return nn.Linear(1, 1)

class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples
    def __iter__(self):
        return iter(self.samples)

class Sized(Stream):
    def __len__(self):
        return len(self.samples)

class NoLength:
    def __getitem__(self, index):
        return index, index

class BrokenSample:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return 1 / 0

def build(width=2):
    return nn.Sequential(nn.Linear(width, 2))

def needs_width(width):
    return build(width)

def returns_none():
    return None

def raises():
    raise RuntimeError("no GPU")

def exits():
    sys.exit(3)

def ten():
    return TensorDataset(torch.zeros(10, 2), torch.zeros(10))

def three():
    return [(torch.zeros(2), 0)] * 3

def empty():
    return []

def singles():
    return TensorDataset(torch.zeros(10, 2))

def mapping():
    return {"a": 1}

def stream(number=4):
    return Stream([(torch.zeros(2), 0)] * number)

def sized():
    return Sized([(torch.zeros(2), 0)] * 4)

def stream_of_singles():
    return Stream([1, 2])

def no_length():
    return NoLength()

def broken_sample():
    return BrokenSample()

def one_argument_loss(output):
    return output.mean()

def loss(output, target):
    return (output - target).square().mean()

def metric(output, target, scale=1.0):
    return 0.5

def numbers(count=4):
    return list(range(count))

def pad(samples):
    return torch.tensor(samples), torch.tensor(samples)

class Padding:
    def __init__(self, value=0):
        self.value = value
    def __call__(self, samples):
        return torch.tensor([self.value]), torch.tensor(samples)

def no_samples():
    return 0

def backwards(data):
    return torch.arange(len(data) - 1, -1, -1)

def rotated(data, by, epoch):
    return [(index + by * epoch) % len(data) for index in range(len(data))]

def repeats(data):
    return [0, 1, 1, 2]

def exceeds(data):
    return range(len(data) + 1)

def negative(data):
    return [-1, 0, 1, 2]

def endless(data):
    while True:
        yield 3

def lacks(data):
    return [3, 0]

def in_lists(data):
    return [[0, 1], [2, 3]]

def breaks_off(data):
    yield 0
    raise RuntimeError("no index")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of user code; what is imported from it is forgotten again."""
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "user_code.py").write_text(USER_CODE, encoding="utf-8")
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def job(**changes: Any) -> Job:
    """A job on the user code, with `changes`."""
    values: dict[str, Any] = {
        "model": "user_code:build",
        "loss": "user_code:loss",
        "data": {"train": "user_code:ten"},
        "optimizer": {"name": "SGD"},
        "batch_size": 2,
        "epochs": 1,
    }
    return Job(**{**values, **changes})


def refused(reference: str, folder: Path) -> str:
    """The message with which `load_callable` refuses `reference`."""
    with pytest.raises(CallableError) as caught:
        load_callable(reference, folder, "loss")
    return str(caught.value)


class TestLoadCallable:
    def test_from_the_folder(self, folder: Path) -> None:
        assert isinstance(load_callable("user_code:build", folder)(), nn.Sequential)

    def test_dots_reach_into_classes(self, folder: Path) -> None:
        assert isinstance(load_callable("user_code:Holder.build", folder)(), nn.Linear)

    def test_installed_modules(self, folder: Path) -> None:
        assert load_callable("torch.nn.functional:cross_entropy", folder) is functional.cross_entropy

    def test_the_folder_comes_first_and_stays(self, folder: Path) -> None:
        load_callable("user_code:build", folder)
        load_callable("user_code:build", folder)
        assert sys.path.count(str(folder)) == 1
        assert sys.path[0] == str(folder)

    @pytest.mark.parametrize("reference", ["user_code", "user_code:", ":build", ""])
    def test_bad_form(self, folder: Path, reference: str) -> None:
        assert refused(reference, folder) == f"loss: {reference!r} must be `module:callable`, for example `model:build`"

    def test_no_such_module(self, folder: Path) -> None:
        message = refused("usr_code:build", folder)
        assert message == (
            f"loss: there is no module `usr_code`; looked in {folder}, then among the installed packages; "
            "did you mean `user_code`?"
        )

    def test_no_such_submodule(self, folder: Path) -> None:
        assert "there is no module `torch.nn.funktional`; looked in" in refused("torch.nn.funktional:mse_loss", folder)
        assert "there is no module `user_code.deep`" in refused("user_code.deep:build", folder)

    def test_a_module_that_needs_a_missing_one(self, folder: Path) -> None:
        (folder / "needy.py").write_text("import torch\nimport not_installed_anywhere\n", encoding="utf-8")
        message = refused("needy:build", folder)
        assert message.startswith(
            "loss: importing `needy` needs the module `not_installed_anywhere`, which is not installed"
        )
        assert f"({folder / 'needy.py'} line 2)" in message

    def test_a_package_of_the_extra_models_that_is_missing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)
        (folder / "vision.py").write_text("import timm\n", encoding="utf-8")
        for reference in ("timm:create_model", "vision:build"):
            assert refused(reference, folder).endswith("install it on every node: pip install 'hetpipe[models]'")
        assert "hetpipe[models]" not in refused("transformers.nothing:build", folder), "which is installed"

    @pytest.mark.parametrize(
        ("code", "told"),
        [
            ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero ({file} line 2)"),
            ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax ({file} line 2)"),
            ("import sys\nsys.exit(2)\n", "SystemExit: 2 ({file} line 2)"),
            ("from torch import not_a_name\n", "ImportError: cannot import name 'not_a_name' from 'torch'"),
        ],
    )
    def test_an_error_during_import(self, folder: Path, code: str, told: str) -> None:
        (folder / "broken.py").write_text(code, encoding="utf-8")
        message = refused("broken:build", folder)
        assert message.startswith(f"loss: importing `broken` raised {told.format(file=folder / 'broken.py')}"), message
        assert message.endswith("; fix the module")

    def test_a_script_that_starts_a_run_when_it_is_imported(self, folder: Path) -> None:
        (folder / "script.py").write_text("import hetpipe\nhetpipe.train('job.yaml')\n", encoding="utf-8")
        assert refused("script:build", folder) == (
            "loss: `script` starts a run while it is imported by a process of the run; put the call under "
            '`if __name__ == "__main__":`'
        )

    def test_no_such_attribute(self, folder: Path) -> None:
        assert refused("user_code:biuld", folder) == "loss: `user_code` has no `biuld`; did you mean `build`?"
        assert refused("user_code:zebra", folder) == "loss: `user_code` has no `zebra`; define it there"
        assert (
            refused("user_code:Holder.biuld", folder)
            == "loss: `user_code.Holder` has no `biuld`; did you mean `build`?"
        )

    def test_not_callable(self, folder: Path) -> None:
        message = refused("user_code:NUMBER", folder)
        assert message == "loss: `user_code:NUMBER` is of type int and cannot be called; name a function or class"

    def test_a_namesake_that_is_imported_already(self, folder: Path) -> None:
        (folder / "json.py").write_text("def build(): ...\n", encoding="utf-8")
        message = refused("json:build", folder)
        assert message.startswith(f"loss: the module `json` of {folder} is shadowed by the one already imported from")
        assert message.endswith("rename your module")

    def test_a_checkout_of_hetpipe_is_no_namesake(self, folder: Path) -> None:
        (folder / "hetpipe").mkdir()
        (folder / "hetpipe" / "__init__.py").write_text("", encoding="utf-8")
        assert load_callable("hetpipe.pipeline.metrics:accuracy", folder) is metrics.accuracy


class TestModel:
    def test_good(self, folder: Path) -> None:
        assert isinstance(build_model(job(), folder), nn.Sequential)
        assert isinstance(build_model(job(model="user_code:Holder.Inner"), folder), nn.Module)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("returns_none", "model: `user_code:returns_none()` returned None; it must return a torch.nn.Module"),
            ("ten", "returned an object of type TensorDataset; it must return a torch.nn.Module"),
            ("three", "returned a list of 3; it must return"),
            ("raises", "model: `user_code:raises()` raised RuntimeError: no GPU ("),
            ("exits", "model: `user_code:exits()` raised SystemExit: 3 ("),
            (
                "needs_width",
                "model: `user_code:needs_width` is called without arguments, but missing a required argument",
            ),
            ("instance", "model: `user_code:instance` is a module itself; name a function that returns a new one"),
        ],
    )
    def test_bad(self, folder: Path, name: str, message: str) -> None:
        with pytest.raises(CallableError, match=re.escape(message)):
            build_model(job(model=f"user_code:{name}"), folder)


class TestLazyImports:
    """Packages that import their modules on first use hide why one of them failed."""

    LAZY = """
def __getattr__(name):
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'GPT2'") from error
"""

    @pytest.fixture
    def lazy(self, folder: Path) -> Path:
        (folder / "lazy_package.py").write_text(self.LAZY)
        (folder / "uses_lazy.py").write_text("from lazy_package import GPT2\n")
        return folder

    def test_the_cause_of_a_failed_look_up_is_named(self, lazy: Path) -> None:
        with pytest.raises(CallableError, match=r"caused by RuntimeError: operator torchvision::nms does not exist"):
            load_callable("lazy_package:GPT2", lazy)

    def test_a_failed_import_is_not_told_as_a_missing_package_without_a_name(self, lazy: Path) -> None:
        with pytest.raises(CallableError) as caught:
            load_callable("uses_lazy:build", lazy)
        message = str(caught.value)
        assert "model: importing `uses_lazy` raised ModuleNotFoundError: Could not import module 'GPT2' (" in message
        assert "caused by RuntimeError: operator torchvision::nms does not exist" in message
        assert "``" not in message


class TestDatasets:
    def test_good(self, folder: Path) -> None:
        train, evaluation = build_datasets(job(data={"train": "user_code:ten", "eval": "user_code:three"}), folder)
        assert len(train) == 10
        assert evaluation is not None
        assert len(evaluation) == 3

    def test_no_evaluation(self, folder: Path) -> None:
        assert build_datasets(job(), folder)[1] is None

    def test_a_batch_larger_than_the_data(self, folder: Path) -> None:
        assert len(build_datasets(job(batch_size=10), folder)[0]) == 10
        expected = "batch_size: is 11, but data.train (`user_code:ten`) has only 10 samples; set it to 10 or less"
        with pytest.raises(CallableError, match=re.escape(expected)):
            build_datasets(job(batch_size=11), folder)

    @pytest.mark.parametrize("key", ["train", "eval"])
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("empty", "is empty; a dataset needs at least one sample"),
            ("singles", "sample 0 is a tuple of 1; each sample must be a pair (input, target)"),
            ("mapping", "returned an object of type dict; return a map-style dataset"),
            ("no_length", "returned an object of type NoLength without __len__; return a map-style dataset"),
            ("returns_none", "returned None without __len__ and __getitem__"),
            ("broken_sample", "reading its length and first sample raised ZeroDivisionError: division by zero ("),
        ],
    )
    def test_bad(self, folder: Path, key: str, name: str, message: str) -> None:
        data = {"train": "user_code:ten", key: f"user_code:{name}"}
        with pytest.raises(CallableError) as caught:
            build_datasets(job(data=data), folder)
        assert str(caught.value).startswith(f"data.{key}: `user_code:{name}()`")
        assert message in str(caught.value)


class TestStreams:
    def built(self, folder: Path, **data: Any) -> tuple[MapDataset, MapDataset | None]:
        return build_datasets(job(batch_size=2, data={"shuffle": False, "train": "user_code:stream", **data}), folder)

    def test_good(self, folder: Path) -> None:
        train, evaluation = self.built(folder, length=3, eval="user_code:stream", eval_length=2)
        assert isinstance(train, StreamDataset)
        assert isinstance(evaluation, StreamDataset)
        assert (len(train), len(evaluation)) == (3, 2)
        assert [len(self.built(folder, train="user_code:sized", **keys)[0]) for keys in ({}, {"length": 3})] == [4, 3]
        collated, _ = self.built(folder, train="user_code:stream_of_singles", length=2, collate_fn="user_code:pad")
        assert isinstance(collated, CollatedDataset)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (
                {},
                (
                    "data.train: `user_code:stream()` returned a stream (Stream), which does not say how long it is; "
                    "state the number of samples of an epoch as data.length"
                ),
            ),
            (
                {"train": "user_code:ten", "eval": "user_code:stream"},
                (
                    "data.eval: `user_code:stream()` returned a stream (Stream), which does not say how long it is; "
                    "state the number of samples of an epoch as data.eval_length"
                ),
            ),
            (
                {"train": "user_code:sized", "length": 5},
                "data.length: is 5, but the stream of `user_code:sized()` says that it has 4 samples; set it to 4 or",
            ),
            (
                {"train": "user_code:ten", "length": 5},
                "data.length: is 5, but `user_code:ten()` returned a map-style dataset, which has a length; remove it,",
            ),
            (
                {"length": 3, "shuffle": True},
                "data.shuffle: is true, but `user_code:stream()` returned a stream, which is read in its own order;",
            ),
            (
                {"length": 3, "shuffle": True, "sampler": "user_code:backwards"},
                "data.sampler: is `user_code:backwards`, but `user_code:stream()` returned a stream, which is read in",
            ),
            (
                {"train": {"call": "user_code:stream", "args": {"number": 0}}, "length": 3},
                "data.train: the stream ends in epoch 1 after 0 samples, at position 0, but an epoch has 3",
            ),
            (
                {"train": "user_code:stream_of_singles", "length": 2},
                "data.train: `user_code:stream_of_singles()`: sample 0 is an object of type int; each sample must be a",
            ),
            ({"length": 1}, "batch_size: is 2, but data.train (`user_code:stream`) has only 1 samples; set it to 1"),
        ],
    )
    def test_bad(self, folder: Path, data: dict[str, Any], message: str) -> None:
        with pytest.raises(CallableError) as caught:
            self.built(folder, **data)
        assert str(caught.value).startswith(message)


class TestMeanOver:
    def test_samples_have_no_callable(self, folder: Path) -> None:
        assert load_minibatch_weight(job(), folder) is None

    @pytest.mark.parametrize(("word", "expected"), [("tokens", 4), ("next_tokens", 3)])
    def test_the_words(self, word: str, expected: int, folder: Path) -> None:
        labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
        weight = load_minibatch_weight(job(mean_over=word), folder)
        assert weight is not None
        assert weight(labels) == weight({"labels": labels, "x": None}) == expected

    @pytest.mark.parametrize(
        ("target", "found"),
        [
            (torch.ones(2), "a tensor of torch.float32"),
            ({"input_ids": torch.ones(2)}, "None"),
            ((torch.ones(2),), "a tuple of 1"),
        ],
    )
    def test_a_target_without_tokens(self, target: object, found: str, folder: Path) -> None:
        weight = load_minibatch_weight(job(mean_over="tokens"), folder)
        assert weight is not None
        with pytest.raises(
            CallableError, match=rf"mean_over: `tokens` counts the entries .*, and found {found}; name a"
        ):
            weight(target)

    def test_a_callable_of_ones_own(self, folder: Path) -> None:
        weight = load_minibatch_weight(job(mean_over="builtins:len"), folder)
        assert weight is not None
        assert weight([1, 2, 3]) == 3
        with pytest.raises(CallableError, match=r"mean_over: `builtins:len` raised TypeError"):
            weight(3)
        with pytest.raises(CallableError, match=r"mean_over: `user_code:loss` must take the target or batch, but"):
            load_minibatch_weight(job(mean_over="user_code:loss"), folder)

    @pytest.mark.parametrize("returned", [-1, 0.5, True, "3", None, torch.ones(2), float("nan"), float("inf")])
    def test_what_is_no_count(self, returned: object, folder: Path) -> None:
        function = partial(_own_weight, "m:f", lambda _: returned)
        with pytest.raises(CallableError, match=r"mean_over: `m:f` returned .*; return a whole number of at least 0"):
            function(None)


class TestCollateFunction:
    def test_a_function_and_the_result_of_a_call(self, folder: Path) -> None:
        data = {"train": {"call": "user_code:numbers", "args": {"count": 3}}, "collate_fn": "user_code:pad"}
        train, _ = build_datasets(job(data=data), folder)
        assert isinstance(train, CollatedDataset)
        assert (len(train), train[2], train.collate_fn([1, 2])[0].tolist()) == (3, 2, [1, 2])
        padding = {"call": "user_code:Padding", "args": {"value": 7}}
        train, _ = build_datasets(job(data={"train": "user_code:numbers", "collate_fn": padding}), folder)
        assert isinstance(train, CollatedDataset)
        assert train.collate_fn([1])[0].tolist() == [7]

    @pytest.mark.parametrize(
        ("named", "message"),
        [
            (
                "user_code:Padding",
                "is a class, and calling it with the samples would only construct it",
            ),
            ("user_code:no_samples", "must take one argument, the list of samples, but too many positional arguments"),
            ("user_code:absent", "has no `absent`"),
            ({"call": "user_code:ten"}, "returned an object of type TensorDataset, which cannot be called"),
            ({"call": "user_code:raises"}, "raised RuntimeError: no GPU"),
        ],
    )
    def test_bad(self, folder: Path, named: Any, message: str) -> None:
        with pytest.raises(CallableError) as caught:
            build_datasets(job(data={"train": "user_code:numbers", "collate_fn": named}), folder)
        assert str(caught.value).startswith("data.collate_fn: ")
        assert message in str(caught.value)


class TestEpochOrder:
    def order(self, folder: Path, **data: Any) -> EpochOrder | None:
        checked = job(data={"train": "user_code:numbers", "collate_fn": "user_code:pad", **data})
        train, _ = build_datasets(checked, folder)
        return epoch_order(checked, folder, train)

    def test_a_shuffled_job_has_none(self, folder: Path) -> None:
        assert self.order(folder) is None

    def test_good(self, folder: Path) -> None:
        for keys, first, second in (
            ({"shuffle": False}, [0, 1, 2, 3], [0, 1, 2, 3]),
            ({"sampler": "user_code:backwards"}, [3, 2, 1, 0], [3, 2, 1, 0]),
            ({"sampler": {"call": "user_code:rotated", "args": {"by": 3}}}, [0, 1, 2, 3], [3, 0, 1, 2]),
        ):
            order = self.order(folder, **keys)
            assert order is not None
            assert (list(order(0)), list(order(1))) == (first, second)

    def test_once_per_epoch_under_a_seed_of_its_own(self, folder: Path) -> None:
        name = "torch.utils.data:RandomSampler"
        first, again = self.order(folder, sampler=name), self.order(folder, sampler=name)
        assert first is not None and again is not None
        before = torch.get_rng_state()
        orders = [first(epoch) for epoch in range(8)]
        assert torch.equal(torch.get_rng_state(), before)
        assert len(set(map(tuple, orders))) > 2
        assert [again(epoch) for epoch in range(8)] == orders
        assert first(7) is orders[7]

    @pytest.mark.parametrize(
        ("named", "message"),
        [
            (
                "repeats",
                "gives sample 1 twice, at positions 1 and 2; each sample counts once per epoch: give every index",
            ),
            ("endless", "gives sample 3 twice, at positions 0 and 1"),
            ("exceeds", "gives sample 4 at position 4, but data.train has 4 samples, numbered from 0"),
            ("negative", "gives sample -1 at position 0, but data.train has 4 samples"),
            ("lacks", "gives 2 of the 4 samples of data.train; sample 1 is the first that is missing: give every"),
            ("in_lists", "gives a list of 2 at position 0; a sampler gives the indices of samples, one by one"),
            ("breaks_off", "raised RuntimeError: no index ("),
            ("no_samples", None),
            ("rotated", None),
            ("raises", None),
        ],
    )
    def test_bad(self, folder: Path, named: str, message: str | None) -> None:
        order = self.order(folder, sampler=f"user_code:{named}")
        assert order is not None
        with pytest.raises(CallableError) as caught:
            order(2)
        if message is None:
            assert str(caught.value).startswith(f"data.sampler: `user_code:{named}`")
        else:
            assert str(caught.value).startswith(f"data.sampler: in epoch 3, `user_code:{named}` {message}")

    def test_what_cannot_be_iterated(self, folder: Path) -> None:
        order = self.order(folder, sampler={"call": "user_code:Padding"})
        assert order is not None
        with pytest.raises(CallableError, match=r"raised TypeError: 'Padding' object is not iterable"):
            order(0)


class TestLossAndMetrics:
    def test_good(self, folder: Path) -> None:
        loss = load_loss(job(), folder)
        assert loss is not None
        assert call_loss(loss, torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])).item() == 5.0
        metrics = load_metrics(job(metrics={"b": "user_code:metric", "a": "user_code:loss"}), folder)
        assert list(metrics) == ["b", "a"]
        assert call_metric("b", metrics["b"], None, None) == 0.5
        assert call_metric("a", metrics["a"], torch.tensor([2.0]), torch.tensor([0.0])) == 4.0

    def test_several_losses(self, folder: Path) -> None:
        terms = {"main": "user_code:loss", "aux": {"call": "user_code:loss", "weight": 0.5}}
        loss = load_loss(job(loss=terms), folder)
        assert isinstance(loss, WeightedLosses)
        output, target = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 0.0])
        assert call_loss(loss, output, target).item() == 7.5
        assert loss.values == {"main": 5.0, "aux": 5.0}
        with torch.no_grad():
            found = {name: call_metric(name, each, output, target) for name, each in loss.functions.items()}
        assert found == loss.values
        assert loss.computed_by_model is None

    def test_one_of_several_losses_is_named_in_its_mistakes(self, folder: Path) -> None:
        with pytest.raises(CallableError, match=r"loss\.aux\.call: `user_code` has no `los`; did you mean `loss`"):
            load_loss(job(loss={"main": "user_code:loss", "aux": "user_code:los"}), folder)
        own = load_loss(job(loss={"main": "user_code:loss", "own": {}}), folder)
        assert isinstance(own, WeightedLosses)
        assert own.computed_by_model == "own"
        with pytest.raises(CallableError, match=r"^loss\.own: has no `call`, and the model's output \(Tensor\) has no"):
            call_loss(own, torch.ones(2, requires_grad=True), torch.ones(2))
        with pytest.raises(CallableError, match=r"^loss\.main: raised RuntimeError"):
            call_loss(own, torch.ones(2, requires_grad=True), torch.ones(3))
        with pytest.raises(CallableError, match=r"^loss\.own: has no `call`, and Sequential is a chain of layers"):
            layers_of(nn.Sequential(nn.Linear(2, 2)), Batch((torch.zeros(2, 2),), torch.zeros(2), 2), own)

    def test_a_ratio(self) -> None:
        found = call_metric("m", lambda *_: Ratio(torch.tensor([1, 2]), torch.tensor([2.0, 4.0])), None, None)
        assert found == RatioSums((1.0, 2.0), (2.0, 4.0))
        assert call_metric("m", lambda *_: Ratio(torch.tensor(1), torch.tensor(2)), None, None) == RatioSums(
            (1.0,), (2.0,)
        )

    @pytest.mark.parametrize(("numerators", "denominators"), [(2, 1), (0, 0), (4097, 4097)])
    def test_a_bad_ratio(self, numerators: int, denominators: int) -> None:
        ratio = Ratio(torch.ones(numerators), torch.ones(denominators))
        message = rf"metrics\.m: returned a Ratio of {numerators} numerators and {denominators} denominators; return as"
        with pytest.raises(CallableError, match=message):
            call_metric("m", lambda *_: ratio, None, None)

    def test_a_class_is_no_loss(self, folder: Path) -> None:
        with pytest.raises(CallableError, match=r"loss: `torch\.nn:CrossEntropyLoss` is a class, and calling it"):
            load_loss(job(loss="torch.nn:CrossEntropyLoss"), folder)

    def test_too_few_arguments(self, folder: Path) -> None:
        with pytest.raises(
            CallableError, match=r"loss: `user_code:one_argument_loss` must take \(output, target\), but too"
        ):
            load_loss(job(loss="user_code:one_argument_loss"), folder)
        with pytest.raises(CallableError, match=r"metrics\.x: `user_code:one_argument_loss` must take"):
            load_metrics(job(metrics={"x": "user_code:one_argument_loss"}), folder)

    def test_one_element_is_made_a_scalar(self) -> None:
        output = torch.ones(3, requires_grad=True)
        result = call_loss(lambda out, _: out.sum().reshape(1, 1), output, None)
        assert result.shape == ()
        result.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        assert output.grad is not None

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (torch.zeros(4), "loss: returned a tensor of shape [4]; return one number, the mean over the samples"),
            (torch.zeros(2, 3), "loss: returned a tensor of shape [2, 3]; return one number"),
            (torch.zeros(0), "loss: returned a tensor of shape [0]; return one number"),
            (torch.tensor(3), "loss: returned a tensor of torch.int64; return a floating-point tensor"),
            (torch.tensor(1j), "loss: returned a tensor of torch.complex64; return a floating-point tensor"),
            (1.5, "loss: returned an object of type float; return a tensor with the mean over the samples"),
            (None, "loss: returned None; return a tensor"),
            ((torch.zeros(()), 1), "loss: returned a tuple of 2; return a tensor"),
        ],
    )
    def test_no_scalar(self, returned: object, message: str) -> None:
        with pytest.raises(CallableError, match=re.escape(message)):
            call_loss(lambda *_: returned, torch.zeros(4), torch.zeros(4))

    def test_a_detached_loss(self) -> None:
        def detached(output: Tensor, _: Tensor) -> Tensor:
            return torch.tensor(output.sum().item())

        output = torch.ones(3, requires_grad=True)
        with pytest.raises(CallableError, match="loss: its result does not depend on the output"):
            call_loss(detached, output, None)
        with torch.no_grad():
            assert call_loss(lambda out, _: out.sum(), output * 2, None).item() == 6.0

    def test_a_loss_that_raises(self) -> None:
        with pytest.raises(CallableError, match=r"loss: raised RuntimeError: .*size of tensor"):
            call_loss(lambda output, target: (output - target).sum(), torch.zeros(2), torch.zeros(3))
        with pytest.raises(CallableError, match=r"metrics\.f1: returned a tensor of shape \[2\]"):
            call_metric("f1", lambda output, _: output, torch.zeros(2), None)
