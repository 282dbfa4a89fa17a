"""The section of a job file about waits for processes that are coming up, or are to stop."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from hetpipe.job.sections import Section
from hetpipe.job.survive import Duration, checked_bounds

_Wait = Annotated[Duration, AfterValidator(partial(checked_bounds, least="1s", most="24h"))]


class PatienceSection(Section):
    """How long (1s to 24h) a process may be silent before it is given up.

    A process that is coming up says every second what it is doing, for example that it imports torch. As long as it
    does, it is waited for, however long that takes.
    """

    members: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """A service that `hetpipe train` has started: until it is ready. And how long these services, once they are all
    ready, may lack what the job needs. On a cluster a job waits in the queue, without a bound."""
    inspection: _Wait = Field(default=timedelta(seconds=120), examples=["2min"])
    """The process that imports the user's code and inspects the model."""
    preparation: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """The plan, and the parameter servers that are told of it; this is no silence, but the whole time."""
    ready: _Wait = Field(default=timedelta(seconds=120), examples=["2min"])
    """A stage process: until it is connected with its neighbours."""
    stop: _Wait = Field(default=timedelta(seconds=600), examples=["10min"])
    """The barrier of a stop, as the minibatches under way have to end; this, too, is the whole time."""
    last_checkpoint: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """The checkpoint that ends a run, where a disk is full or broken: it is tried again every second for so long."""
