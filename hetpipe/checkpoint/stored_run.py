"""The documents of a run in an object store: its owner, and the input of a resumed run.

`run.json`, `job.json` and `facts.json` are below the run's URL beside its checkpoints, written once before it trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hetpipe.errors import CheckpointError, UserError
from hetpipe.storage.objects import ObjectStore
from hetpipe.values.ids import JobId
from hetpipe.values.storage_url import checked_url

_OWNER = "run.json"
_DOCUMENTS = ("job.json", "facts.json")

#: Largest document that is read; `facts.json` lists samples.
_MAX_DOCUMENT_BYTES = 1 << 30

#: Timeout for a document.
_SECONDS = 60.0


def claim_run(url: str, job_id: JobId, documents: Mapping[str, str], *, store: ObjectStore | None = None) -> None:
    """Write the documents of a job's run at `url`, which also verifies that it is writable. Idempotent.

    Raises:
        UserError: the store cannot be used, or `url` has the run of another job.
    """
    objects = store or ObjectStore(url)
    try:
        owner = _owner(objects)
        if owner not in {None, job_id}:
            raise UserError(
                f"storage: {url} is the run of another job, {owner}; train in a folder of another name (--run-dir), or "
                "name another storage"
            )
        for name in _DOCUMENTS:
            if name in documents:
                objects.put(name, documents[name].encode(), seconds=_SECONDS)
        objects.put(_OWNER, json.dumps({"job_id": job_id}).encode())
    except OSError as error:
        raise UserError(f"storage: {error}") from error


def _owner(objects: ObjectStore) -> str | None:
    try:
        return str(json.loads(objects.get(_OWNER, max_bytes=1 << 20))["job_id"])
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"storage: {objects.url}/{_OWNER} is not the document of a run: {error}; name another storage"
        ) from error


def fetch_documents(url: str, into: Path, *, store: ObjectStore | None = None) -> None:
    """Write the documents of the run at `url` into a folder.

    Raises:
        UserError: the URL has no run, or the store cannot be used.
        CheckpointError: it is not the URL of a store.
    """
    try:
        objects = store or ObjectStore(checked_url(url))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for name in _DOCUMENTS:
        try:
            (into / name).write_bytes(objects.get(name, max_bytes=_MAX_DOCUMENT_BYTES, seconds=_SECONDS))
        except FileNotFoundError:
            raise UserError(
                f"{url} is not a run: it has no {name}; name the URL of a run, which is below its job's storage"
            ) from None
        except OSError as error:
            raise UserError(f"{url} cannot be read: {error}") from error
