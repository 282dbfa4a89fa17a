"""Commands on their way to agents: numbered per registration, kept until the agent has carried them out.

So a stream that breaks loses nothing, and a command that arrives twice is recognised. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.errors import ProtocolViolation
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.commands import Command, NumberedCommand
from hetpipe.values.ids import AgentId


@dataclass(slots=True)
class _Mailbox:
    last_sequence: int = 0
    waiting: list[NumberedCommand] = field(default_factory=list)
    #: Number of the last batch of news taken in.
    last_batch: int = 0


class Mailboxes:
    """One mailbox per registered agent. A mailbox holds at most the commands of the jobs the agent serves."""

    def __init__(self) -> None:
        self._boxes: dict[AgentId, _Mailbox] = {}

    def open(self, agent: AgentId, *, is_new: bool = False) -> None:
        """Start a mailbox for a new registration.

        What the same process has not carried out yet is still wanted, and numbered anew; of a process that `is_new`
        nothing is.
        """
        before = self._boxes.pop(agent, None)
        self._boxes[agent] = _Mailbox()
        for numbered in () if before is None or is_new else before.waiting:
            self.post(agent, numbered.command)

    def close(self, agent: AgentId) -> None:
        """The agent is gone."""
        self._boxes.pop(agent, None)

    def post(self, agent: AgentId, command: Command) -> None:
        """Queue a command; nothing happens when the agent is gone, since its processes then end by themselves."""
        box = self._boxes.get(agent)
        if box is not None:
            box.last_sequence += 1
            box.waiting.append(NumberedCommand(box.last_sequence, command))

    def after(self, agent: AgentId, sequence: int) -> tuple[NumberedCommand, ...]:
        """The commands after number `sequence`, in order.

        Raises:
            ProtocolViolation: there is no such number yet.
        """
        box = self._boxes.get(agent)
        self._check(box, agent, sequence)
        return () if box is None else tuple(command for command in box.waiting if command.sequence > sequence)

    def acknowledge(self, agent: AgentId, sequence: int) -> None:
        """Forget the commands up to number `sequence`: they were carried out.

        Raises:
            ProtocolViolation: there is no such number yet.
        """
        box = self._boxes.get(agent)
        self._check(box, agent, sequence)
        if box is not None:
            box.waiting = [command for command in box.waiting if command.sequence > sequence]

    @staticmethod
    def _check(box: _Mailbox | None, agent: AgentId, sequence: int) -> None:
        last = 0 if box is None else box.last_sequence
        if sequence > last:
            raise ProtocolViolation(f"{agent} knows of command {sequence}; the last one of its registration is {last}")

    def take_batch(self, agent: AgentId, batch: int) -> bool:
        """True once for every batch number of a registration, which only grows.

        Raises:
            ProtocolViolation: the number is none that anybody counts to.
        """
        if not 0 < batch < MAX_COUNT:
            raise ProtocolViolation(f"agent {agent} numbers a batch of news {batch}; the first one is 1")
        box = self._boxes.get(agent)
        if box is None or batch <= box.last_batch:
            return False
        box.last_batch = batch
        return True
