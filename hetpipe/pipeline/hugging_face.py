"""Export to a folder that `from_pretrained` of Hugging Face's libraries reads.

The job's model is built as for training, the checkpoint is loaded into it strictly, and the model writes itself
(`save_pretrained`): its configuration, its weights with ties left out as safetensors needs it, and the configuration of
its generation where it has one.
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

#: Differences between a checkpoint and a model that a message names.
_MAX_NAMED = 4


def export_hugging_face(job: Job, import_path: Path, run_dir: Path, out: Path) -> Exported:
    """Write the folder `out`, whole or not at all.

    Args:
        job: of the run.
        import_path: the folder that user code is imported from first.
        run_dir: whose newest checkpoint is exported.
        out: a new folder, or an empty one.

    Raises:
        CallableError: the model cannot be built, for example because a package is not installed.
        CheckpointError: the run has no complete checkpoint, or it is none of this model.
        UserError: the model is none of Hugging Face, or `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already; name a new folder, for example {out.with_name(out.name + '-new')}")
    state = read_trained_state(run_dir)
    with preserved_generators():
        model: Any = build_model(job, import_path)
    if not callable(getattr(model, "save_pretrained", None)):
        raise UserError(
            f"model: `{job.model}` returns a {type(model).__name__}, which is no Hugging Face model: it has no "
            "save_pretrained; write its weights with --to safetensors, and load them with load_state_dict into one "
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
        raise UserError(f"cannot write {out}: {raised_text(error)}; name a folder that can be written") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Exported(state.checkpoint, state.clock, len(state.tensors), num_bytes)


def load_strictly(model: nn.Module, state: TrainedState) -> None:
    """Load everything that `state` has into `model`, and nothing less than everything that the model needs.

    Raises:
        CheckpointError: it is of another model.
    """
    tensors = dict(state.tensors)
    for name, keys in state_names(model).items():
        # Of an older checkpoint, which has one name of a tied weight, and buffers that are not persistent.
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
            f"{state.checkpoint} is not of the model that the job's `model` returns here: "
            f"{'; '.join(sorted(amiss)[:_MAX_NAMED])}; export in the folder with the code that it was trained with"
        )
    model.load_state_dict(tensors)
