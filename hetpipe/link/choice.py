"""Choice of the link between two stages. Pure: both ends decide independently from the same inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from hetpipe.errors import UserError
from hetpipe.values.policies import AskedLink, LinkKind


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """The chosen transport, and the reason."""

    kind: LinkKind
    loopback: bool
    """Whether it uses the loopback interface only."""
    reason: str
    may_fall_back: bool = False
    """Whether gRPC takes the place of memory that cannot be shared."""

    def __str__(self) -> str:
        """For messages: `gloo: without TLS …`."""
        return f"{self.kind.replace('_', ' ')}: {self.reason}"

    def refused(self, why: str) -> LinkChoice:
        """The choice after shared memory was refused."""
        return replace(self, kind="grpc", reason=f"memory cannot be shared: {why}", may_fall_back=False)


def choose_link(requested: AskedLink, *, tls: bool, same_node: bool) -> LinkChoice:
    """Choose the link between two stages.

    Args:
        requested: the job's key `link`.
        tls: the cluster uses TLS, so traffic between nodes must be encrypted.
        same_node: both stages are on one node.

    Raises:
        UserError: the job asks for memory shared by stages on different nodes.

    >>> str(choose_link("auto", tls=True, same_node=False))
    'grpc: with TLS, because the stages are on different nodes'
    >>> str(choose_link("auto", tls=True, same_node=True))
    'shared memory: it is the fastest, and both stages are on one node'
    """
    #: Without TLS a cluster may address its nodes by names that do not resolve to loopback, even within a node.
    loopback = tls and same_node
    match requested:
        case "grpc":
            return LinkChoice("grpc", loopback, f"set by the job, {'with' if tls else 'without'} TLS")
        case "gloo":
            open_ = tls and not same_node
            return LinkChoice("gloo", loopback, f"set by the job{', not encrypted in spite of TLS' if open_ else ''}")
        case "shared_memory":
            if not same_node:
                raise UserError(
                    "`link: shared_memory` needs neighbouring stages on one node, and these are on two; use "
                    "`link: auto`, which shares memory within a node"
                )
            return LinkChoice("shared_memory", loopback, "set by the job")
        case "auto":
            if same_node:
                reason = "it is the fastest, and both stages are on one node"
                return LinkChoice("shared_memory", loopback, reason, may_fall_back=True)
            if not tls:
                return LinkChoice("gloo", loopback, "it is fast, and without TLS nothing is encrypted")
            return LinkChoice("grpc", loopback, "with TLS, because the stages are on different nodes")
        case _:
            assert_never(requested)


def check_replicas(requested: AskedLink, *, tls: bool, same_node: bool) -> None:
    """Check that gradients between replicas do not leave their node unencrypted while TLS is on.

    Args:
        requested: the job's key `link`.
        tls: as in `choose_link`.
        same_node: all replicas of one stage are on one node.

    Raises:
        UserError: they would, and the job does not permit it.
    """
    if tls and not same_node and requested != "gloo":
        raise UserError(
            "sync: allreduce sends gradients between nodes, but its backends (gloo and NCCL) do not encrypt; "
            "use `sync: wsp`, or set `link: gloo` if the network between the nodes is trusted"
        )
