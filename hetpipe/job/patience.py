"""The section of a job file about timeouts of processes that are starting up or stopping."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from hetpipe.job.sections import Section
from hetpipe.job.survive import Duration, checked_bounds

_Wait = Annotated[Duration, AfterValidator(partial(checked_bounds, least="1s", most="24h"))]


class PatienceSection(Section):
    """Timeouts (1s to 24h) for processes without a sign of life.

    A process that is starting up reports its current phase every second, for example that it imports torch. The timeout
    applies to the silence between reports, not to the duration of the start-up.
    """

    members: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """A service started by `hetpipe train`, until it is ready. Also how long resources that the job needs may be
    missing once all of these services are ready. On a cluster a job waits in the queue without a limit.
    """
    inspection: _Wait = Field(default=timedelta(seconds=120), examples=["2min"])
    """The process that imports the user's code and inspects the model."""
    preparation: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """Planning, and the configuration of the parameter servers; a limit on the total time."""
    ready: _Wait = Field(default=timedelta(seconds=120), examples=["2min"])
    """A stage process, until it is connected with its neighbours."""
    stop: _Wait = Field(default=timedelta(seconds=600), examples=["10min"])
    """The barrier of a stop, which lets the minibatches in flight complete; a limit on the total time."""
    data: _Wait = Field(default=timedelta(seconds=300), examples=["5min"])
    """A minibatch that is waited for, until a data worker (`data.num_workers`) has read it; then the workers count as
    hung, and the virtual worker is restarted.
    """
    last_checkpoint: _Wait = Field(default=timedelta(seconds=60), examples=["60s"])
    """The checkpoint that ends a run, while a disk is full or broken: how long it is retried, once per second."""
