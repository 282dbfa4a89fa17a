"""Profiles: which are refused, and where they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetpipe.errors import DocumentError
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import document_of
from hetpipe.values.fit import check_fits, read_fitting
from hetpipe.values.profile import Profile
from tests.values.document_cases import ABSENT, CLUSTER, PROFILE, changed, paths, problems


def refused(changes: dict[tuple[str | int, ...], Any]) -> list[str]:
    return problems(Profile, changed(PROFILE, changes))


class TestProfiles:
    def test_the_types_with_times(self) -> None:
        assert document_of(Profile, PROFILE, what="p").device_types == ("Q", "V")

    def test_many_mistakes_at_once(self) -> None:
        found = refused(
            {
                ("layers", 0, "parameter_bytes"): -4,
                ("layers", 1, "forward_ms", "V"): ABSENT,
                ("layers", 2, "backward_ms", "V"): -2.5,
                ("layers", 3, "forward_ms", "V"): 7_200_000.0,
                ("layers", 3, "output_byte"): 3,
                ("batch_size",): 0,
                ("estimated",): ["R"],
            }
        )
        assert sorted(found) == [
            "batch_size: must be at least 1, not 0",
            "estimated[0]: is the text 'R', which no layer has times for; use Q or V",
            "layers[0].parameter_bytes: must be at least 0, not -4",
            "layers[1].forward_ms: has no time for V; every layer needs one for every type",
            "layers[2].backward_ms.V: must be at least 0, not -2.5",
            (
                "layers[3].forward_ms.V: is 7.2e+06 ms, more than an hour; for microseconds write 7200, "
                "for nanoseconds 7.2"
            ),
            "layers[3].output_byte: unknown key; did you mean `output_bytes`?",
        ]

    def test_a_type_that_hardly_any_layer_has_is_a_slip_where_it_stands(self) -> None:
        names = {"VV": 1.0, "Q": 2.0}
        assert refused({("layers", 2, "forward_ms"): names}) == [
            "layers[2].forward_ms.VV: most layers have no time for this type; did you mean `V`?"
        ]
        assert paths(refused({("layers", 2, "forward_ms", "Zulu"): 1.0})) == ["layers[2].forward_ms.Zulu"]

    def test_a_single_layer_needs_both_times(self) -> None:
        (layer,) = PROFILE["layers"][:1]
        found = refused({("layers",): [changed(layer, {("backward_ms",): {"V": 1.0}})]})
        assert found == ["layers[0].backward_ms: has no time for Q; every layer needs one for every type"]

    def test_names_given_twice(self) -> None:
        weight = {"name": "w", "shape": [2], "dtype": "float32"}
        found = refused(
            {
                ("layers", 2, "name"): "a",
                ("layers", 1, "parameters"): [weight, weight],
                ("layers", 3, "parameters"): [{**weight, "name": "a"}],
            }
        )
        assert found == [
            "layers[1].parameters[1].name: is the text 'w', as that of layers[1].parameters[0]; rename one",
            "layers[2].name: is the text 'a', as that of layers[0]; rename one",
            "layers[3].parameters[0].name: is the text 'a', as that of layers[0]; rename one",
        ]

    def test_layers_without_parameters_may_share_a_name(self) -> None:
        relu: dict[tuple[str | int, ...], Any] = {
            ("layers", index, key): value for index in (0, 2) for key, value in (("name", "r"), ("parameter_bytes", 0))
        }
        assert document_of(Profile, changed(PROFILE, relu), what="p").layers[2].name == "r"

    def test_no_layers_and_no_types(self) -> None:
        assert refused({("layers",): []}) == ["layers: is an empty list; a model has at least one layer"]
        nothing: dict[tuple[str | int, ...], Any] = {
            ("layers", index, key): {} for index in range(4) for key in ("forward_ms", "backward_ms")
        }
        assert refused({**nothing, ("estimated",): []}) == [
            "layers[0].forward_ms: names no device type; give the times of at least one"
        ]


class TestFit:
    def test_a_type_without_times(self) -> None:
        profile = document_of(Profile, PROFILE, what="p")
        check_fits(profile, document_of(Cluster, CLUSTER, what="c"))
        devices = changed(CLUSTER, {("nodes", 0, "devices", 1): "RTX_3090", ("nodes", 1, "devices", 1): "v"})
        unfit = document_of(Cluster, changed(devices, {("device_types", "v"): {"memory_bytes": 1 << 30}}), what="c")
        with pytest.raises(DocumentError) as caught:
            check_fits(profile, unfit)
        assert caught.value.problems == (
            (
                "device_types.RTX_3090: the profile has no times for this type; its times are for Q and V; profile "
                "this type too, or remove its devices"
            ),
            "device_types.v: the profile has no times for this type; did you mean `V`?",
        )

    def test_both_files_tell_their_mistakes_together(self, tmp_path: Path) -> None:
        profile, cluster = tmp_path / "p.json", tmp_path / "c.json"
        profile.write_text(json.dumps(PROFILE))
        cluster.write_text(json.dumps(CLUSTER))
        assert read_fitting(profile, cluster)[0].batch_size == 16
        profile.write_text(json.dumps({**PROFILE, "batch_size": -1}))
        cluster.write_text(json.dumps({**CLUSTER, "nodes": []}))
        with pytest.raises(DocumentError) as caught:
            read_fitting(profile, cluster)
        told = caught.value.problems
        assert len(told) >= 2
        assert told[0] == f"{profile}: batch_size: must be at least 1, not -1"
        assert f"{cluster}: nodes: have no devices; give at least one" in told
        assert caught.value.sentences == told
        assert str(caught.value).startswith(f"{profile}: batch_size: ")

    def test_what_does_not_fit_names_the_file_of_the_cluster(self, tmp_path: Path) -> None:
        profile, cluster = tmp_path / "p.json", tmp_path / "c.json"
        profile.write_text(json.dumps(PROFILE))
        cluster.write_text(json.dumps(changed(CLUSTER, {("nodes", 0, "devices", 1): "RTX_3090"})))
        with pytest.raises(DocumentError) as caught:
            read_fitting(profile, cluster)
        (sentence,) = caught.value.sentences
        assert sentence.startswith(f"{cluster}: device_types.RTX_3090: the profile has no times for this type; ")
