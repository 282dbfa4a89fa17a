"""Export to a folder that `from_pretrained` of Hugging Face's libraries can load.

The job's model is built as for training, the checkpoint is loaded strictly, and the model's `save_pretrained` writes
its configuration, its weights (with ties omitted, as safetensors requires), and its generation configuration if any.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

from torch import nn

from hetpipe.checkpoint.export import Exported, TrainedState, read_trained_state
from hetpipe.errors import CheckpointError, UserError
from hetpipe.job.file import Job
from hetpipe.model.user_errors import raised_text
from hetpipe.pipeline.callables import build_model
from hetpipe.pipeline.chain import state_names
from hetpipe.pipeline.seeds import preserved_generators

#: Limit on the differences between checkpoint and model listed in a message.
_MAX_NAMED = 4


def export_hugging_face(job: Job, import_path: Path, run: str | Path, out: Path, *, is_best: bool = False) -> Exported:
    """Write the folder `out`, atomically.

    Args:
        job: the run's job.
        import_path: folder searched first for user code.
        run: folder or URL of the run; its newest checkpoint is exported.
        is_best: its best checkpoint instead.
        out: a new or an empty folder.

    Raises:
        CallableError: the model cannot be built, for example because a package is not installed.
        CheckpointError: the run has no complete checkpoint, or it does not fit the model.
        UserError: the model is not a Hugging Face model, or `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; name a new folder, for example {out.with_name(out.name + '-new')}")
    state = read_trained_state(run, is_best=is_best)
    with preserved_generators():
        model: Any = build_model(job, import_path)
    if not callable(getattr(model, "save_pretrained", None)):
        raise UserError(
            f"model: `{job.model}` returns a {type(model).__name__}, which is not a Hugging Face model: it has no "
            "save_pretrained; write its weights with --to safetensors, and load them with load_state_dict into a model "
            "that the same callable returns"
        )
    load_strictly(model, state)
    unfinished = out.absolute().with_name(f".{out.name}-{uuid.uuid4().hex[:8]}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except Exception as error:
        raise UserError(f"cannot write {out}: {raised_text(error)}; name a writable folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Exported(state.checkpoint, state.clock, len(state.tensors), num_bytes)


def load_strictly(model: nn.Module, state: TrainedState) -> None:
    """Load `state` into `model`; neither may have tensors that the other lacks.

    Raises:
        CheckpointError: the checkpoint does not fit the model.
    """
    tensors = dict(state.tensors)
    for name, keys in state_names(model).items():
        # An older checkpoint has one name per tied weight, and non-persistent buffers.
        first = next((tensors[key] for key in (name, *keys) if key in tensors), None)
        if first is not None:
            tensors |= {key: tensors.get(key, first) for key in keys}
        if not keys:
            tensors.pop(name, None)
    expected = model.state_dict()
    amiss = [
        *(f"it has no {name}" for name in expected.keys() - tensors.keys()),
        *(f"it has {name}, and the model has none" for name in tensors.keys() - expected.keys()),
        *(
            f"its {name} is of shape {list(tensors[name].shape)}, the model's of {list(value.shape)}"
            for name, value in expected.items()
            if name in tensors and tensors[name].shape != value.shape
        ),
    ]
    if amiss:
        raise CheckpointError(
            f"{state.checkpoint} does not fit the model that the job's `model` returns here: "
            f"{'; '.join(sorted(amiss)[:_MAX_NAMED])}; export in the folder with the code it was trained with"
        )
    model.load_state_dict(tensors)
