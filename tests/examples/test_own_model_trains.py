"""What `hetpipe init --from` writes trains, for each task, from the command line; with small models in folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from hetpipe.cli.start.own_model import TASKS
from hetpipe.pipeline.torchvision_operators import prepare_import

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]

VOCABULARY, LENGTH = 200, 32
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}


def _models() -> dict[str, Callable[[Any], Any]]:
    """Task → the model, of the library."""
    return {
        "causal-lm": lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=2)
        ),
        "masked-lm": lambda t: t.BertForMaskedLM(t.BertConfig(**_BERT)),
        "text-classification": lambda t: t.BertForSequenceClassification(t.BertConfig(**_BERT)),
        "image-classification": lambda t: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            )
        ),
        "seq2seq": lambda t: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
    }


def _write(task: str, folder: Path) -> None:
    """The folder that `save_pretrained` of model and tokenizer leaves."""
    prepare_import()
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    _models()[task](transformers).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL))
    words.train_from_iterator(list(topics.values())[:30], trainer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LENGTH, **names).save_pretrained(
        folder
    )


def hetpipe(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hetpipe", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained(folder: Path, *changes: str) -> str:
    """What a short training says."""
    given = ("epochs=null", "data.eval=null", *changes)
    return hetpipe(folder, "train", "job.yaml", *(part for one in given for part in ("--set", one)))


@pytest.mark.parametrize("task", TASKS)
def test_a_model_in_a_folder_trains(task: str, tmp_path: Path) -> None:
    _write(task, tmp_path / "model")
    hetpipe(tmp_path, "init", "mine", "--from", "hf:model")
    said = trained(tmp_path / "mine", "minibatches=4")
    assert "it is trained in training mode" in said
    assert "the history shows no violation" in said


def test_a_model_of_timm_trains(tmp_path: Path) -> None:
    hetpipe(tmp_path, "init", "mine", "--from", "timm:resnet10t")
    arguments = "{model_name: resnet10t, pretrained: false, num_classes: 4}"
    said = trained(tmp_path / "mine", "minibatches=2", "batch_size=2", f"model.args={arguments}")
    assert "the history shows no violation" in said
