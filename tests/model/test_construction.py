"""Stages build the model without memory, from the file of the inspection, and hold nothing but their own part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from hetpipe.model.absent import AbsentTensor
from hetpipe.model.description import from_plain, to_plain
from hetpipe.model.structure_text import NotDescribable
from hetpipe.pipeline.chain import Layer, Values, chain_of, forget_weights, run_layers, tensor_places
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.model_file import (
    ModelFileUnusable,
    construct,
    open_model_file,
    prove_construction,
    write_model_file,
)
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.rewinds import MODEL_FILE
from tests.model import zoo
from tests.model.harness import CPU, Made, Outcome, P, Subject, copies, differences, outputs_of, values_of


class Mixed(nn.Module):
    """A tie, frozen weights, a read-only buffer that two blocks use, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(zoo.VOCABULARY, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, zoo.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.offset = nn.Parameter(torch.linspace(-1.0, 1.0, 8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Any:
        h = self.embedding(tokens).mean(1)
        h = self.drop(self.frozen(h) + h) * (1.0 + self.offset)
        for index, block in enumerate(self.blocks):
            h = h + block(h * self.scale if index != 1 else h)
        return self.head(self.norm(h))


def tokens() -> Made:
    return (torch.randint(0, zoo.VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(0)),)


def images() -> Made:
    return (torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)


def loss(output: Tensor) -> Tensor:
    found: Tensor = output.square().mean()
    return found


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Made]]] = {
    "mixed": (Mixed, tokens),
    "u_net": (zoo.u_net, images),
}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return built


def apart(subject: Subject, build: Callable[[], nn.Module], folder: Path, bounds: Sequence[int], made: Made) -> Outcome:
    """Stages that have each built the model for themselves, as processes do."""
    subject.reset()
    path = folder / MODEL_FILE
    construction, why = prove_construction(seeded(build), subject.layers, values_of(made), seed=5)
    assert construction == "meta", why
    file = open_model_file(path, write_model_file(path, subject.layers, construction))
    groups: list[tuple[Layer, ...]] = []
    for first, last in pairwise([0, *bounds, len(subject.layers)]):
        group = file.chain(construct(seeded(build), file.construction))[first:last]
        file.take(group, CPU)
        groups.append(group)
    cut = groups[-1][0].cut
    assert cut is not None
    computes = [
        StageCompute(
            group,
            vw=VirtualWorkerIndex(0),
            seed=5,
            device=CPU,
            loss=(lambda _, __: loss(cut.output)) if group is groups[-1] else None,
            watches_activations=False,
        )
        for group in groups
    ]
    values: Values = copies(values_of(made))
    own = [
        {
            n: layer.module.get_parameter(k).detach().clone().requires_grad_()
            for layer in g
            for k, n in layer.parameters.items()
        }
        for g in groups
    ]
    for compute, weights in zip(computes, own, strict=True):
        values = compute.forward(P, weights, copies(tuple(value.detach() for value in values)))
    found = float(computes[-1].loss(P, values, None))
    outputs = outputs_of(cut.output)
    buffers = {
        name: layer.module.get_buffer(local).clone()
        for group in groups
        for layer in group
        for local, name in layer.buffers.items()
    }
    gradients: dict[str, Tensor | None] = {}
    sent: Sequence[Tensor | None] | None = None
    for compute, weights in reversed(list(zip(computes, own, strict=True))):
        step = compute.backward(P, weights, sent)
        gradients |= step.weights
        sent = step.inputs
    return Outcome(found, gradients, buffers, outputs)


