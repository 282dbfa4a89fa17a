"""Parse the files of `RUN_DIR/history` into events.

The lines of a process may be split into segments, `NAME.jsonl`, `NAME.0001.jsonl`, …, of which old ones end in `.gz`;
they are read as one file. Only the syntax of lines is verified here: malformed ones become `Damage`, which the checker
assesses.
Unknown keys are ignored and unknown events counted, for compatibility between versions.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.checker.events import (
    Activate,
    Apply,
    Backward,
    Barrier,
    Commit,
    Crossed,
    Damage,
    Event,
    Evict,
    Forward,
    Freeze,
    Fresh,
    Handover,
    Join,
    Leave,
    Memory,
    Norms,
    Origin,
    Plan,
    Publish,
    Pull,
    Skip,
    Staged,
    StageEvent,
    Step,
    Takeover,
    Used,
    Wave,
    Waves,
)
from hetpipe.errors import UserError

Record = Mapping[str, object]


class _MalformedError(ValueError):
    """A JSON line that is not a valid event; the message is the reason."""


@dataclass(slots=True)
class History:
    """All lines of a run, by file, each in line order."""

    events: list[Event] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """Files that lack lines, because their disk failed."""
    files: int = 0
    lines: int = 0
    unknown_events: int = 0


def read_history(run_dir: Path) -> History:
    """Read every `RUN_DIR/history/*.jsonl` and `*.jsonl.gz`.

    Raises:
        UserError: the folder is missing or holds no history file.
    """
    streams = history_files(run_dir)
    if not streams:
        raise UserError(f"{run_dir} holds no history/*.jsonl: name the folder of a run")
    history = History()
    history.lacking += sorted(f"history/{path.stem}" for path in (run_dir / "history").glob("*.jsonl.incomplete"))
    for stem, paths in streams.items():
        history.files += 1
        life: tuple[int, int] | None = None
        for path in paths:
            life = _read_file(path, f"history/{stem}.jsonl", life, history)
    return history


_NAME = re.compile(r"(?P<stem>.+?)(?:\.(?P<number>\d{4,}))?\.jsonl(?P<packed>\.gz)?")


def history_files(run_dir: Path) -> dict[str, list[Path]]:
    """Process (`shard-0`, `vw-1-stage-0`) → its segments, oldest first.

    If a segment exists both plain and compressed, its process ended before deleting one; both have the same content.
    """
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((run_dir / "history").glob("*.jsonl*")):  # NAME.jsonl before NAME.jsonl.gz
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault(name["stem"], {})[int(name["number"] or 0)] = path
    return {stem: [segments[number] for number in sorted(segments)] for stem, segments in found.items()}


def _read_file(path: Path, file: str, life: tuple[int, int] | None, history: History) -> tuple[int, int] | None:
    """Read one segment into `history`; return the incarnation its virtual worker's lines belong to, if known."""
    where, number = f"history/{path.name}", 0
    segment = "" if where == file else where
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                history.lines += 1
                try:
                    event = _parse(raw, file, number, segment)
                except (ValueError, OverflowError, RecursionError) as error:
                    torn = not raw.endswith(b"\n")
                    history.damage.append(Damage(where, number, _first_line(error), torn=torn, life=life))
                    continue
                if event is None:
                    history.unknown_events += 1
                    continue
                history.events.append(event)
                if life is None and isinstance(event, StageEvent | Wave):
                    life = (event.vw, event.incarnation)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        history.damage.append(Damage(where, number + 1, f"no whole gzip: {error}", torn=False, life=life))
    return life


