"""Cache key of a measurement: the user's code and model, the minibatch, the device and software versions.

All source files imported for the job are hashed in full, so any change in them invalidates the measurement. Other
inputs of the code count only through the shapes of parameters and inputs; use `--fresh` if those do not change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import torch

import hetpipe
from hetpipe.job.sections import CallSpec, LossTerm
from hetpipe.pipeline.chain import dtype_name, tensor_spec
from hetpipe.profiler.machine import processor_name
from hetpipe.profiler.subject import Subject
from hetpipe.values import wire
from hetpipe.values.plan import TensorSpec
from hetpipe.values.precision import Precision

#: Version of the format; a new one invalidates all older measurements.
_METHOD = 3

#: Top-level names of hetpipe's own modules, including the main module of the measuring program.
_OWN = frozenset({hetpipe.__name__, "__main__", "__mp_main__"})

#: Folders of packages that are installed, not the user's.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything a measurement depends on; measurements with equal fingerprints are interchangeable."""

    model: str
    loss: str
    sources: Mapping[str, str]
    """Module → digest of its file, of the user's modules."""
    layers: tuple[tuple[str, tuple[TensorSpec, ...]], ...]
    """Name, then parameters (frozen ones included) and buffers."""
    inputs: tuple[TensorSpec, ...]
    """Of one minibatch, by position."""
    batch_size: int
    device: str
    """Name reported by the device."""
    num_threads: int
    torch_version: str
    precision: Precision
    method: int = _METHOD

    @property
    def key(self) -> str:
        """The fingerprint as a file name."""
        return sha256(wire.to_json(Fingerprint, self).encode()).hexdigest()[:32]


def fingerprint_of(subject: Subject, device: torch.device, import_path: Path) -> Fingerprint:
    """The fingerprint of `subject` on `device`; its code was imported from `import_path`."""
    return Fingerprint(
        model=_as_text(subject.job.model),
        loss=_as_text(subject.job.loss),
        sources=digests(sys.modules, import_path.resolve()),
        layers=tuple((layer.name, _specs(layer.module)) for layer in subject.chain),
        inputs=tuple(tensor_spec(str(index), value) for index, value in enumerate(subject.batch.inputs)),
        batch_size=subject.job.batch_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        precision=subject.job.precision,
    )


def _as_text(named: str | CallSpec | Mapping[str, LossTerm] | None) -> str:
    """A reference unchanged; anything else as JSON."""
    if named is None or isinstance(named, str):
        return named or ""
    values = (
        named.model_dump() if isinstance(named, CallSpec) else {key: each.model_dump() for key, each in named.items()}
    )
    return json.dumps(values)


def digests(modules: Mapping[str, ModuleType], folder: Path) -> dict[str, str]:
    """Digests of module files in `folder` (resolved), except installed packages and hetpipe itself."""
    found = {}
    for name, module in sorted(modules.items()):
        file = getattr(module, "__file__", None)
        # Thousands of modules are not the user's: comparing their paths as text is faster.
        if file is None or not file.startswith(f"{folder}/") or name.partition(".")[0] in _OWN:
            continue
        path = Path(file)
        if not _INSTALLED & set(path.parts) and path.is_file():
            found[name] = sha256(path.read_bytes()).hexdigest()
    return found


def _specs(module: torch.nn.Module) -> tuple[TensorSpec, ...]:
    tensors: Iterable[tuple[str, torch.Tensor]] = (*module.named_parameters(), *module.named_buffers())
    return tuple(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors)
