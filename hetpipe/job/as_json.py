"""Serialized jobs between processes: JSON text, with its size checked before it is validated.

All mistakes of a job are reported, so a text with a million mistakes would produce a million sentences; hence the
limits.
"""

from __future__ import annotations

import json
from typing import Any

from hetpipe.errors import JobError
from hetpipe.job.model import Job

#: Maximum characters of a job. A profile of 1,000 layers on 8 device types takes a third of it.
MAX_JOB_CHARACTERS = 1 << 20

#: Maximum number of values in a job: numbers, texts, lists and mappings.
MAX_JOB_VALUES = 50_000


def job_from_json(text: str | bytes) -> Job:
    """Parse a job.

    Raises:
        JobError: it is not JSON or too large; or the list of its mistakes.
    """
    if len(text) > MAX_JOB_CHARACTERS:
        raise JobError(f"the job is {len(text)} characters of JSON; the limit is {MAX_JOB_CHARACTERS}")
    try:
        return Job.model_validate(_checked(json.loads(text)))
    except JobError:
        raise
    except RecursionError:
        raise JobError("the job is nested too deeply") from None
    except ValueError as error:
        raise JobError(f"the job is not JSON: {error}") from error


def _checked(values: Any) -> Any:
    if _num_values(values) > MAX_JOB_VALUES:
        raise JobError(f"the job has more than {MAX_JOB_VALUES} values; shorten its lists")
    return values


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(_num_values(entry) for entry in value.values())
    if isinstance(value, list):
        return 1 + sum(_num_values(entry) for entry in value)
    return 1