def _first_line(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg  # its own line number is that of the line's text, not of the file
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _parse(raw: bytes, file: str, line: int, segment: str) -> Event | None:
    """Parse the event of one line; None for an unknown event."""
    record = json.loads(raw)
    if not isinstance(record, dict):
        raise _MalformedError("the line is no JSON object")
    t = record.get("t")
    if type(t) is not float and type(t) is not int:
        raise _MalformedError(f"t must be a number of seconds, not {t!r}")
    origin = Origin(
        float(t),
        _text(record, "host"),
        _count(record, "pid"),
        _text(record, "role"),
        _count(record, "term"),
        file,
        line,
        segment,
    )
    parser = _PARSERS.get(_text(record, "event"))
    return None if parser is None else parser(record, origin)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _MalformedError(f"{key} must be a string, not {value!r}")
    return value


def _texts(record: Record, key: str) -> tuple[str, ...]:
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _MalformedError(f"{key} must be a list of strings")
    return tuple(values)


def _count(record: Record, key: str) -> int:
    value = record.get(key)
    # `type(...) is int` on purpose: True and False are no counts.
    if type(value) is not int or value < 0:
        raise _MalformedError(f"{key} must be an integer >= 0, not {value!r}")
    return value


def _flag(record: Record, key: str) -> bool:
    value = _count(record, key)
    if value > 1:
        raise _MalformedError(f"{key} must be 0 or 1, not {value}")
    return value == 1


def _counts(record: Record, keys: Sequence[str]) -> list[int]:
    return [_count(record, key) for key in keys]


def _plain(kind: Callable[..., Event], *keys: str) -> Callable[[Record, Origin], Event]:
    """Parser of an event whose fields are all counts."""

    def parse(record: Record, origin: Origin) -> Event:
        return kind(origin, *_counts(record, keys))

    return parse


def _versioned(kind: Callable[..., Event], *keys: str) -> Callable[[Record, Origin], Event]:
    """Parser of an event of counts and inactive layers; older histories lack the version of the plan, and F."""

    def parse(record: Record, origin: Origin) -> Event:
        later = [_count(record, key) if key in record else 0 for key in ("version", "frozen")]
        return kind(origin, *_counts(record, keys), *later, _inactive(record))

    return parse


def _step(kind: Callable[..., Event], *keys: str) -> Callable[[Record, Origin], Event]:
    """Parser of an update; older histories lack F."""

    def parse(record: Record, origin: Origin) -> Event:
        frozen = _count(record, "frozen") if "frozen" in record else 0
        return kind(origin, *_counts(record, keys), frozen=frozen, inactive=_inactive(record))

    return parse


def _list(record: Record, key: str) -> tuple[int, ...]:
    values = record.get(key)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise _MalformedError(f"{key} must be a list of integers >= 0")
    return tuple(values)


def _inactive(record: Record) -> tuple[int, ...]:
    """Layers that a stage leaves out: none, where the line does not say so."""
    return _list(record, "inactive") if "inactive" in record else ()


def _activate(record: Record, origin: Origin) -> Event:
    fresh = _list(record, "fresh") if "fresh" in record else ()
    return Activate(origin, _count(record, "clock"), _list(record, "inactive"), fresh)


def _fresh(record: Record, origin: Origin) -> Event:
    layers, digests = _list(record, "layers"), record.get("digests")
    if not isinstance(digests, list) or not all(isinstance(each, str) for each in digests):
        raise _MalformedError("digests must be a list of strings")
    if len(digests) != len(layers):
        raise _MalformedError(f"{len(digests)} digests of {len(layers)} layers")
    vw, incarnation, stage, clock = _counts(record, _FRESH_KEYS)
    return Fresh(origin, vw, incarnation, stage, clock, layers, tuple(digests))


def _staged(record: Record, origin: Origin) -> Event:
    is_listed = isinstance(record.get("slices"), list)
    indices = _list(record, "slices") if is_listed else ()
    num_slices = len(indices) if is_listed else _count(record, "slices")
    vw, incarnation, stage, wave, shard = _counts(record, _STAGED_KEYS)
    return Staged(origin, vw, incarnation, stage, wave, shard, num_slices, indices)


def _plan(record: Record, origin: Origin) -> Event:
    vw, incarnation, clock, version = _counts(record, _PLAN_KEYS)
    return Plan(origin, vw, incarnation, clock, version, _list(record, "bounds"), record.get("live") is True)


def _waves(record: Record, origin: Origin) -> Event:
    vw, clock, minibatches, before = _counts(record, ("vw", "clock", "minibatches_per_wave", "origin"))
    if minibatches == 0:
        raise _MalformedError("minibatches_per_wave must be at least 1, not 0")
    return Waves(origin, vw, clock, minibatches, before)


def _memory(record: Record, origin: Origin) -> Event:
    vw, incarnation, stage, p = _counts(record, _STAGE_KEYS)
    return Memory(origin, vw, incarnation, stage, p, _texts(record, "policies"))


def _crossed(record: Record, origin: Origin) -> Event:
    computed, since = _list(record, "computed"), record.get("since")
    if len(computed) != len(("first", "last")):
        raise _MalformedError("computed must be the first layer and the one behind the last")
    if type(since) is not float:
        raise _MalformedError(f"since must be a number of seconds, not {since!r}")
    vw, incarnation, stage, p = _counts(record, _STAGE_KEYS)
    read, kept = _counts(record, ("read", "kept"))
    cache, units = _text(record, "cache"), _texts(record, "units")
    return Crossed(
        origin,
        vw,
        incarnation,
        stage,
        p,
        cache,
        read,
        computed[0],
        computed[1],
        kept=bool(kept),
        since=since,
        units=units,
    )


def _norms(record: Record, origin: Origin) -> Event:
    layers, squares = _list(record, "layers"), record.get("squares")
    if not isinstance(squares, list) or len(squares) != len(layers) or not all(type(s) is float for s in squares):
        raise _MalformedError("squares must be a list of numbers, one for each layer")
    return Norms(origin, _count(record, "clock"), _count(record, "vw"), layers, tuple(squares))


def _join(record: Record, origin: Origin) -> Event:
    num_stages = _count(record, "num_stages") if "num_stages" in record else None
    if num_stages == 0:
        raise _MalformedError("num_stages must be at least 1, not 0")
    minibatches = _count(record, "minibatches_per_wave") if "minibatches_per_wave" in record else None
    if minibatches == 0:
        raise _MalformedError("minibatches_per_wave must be at least 1, not 0")
    vw, incarnation, clock = _counts(record, _LIFE_KEYS)
    return Join(origin, vw, incarnation, clock, num_stages, minibatches)


def _barrier(record: Record, origin: Origin) -> Event:
    return Barrier(origin, _count(record, "clock"), frozenset(_text(record, "reason").split("+")))


def _used(record: Record, origin: Origin) -> Event:
    indices = record.get("indices")
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise _MalformedError("indices must be a list of integers")
    vw, wave, epoch = _counts(record, _USED_KEYS)
    return Used(origin, vw, wave, epoch, tuple(indices))


def _handover(record: Record, origin: Origin) -> Event:
    vw, incarnation, clock = _counts(record, _LIFE_KEYS)
    return Handover(origin, vw, incarnation, clock, _flag(record, "whole"))


def _takeover(record: Record, origin: Origin) -> Event:
    vw, incarnation, stage, clock, source = _counts(record, _TAKEOVER_KEYS)
    return Takeover(origin, vw, incarnation, stage, clock, source, _flag(record, "whole"))


_STAGE_KEYS = ("vw", "incarnation", "stage", "p")
_LIFE_KEYS = ("vw", "incarnation", "clock")
_PLAN_KEYS = (*_LIFE_KEYS, "version")
_STAGED_KEYS = ("vw", "incarnation", "stage", "wave", "shard")
_USED_KEYS = ("vw", "wave", "epoch")
_FRESH_KEYS = ("vw", "incarnation", "stage", "clock")
_TAKEOVER_KEYS = ("vw", "incarnation", "stage", "clock", "source")

_PARSERS: dict[str, Callable[[Record, Origin], Event]] = {
    "forward": _versioned(Forward, "vw", "incarnation", "stage", "p", "clock", "local_through"),
    "backward": _versioned(Backward, "vw", "incarnation", "stage", "p", "clock", "local_through"),
    "step": _step(Step, "vw", "incarnation", "stage", "p"),
    "skip": _step(Skip, "vw", "incarnation", "stage", "p", "scale"),
    "memory": _memory,
    "crossed": _crossed,
    "staged": _staged,
    "commit": _plain(Commit, "vw", "incarnation", "wave", "samples"),
    "apply": _plain(Apply, "shard", "vw", "incarnation", "wave"),
    "publish": _plain(Publish, "clock"),
    "pull": _plain(Pull, "shard", "vw", "stage", "clock"),
    "evict": _plain(Evict, *_LIFE_KEYS),
    "join": _join,
    "plan": _plan,
    "waves": _waves,
    "norms": _norms,
    "freeze": _plain(Freeze, "clock", "frozen", "layers"),
    "activate": _activate,
    "fresh": _fresh,
    "leave": _plain(Leave, *_LIFE_KEYS),
    "handover": _handover,
    "takeover": _takeover,
    "barrier": _barrier,
    "used": _used,
    "wave": _versioned(Wave, "vw", "incarnation", "stage", "wave", "first", "last", "first_clock", "last_clock"),
}
