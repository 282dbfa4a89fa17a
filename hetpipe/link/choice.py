"""Which link carries the frames between two stages. Pure: both ends decide by themselves, from what both know."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.errors import UserError
from hetpipe.values.policies import AskedLink, LinkKind


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """What carries the frames, and why."""

    kind: LinkKind
    loopback: bool
    """It needs no address that other nodes reach, and takes none."""
    reason: str

    def __str__(self) -> str:
        """For people: `gloo: without TLS …`."""
        return f"{self.kind}: {self.reason}"


def choose_link(asked: AskedLink, *, tls: bool, same_node: bool) -> LinkChoice:
    """The link between two stages.

    Args:
        asked: the job's key `link`.
        tls: this cluster's processes prove who they are; what leaves a node is to be encrypted.
        same_node: both stages are on one node.

    >>> str(choose_link("auto", tls=True, same_node=False))
    'grpc: with TLS, because the stages are on different nodes'
    >>> choose_link("auto", tls=True, same_node=True).loopback
    True
    """
    #: Without TLS a cluster may know its nodes by addresses that are no loopback, also among themselves.
    loopback = tls and same_node
    if asked == "grpc":
        return LinkChoice("grpc", loopback, f"the job says so, {'with' if tls else 'without'} TLS")
    if asked == "gloo":
        open_ = tls and not same_node
        return LinkChoice("gloo", loopback, f"the job says so{', not encrypted in spite of TLS' if open_ else ''}")
    if not tls:
        return LinkChoice("gloo", loopback, "it is fast, and without TLS nothing is encrypted")
    if same_node:
        return LinkChoice("gloo", loopback, "it is fast, and both stages are on one node, which it does not leave")
    return LinkChoice("grpc", loopback, "with TLS, because the stages are on different nodes")


def check_replicas(asked: AskedLink, *, tls: bool, same_node: bool) -> None:
    """Let no gradients between replicas leave their node in the clear where TLS is on.

    Args:
        asked: the job's key `link`.
        tls: as in `choose_link`.
        same_node: all replicas of one stage are on one node.

    Raises:
        UserError: they would, and the job does not say that this is all right.
    """
    if tls and not same_node and asked != "gloo":
        raise UserError(
            "sync: allreduce sends gradients between nodes, and what adds them up (gloo or NCCL) does not encrypt; use "
            "`sync: wsp`, or say `link: gloo` if the network between the nodes is to be trusted"
        )