@pytest.mark.parametrize("name", SUBJECTS)
def test_stages_that_hold_only_their_part_compute_the_bits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    build, made = SUBJECTS[name]
    subject = Subject(build, made(), loss=loss)
    whole = subject.stages((), made())
    last = len(subject.layers) - 1
    for bounds in ((last // 3,), (last // 2, last), tuple(range(1, last + 1))):
        assert not differences(whole, apart(subject, build, tmp_path, bounds, made()))


def held_bytes(layers: Sequence[Layer]) -> int:
    """Of tensors with elements, over all of the model's modules."""
    cut = layers[0].cut
    assert cut is not None
    tensors = {
        id(tensor): tensor
        for module in cut.model.modules()
        for table in (module._parameters, module._buffers)
        for tensor in table.values()
        if tensor is not None and not tensor.is_meta and not isinstance(tensor, AbsentTensor)
    }
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_stage_holds_its_own_tensors_and_frozen_ones_only_where_they_are_used(tmp_path: Path) -> None:
    subject = Subject(Mixed, tokens(), loss=loss)
    path = tmp_path / MODEL_FILE
    file = open_model_file(path, write_model_file(path, subject.layers, "meta"))
    whole = sum(t.nbytes for t in (*subject.bare.parameters(), *subject.bare.buffers()))
    holds: dict[str, set[int]] = {"scale": set(), "frozen.weight": set()}
    total = 0
    for index in range(len(subject.layers)):
        group = file.chain(construct(seeded(Mixed), "meta"))[index : index + 1]
        file.take(group, CPU)
        total += held_bytes(group)
        assert held_bytes(group) == sum(places[0][0][places[0][1]].nbytes for places in tensor_places(group).values())
        for name, found in holds.items():
            if name in tensor_places(group):
                found.add(index)
    scale = subject.cut.buffer_places["scale"][0][0]["scale"].nbytes
    assert total == whole + (len(holds["scale"]) - 1) * scale, "nothing but the buffer that several read is there twice"
    assert len(holds["frozen.weight"]) == 1
    assert 1 < len(holds["scale"]) < len(subject.layers)


def test_a_stage_in_the_run_does_not_keep_the_file_of_its_initial_weights_in_memory(tmp_path: Path) -> None:
    """A cut model has every parameter in two tables; one that is left holds the mapping of the whole file."""
    subject = Subject(Mixed, tokens(), loss=loss)
    path = tmp_path / MODEL_FILE
    file = open_model_file(path, write_model_file(path, subject.layers, "meta"))

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    layers = file.chain(construct(seeded(Mixed), "meta"))[:-1]
    file.take(layers, CPU)
    assert is_mapped()
    forget_weights(layers)
    assert not is_mapped()
    assert all(p.is_meta for layer in layers for p in map(layer.module.get_parameter, layer.parameters))


def test_what_the_description_says_is_read_as_it_was_written() -> None:
    for build, made in SUBJECTS.values():
        description = Subject(build, made(), loss=loss).cut.description
        assert from_plain(json.loads(json.dumps(to_plain(description)))) == description


def test_trainable_parameters_stay_in_the_file_until_they_are_read(tmp_path: Path) -> None:
    """The stage of a virtual worker that pulls its weights never reads those that the model was made with."""
    chain = chain_of(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)))
    path = tmp_path / MODEL_FILE
    file = open_model_file(path, write_model_file(path, chain, "meta"))
    layers = file.chain(construct(lambda: nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), "meta"))

    def resident() -> int:
        """Bytes of the file in memory, by all its mappings in this process."""
        lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
        sizes = (next(line for line in lines if line.startswith("Rss:")) for of in lines if of.endswith(str(path)))
        return sum(int(size.split()[1]) for size in sizes) * 1024

    file.take(layers[:1], CPU)
    assert resident() < 4 * 2**20
    assert torch.equal(layers[0].module.get_parameter("weight"), chain[0].module.get_parameter("weight"))
    assert resident() >= 16 * 2**20


class Computes(nn.Module):
    """Its constructor looks into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.scale = float(self.body.weight.detach().abs().max())

    def forward(self, x: Tensor) -> Any:
        return self.head(relu(self.body(x)) * self.scale)


class Keeps(nn.Module):
    """Keeps a tensor that is not registered, which has no elements when it is made without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.scale = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.head(relu(self.body(x)) * self.scale)


