"""The report of a job's model, without the proof that an agent makes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hetpipe.job.file import Job
from hetpipe.pipeline.data import EXAMPLE_SAMPLES
from hetpipe.profiler.subject import load_subject
from hetpipe.server.agent.inspection import hand_over, inspect_subject
from hetpipe.values.plan import ModelReport
from hetpipe.values.policies import POLICIES
from hetpipe.values.rewinds import MODEL_FILE

#: Keys of a job that neither the report nor the model file depends on: how a run is divided, ordered, updated and kept.
_OF_RUNS = frozenset(
    {
        *("name", "workers", "sync", "weights", "schedule", "parameter_servers", "epochs", "minibatches", "optimizer"),
        *("gradients", "lr_schedule", "prediction", "evaluate", "checkpoint", "history", "elastic", "patience"),
    }
)

#: Reports of earlier calls of `inspect_once`, with the bytes of their model files; None where there was none.
_known: dict[tuple[str, bool, Path], tuple[ModelReport, bytes | None]] = {}


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


def inspect_once(job: Job, import_path: Path, *, run_folder: Path | None = None) -> ModelReport:
    """The result and the file of `inspect_job`, made once for all jobs that differ in their runs alone.

    For small models whose modules in `import_path` do not change. The optimizer is checked with the first job only.
    """
    key = job.model_dump_json(exclude=set(_OF_RUNS)), POLICIES[job.weights].splits_ties, import_path
    if key not in _known:
        _known[key] = _inspected(job, import_path)
    report, file = _known[key]
    if run_folder is not None and file is not None:
        (run_folder / MODEL_FILE).write_bytes(file)
    return report


def _inspected(job: Job, import_path: Path) -> tuple[ModelReport, bytes | None]:
    with TemporaryDirectory() as folder:
        report = inspect_job(job, import_path, run_folder=Path(folder))
        path = Path(folder) / MODEL_FILE
        return report, path.read_bytes() if path.exists() else None
