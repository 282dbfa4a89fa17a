"""Seeds that depend on what is computed, never on where: another partition draws the same numbers."""

from __future__ import annotations

from hashlib import blake2b

from hetpipe.spec.ids import LayerIndex, Minibatch, VirtualWorkerIndex


def _digest(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def layer_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch, layer: LayerIndex) -> int:
    """The seed (63 bits) that layer `layer` runs the forward of minibatch `p` of `vw` under; dropout draws from it."""
    return _digest("layer", seed, vw, p, layer)


def fetch_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch) -> int:
    """The seed (63 bits) under which the samples of minibatch `p` of `vw` are read, for random augmentation."""
    return _digest("fetch", seed, vw, p)