@pytest.mark.parametrize("kind", [Computes, Keeps])
def test_a_model_that_needs_its_elements_to_be_built_is_built_whole(kind: type[nn.Module], tmp_path: Path) -> None:
    made: Made = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(kind, made, loss=loss)
    construction, why = prove_construction(seeded(kind), subject.layers, values_of(made), seed=5)
    assert construction == "whole"
    assert why
    path = tmp_path / MODEL_FILE
    file = open_model_file(path, write_model_file(path, subject.layers, construction))
    assert path.stat().st_size < 2**16
    layers = file.chain(construct(seeded(kind), file.construction))
    file.take(layers[-1:], CPU)
    assert held_bytes(layers[-1:]) < sum(p.nbytes for p in subject.bare.parameters())
    assert all(isinstance(p, AbsentTensor) for p in layers[0].cut.model.body.parameters())  # type: ignore[union-attr]


def test_a_layer_that_reads_more_than_was_recorded_is_found_before_training() -> None:
    """Here the second forward in a process takes another way than the first."""

    class Counts(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.late: Tensor
            self.register_buffer("late", torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            type(self).calls += 1
            x = self.body(x)
            return self.head(relu(x * self.late if type(self).calls > 3 else x))

    made: Made = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)
    subject = Subject(Counts, made, loss=loss)
    Counts.calls = 10
    construction, why = prove_construction(seeded(Counts), subject.layers, values_of(made), seed=5)
    assert construction is None
    assert "late" in why


def test_a_class_that_nobody_can_find_again_is_not_described() -> None:
    class Local(dict[str, Tensor]):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.inner = Inner()

        def forward(self, x: Tensor) -> Any:
            return self.head(self.inner(self.body(x))["out"])

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Mapping[str, Tensor]:
            return Local(out=x + 1)

    subject = Subject(Model, (torch.randn(3, 4),), loss=loss)
    with pytest.raises(NotDescribable, match="Local"):
        to_plain(subject.cut.description)


def test_another_file_than_the_plan_was_made_with_is_refused(tmp_path: Path) -> None:
    chain = chain_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    path = tmp_path / MODEL_FILE
    digest = write_model_file(path, chain, "meta")
    write_model_file(path, chain[:1], "meta")
    with pytest.raises(ModelFileUnusable, match="not the file that the plan was made with"):
        open_model_file(path, digest)
    with pytest.raises(ModelFileUnusable, match="cannot be read"):
        open_model_file(tmp_path / "none", digest)
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ModelFileUnusable, match="is truncated"):
        open_model_file(path, digest)


def test_a_damaged_tensor_is_found_by_the_stage_that_takes_it(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1000))

    path = tmp_path / MODEL_FILE
    digest = write_model_file(path, chain_of(build()), "meta")
    wanted = chain_of(build())[1].module.get_parameter("weight").nbytes
    file = open_model_file(path, digest)
    damaged = file.tensors["1.weight"]
    assert damaged.num_bytes == wanted > 2**20, "more than one block"
    with path.open("r+b") as data:
        data.seek(damaged.start + damaged.num_bytes - 1)
        (last,) = data.read(1)
        data.seek(-1, 1)
        data.write(bytes([last ^ 1]))
    file = open_model_file(path, digest)
    layers = file.chain(construct(build, "meta"))
    with pytest.raises(ModelFileUnusable, match=r"is damaged: 1\.weight does not have its checksum"):
        file.take(layers[1:], CPU)
    with pytest.raises(ModelFileUnusable, match=r"does not have 0\.weight"):
        replace(file, tensors={}).take(layers[:1], CPU)
    file.take(layers[:1], CPU)
    file.take(layers[1:], CPU, is_filled=False)
    assert layers[1].module.get_parameter("weight").shape == (1000, 300), "there, and not read"


def test_a_chain_made_from_the_file_computes_what_the_model_computes(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))

    chain = chain_of(build())
    x = torch.randn(5, 4)
    construction, _ = prove_construction(build, chain, (x,), seed=1)
    assert construction == "meta"
    path = tmp_path / MODEL_FILE
    file = open_model_file(path, write_model_file(path, chain, construction))
    layers = file.chain(construct(build, "meta"))
    file.take(layers, CPU)

    def run(layers: Sequence[Layer]) -> Tensor:
        weights = {n: layer.module.get_parameter(k).detach() for layer in layers for k, n in layer.parameters.items()}
        return run_layers(layers, weights, (x.clone(),))[0]

    assert torch.equal(run(chain), run(layers))
