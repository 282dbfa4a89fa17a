"""Trains the vision transformer to tell digits apart, in this process: `python -m examples.vit.pretrain`.

Writes `build/vit.safetensors`, with a new head of two classes: what the job begins with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.vit.data import digits
from hetpipe.job.file import load_job
from hetpipe.pipeline.callables import build_model

FILE = Path("build") / "vit.safetensors"
STEPS, BATCH = 600, 64
HEAD = "classifier."


def classifier(num_labels: int) -> nn.Module:
    """The model of the job, with so many classes."""
    changes = {"init_from": None, "model": {"args": {"config": {"args": {"num_labels": num_labels}}}}}
    return build_model(load_job(Path(__file__).with_name("job.yaml"), changes), Path.cwd())


def trained() -> nn.Module:
    """A classifier of ten digits."""
    torch.manual_seed(0)
    model, images = classifier(10), digits()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=STEPS)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        loss: Tensor = model(pixel_values=images.images[chosen], labels=images.labels[chosen]).loss
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
    start = classifier(2).state_dict()
    FILE.parent.mkdir(exist_ok=True)
    save_file({name: tensor if name.startswith(HEAD) else known[name] for name, tensor in start.items()}, FILE)
    sys.stdout.write(f"wrote {FILE}\n")


if __name__ == "__main__":
    main()
