"""The supernet: a stem, four places with three candidate blocks each, and a head.

At most one block of a place is active at a time; a place without one is skipped. Shape suffixes: B images, P pixels,
W features, C classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from examples.digits.model import NUM_CLASSES, NUM_PIXELS

WIDTH = 48

PLACES = ("a", "b", "c", "d")

#: The candidates of a place; `skip` has no block.
CHOICES = ("tanh", "relu", "wide", "skip")

#: The choice at each place.
Architecture = tuple[str, ...]


class Wide(nn.Module):
    """Four times as many features in between, and a shortcut around them: [B W] → [B W]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BW: Tensor) -> Tensor:
        """Add what the inner layers compute."""
        added_BW: Tensor = self.inner(x_BW)
        return x_BW + added_BW


def build() -> nn.Sequential:
    """The supernet, [B P] → [B C]: a chain of 14 layers, named `stem`, `a_tanh`, …, `d_wide`, `head`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Linear(NUM_PIXELS, WIDTH))
    for place in PLACES:
        layers[f"{place}_tanh"] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        layers[f"{place}_relu"] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        layers[f"{place}_wide"] = Wide()
    layers["head"] = nn.Linear(WIDTH, NUM_CLASSES)
    return nn.Sequential(layers)


def active_layers(architecture: Sequence[str]) -> list[str]:
    """The names of the layers that an architecture consists of, in order."""
    blocks = (f"{place}_{choice}" for place, choice in zip(PLACES, architecture, strict=True) if choice != "skip")
    return ["stem", *blocks, "head"]
