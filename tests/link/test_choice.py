"""Which link two stages choose, cell by cell."""

from __future__ import annotations

import pytest

from hetpipe.errors import UserError
from hetpipe.link.choice import check_replicas, choose_link
from hetpipe.values.policies import AskedLink, LinkKind


@pytest.mark.parametrize(
    ("asked", "tls", "same_node", "kind", "loopback", "reason"),
    [
        ("auto", False, False, "gloo", False, "without TLS nothing is encrypted"),
        ("auto", False, True, "shared_memory", False, "both stages are on one node"),
        ("auto", True, False, "grpc", False, "with TLS, because the stages are on different nodes"),
        ("auto", True, True, "shared_memory", True, "both stages are on one node"),
        ("gloo", False, False, "gloo", False, "set by the job"),
        ("gloo", False, True, "gloo", False, "set by the job"),
        ("gloo", True, False, "gloo", False, "set by the job, not encrypted in spite of TLS"),
        ("gloo", True, True, "gloo", True, "set by the job"),
        ("grpc", False, False, "grpc", False, "set by the job, without TLS"),
        ("grpc", False, True, "grpc", False, "set by the job, without TLS"),
        ("grpc", True, False, "grpc", False, "set by the job, with TLS"),
        ("grpc", True, True, "grpc", True, "set by the job, with TLS"),
        ("shared_memory", False, True, "shared_memory", False, "set by the job"),
        ("shared_memory", True, True, "shared_memory", True, "set by the job"),
    ],
)
def test_every_case(
    asked: AskedLink, kind: LinkKind, reason: str, *, tls: bool, same_node: bool, loopback: bool
) -> None:
    chosen = choose_link(asked, tls=tls, same_node=same_node)
    assert (chosen.kind, chosen.loopback) == (kind, loopback)
    assert reason in chosen.reason
    assert chosen.may_fall_back == (asked == "auto" and kind == "shared_memory")


@pytest.mark.parametrize("tls", [False, True])
def test_memory_is_not_shared_between_nodes(*, tls: bool) -> None:
    with pytest.raises(UserError, match="needs neighbouring stages on one node, and these are on two"):
        choose_link("shared_memory", tls=tls, same_node=False)


def test_a_choice_after_a_refusal_is_grpc_with_the_reason() -> None:
    refused = choose_link("auto", tls=True, same_node=True).refused("no memfds")
    assert str(refused) == "grpc: memory cannot be shared: no memfds"
    assert refused.loopback


@pytest.mark.parametrize("asked", ["auto", "grpc", "gloo", "shared_memory"])
def test_gradients_of_replicas_leave_a_node_with_tls_only_on_demand(asked: AskedLink) -> None:
    for tls, same_node in ((False, False), (False, True), (True, True)):
        check_replicas(asked, tls=tls, same_node=same_node)
    if asked == "gloo":
        check_replicas(asked, tls=True, same_node=False)
    else:
        with pytest.raises(UserError, match="`sync: wsp`, or set `link: gloo`"):
            check_replicas(asked, tls=True, same_node=False)
