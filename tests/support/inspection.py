"""The report of a job's model, without the proof that an agent makes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetpipe.job.file import Job
from hetpipe.pipeline.data import EXAMPLE_SAMPLES
from hetpipe.profiler.subject import load_subject
from hetpipe.server.agent.inspection import hand_over, inspect_subject
from hetpipe.values.plan import ModelReport


def inspect_job(job: Job, import_path: Path, *, run_folder: Path | None = None) -> ModelReport:
    """Import everything the job names, run one minibatch through it, and report sizes. Proves nothing.

    Args:
        job: the job.
        import_path: folder that user code is imported from first.
        run_folder: where the model is written from which stages build theirs; None: nowhere.

    Raises:
        CallableError, JobError: what cannot be used, by its path in the job.
    """
    subject, digest = load_subject(job, import_path), ""
    if run_folder is not None:
        digest, _ = hand_over(subject, import_path, run_folder, samples=min(EXAMPLE_SAMPLES, job.batch_size))
    return replace(inspect_subject(subject, import_path), digest=digest)
