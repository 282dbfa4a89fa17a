"""`hetpipe cluster from-k8s`: the GPU nodes of a Kubernetes cluster as a cluster file.

Its input is the output of `kubectl get nodes -o json`, with the labels of NVIDIA's GPU feature discovery:
`nvidia.com/gpu.product` (the driver's name of the GPU, blanks as dashes), `.count`, and `.memory` (MiB of one). Pure
but for reading the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field, ValidationError

from hetpipe.cli.options import Json
from hetpipe.decide.lifecycle.known_cluster import cluster_of
from hetpipe.errors import DocumentError, UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.catalogue import CATALOGUE, catalogue_hint, type_of_device_name
from hetpipe.values.document import to_plain, to_yaml
from hetpipe.values.ids import AgentId
from hetpipe.values.problems import shown
from hetpipe.values.run import AgentDevice, AgentInfo, type_of

#: What a node's labels and resources are called.
PRODUCT = "nvidia.com/gpu.product"
COUNT = "nvidia.com/gpu.count"
MEMORY = "nvidia.com/gpu.memory"
REPLICAS = "nvidia.com/gpu.replicas"
GPUS = "nvidia.com/gpu"

#: In the names of products: a GPU that several pods get at once, and a slice of one.
_SHARED = "-SHARED"
_SLICE = "-MIG-"

_MIB = 1 << 20

#: More GPUs, and more MiB in one, no node has.
_MOST_GPUS = 1 << 10
_MOST_MIB = 1 << 24

_WANTED = "it must be the output of `kubectl get nodes -o json`"

_HEADER = (
    "# Made by `hetpipe cluster from-k8s`. Links are not measured: intra_node is what two processes of one machine",
    "# exchange, inter_node is 10 Gbit/s Ethernet. Correct them where yours differ.",
)


class _Metadata(BaseModel):
    name: str = Field(pattern=r"^[a-z0-9.-]+$")
    labels: dict[str, str] = Field(default_factory=dict)


class _Spec(BaseModel):
    unschedulable: bool = False


class _Condition(BaseModel):
    type: str
    status: str


class _Status(BaseModel):
    allocatable: dict[str, str] = Field(default_factory=dict)
    conditions: tuple[_Condition, ...] = ()


class _Node(BaseModel):
    kind: Literal["Node"]
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Nodes(BaseModel):
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class FoundNodes:
    """The usable nodes."""

    nodes: tuple[AgentInfo, ...]
    """Those with GPUs for hetpipe, in the order given, each GPU a device."""
    remarks: tuple[str, ...]
    """A sentence for each node that is left out, and for each type that the catalogue lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Make a cluster file of the GPU nodes of a Kubernetes cluster. Reads the labels of GPU feature discovery."""

    source: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="What `kubectl get nodes -o json` printed; -: standard input.")
    ] = "-"
    as_agents: Annotated[
        bool, typer.Option("--as-agents", help="Name nodes like the agents of k8s/: by product and number.")
    ] = False
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Write the cluster file of the nodes in a file, or on standard input.

    Raises:
        UserError: it cannot be read, is no list of nodes, or no node has a GPU.
    """
    source = options.source
    name = "standard input" if source == "-" else source
    found = nodes_of(_read(source), what=name)
    output.complaints.write("".join(f"{remark}\n" for remark in found.remarks))
    if not found.nodes:
        raise UserError(f"no node in {name} has a GPU that pods can be given, so there is no cluster to write")
    cluster = cluster_of(named_as_agents(found.nodes) if options.as_agents else found.nodes)
    output.answer(to_plain(cluster), *_HEADER, to_yaml(cluster))
    return ExitStatus.OK


def nodes_of(text: str, *, what: str) -> FoundNodes:
    """The nodes with GPUs in `text`, and the reasons for omitting the others.

    Args:
        text: the output of `kubectl get nodes -o json`, also of one node.
        what: names the origin in errors.

    Raises:
        DocumentError: it is something else.
    """
    nodes: list[AgentInfo] = []
    remarks: list[str] = []
    for node in _parsed(text, what):
        reason = _why_not(node)
        if reason:
            remarks.append(f"left out {node.metadata.name}: {reason}")
        else:
            nodes.append(_agent(node, what))
    remarks += [
        f"the catalogue has no {kind}, so its memory is the label's; add it to the profile by `hetpipe profile` on "
        f"such a node, or write another type into the file: {catalogue_hint(kind)}"
        for kind in sorted({type_of(node.devices[0]) for node in nodes} - set(CATALOGUE))
    ]
    return FoundNodes(tuple(nodes), tuple(remarks))


