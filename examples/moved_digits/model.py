"""A small convolutional network as a chain of eight layers that four stages share about evenly, two layers each.

Its norms are GroupNorm rather than BatchNorm: they keep no statistics of earlier minibatches, so weight policies differ
in the weights they use and in nothing else. Shape suffixes: B images, C channels (at the end: classes), H and W pixels.
"""

from __future__ import annotations

from torch import Tensor, nn

SIZE = 16
"""Pixels of an image's edge."""
NUM_CLASSES = 10
CHANNELS = (32, 64, 128)
CHANNELS_PER_GROUP = 16


def build() -> nn.Sequential:
    """The model, [B 1 16 16] → [B 10]."""
    small, middle, large = CHANNELS
    return nn.Sequential(
        nn.Conv2d(1, small, kernel_size=3, padding=1),
        Shortcut(small),
        halving(small, middle),
        Shortcut(middle),
        halving(middle, large),
        Shortcut(large),
        Shortcut(large),
        nn.Sequential(norm(large), nn.Flatten(), nn.Linear(large * (SIZE // 4) ** 2, NUM_CLASSES)),
    )


class Shortcut(nn.Module):
    """A convolution of 3 × 3 pixels behind a norm and around a shortcut, [B C H W] → [B C H W]."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.norm = norm(num_channels)
        self.convolution = nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images to images of the same shape."""
        convolved: Tensor = self.convolution(self.norm(images_BCHW))
        return images_BCHW + convolved


def halving(num_in: int, num_out: int) -> nn.Sequential:
    """Half as many pixels each way, and more channels: [B in H W] → [B out H/2 W/2]."""
    return nn.Sequential(norm(num_in), nn.Conv2d(num_in, num_out, kernel_size=3, stride=2, padding=1))


def norm(num_channels: int) -> nn.Sequential:
    """A norm over groups of channels, and a ReLU; [B C H W] → [B C H W]."""
    return nn.Sequential(nn.GroupNorm(num_channels // CHANNELS_PER_GROUP, num_channels), nn.ReLU())
