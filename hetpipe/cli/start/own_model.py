"""Job and data for a model of Hugging Face or timm, for `hetpipe init --from`. Imports neither library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.errors import UserError
from hetpipe.values.suggest import did_you_mean, join_names

#: Classes of the made-up data, which a user's own replace.
_TEXT_CLASSES, _IMAGE_CLASSES = 2, 4

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TIMM_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)?", re.ASCII)

_HOW = "write --from hf:NAME for a model of Hugging Face's hub, hf:FOLDER for one in a folder, or timm:NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a Hugging Face model; the template of its data has the task's name."""

    auto_class: str
    """The class of transformers that loads such models."""
    heads: tuple[str, ...]
    """Ends of the names of the models' classes, as in `architectures` of their configuration."""
    metrics: str
    """Value of the job's key."""
    mean_over: str = ""
    """Value of the job's key; empty for the default."""
    num_labels: int | None = None
    """Classes of the data; None if there are none."""
    collates: bool = True
    """Whether minibatches are made by the data's `collate`."""


TASKS: Mapping[str, Task] = {
    "causal-lm": Task(
        auto_class="AutoModelForCausalLM",
        heads=("ForCausalLM", "LMHeadModel"),
        metrics="{perplexity: next_token_perplexity}",
        mean_over="next_tokens",
        collates=False,
    ),
    "masked-lm": Task(
        auto_class="AutoModelForMaskedLM",
        heads=("ForMaskedLM", "ForPreTraining"),
        metrics="{perplexity: perplexity}",
        mean_over="tokens",
    ),
    "text-classification": Task(
        auto_class="AutoModelForSequenceClassification",
        heads=("ForSequenceClassification",),
        metrics="{accuracy: accuracy}",
        num_labels=_TEXT_CLASSES,
    ),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification",
        heads=("ForImageClassification",),
        metrics="{accuracy: accuracy}",
        num_labels=_IMAGE_CLASSES,
        collates=False,
    ),
    "seq2seq": Task(
        auto_class="AutoModelForSeq2SeqLM",
        heads=("ForConditionalGeneration",),
        metrics="{perplexity: perplexity}",
        mean_over="tokens",
    ),
}


#: Files of weights, and of a tokenizer.
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "merges.txt")


def model_files(source: str, task: str | None, current: Path) -> dict[str, str]:
    """`job.yaml` and `data.py` that train a model as it is.

    Args:
        source: `hf:NAME`, `hf:FOLDER` or `timm:NAME`.
        task: a name in `TASKS`; None: that of the configuration in the model's folder.
        current: the folder to which a relative one refers.

    Raises:
        UserError: naming what is wrong with one of them.
    """
    library, colon, name = source.partition(":")
    if not colon or not name or library not in ("hf", "timm"):
        raise UserError(f"--from {source!r} names no model; {_HOW}")
    if library == "timm":
        return _of_timm(name, task)
    if task is not None and task not in TASKS:
        raise UserError(f"--task {task!r} is unknown; {did_you_mean(task, TASKS)}")
    folder = current / name
    is_folder = folder.is_dir()
    if not is_folder and not _HUB_NAME.fullmatch(name):
        raise UserError(f"--from {source!r}: {folder} is no folder, and {name!r} is no name of the hub; {_HOW}")
    task = task or (_task_of(folder) if is_folder else None)
    if task is None:
        raise UserError(f"--from {source} needs --task, as its configuration is not at hand; {_use_tasks()}")
    return _of_hugging_face(str(folder.resolve()) if is_folder else name, task)


def missing_remarks(source: str, texts: Mapping[str, str], current: Path) -> list[str]:
    """What to do about a folder without weights, or without the tokenizer that the data of `model_files` need.

    `AutoTokenizer` makes an empty one then, to which every text is unknown tokens, and the model learns nothing.
    """
    folder = current / source.partition(":")[2]
    if not source.startswith("hf:") or not folder.is_dir():
        return []

    def lacks(patterns: Sequence[str]) -> bool:
        return not any(found for pattern in patterns for found in folder.glob(pattern))

    remarks = []
    if lacks(_WEIGHTS):
        fix = f"save some there: model.save_pretrained({str(folder)!r})"
        remarks.append(f"{folder} has no weights, which job.yaml starts from; {fix}")
    if "AutoTokenizer" in texts["data.py"] and lacks(_TOKENIZERS):
        fix = f"save one there: tokenizer.save_pretrained({str(folder)!r})"
        remarks.append(f"{folder} has no tokenizer, which data.py needs; {fix}")
    return remarks


def _of_hugging_face(model: str, name: str) -> dict[str, str]:
    task = TASKS[name]
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": model}
    if task.num_labels is not None:
        arguments |= {"num_labels": task.num_labels, "ignore_mismatched_sizes": True}
    job = {
        "call": f"transformers:{task.auto_class}.from_pretrained",
        "args": json.dumps(arguments),
        "loss": "",
        "metrics": task.metrics,
        "mean_over": task.mean_over,
        "collate": task.collates,
    }
    return _rendered(name, model, job, is_timm=False)


def _of_timm(model: str, task: str | None) -> dict[str, str]:
    if task not in (None, "image-classification"):
        raise UserError(f"--task {task} does not go with --from timm:{model}, which classifies images; remove it")
    if not _TIMM_NAME.fullmatch(model):
        raise UserError(f"--from timm:{model} is no name of a model of timm; timm.list_models() has them")
    job = {
        "call": "timm:create_model",
        "args": json.dumps({"model_name": model, "pretrained": True, "num_classes": _IMAGE_CLASSES}),
        "loss": "torch.nn.functional:cross_entropy",
        "metrics": "{accuracy: accuracy}",
        "mean_over": "",
        "collate": False,
    }
    return _rendered("image-classification", model, job, is_timm=True)


def _rendered(template: str, model: str, job: Mapping[str, object], *, is_timm: bool) -> dict[str, str]:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # What is written is YAML and Python, not HTML; values from outside are quoted as JSON.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("hetpipe.cli", "templates/from"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-._")[:64] or "model"
    title = f"{name} of {'timm' if is_timm else 'Hugging Face'}"
    data = environment.get_template(f"{template}.py.j2").render(title=title, model=json.dumps(model), is_timm=is_timm)
    return {
        "job.yaml": environment.get_template("job.yaml.j2").render(title=title, name=json.dumps(name), **job),
        "data.py": data,
    }


def _task_of(folder: Path) -> str:
    """The task of the model in a folder, by its class.

    Raises:
        UserError: the folder has no configuration, or none that says it.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (architecture,) = config["architectures"]
    except OSError as error:
        raise UserError(
            f"{folder}/config.json cannot be read: {error.strerror}; name a folder that `save_pretrained` has written"
        ) from error
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder}/config.json names no class in `architectures`; {_use_tasks()}") from None
    for name, task in TASKS.items():
        if str(architecture).endswith(task.heads):
            return name
    raise UserError(f"{folder} has a {architecture}, for which there is no template; {_use_tasks()}")


def _use_tasks() -> str:
    return f"give --task {join_names(tuple(TASKS))}"
