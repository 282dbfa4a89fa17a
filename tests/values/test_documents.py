"""Documents in general: two syntaxes, one list of mistakes, and never anything worse. And the plan's own checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hetpipe.errors import DocumentError
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import Document, document_of, parse_document, read_document, to_plain, write_document
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.values.document_cases import ABSENT, CLUSTER, GOOD, PLAN, PROFILE, changed, paths, problems

KINDS = [kind for kind, _ in GOOD]


class TestReadingAndWriting:
    @pytest.mark.parametrize(("kind", "good"), GOOD)
    def test_json_and_yaml_say_the_same(self, kind: type[Document], good: dict[str, Any]) -> None:
        as_json = parse_document(kind, json.dumps(good), what="j")
        assert as_json == parse_document(kind, yaml.safe_dump(good), what="y")
        assert as_json == document_of(kind, good, what="v")

    @pytest.mark.parametrize(("kind", "good"), GOOD)
    def test_what_is_written_is_read(self, kind: type[Document], good: dict[str, Any], tmp_path: Path) -> None:
        document = document_of(kind, good, what="v")
        write_document(document, tmp_path / "file.json")
        assert read_document(kind, tmp_path / "file.json") == document
        assert [path.name for path in tmp_path.iterdir()] == ["file.json"]

    @pytest.mark.parametrize(("kind", "good"), GOOD)
    def test_nothing_given_is_lost_and_the_version_comes_first(
        self, kind: type[Document], good: dict[str, Any]
    ) -> None:
        plain = to_plain(document_of(kind, changed(good, {}), what="v"))
        assert next(iter(plain)) == "version"
        if kind is Cluster:
            plain["device_types"]["RTX_3090"] = {}
        assert plain == good

    def test_a_byte_order_mark_is_no_mistake(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text(json.dumps(PROFILE), encoding="utf-8-sig")
        assert read_document(Profile, tmp_path / "f").model == "model:build"

    def test_half_a_character_can_be_written_again(self, tmp_path: Path) -> None:
        profile = parse_document(Profile, json.dumps({**PROFILE, "model": "a\ud800b"}), what="p")
        write_document(profile, tmp_path / "p.json")
        assert read_document(Profile, tmp_path / "p.json").model == "a?b"

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "latin").write_bytes("modèle: 1".encode("latin-1"))
        for path, message in (("none", "No such file"), (".", "Is a directory"), ("latin", "save it as UTF-8")):
            with pytest.raises(DocumentError, match=message):
                read_document(Profile, tmp_path / path)


class TestOneListOfMistakes:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty; expected a mapping with the keys version, model, batch_size, input_bytes and layers"),
            ("[1]", "is a list; expected a mapping with the keys"),
            ('{"version": 1,\n\t"layers": [}', "line 2: Expecting value; expected JSON or YAML"),
            ("version: 1\nlayers: [", "line 2: "),
            ("a: !!bool maybe", "remove the tag"),
            ("\0", "special characters are not allowed"),
            ("[" * 100_000, "is nested too deeply"),
            ("a: [" * 2_000, "is nested too deeply"),
        ],
    )
    def test_text_that_is_no_document(self, text: str, message: str) -> None:
        (problem,) = problems(Profile, text)
        assert message in problem

    def test_keys_given_twice_are_told_with_all_else(self) -> None:
        text = json.dumps(CLUSTER).replace('"efficiency": 0.8', '"efficiency": 0.8, "efficiency": 80')
        assert problems(Cluster, text) == [
            "links.intra_node.efficiency: is given twice; keep one of them",
        ]
        found = problems(Cluster, text.replace('"n1"', '"n0"').replace('"version": 1', '"version": 2'))
        assert {"links.intra_node.efficiency", "version", "nodes[1].name"} <= set(paths(found))
        assert "lines 3 and 4" in problems(Profile, "version: 1\nmodel: x\nbatch_size: 1\nbatch_size: 2")[0]

    @pytest.mark.parametrize("key", ["<", "<shard>", "[key]", "", "a.b"])
    def test_unknown_keys_of_whatever_form(self, key: str) -> None:
        (problem,) = problems(Cluster, {**CLUSTER, key: 1})
        assert problem.startswith(f"{key}: unknown key")

    @pytest.mark.parametrize("kind", KINDS)
    def test_another_version_is_refused(self, kind: type[Document]) -> None:
        good = dict(GOOD)[kind]
        known = "1 or 2" if kind is Profile else "1"
        assert problems(kind, {**good, "version": 3}) == [f"version: must be {known}, not 3"]
        assert problems(kind, {**good, "version": "1"}) == [f"version: must be {known}, not the text '1'"]

    def test_what_is_alive_at_a_cut_is_of_version_2_and_adds_up(self) -> None:
        alive = [{"name": "a:0", "num_bytes": 1000, "has_gradient": True}, {"name": "log", "num_bytes": 24}]
        good = changed(PROFILE, {("layers", 0, "alive"): alive, ("layers", 0, "gradient_bytes"): 1000})

        assert document_of(Profile, {**good, "version": 2}, what="v").layers[0].backward_bytes == 1000
        assert problems(Profile, good) == [
            "layers[0].gradient_bytes: is unknown to version 1 of the format; write version: 2",
            "layers[0].alive: is unknown to version 1 of the format; write version: 2",
        ]
        wrong = changed(good, {("layers", 0, "output_bytes"): 1025, ("version",): 2})
        assert problems(Profile, wrong) == ["layers[0].output_bytes: is 1025, but what is `alive` sums to 1024"]

    def test_a_whole_number_is_told_for_a_fraction(self) -> None:
        found = problems(Cluster, changed(CLUSTER, {("device_types", "V", "memory_bytes"): 24e9}))
        assert found == [
            "device_types.V.memory_bytes: must be a whole number, not 24000000000.0; write 24000000000",
        ]

    def test_values_that_are_not_finite(self) -> None:
        bandwidth = ("links", "inter_node", "bandwidth_bytes_per_second")
        for value in (float("inf"), float("nan")):
            (problem,) = problems(Cluster, changed(CLUSTER, {bandwidth: value}))
            assert problem == f"links.inter_node.bandwidth_bytes_per_second: must be a finite number, not {value}"

    def test_made_in_python_a_document_is_checked_too(self) -> None:
        good = document_of(Cluster, CLUSTER, what="v")
        with pytest.raises(ValidationError, match=r"nodes\[1\].name"):
            Cluster(device_types=good.device_types, nodes=(good.nodes[0], good.nodes[0]), links=good.links)


class TestPlans:
    def test_mistakes_in_all_corners(self) -> None:
        stages = ("virtual_workers", 0, "stages")
        found = problems(
            PlanDocument,
            changed(
                PLAN,
                {
                    (*stages, 0, "time_ms"): -1,
                    (*stages, 0, "layers"): [0, 2],
                    (*stages, 1, "device"): "n0/1",
                    ("virtual_workers", 1, "stages", 0, "layers"): [0, 5, 6],
                    ("max_minibatches_per_wave",): [8],
                    ("placement", "a.weight"): 2,
                    ("placement", "b.weight"): [[0, 0]],
                    ("predicted", "samples_per_second"): ABSENT,
                    ("minibatches_per_wave",): 0,
                },
            ),
        )
        assert sorted(paths(found)) == [
            "max_minibatches_per_wave",
            "minibatches_per_wave",
            "placement.a.weight",
            "placement.b.weight[0][2]",
            "predicted.samples_per_second",
            "virtual_workers[0].stages[0].time_ms",
            "virtual_workers[0].stages[1].layers",
            "virtual_workers[1].stages[0].device",
            "virtual_workers[1].stages[0].layers",
        ]

    @pytest.mark.parametrize(
        ("path", "value", "problem"),
        [
            (("virtual_workers",), [], "virtual_workers: is an empty list; a plan has at least one virtual worker"),
            (("virtual_workers", 1, "stages"), [], "virtual_workers[1].stages: is an empty list"),
            (
                ("virtual_workers", 1, "stages", 0, "layers"),
                [0, 3],
                "virtual_workers: end after 3 and 4 layers; all train the same model",
            ),
            (
                ("virtual_workers", 0, "stages", 1, "layers"),
                [3, 3],
                "virtual_workers[0].stages[1].layers: is [3, 3], which contains no layer",
            ),
            (("idle_devices",), ["n0/0"], "idle_devices[0]: is n0/0, which is used twice in the plan"),
            (("placement", "b.weight", 1, 0), 7, "placement.b.weight: is on shard 7, but there are 2 shards"),
            (("has_shards",), False, "shards: is about parameter servers, but has_shards is false; empty it"),
            (("has_shards",), False, "placement: is about parameter servers, but has_shards is false; empty it"),
            (("has_shards",), False, "virtual_workers: are 2, but has_shards is false"),
        ],
    )
    def test_one_by_one(self, path: tuple[str | int, ...], value: object, problem: str) -> None:
        assert problem in "\n".join(problems(PlanDocument, changed(PLAN, {path: value})))


def _places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of everything below `value`."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, entry in children for place in ((*path, key), *_places(entry, (*path, key)))]


_RUBBISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["V", "n0", "n0/0", "RTX_2060", 0, 1, -1, 24_000_000_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(("kind", "good"), GOOD)
@given(data=st.data())
@settings(max_examples=75)
def test_corruptions_are_refused_or_harmless(kind: type[Document], good: dict[str, Any], data: st.DataObject) -> None:
    made = changed(good, {})
    for _ in range(data.draw(st.integers(1, 4))):
        places = _places(made)
        place = data.draw(st.sampled_from(places)) if places else ("version",)
        made = changed(made, {place: data.draw(st.just(ABSENT) | _RUBBISH)} if places else {place: 1})
    try:
        document = parse_document(kind, json.dumps(made), what="file")
    except DocumentError as error:
        found = error.problems
    else:
        assert document_of(kind, to_plain(document), what="again") == document
        return
    assert found
    assert len(set(found)) == len(found)


@given(text=st.text(max_size=60) | st.text("[]{}:,-? &*!|>'\"#%@`\n\t0a<~", max_size=40))
@settings(max_examples=300)
def test_rubbish_is_refused(text: str) -> None:
    assert problems(Cluster, text)


@given(content=st.binary(max_size=60))
@settings(max_examples=100)
def test_rubbish_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "rubbish"
    path.write_bytes(content)
    with pytest.raises(DocumentError):
        read_document(PlanDocument, path)
