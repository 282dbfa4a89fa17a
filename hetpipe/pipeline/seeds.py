"""Seeds that depend on what is computed, never on where: another partition draws the same numbers.

User code may draw from torch, from `random` or from NumPy's global functions; all three are seeded together.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType

import torch

from hetpipe.values.ids import LayerIndex, Minibatch, VirtualWorkerIndex

#: Seeds of NumPy's global generator lie below this.
_NUMPY_SEEDS = 1 << 32


def _digest(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def layer_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch, layer: LayerIndex | str) -> int:
    """The seed (63 bits) that layer `layer` runs the forward of minibatch `p` of `vw` under; dropout draws from it.

    In a model that is cut by its own forward, `layer` is the name of the call that draws.
    """
    return _digest("layer", seed, vw, p, layer)


def fetch_seed(seed: int, vw: VirtualWorkerIndex, p: Minibatch) -> int:
    """The seed (63 bits) under which the samples of minibatch `p` of `vw` are read, for random augmentation."""
    return _digest("fetch", seed, vw, p)


def evaluation_layer_seed(seed: int, vw: VirtualWorkerIndex, number: int, layer: LayerIndex | str) -> int:
    """The seed (63 bits) of layer `layer` in evaluation minibatch `number` (from 1) of `vw`."""
    return _digest("evaluation layer", seed, vw, number, layer)


def evaluation_fetch_seed(seed: int, vw: VirtualWorkerIndex, number: int) -> int:
    """The seed (63 bits) under which the samples of evaluation minibatch `number` (from 1) of `vw` are read."""
    return _digest("evaluation fetch", seed, vw, number)


def dataset_seed(seed: int, key: str) -> int:
    """The seed (63 bits) under which the data set of the job's key `key` is made: every process makes the same one."""
    return _digest("data set", seed, key)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed what user code draws from: torch on the CPU and on `device`, `random`, and NumPy where it is imported.

    Generators that user code made itself (`numpy.random.default_rng()`) are out of reach; the proof before training
    finds data sets and layers that draw from one.
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
    """Leave the generators of torch (CPU and `device`), `random` and NumPy after this block as they were before it."""
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
    """Where the generators of torch (on the CPU), `random` and NumPy stand; equal as long as nobody draws."""
    numpy = _numpy()
    kept = () if numpy is None else numpy.random.get_state()
    of_numpy = tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in kept)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), of_numpy


def _numpy() -> ModuleType | None:
    """NumPy, which hetpipe itself does not need: who has not imported it has drawn nothing from it."""
    return sys.modules.get("numpy")
