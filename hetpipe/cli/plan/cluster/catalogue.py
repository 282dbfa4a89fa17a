"""`hetpipe cluster catalogue`: published properties of device types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from hetpipe.cli.options import Json
from hetpipe.errors import UserError
from hetpipe.report.text import columns
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell
from hetpipe.values.catalogue import CATALOGUE, CatalogueEntry, catalogue_hint

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the catalogue of device types. Memory, peaks, bandwidth, links, and the source of each figure."""

    wanted: Annotated[str, typer.Argument(metavar="FILTER", help="Part of a name, for example 3090.")] = ""
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Show the types whose names contain the filter, ignoring case and punctuation.

    Raises:
        UserError: no type matches.
    """
    wanted = options.wanted
    entries = [entry for entry in CATALOGUE.values() if _letters(wanted) in _letters(entry.name)]
    if not entries:
        raise UserError(f"no type of the catalogue has {wanted!r} in its name; {catalogue_hint(wanted)}")
    output.answer({"types": [_entry_json(entry) for entry in entries]}, *_catalogue_table(entries))
    return ExitStatus.OK


def _letters(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _entry_json(entry: CatalogueEntry) -> dict[str, Any]:
    values = asdict(entry)
    del values["reported_as"]
    return values


def _catalogue_table(entries: Sequence[CatalogueEntry]) -> list[str]:
    sources = {source: number for number, source in enumerate(dict.fromkeys(entry.source for entry in entries), 1)}
    rows = [["type", "GiB", "fp32", "tf32", "bf16", "fp16", "GB/s", "link", "GB/s each way", "source"]]
    for entry in entries:
        peaks = (
            entry.fp32_flops_per_second,
            entry.tf32_flops_per_second,
            entry.bf16_flops_per_second,
            entry.fp16_flops_per_second,
        )
        rows.append(
            [
                entry.name,
                str(entry.memory_bytes // _GIB),
                *(f"{peak / 1e12:.5g}" if peak is not None else "-" for peak in peaks),
                f"{entry.memory_bytes_per_second / 1e9:.5g}",
                entry.link.name,
                f"{entry.link.bytes_per_second / 1e9:.4g}",
                str(sources[entry.source]),
            ]
        )
    notes = [
        "peaks in TFLOP/s, dense, sums in fp32; -: not in hardware, or no faster than fp32",
        *(f"source {number}: {source}" for source, number in sources.items()),
    ]
    return [*columns(rows), "", *notes]
