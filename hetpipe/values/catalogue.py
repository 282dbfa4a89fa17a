"""The catalogue of device types: published figures of GPUs, used where nothing has been measured.

`emulate_as: TYPE`, cluster files that name a type without its memory, and the profiler's roofline estimates use it.
Every figure is for dense arithmetic at boost clock, from the entry's `source`. They are peaks, suited to ratios between
types and to bounds, not to predicting a model's speed: the paper measures TITAN V ahead of TITAN RTX (section 8.1),
although the peak of TITAN RTX is a tenth higher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from hetpipe.values.catalogue_table import TABLE, CatalogueEntry, DeviceLink
from hetpipe.values.quantities import bytes_text
from hetpipe.values.suggest import closest

__all__ = ["CATALOGUE", "CatalogueEntry", "DeviceLink", "catalogue_hint", "memory_text", "type_of_device_name"]

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {entry.name: entry for entry in sorted(TABLE, key=lambda entry: entry.name)}
)
"""Types by name, sorted."""

#: Words of a reported name that do not distinguish devices.
_IDLE_WORDS = frozenset({"nvidia", "amd", "geforce", "radeon", "tesla", "instinct", "generation", "graphics"})

#: A driver reports somewhat less memory than the module has (its own share, error correction), and rounds.
_LEAST_REPORTED_SHARE = 0.85
_MOST_REPORTED_SHARE = 1.03


def _key(name: str) -> str:
    """Normalize a name: without case, punctuation and vendors, `NVIDIA GeForce RTX 3090` → `rtx3090`."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in _IDLE_WORDS)


def _by_key() -> dict[str, list[CatalogueEntry]]:
    found: dict[str, list[CatalogueEntry]] = {}
    for entry in CATALOGUE.values():
        for key in {_key(name) for name in (entry.name, *entry.reported_as)}:
            found.setdefault(key, []).append(entry)
    return found


_BY_KEY = _by_key()


def type_of_device_name(reported: str, memory_bytes: int | None = None) -> str | None:
    """The catalogue's type for a name given by a user or a driver, or None if it has no such type.

    Args:
        reported: a catalogue name in any case, or the result of `torch.cuda.get_device_name` under CUDA or ROCm.
        memory_bytes: the memory reported by the driver; distinguishes devices that report the same name, and excludes
            similar ones. None: of several, the one with exactly that name.

    >>> type_of_device_name("NVIDIA GeForce RTX 3090"), type_of_device_name("rtx_2060"), type_of_device_name("Tesla T4")
    ('RTX_3090', 'RTX_2060', 'T4')
    >>> type_of_device_name("NVIDIA GeForce RTX 4060 Ti", 16_712_000_000)
    'RTX_4060_TI_16GB'
    >>> type_of_device_name("NVIDIA GeForce RTX 3080 Laptop GPU") is None
    True
    """
    key = _key(reported)
    candidates = _BY_KEY.get(key, [])
    if memory_bytes is None:
        named = [entry for entry in candidates if len(candidates) == 1 or _key(entry.name) == key]
        return named[0].name if named else None
    fitting = [
        entry
        for entry in candidates
        if _LEAST_REPORTED_SHARE <= memory_bytes / entry.memory_bytes <= _MOST_REPORTED_SHARE
    ]
    return min(fitting, key=lambda entry: abs(entry.memory_bytes - memory_bytes)).name if fitting else None


def catalogue_hint(name: str) -> str:
    """Hint for a name that is not in the catalogue, as the end of a message.

    >>> catalogue_hint("RTX2060"), catalogue_hint("abacus")
    ('did you mean `RTX_2060`?', '`hetpipe cluster catalogue` lists the known types')
    """
    likely = closest(name, CATALOGUE)
    return f"did you mean `{likely}`?" if likely else "`hetpipe cluster catalogue` lists the known types"


def memory_text(memory_bytes: int) -> str:
    """Format a memory size for messages.

    >>> memory_text(25769803776), memory_text(24_000_000_000)
    ('25769803776 (24 GiB)', '24000000000 (22.4 GiB)')
    """
    return f"{memory_bytes} ({bytes_text(memory_bytes)})"
