"""Trains BERT to fill in masked bytes, in this process: `python -m examples.bert.pretrain`.

Writes `build/bert.safetensors`, with a new head of two classes: what the job `fine_tune.yaml` begins with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.bert.data import CLASSIFY, PADDING, pad, train_data
from hetpipe.job.file import load_job
from hetpipe.pipeline.callables import build_model

FILE = Path("build") / "bert.safetensors"
STEPS, BATCH = 500, 32
MASK = 2
"""Stands in place of a byte that is to be found."""
MASKED_SHARE = 0.15
IGNORED = -100


def model_of(kind: str) -> nn.Module:
    """The model of the job, of this kind."""
    changes = {"init_from": None, "model": {"call": f"transformers:{kind}.from_config"}}
    return build_model(load_job(Path(__file__).with_name("fine_tune.yaml"), changes), Path.cwd())


def masked(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of which some are masked, and what stood there; −100 where nothing is asked."""
    asked = (torch.rand(ids.shape) < MASKED_SHARE) & (ids != PADDING) & (ids != CLASSIFY)
    return ids.masked_fill(asked, MASK), ids.masked_fill(~asked, IGNORED)


def trained() -> nn.Module:
    """A model of masked bytes."""
    torch.manual_seed(0)
    model = model_of("AutoModelForMaskedLM")
    lines = train_data()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=STEPS)
    for step in range(STEPS):
        batch = pad([lines[index] for index in torch.randint(len(lines), (BATCH,)).tolist()])
        ids, wanted = masked(batch["input_ids"])
        loss: Tensor = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            sys.stdout.write(f"step {step + 1} of {STEPS}, loss {loss.item():.3f}\n")
    return model


def main() -> None:
    """Train, and write the weights with a new head."""
    known = trained().state_dict()
    start = model_of("AutoModelForSequenceClassification").state_dict()
    FILE.parent.mkdir(exist_ok=True)
    save_file({name: known.get(name, tensor) for name, tensor in start.items()}, FILE)
    sys.stdout.write(f"wrote {FILE}\n")


if __name__ == "__main__":
    main()
