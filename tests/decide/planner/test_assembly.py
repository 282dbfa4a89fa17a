"""From measurements to the public profile."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.planner.assembly import profile_of
from hetpipe.values.document import parse_document, to_json
from hetpipe.values.measurement import Work
from hetpipe.values.profile import Profile
from tests.profiler.builders import layer, measurement

A = layer("a", parameters=10)
B = layer("b")


def test_every_type_has_its_times_and_estimates_are_marked() -> None:
    slower = replace(A, forward_ms=3.0)
    profile = profile_of("m:build", 8, measured=[measurement("cpu", A, B)], estimated=[measurement("T4", slower, B)])
    assert (profile.model, profile.batch_size, profile.input_bytes) == ("m:build", 8, 64)
    assert profile.device_types == ("T4", "cpu")
    assert profile.estimated == ("T4",)
    assert profile.layers[0].forward_ms == {"cpu": 2.0, "T4": 3.0}
    assert profile.layers[0].backward_ms == {"cpu": 5.0, "T4": 5.0}
    assert (profile.layers[0].parameter_bytes, profile.layers[1].parameter_bytes) == (40, 0)
    assert profile.layers[0].parameters[0].name == "a.weight"


def test_the_largest_activations_of_all_types_count() -> None:
    more = replace(B, activation_bytes=999)
    profile = profile_of("m", 1, measured=[measurement("cpu", A, B), measurement("L4", A, more)])
    assert [found.activation_bytes for found in profile.layers] == [300, 999]


def test_operations_are_those_of_the_model_and_tokens_those_of_the_job() -> None:
    again = replace(A, forward=Work(70, 1), backward=Work(210, 2, recomputed_flops=70))
    here = replace(measurement("cpu", again, B), tokens_per_sample=16)
    profile = profile_of("m", 1, measured=[here])
    assert [(found.forward_flops, found.backward_flops) for found in profile.layers] == [(70, 140), (0, 0)]
    assert (profile.model_flops(0, 1), profile.model_flops(0, 2)) == (210, 210)
    assert profile.tokens_per_sample == 16
    assert profile_of("m", 1, measured=[here], tokens_per_sample=7).tokens_per_sample == 7


def test_the_profile_is_a_document() -> None:
    profile = profile_of("m", 1, measured=[measurement("cpu", A, B)])
    assert parse_document(Profile, to_json(profile), what="test") == profile
