"""Seeds that depend on what is computed, never on where: every partition draws the same numbers.

User code may draw from torch, `random` and NumPy's global functions; all three are seeded together.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType

import torch

from hetpipe.values.ids import Clock, LayerIndex, Minibatch, VirtualWorkerIndex

#: Exclusive upper bound on seeds of NumPy's global generator.
_NUMPY_SEEDS = 1 << 32


def _digest(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def layer_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch, layer: LayerIndex | str) -> int:
    """Seed (63 bits) for the forward of minibatch `p` of `vw` in layer `layer`, for example for dropout.

    In a model that is cut by its own forward, `layer` is the name of the call that draws.
    """
    return _digest("layer", seed, vw, p, layer)


def fetch_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch) -> int:
    """Seed (63 bits) for reading the samples of minibatch `p` of `vw`, for random augmentation."""
    return _digest("fetch", seed, vw, p)


def evaluation_layer_seed(seed: int, vw: VirtualWorkerIndex, number: int, layer: LayerIndex | str) -> int:
    """Seed (63 bits) for layer `layer` in evaluation minibatch `number` (from 1) of `vw`."""
    return _digest("evaluation layer", seed, vw, number, layer)


def evaluation_fetch_seed(seed: int, vw: VirtualWorkerIndex, number: int) -> int:
    """Seed (63 bits) for reading the samples of evaluation minibatch `number` (from 1) of `vw`."""
    return _digest("evaluation fetch", seed, vw, number)


def fresh_seed(seed: int, clock: Clock) -> int:
    """Seed (63 bits) under which the model is built whose layers are built anew at the barrier at `clock`."""
    return _digest("fresh", seed, clock)


def dataset_seed(seed: int, key: str) -> int:
    """Seed (63 bits) for building the data set of job key `key`: every process builds the same one."""
    return _digest("data set", seed, key)


def sampler_seed(seed: int, epoch: int) -> int:
    """Seed (63 bits) for the sampler of an epoch (from 0): every process gets the same order."""
    return _digest("sampler", seed, epoch)


def stream_seed(seed: int, key: str, epoch: int, position: int | None) -> int:
    """Seed (63 bits) for reading the sample at `position` of a stream in an epoch (from 0); None: for its iterator."""
    return _digest("stream", seed, key, epoch, position)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of user code: torch on the CPU and on `device`, `random`, and NumPy if it is imported.

    Generators created by user code (`numpy.random.default_rng()`) cannot be seeded; the proof before training detects
    data sets and layers that draw from one.
    """
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of torch (CPU and `device`), `random` and NumPy after this block."""
    of_python, numpy = random.getstate(), _numpy()
    of_numpy = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def generator_states() -> tuple[object, ...]:
    """States of the generators of torch (CPU), `random` and NumPy; equal if nothing was drawn in between."""
    numpy = _numpy()
    kept = () if numpy is None else numpy.random.get_state()
    of_numpy = tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in kept)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), of_numpy


def _numpy() -> ModuleType | None:
    """NumPy, if imported; else its generator is unused, since hetpipe itself does not depend on NumPy."""
    return sys.modules.get("numpy")
