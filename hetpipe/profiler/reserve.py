"""What the framework takes of a device's memory beside the tensors of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hetpipe.pipeline.chain import Layer

#: Side of the matrices whose product makes libraries take their workspace.
_WARM_UP_SIZE = 64


def framework_reserve(device: torch.device, chain: Sequence[Layer]) -> int:
    """Bytes that a process like this one takes of `device`, without the tensors of the model.

    On a GPU: what is not free after a first matrix product, and not held by torch for tensors: the context, the
    libraries' workspaces, and what other programs hold, which is no more to be had. On the CPU: this process's resident
    memory without the model `chain`, which lies there; Python, torch and what the user's code imports.
    """
    if device.type == "cuda":
        side = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, device=device)
        torch.mm(side, side).sum().item()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    modules = [layer.module for layer in chain]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers()) if t.device == device}
    return max(0, _resident_bytes() - sum(tensor.nbytes for tensor in tensors.values()))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
