"""A job as it travels between processes: JSON text, bounded before it is looked at in detail.

Every mistake of a job is told, so a text of a million mistakes would be a million sentences; hence the limits.
"""

from __future__ import annotations

import json
from typing import Any

from hetpipe.errors import JobError
from hetpipe.job.model import Job

#: Most characters of a job. A profile of 1,000 layers on 8 device types takes a third of it.
MAX_JOB_CHARACTERS = 1 << 20

#: Most numbers, texts, lists and mappings in a job.
MAX_JOB_VALUES = 50_000


def job_from_json(text: str | bytes) -> Job:
    """The job in `text`.

    Raises:
        JobError: it is no JSON, too large, or with every mistake in it.
    """
    if len(text) > MAX_JOB_CHARACTERS:
        raise JobError(f"the job is {len(text)} characters of JSON; at most {MAX_JOB_CHARACTERS} are taken")
    try:
        return Job.model_validate(_checked(json.loads(text)))
    except JobError:
        raise
    except RecursionError:
        raise JobError("the job is nested too deeply to be one") from None
    except ValueError as error:
        raise JobError(f"the job is not JSON: {error}") from error


def _checked(values: Any) -> Any:
    if _num_values(values) > MAX_JOB_VALUES:
        raise JobError(f"the job holds over {MAX_JOB_VALUES} values; shorten its lists")
    return values


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(_num_values(entry) for entry in value.values())
    if isinstance(value, list):
        return 1 + sum(_num_values(entry) for entry in value)
    return 1
