"""Loading of jobs from files, mappings and overrides. The model is in `job.model`, its sections in `job.sections`.

>>> job = load_job(
...     {
...         "model": "model:build",
...         "loss": "torch.nn.functional:cross_entropy",
...         "data": {"train": "model:train_data"},
...         "optimizer": {"name": "SGD", "lr": 0.1},
...         "epochs": 3,
...     },
...     ["sync.D=4", "workers.count=2"],
... )
>>> job.sync.D, job.num_devices
(4, 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.errors import DocumentError, JobError
from hetpipe.job.model import Job, normalised
from hetpipe.job.overrides import Overrides, merged, parse_set
from hetpipe.job.training import GradientsSection, LrScheduleSpec, OptimizerSpec, ParameterGroup, PredictionSection
from hetpipe.values.cluster import Cluster
from hetpipe.values.document import read_document
from hetpipe.values.problems import shown
from hetpipe.values.profile import Profile
from hetpipe.values.yaml_text import YamlSyntaxError, parse_yaml

#: Keys of `cluster` whose value may be a path.
_FILES: Mapping[str, type[Cluster | Profile]] = {"file": Cluster, "profile": Profile}

__all__ = [
    "GradientsSection",
    "Job",
    "LrScheduleSpec",
    "OptimizerSpec",
    "Overrides",
    "ParameterGroup",
    "PredictionSection",
    "load_job",
    "parse_set",
]


def load_job(source: str | Path | Mapping[str, Any] | Job, overrides: Overrides = ()) -> Job:
    """Load a job from a YAML file, a mapping or another job, and apply overrides.

    Args:
        source: path of a job file; a mapping with the same structure; or a `Job`.
        overrides: `path=value` texts, or a mapping with nested or dotted keys (`{"sync": {"D": 4}, "epochs": 2}`).
            Setting one of two keys that exclude each other removes the other one from `source` (`job.overrides`).

    Raises:
        JobError: lists every mistake of the source and of the overrides.
    """
    problems: list[str] = []
    base: Mapping[str, Any]
    if isinstance(source, Job):
        base = source.model_dump()
    elif isinstance(source, Mapping):
        base = source
    else:
        base, problems = _read(Path(source))
    values, override_problems = merged(base, overrides)
    problems += override_problems
    values, file_problems = _with_files(values, beside=None if isinstance(source, Job | Mapping) else Path(source))
    if file_problems:
        raise JobError([*problems, *file_problems])
    try:
        job = Job(**values)
    except JobError as error:
        raise JobError([*problems, *error.problems]) from None
    if problems:
        raise JobError(problems)
    return job


def _with_files(values: dict[str, Any], *, beside: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Replace the paths of cluster file and profile by the contents of these files.

    Paths are relative to the folder of the job file `beside`, or else to the current folder.
    """
    cluster = values.get("cluster")
    if not isinstance(cluster, Mapping):
        return values, []
    cluster, problems = dict(cluster), []
    for key, kind in _FILES.items():
        given = cluster.get(key)
        if not isinstance(given, str):
            continue
        path = Path(given) if beside is None or Path(given).exists() else beside.parent / given
        del cluster[key]
        try:
            cluster[key] = normalised(read_document(kind, path).model_dump(mode="json"))
        except DocumentError as error:
            problems += [f"cluster.{key}: {error.what}: {problem}" for problem in error.problems]
    return {**values, "cluster": cluster}, problems


def _read(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobError(f"{path}: no such file; looked in {path.absolute().parent}") from None
    except IsADirectoryError:
        raise JobError(f"{path}: is a folder; give the job file in it, for example {path / 'job.yaml'}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); is it a job file?") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        value, problems = parse_yaml(text)
    except YamlSyntaxError as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        raise JobError(f"{where}: not valid YAML: {error}; check indentation, colons and quotes there") from error
    if value is None:
        raise JobError(f"{path}: is empty; `hetpipe init` writes a job file to start from")
    if not isinstance(value, Mapping):
        raise JobError(f"{path}: a job is a mapping of keys, not {shown(value)}; write for example `name: my-job`")
    return value, [str(problem) for problem in problems]