def named_as_agents(nodes: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The nodes under the names that the agents of `k8s/` have: GROUP-INDEX, one group per type and number of GPUs.

    Groups come in the order of their first nodes, so that shard I can be on the node in line I.
    """
    groups: dict[tuple[str, int], list[AgentInfo]] = defaultdict(list)
    for node in nodes:
        groups[type_of(node.devices[0]), len(node.devices)].append(node)
    sizes = Counter(kind for kind, _ in groups)
    named = []
    for (kind, size), members in groups.items():
        group = re.sub(r"[^a-z0-9]+", "-", kind.casefold()) + (f"-x{size}" if sizes[kind] > 1 else "")
        named += [_renamed(node, f"{group}-{index}") for index, node in enumerate(members)]
    return tuple(named)


def _renamed(node: AgentInfo, name: str) -> AgentInfo:
    devices = tuple(replace(device, device=f"{name}/{index}") for index, device in enumerate(node.devices))
    return replace(node, agent=AgentId(name), devices=devices)


def _read(source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}); give a file, or - for standard input") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


def _parsed(text: str, what: str) -> tuple[_Node, ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DocumentError(what, [f"is no JSON ({error}); {_WANTED}"]) from error
    is_one = isinstance(value, dict) and value.get("kind") == "Node"
    try:
        nodes = _Nodes.model_validate({"items": [value]} if is_one else value).items
    except ValidationError as error:
        raise DocumentError(what, [_problem(found) for found in error.errors()]) from error
    twice = [name for name, times in Counter(node.metadata.name for node in nodes).items() if times > 1]
    if twice:
        raise DocumentError(what, [f"items has node {name} more than once; {_WANTED}" for name in twice])
    return nodes


def _problem(found: Mapping[str, Any]) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).removeprefix(".")
    return f"{where}{': ' if where else ''}{found['msg']}; {_WANTED}"


def _why_not(node: _Node) -> str:
    """The reason for omitting a node; empty if it is used."""
    labels, reason = node.metadata.labels, ""
    product, number = labels.get(PRODUCT, ""), _offered(node)
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in node.status.conditions)
    if not product:
        fix = f"install NVIDIA's GPU feature discovery, or say kubectl label node {node.metadata.name} {PRODUCT}=…"
        reason = "it has no GPU" if number in {"0", ""} else f"it has GPUs and no label {PRODUCT}; {fix}"
    elif node.spec.unschedulable:
        reason = f"it is cordoned; kubectl uncordon {node.metadata.name} makes it usable"
    elif not ready:
        reason = "it is not ready"
    elif product.endswith(_SHARED) or labels.get(REPLICAS, "1") not in {"0", "1"}:
        reason = f"its GPUs ({product}) are shared by several pods, and a stage needs one to itself"
    elif _SLICE in product:
        reason = f"its GPUs are cut into slices ({product}), of which CUDA shows one to a process; give it whole GPUs"
    elif number in {"0", ""}:
        reason = f"it hands out none of its GPUs ({product}) as {GPUS}; look at the device plugin there"
    elif MEMORY not in labels and type_of_device_name(_spelled(product)) is None:
        reason = f"the catalogue has no {product}, and there is no label {MEMORY} (MiB of one GPU); add it"
    return reason


def _agent(node: _Node, what: str) -> AgentInfo:
    """The node as an agent would offer it."""
    labels = node.metadata.labels
    kind = _spelled(labels[PRODUCT])
    known = type_of_device_name(kind)
    number = _number(_offered(node), f"{GPUS} of node {node.metadata.name}", what, most=_MOST_GPUS)
    if MEMORY in labels:
        label = f"{MEMORY} of node {node.metadata.name}"
        memory_bytes = _number(labels[MEMORY], label, what, most=_MOST_MIB) * _MIB
    else:
        assert known is not None, "nodes of unknown memory are left out"
        memory_bytes = CATALOGUE[known].memory_bytes
    name = node.metadata.name
    devices = tuple(AgentDevice(f"{name}/{index}", kind, memory_bytes, f"cuda:{index}") for index in range(number))
    return AgentInfo(AgentId(name), host="", pid=0, devices=devices)


def _spelled(product: str) -> str:
    """A product as the driver spells it, and so as agents report it: labels have dashes for blanks."""
    return product.replace("-", " ")


def _offered(node: _Node) -> str:
    """The allocatable GPUs, fewer than in the label where one is broken; empty: unknown."""
    return node.status.allocatable.get(GPUS, node.metadata.labels.get(COUNT, ""))


def _number(text: str, name: str, what: str, *, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= most:
        raise DocumentError(what, [f"{name} is {shown(text)}; it must be a whole number from 1 to {most}"])
    return int(text)
