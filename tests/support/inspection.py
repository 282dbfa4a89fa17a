"""The report of a job's model, without the proof that an agent makes first."""

from __future__ import annotations

from pathlib import Path

from hetpipe.job.file import Job
from hetpipe.profiler.subject import load_subject
from hetpipe.server.agent.inspection import inspect_subject
from hetpipe.values.plan import ModelReport


def inspect_job(job: Job, import_path: Path) -> ModelReport:
    """Import everything the job names, run one minibatch through it, and report sizes. Proves nothing.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    return inspect_subject(load_subject(job, import_path), import_path)
