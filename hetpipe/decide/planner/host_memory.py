"""Peak of host memory of each node of a plan: the sum over its processes. Pure (`docs/semantics/host-memory.md`).

The terms are what the code allocates, counted in tensors of the size of a stage's parameters or of a shard's slices;
what processes take by themselves was measured. A process keeps the memory that it frees, so the peaks of its terms are
added even where they are not at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.borders import Stage
from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.shard_bytes import PlacedParameters, parameters_of
from hetpipe.values.cluster import node_of
from hetpipe.values.measurement import CPU_TYPE
from hetpipe.values.memory import stage_memory
from hetpipe.values.plan_document import PlannedNode, PlannedProcess

_MIB = 1 << 20

#: Proportional set sizes of idle processes, measured with torch 2.13 on Linux.
STAGE_BASE_BYTES = 60 * _MIB
SHARD_BASE_BYTES = 62 * _MIB
INSPECTION_BASE_BYTES = 72 * _MIB
AGENT_BYTES = 62 * _MIB
FORK_SERVER_BYTES = 50 * _MIB
COORDINATOR_BYTES = 66 * _MIB
COMMAND_BYTES = 46 * _MIB

#: Of gRPC, per stage that pushes to a shard: messages that have arrived, and the heap of the thread that takes them.
STREAM_BYTES = 16 * _MIB

#: Frames of one kind between two stages that each end holds, besides those that may wait: queued, and in transport.
FRAMES_UNDER_WAY = 2

#: Whole sets of the model's tensors in an inspection: the model, other weights, three sets of gradients.
INSPECTION_COPIES = 5
#: Minibatches whose activations it holds, and their samples.
INSPECTION_MINIBATCHES = 2
INSPECTION_SAMPLES = 4

#: From this number of slots on a step of the optimizer needs two tensors of the size of a parameter, before one.
_SLOTS_OF_TWO_TEMPORARIES = 2


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The figures that a prediction is made from, besides the stages."""

    costs: Costs
    memory: MemoryModel
    placed: PlacedParameters
    staleness: int | None
    """D; None: unbounded, taken as 0, because a stage that nobody waits for is never ahead for long."""

    def nodes(self, workers: Sequence[Sequence[Stage]]) -> tuple[PlannedNode, ...]:
        """The peak of every node that computes or has a shard, in the order of the cluster.

        Args:
            workers: the stages of each virtual worker, first stage first.
        """
        found: dict[str, list[PlannedProcess]] = {}
        for vw, stages in enumerate(workers):
            for index, stage in enumerate(stages):
                process = PlannedProcess(
                    name=f"stage {index} of virtual worker {vw}",
                    bytes=self._stage_bytes(stage, index, len(stages)),
                )
                found.setdefault(node_of(stage.device), []).append(process)
        for shard, node in enumerate(self.placed.shards):
            process = PlannedProcess(
                name=f"parameter server {shard}",
                bytes=self._shard_bytes(shard, num_workers=len(workers), num_stages=sum(map(len, workers))),
            )
            found.setdefault(node, []).append(process)
        nodes = [node.name for node in self.costs.cluster.nodes if node.name in found]
        return tuple(self._node(name, found[name], is_alone=len(nodes) == 1) for name in nodes)

    def _node(self, name: str, processes: Sequence[PlannedProcess], *, is_alone: bool) -> PlannedNode:
        """A node with `processes` of the run; `is_alone`: `hetpipe train` runs on it, with the coordinator."""
        services = [PlannedProcess(name="agent and its fork server", bytes=AGENT_BYTES + FORK_SERVER_BYTES)]
        if is_alone:
            services += [
                PlannedProcess(name="command and its fork server", bytes=COMMAND_BYTES + FORK_SERVER_BYTES),
                PlannedProcess(name="coordinator", bytes=COORDINATOR_BYTES),
            ]
        always = sum(one.bytes for one in services)
        in_training = always + sum(one.bytes for one in processes)
        # One node inspects, any of them; parameter servers have no weights yet.
        idle = sum(SHARD_BASE_BYTES for shard in self.placed.shards if shard == name)
        in_inspection = always + idle + self.inspection_bytes
        return PlannedNode(
            node=name,
            peak_bytes=max(in_training, in_inspection),
            training_bytes=in_training,
            inspection_bytes=in_inspection,
            processes=(*processes, *services),
        )

    # -- processes ----------------------------------------------------------------------------------------------------

    def _stage_bytes(self, stage: Stage, index: int, num_stages: int) -> int:
        parameters = self._parameter_bytes(stage.first, stage.last)
        total = STAGE_BASE_BYTES + self.host_buffers * parameters + self._swapped_bytes(stage, index, num_stages)
        if stage.kind != CPU_TYPE:
            return total + self._frame_bytes(stage, index, num_stages)
        device = self.costs.bytes_of(stage, (index, num_stages), self.memory)
        return (
            total
            + device
            - self.memory.reserve_bytes
            + self._temporary_bytes(stage.first, stage.last)
            + self._tie_bytes(stage.first, stage.last)
            + self._frame_bytes(stage, index, num_stages)
        )

    def _swapped_bytes(self, stage: Stage, index: int, num_stages: int) -> int:
        """Bytes that the minibatches in flight have swapped to host memory."""
        figures = self.costs.place(stage.kind, (index, num_stages), self.memory).figures(stage.first, stage.last)
        return figures.in_flight * stage_memory(figures, stage.memory).swapped_bytes if stage.memory else 0

    @property
    def host_buffers(self) -> int:
        """Parameter-sized buffers in host memory: own ũ that anchors still need, and weights that arrive."""
        return 2 + (self.staleness or 0) if self.memory.with_shards else 0

    def _temporary_bytes(self, first: int, last: int) -> int:
        """Of a backward, gradients of one layer's activations; of a step, temporaries of the largest parameter."""
        layers = self.costs.profile.layers[first:last]
        backward = max(layer.activation_bytes for layer in layers)
        of_stage = (each.num_bytes for each in parameters_of(self.costs.profile) if first <= each.layer < last)
        largest = max(of_stage, default=0)
        several = self.memory.optimizer_slots >= _SLOTS_OF_TWO_TEMPORARIES
        return backward + (2 if several else 1) * largest

    def _frame_bytes(self, stage: Stage, index: int, num_stages: int) -> int:
        """Frames between their sender and their use, which are not among the activations."""
        total = 0
        if index > 0:
            arriving = self.memory.in_flight(index - 1, num_stages)
            total += arriving * self.costs.cut_bytes[stage.first]
            total += FRAMES_UNDER_WAY * self.costs.returning_bytes[stage.first]
        if index < num_stages - 1:
            total += FRAMES_UNDER_WAY * (self.costs.cut_bytes[stage.last] + self.costs.returning_bytes[stage.last])
        return total

    def _tie_bytes(self, first: int, last: int) -> int:
        """Gradients of a tied weight that the stage shares with others: of one more use, and their sum."""
        layers = self.costs.profile.layers
        borders = [layers[cut - 1].tie_bytes for cut in (first, last) if 0 < cut < self.costs.num_layers]
        return 2 * max(borders, default=0)

    def _shard_bytes(self, shard: int, *, num_workers: int, num_stages: int) -> int:
        """Versions (D + 2, the oldest until all have left it) and one staged wave per virtual worker."""
        whole = self.placed.held_by_shard[shard]
        buffers = 2 + (self.staleness or 0) + num_workers
        return SHARD_BASE_BYTES + buffers * whole + num_stages * STREAM_BYTES

    @property
    def inspection_bytes(self) -> int:
        """Of the process that inspects the model and proves its cutting, on few samples; nothing is frozen there."""
        if self.costs.frozen_layers:
            whole = Costs(self.costs.original, self.costs.cluster)
            return HostMemory(whole, self.memory, self.placed, self.staleness).inspection_bytes
        samples = min(INSPECTION_SAMPLES, self.costs.profile.batch_size)
        activations = self.costs.activation_bytes[-1] * samples // self.costs.profile.batch_size
        ties = max((layer.tie_bytes for layer in self.costs.profile.layers), default=0)
        return (
            INSPECTION_BASE_BYTES
            + INSPECTION_COPIES * self._parameter_bytes(0, self.costs.num_layers)
            + INSPECTION_MINIBATCHES * (activations + ties)
            + self._temporary_bytes(0, self.costs.num_layers)
        )

    def _parameter_bytes(self, first: int, last: int) -> int:
        return self.costs.parameter_bytes[last] - self.costs.parameter_bytes[first]
