"""Places at which a model may be cut, and the values that cross there. Pure: decisions derive from a recording alone.

A forward is a tree of *frames*, one per call of a module. The *entries* of a frame are calls of modules, and calls of
functions ("glue") on values that depend on weights. A cut is placed before an entry; the frames around it are open
there: every stage after the cut executes their Python again, with the entries before the cut answered from a log.

A value is *shared* if it depends on integer inputs and constants only (masks, position ids): every stage recomputes it,
so it never crosses. Every other value is made by one entry and crosses every cut between that entry and its last use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from hetpipe.values.plan import DTYPE_BYTES

#: Dtypes of tensors that cuts, shards and checkpoints support.
_MOVED = frozenset(DTYPE_BYTES)

#: Why a cut is forbidden; each completes the sentence "no cut before X: …".
CHECKPOINTED = "it is inside a region that is recomputed as a whole (torch.utils.checkpoint)"
REENTRANT = "{} before it is under torch.utils.checkpoint(use_reentrant=True); use_reentrant=False can be cut"
SIDE_CHANNEL = "a value made in {} is used after it without being returned by it"
SIDE_CHANNEL_BEHIND = "a value made in {} is used in the forward of {} without being returned by it"
RAISES = "the forward of {} catches an exception that a call raises"
HOOKED = "the forward of {} calls a module with a hook on its gradient (register_full_backward_hook)"
OPAQUE = "{} returns an object ({}) that cannot be rebuilt on another stage"
ALIASED = "{} and {} share memory that is modified in place after it"
CHANGED_SHARED = "{} is modified in place by values that depend on weights"
CHANGED_INSIDE = "the forward of {} goes on with a tensor that a module it calls has changed in place"
BUFFER = "{} is used before and after it, and the forward writes it"
UNSEEN = "the forward of {} computes with a value that was not made by any module or torch function"
DECIDES = "the forward of {} reads a number that depends on weights, so it may take another path each time"
DRAWN = "the forward of {} decides by random numbers more often than can be tried"
DIFFERENTIATES = "the forward of {} differentiates (torch.autograd.grad), and its graph cannot span a cut"
SIZED = "the forward of {} reads the size of a value that depends on weights, so it may take another path each time"
TIED = "{} is used before and after it, and weights that are predicted for one minibatch are not sent"
REENTRANT_TIE = (
    "{} is used before and after it, and under torch.utils.checkpoint(use_reentrant=True), which accumulates its "
    "gradients in another order; use_reentrant=False can be cut"
)
SWITCHES = "the forward of {} switches gradients of weights off or on (requires_grad)"
SWITCHED = "{} is used before and after it, and the forward switches its gradient off or on (requires_grad)"
UNMOVED = "{} is of type {}, which cannot cross cuts"
VARIES = "what is called or crosses there depends on the values of shared tensors (a mask without padding, for example)"
TRAINING_ONLY = "evaluation calls something else there"
DRAWS = (
    "the forward of {} draws from `random` or NumPy with a function that it has imported by name (write "
    "random.random(), numpy.random.rand()), or seeds them"
)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a module."""

    position: str
    """Path of nested calls; empty for the model itself."""
    path: str
    """The module's name in the model."""
    parent: int | None
    """Index of the enclosing frame; None for the model."""
    closed: str = ""
    """Why no cut may be inside it; empty if cuts are allowed."""
    closed_at: str = ""
    """The line of the user's code that `closed` refers to."""
    is_reentrant: bool = False
    """Called inside `torch.utils.checkpoint` with `use_reentrant=True`."""
    closed_behind: tuple[int, str] | None = None
    """Position from which on no cut may be inside it, and why; None if there is none."""
    changed_inside: tuple[tuple[int, int, str], ...] = ()
    """(position, frame, why): from there on no cut may be inside it, unless it is inside of `frame`, too."""

    @property
    def why_closed(self) -> str:
        """`closed`, with the module's name and the line filled in."""
        return self.closed.format(self.path or "the model") + self.closed_at


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor."""

    dtype: str
    num_bytes: int
    has_gradient: bool
    storage: int
    """Id of its memory; equal for values that share memory."""
    shared_in: int | None
    """The frame in which it was computed from shared values only; None if it depends on an entry."""


@dataclass(frozen=True, slots=True)
class Step:
    """An event of the recorded forward: a function call, or the end of a module call."""

    started: int
    """Position of its start in the common sequence of starts and ends."""
    ended: int
    frame: int
    """Index of the enclosing frame."""
    key: str
    """Key of the entry; empty for a call on shared values only, which is not an entry."""
    label: str
    """Name in messages: the module's path, or the function's name."""
    inputs: frozenset[int] = frozenset()
    """Values it reads; empty for modules, whose inner steps list them."""
    given: frozenset[int] = frozenset()
    """Values in the arguments of a module's call; empty for functions."""
    outputs: tuple[int, ...] = ()
    """Values it returns, by leaf: new ones, or ones passed through."""
    parameters: frozenset[str] = frozenset()
    """Trainable parameters it reads."""
    buffers: frozenset[str] = frozenset()
    """Buffers, and frozen parameters that the forward writes, that it reads or writes."""
    written_buffers: frozenset[str] = frozenset()
    """Those of them that it writes."""
    frozen: frozenset[str] = frozenset()
    """Frozen parameters (`requires_grad=False`) it reads."""
    changed: frozenset[int] = frozenset()
    """Values it modifies in place."""
    opens: int | None = None
    """Frame of the module it calls; None for a function."""
    opaque: str = ""
    """Type of an object in its result that cannot be rebuilt; empty if there is none."""
    is_amid_region: bool = False
    """Both it and an earlier entry are inside `torch.utils.checkpoint`."""
    is_reentrant: bool = False
    """A function call inside `torch.utils.checkpoint` with `use_reentrant=True`."""
    draw: str = ""
    """Key of the call, if it draws random numbers from shared values: `torch.rand([])` before LayerDrop."""

    @property
    def only_writes(self) -> bool:
        """Whether it only writes a buffer, like the count of minibatches in a BatchNorm."""
        return bool(self.written_buffers) and self.opens is None and not self.outputs and not self.parameters


@dataclass(frozen=True, slots=True)
class Recording:
    """One forward, as recorded."""

    frames: tuple[RecordedCall, ...]
    steps: tuple[Step, ...]
    """Steps in the order of their ends."""
    values: tuple[Value, ...]
    inputs: Mapping[str, int]
    """Floating-point inputs of the model: name → value. Integer inputs are shared."""
    results: frozenset[int]
    """Values that the loss needs."""
    switched: frozenset[str] = frozenset()
    """Trainable parameters whose gradients the forward switches on or off."""

    @property
    def entries(self) -> frozenset[str]:
        """Keys of all entries."""
        return frozenset(step.key for step in self.steps if step.key)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses a cut."""

    name: str
    """`input:NAME`, `parameter:NAME`, or entry and leaf: `decoder.2:0`."""
    places: tuple[tuple[str, int], ...]
    """Entries (by key) and leaves with this value in the log."""
    dtype: str
    num_bytes: int
    has_gradient: bool
    others: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Places of values that cross instead where layers are skipped at random: of all that a minibatch computes before
    the cut, the last one crosses."""

    @property
    def all_places(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """`places`, and `others`."""
        return (self.places, *self.others)


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place between two entries."""

    key: str
    """Key of the entry after it, where no layer is skipped at random."""
    label: str
    order: int
    """Position of that entry's start."""
    around: tuple[str, ...]
    """Positions of the frames that are open here, outermost first."""
    crossing: tuple[Crossing, ...]
    """Crossing values in order; integer inputs and the log cross every cut and are not listed."""
    reason: str = ""
    """Why it is forbidden; empty if it is allowed."""
    draw: str = ""
    """Key of the draw of random numbers that it is before, which may skip the entry; empty if there is none."""

    @property
    def end(self) -> str:
        """Key of the call before which a forward ends."""
        return self.draw or self.key

    @property
    def forward_bytes(self) -> int:
        """Bytes sent to the next stage, without tied weights."""
        return sum(each.num_bytes for each in self.crossing if not each.name.startswith("parameter:"))

    @property
    def backward_bytes(self) -> int:
        """Bytes of gradients sent back, without those of tied weights."""
        return sum(
            each.num_bytes for each in self.crossing if each.has_gradient and not each.name.startswith("parameter:")
        )

    @property
    def tie_bytes(self) -> int:
        """Bytes of weights that both sides use; sent in both directions."""
        return sum(each.num_bytes for each in self.crossing if each.name.startswith("parameter:"))


@dataclass(slots=True)
class _Use:
    first: int
    last: int


@dataclass(slots=True)
class _Analysis:
    recording: Recording
    parameter_specs: Mapping[str, tuple[str, int]]
    made: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    names: list[list[Step]] = field(default_factory=list)
    parameters: Mapping[str, _Use] = field(default_factory=dict)
    storage_used: dict[int, int] = field(default_factory=dict)
    closed_behind: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Frame → position from which on no cut may be inside it, and why."""


def first_layers(recording: Recording, cuts: Sequence[CutPoint]) -> dict[str, int]:
    """Parameter (trainable or frozen) or buffer → the first layer between `cuts` of this recording that uses it."""
    orders = [cut.order for cut in cuts]
    found: dict[str, int] = {}
    for step in recording.steps:
        layer = bisect_right(orders, step.started)
        for name in (*step.parameters, *step.frozen, *step.buffers):
            found[name] = min(found.get(name, layer), layer)
    return found


def last_layers(recording: Recording, cuts: Sequence[CutPoint]) -> dict[str, int]:
    """Module that is called → the layer between `cuts` in which its last call ends; the model itself is ``."""
    orders = [cut.order for cut in cuts]
    found = {"": len(cuts)}
    for step in recording.steps:
        if step.opens is not None:
            found[step.label] = bisect_right(orders, step.ended)
    return found


def reads_of(recording: Recording, cuts: Sequence[CutPoint]) -> tuple[frozenset[str], ...]:
    """Per layer between `cuts`: the buffers and frozen parameters that a stage with this layer reads.

    These are those read by its own steps and, because the Python of the frames around its first cut is executed again,
    those read by earlier steps on shared values in these frames. A stage of several layers reads the union.

    Args:
        recording: one forward.
        cuts: borders of layers, in order, of this recording.
    """
    positions = {frame.position: index for index, frame in enumerate(recording.frames)}
    starts = [-1, *(cut.order for cut in cuts)]
    around = [frozenset[int](), *(frozenset(positions[each] for each in cut.around) for cut in cuts)]
    found: list[set[str]] = [set() for _ in starts]
    for step in recording.steps:
        names = step.buffers | step.frozen
        if not names:
            continue
        own = bisect_right(starts, step.started) - 1
        found[own] |= names
        if not step.key:
            for layer in range(own + 1, len(starts)):
                if step.frame in around[layer]:
                    found[layer] |= names
    return tuple(map(frozenset, found))


def cuts_of(
    recording: Recording, parameter_specs: Mapping[str, tuple[str, int]], *, splits_ties: bool = True
) -> tuple[CutPoint, ...]:
    """All candidate cuts of the model, in order; forbidden ones with the reason.

    Args:
        recording: one forward.
        parameter_specs: trainable parameter → dtype and bytes.
        splits_ties: whether a weight may be used on both sides of a cut.
    """
    analysis = _analysed(recording, parameter_specs)
    first_entries: dict[int, int] = {}
    for step in recording.steps:
        if step.key and not step.only_writes:
            first_entries[step.frame] = min(first_entries.get(step.frame, step.started), step.started)
    # A cut before the first entry of a frame that computes something is the cut before the frame itself.
    entries = sorted(
        (step for step in recording.steps if step.key and step.started > first_entries.get(step.frame, step.started)),
        key=lambda step: step.started,
    )
    reentrant = {f"parameter:{name}" for step in recording.steps if step.is_reentrant for name in step.parameters}
    switched = {f"parameter:{name}" for name in recording.switched}
    cuts = [_cut(analysis, step) for step in entries]
    for draw in recording.steps:
        if draw.draw and draw.started > first_entries.get(draw.frame, draw.started):
            behind = next((step for step in entries if step.frame == draw.frame and step.started > draw.started), None)
            if behind is not None:
                cuts.append(replace(_cut(analysis, draw), key=behind.key, label=behind.label, draw=draw.draw))
    cuts.sort(key=lambda cut: cut.order)
    amiss = {REENTRANT_TIE: reentrant, SWITCHED: switched}
    return tuple(_with_ties_judged(cut, amiss, splits_ties=splits_ties) for cut in cuts)


def aligned(cuts: Sequence[CutPoint], others: Iterable[Sequence[CutPoint]]) -> list[tuple[CutPoint, ...]]:
    """The cuts of several recordings of one forward, with one place per key, and the same one in each.

    A draw of random numbers may skip the entry after it in some of them, so the cut before the draw takes the place of
    the one before the entry, under the key of the latter in the first recording.

    Args:
        cuts: of the recording by which the model is cut.
        others: of recordings with other answers.
    """
    own = {cut.key: cut for cut in cuts if not cut.draw}
    own |= {cut.key: cut for cut in cuts if cut.draw}  # of several draws before one entry the last
    keys = {cut.draw: cut.key for cut in own.values() if cut.draw}
    found = [tuple(sorted(own.values(), key=lambda cut: cut.order))]
    for other in others:
        there = {cut.key: cut for cut in other if not cut.draw and cut.key not in keys.values()}
        there |= {keys[cut.draw]: replace(cut, key=keys[cut.draw]) for cut in other if cut.draw in keys}
        found.append(tuple(sorted(there.values(), key=lambda cut: cut.order)))
    return found


def _with_ties_judged(cut: CutPoint, amiss: Mapping[str, AbstractSet[str]], *, splits_ties: bool) -> CutPoint:
    tied = [each.name for each in cut.crossing if each.name.startswith("parameter:")]
    if cut.reason or not tied:
        return cut
    if not splits_ties:
        return replace(cut, reason=TIED.format(tied[0].replace(":", " ")))
    found = ((reason, name) for reason, names in amiss.items() for name in tied if name in names)
    reason, name = next(found, ("", ""))
    return replace(cut, reason=reason.format(name.replace(":", " ")))


def _analysed(recording: Recording, parameter_specs: Mapping[str, tuple[str, int]]) -> _Analysis:
    never = -1
    found = _Analysis(
        recording,
        parameter_specs,
        made=[never] * len(recording.values),
        used=[never] * len(recording.values),
        names=[[] for _ in recording.values],
        parameters=_uses(recording),
    )
    end = max((step.ended for step in recording.steps), default=0) + 1
    for result in recording.results:
        found.used[result] = end
    for step in recording.steps:
        for index in step.inputs:
            found.used[index] = max(found.used[index], step.started)
        for index in filter(never.__ne__, step.outputs):
            if found.made[index] == never:
                found.made[index] = step.ended
            if step.key:
                found.names[index].append(step)
    for value, used in zip(recording.values, found.used, strict=True):
        found.storage_used[value.storage] = max(found.storage_used.get(value.storage, never), used)
    found.closed_behind = _closed_behind(found)
    return found


def _closed_behind(analysis: _Analysis) -> dict[int, tuple[int, str]]:
    """Frame → position from which on no cut may be inside it, and why.

    A later stage runs the Python of an open frame again, and has there the values of its entries only: not those that
    a call inside of it has left in a list, a cache or an attribute, even where nothing uses them after the cut.
    """
    recording = analysis.recording
    found = {
        index: frame.closed_behind for index, frame in enumerate(recording.frames) if frame.closed_behind is not None
    }
    inputs = set(recording.inputs.values())
    for step in recording.steps:
        if step.started >= found.get(step.frame, (step.started + 1, ""))[0]:
            continue
        around = frozenset(_around(recording, step.frame))
        for index in sorted(step.inputs | step.given):
            is_known = index in inputs or analysis.made[index] < 0 or recording.values[index].shared_in in around
            if is_known or any(each.frame in around and each.ended < step.started for each in analysis.names[index]):
                continue
            maker = analysis.names[index][0].label if analysis.names[index] else _maker(recording, index)
            found[step.frame] = (
                step.started,
                SIDE_CHANNEL_BEHIND.format(maker, recording.frames[step.frame].path or "the model"),
            )
            break
    return found


def _around(recording: Recording, frame: int) -> tuple[int, ...]:
    found: list[int] = []
    at: int | None = frame
    while at is not None:
        found.append(at)
        at = recording.frames[at].parent
    return tuple(reversed(found))


def _cut(analysis: _Analysis, behind: Step) -> CutPoint:
    recording = analysis.recording
    around = _around(recording, behind.frame)
    inside = frozenset(around)
    at = behind.started
    crossing: list[tuple[int, Crossing]] = []
    reason = CHECKPOINTED if behind.is_amid_region else _forbidden_frames(analysis, around, inside, at)
    for name, given in recording.inputs.items():
        if analysis.used[given] >= at:
            crossing.append((-1, _crossing(f"input:{name}", (), recording.values[given])))
    inputs = set(recording.inputs.values())
    alive: list[int] = []
    for index, value in enumerate(recording.values):
        if index in inputs or not 0 <= analysis.made[index] < at <= analysis.used[index]:
            continue
        if value.shared_in in inside:
            continue
        steps = [step for step in analysis.names[index] if step.ended < at and step.frame in inside]
        if not steps:
            maker = analysis.names[index][0].label if analysis.names[index] else _maker(recording, index)
            reason = reason or SIDE_CHANNEL.format(maker)
            continue
        places = tuple(
            (step.key, leaf) for step in steps for leaf, output in enumerate(step.outputs) if output == index
        )
        first = steps[0]
        name = f"{first.key}:{first.outputs.index(index)}"
        crossing.append((analysis.made[index], _crossing(name, places, value)))
        alive.append(index)
    # In the model's order: the iteration order of sets of names differs between processes.
    for name, (dtype, num_bytes) in analysis.parameter_specs.items():
        use = analysis.parameters.get(name)
        if use is not None and use.first < at <= use.last:
            crossing.append((-1, Crossing(f"parameter:{name}", (), dtype, num_bytes, has_gradient=True)))
    crossing.sort(key=lambda each: each[0])
    return CutPoint(
        behind.key,
        behind.label,
        at,
        tuple(recording.frames[frame].position for frame in around),
        tuple(each for _, each in crossing),
        reason or _forbidden_types(crossing) or _forbidden_changes(analysis, inside, at, alive),
    )


def _forbidden_types(crossing: Sequence[tuple[int, Crossing]]) -> str:
    found = next((each for _, each in crossing if each.dtype not in _MOVED), None)
    return "" if found is None else UNMOVED.format(found.name.lstrip("/"), found.dtype)


def _crossing(name: str, places: tuple[tuple[str, int], ...], value: Value) -> Crossing:
    return Crossing(name, places, value.dtype, value.num_bytes, value.has_gradient)


def _maker(recording: Recording, index: int) -> str:
    return next((step.label for step in recording.steps if index in step.outputs), "the model")


def _forbidden_frames(analysis: _Analysis, around: Sequence[int], inside: frozenset[int], at: int) -> str:
    recording = analysis.recording
    for frame in map(recording.frames.__getitem__, around):
        if frame.closed:
            return frame.why_closed
    for step in recording.steps:
        if step.key and step.ended < at and step.frame in inside:
            if step.opaque:
                return OPAQUE.format(step.label, step.opaque)
            if step.opens is not None and recording.frames[step.opens].is_reentrant:
                return REENTRANT.format(step.label)
    behind = [analysis.closed_behind[frame] for frame in around if frame in analysis.closed_behind]
    for frame in map(recording.frames.__getitem__, around):
        behind += [(since, why) for since, changing, why in frame.changed_inside if changing not in inside]
    return next((why for since, why in behind if since <= at), "")


def _forbidden_changes(analysis: _Analysis, inside: frozenset[int], at: int, alive: Sequence[int]) -> str:
    recording = analysis.recording
    by_storage: dict[int, list[int]] = {}
    for index in alive:
        by_storage.setdefault(recording.values[index].storage, []).append(index)
    for step in recording.steps:
        for changed in step.changed:
            value = recording.values[changed]
            mates = by_storage.get(value.storage, ())
            if step.started >= at and len(mates) > 1:
                first, second = (analysis.names[mate][0].label for mate in mates[:2])
                return ALIASED.format(first, second)
            if (
                value.shared_in in inside
                and step.started < at <= analysis.storage_used[value.storage]
                and (step.key or step.frame not in inside)
            ):
                return CHANGED_SHARED.format(_maker(recording, changed))
    return ""


def buffers_kept_together(
    recordings: Sequence[tuple[Recording, Sequence[CutPoint]]], rewritten: Iterable[str]
) -> list[tuple[CutPoint, ...]]:
    """The cuts of each recording, with those forbidden that have uses of one rewritten buffer on both sides.

    One stage owns such a buffer. A use counts in whichever recording it is: training writes what evaluation reads.

    Args:
        recordings: every recording of a model, with its cuts.
        rewritten: buffers and frozen parameters that any of them writes.
    """
    found = [list(cuts) for _, cuts in recordings]
    for name in sorted(rewritten):
        spans = []
        for recording, _ in recordings:
            uses = [step.started for step in recording.steps if name in step.buffers]
            spans.append((min(uses), max(uses)) if uses else None)
        before: set[str] = set()
        after: set[str] = set()
        for (_, cuts), span in zip(recordings, spans, strict=True):
            if span is not None:
                before |= {cut.key for cut in cuts if span[0] < cut.order}
                after |= {cut.key for cut in cuts if cut.order <= span[1]}
        for cuts in found:
            for index, cut in enumerate(cuts):
                if cut.key in before and cut.key in after and not cut.reason:
                    cuts[index] = replace(cut, reason=BUFFER.format(name))
    return [tuple(cuts) for cuts in found]


@dataclass(frozen=True, slots=True)
class ForbiddenPlaces:
    """Adjacent places where the model cannot be cut, all for the same reason."""

    order: int
    """Position of the start of the entry after the first of them."""
    before: str
    """The entry after the first of them."""
    upto: str
    """The entry after the last of them."""
    places: int
    reason: str


def weights_kept_together(
    recordings: Sequence[tuple[Recording, Sequence[CutPoint]]], parameters: Iterable[str]
) -> list[tuple[CutPoint, ...]]:
    """The cuts of each recording, with those forbidden that have uses of a weight on both sides, which not all tie.

    The layer that uses a weight first owns it, and a cut sends it on only where it is tied in each recording.

    Args:
        recordings: every recording of a model, with its cuts.
        parameters: trainable parameters.
    """
    found = [list(cuts) for _, cuts in recordings]
    uses = [_uses(recording) for recording, _ in recordings]
    for name in parameters:
        before: set[str] = set()
        after: set[str] = set()
        for (_, cuts), spans in zip(recordings, uses, strict=True):
            if name in spans:
                before |= {cut.key for cut in cuts if spans[name].first < cut.order}
                after |= {cut.key for cut in cuts if cut.order <= spans[name].last}
        both = before & after
        if not both:
            continue
        tied = f"parameter:{name}"
        sent = [{cut.key for cut in cuts if any(each.name == tied for each in cut.crossing)} for _, cuts in recordings]
        amiss = {key for key in both if not all(key in keys for keys in sent)}
        for cuts in found:
            for index, cut in enumerate(cuts):
                if cut.key in amiss and not cut.reason:
                    cuts[index] = replace(cut, reason=VARIES)
    return [tuple(cuts) for cuts in found]


def _uses(recording: Recording) -> dict[str, _Use]:
    """Trainable parameter → starts of the first and the last step that use it."""
    found: dict[str, _Use] = {}
    for step in recording.steps:
        for name in step.parameters:
            use = found.setdefault(name, _Use(step.started, step.started))
            use.first, use.last = min(use.first, step.started), max(use.last, step.started)
    return found


def agreeing(
    cuts: Sequence[CutPoint],
    others: Iterable[tuple[Sequence[CutPoint], AbstractSet[str]]],
    always: AbstractSet[str],
) -> tuple[CutPoint, ...]:
    """The same cuts, with those forbidden that are not allowed, with the same crossing values, in each of `others`.

    A cut before a draw of random numbers, which may skip a layer, may have one value instead of another in each.

    Args:
        cuts: cuts of the recording by which the model is cut.
        others: cuts, and entries, of recordings with other answers of shared values.
        always: entries that no answer skips.
    """
    found = list(cuts)
    #: Name of a value → those that cross instead of it where a layer is skipped at random.
    instead: dict[str, dict[str, Crossing]] = {}
    for other, entries in others:
        there = {cut.key: cut for cut in other if not cut.reason}
        for index, cut in enumerate(found):
            if cut.reason:
                continue
            differing = _differing(cut, there.get(cut.key), entries)
            if differing is None:
                found[index] = replace(cut, reason=VARIES)
            for value, one in differing or ():
                instead.setdefault(value.name, {})[one.name] = one
    return tuple(_with_all_others(cut, instead, always) if cut.draw and not cut.reason else cut for cut in found)


def _differing(
    cut: CutPoint, other: CutPoint | None, entries: AbstractSet[str]
) -> list[tuple[Crossing, Crossing]] | None:
    """The value that crosses `cut`, and the one that crosses `other` instead, if there are; None for more differences.

    Values that are computed in the other recording, too, but not used behind the cut, may cross it.
    """
    if other is None or (cut.around, cut.draw) != (other.around, other.draw):
        return None
    here, there = ([(v.name, v.places, v.dtype, v.has_gradient) for v in each.crossing] for each in (cut, other))
    if here == there:
        return []
    own = [value for value, key in zip(cut.crossing, here, strict=True) if key not in there]
    others = [value for value, key in zip(other.crossing, there, strict=True) if key not in here]
    if not others:
        own = [value for value in own if not any(key in entries for key, _ in value.places)]
    if not cut.draw or len(own) != len(others) or len(own) > 1:
        return None
    pairs = list(zip(own, others, strict=True))
    is_alike = all((v.dtype, v.has_gradient) == (one.dtype, one.has_gradient) and one.places for v, one in pairs)
    return pairs if is_alike else None


def _with_all_others(
    cut: CutPoint, instead: Mapping[str, Mapping[str, Crossing]], always: AbstractSet[str]
) -> CutPoint:
    crossing = tuple(_with_others(each, instead) for each in cut.crossing)
    is_there = all(
        not each.places or any(key in always for places in each.all_places for key, _ in places) for each in crossing
    )
    return replace(cut, crossing=crossing) if is_there else replace(cut, reason=VARIES)


def _with_others(value: Crossing, instead: Mapping[str, Mapping[str, Crossing]]) -> Crossing:
    """The value with all that cross instead of it, where any of the layers before the cut are skipped."""
    found = {value.name: value}
    waiting = [value.name]
    while waiting:
        new = {name: one for name, one in instead.get(waiting.pop(), {}).items() if name not in found}
        found |= new
        waiting += new
    return replace(value, others=tuple(one.places for name, one in found.items() if name != value.name))


def forbidden_places(
    training: Sequence[CutPoint], evaluation: Sequence[CutPoint], borders: Sequence[int]
) -> tuple[ForbiddenPlaces, ...]:
    """Places where no layer can end, in order; adjacent ones with one reason and within one layer are merged.

    Args:
        training: all cuts of the forward in training.
        evaluation: all cuts of the forward in evaluation, which a stage runs as well.
        borders: positions of the starts of the layers' first entries.
    """
    evaluated = {cut.key: cut.reason for cut in evaluation}
    found: list[ForbiddenPlaces] = []
    open_layer = None
    for cut in training:
        reason = cut.reason or evaluated.get(cut.key, TRAINING_ONLY)
        if not reason:
            open_layer = None
            continue
        layer, label = bisect_left(borders, cut.order), cut.label or cut.key
        if found and open_layer == layer and found[-1].reason == reason:
            found[-1] = replace(found[-1], upto=label, places=found[-1].places + 1)
        else:
            found.append(ForbiddenPlaces(cut.order, label, label, 1, reason))
        open_layer = layer
    return tuple(found)


#: Maximum share of the model's work in one layer, if a cut divides it.
_MOST_WORK = 1 / 24
#: Minimum share, if there is a neighbour to merge with.
_LEAST_WORK = 1 / 240
#: Limit on a model's layers: a remaining cut has a layer of the least work on both sides, or divides one of the most.
MOST_LAYERS = 240 + 2 * 24
#: A cut that moves more than this multiple of a neighbour's bytes is dropped.
_TOLERATED = 1.2


def work_until(recording: Recording, parameter_specs: Mapping[str, tuple[str, int]]) -> list[tuple[int, int]]:
    """(position, bytes that functions have read and written so far), in order: a measure of work without a clock."""
    total = 0
    found: list[tuple[int, int]] = []
    for step in sorted(recording.steps, key=lambda step: step.started):
        if step.opens is not None or not step.key:
            continue
        touched = {*step.inputs, *(output for output in step.outputs if output >= 0)}
        total += sum(recording.values[value].num_bytes for value in touched)
        total += sum(parameter_specs[name][1] for name in step.parameters)
        found.append((step.started, total))
    return found


def layers_from(cuts: Sequence[CutPoint], work: Sequence[tuple[int, int]]) -> tuple[CutPoint, ...]:
    """Select from the allowed cuts those that are worth being borders of layers.

    Cuts that move much more than a neighbour are dropped, the worst first, unless a layer becomes too large; then
    neighbours with hardly any work between them are merged. Deterministic for a given recording. Whatever the number of
    cuts, at most `MOST_LAYERS` layers remain, and no merged layer exceeds `_MOST_WORK` of the model: a border is at
    most that far from its best position.

    Args:
        cuts: allowed cuts, in order.
        work: result of `work_until` for the recording.
    """
    total = work[-1][1] if work else 0
    times = [when for when, _ in work]

    def done(cut: CutPoint) -> int:
        index = bisect_left(times, cut.order)
        return work[index - 1][1] if index else 0

    kept = _without_worst([(cut, done(cut), cut.forward_bytes + cut.backward_bytes + 1) for cut in cuts], total)
    index = 0
    while index < len(kept):
        before = kept[index - 1][1] if index else 0
        after = kept[index + 1][1] if index + 1 < len(kept) else total
        is_small = min(kept[index][1] - before, after - kept[index][1]) < total * _LEAST_WORK
        if is_small and after - before <= total * _MOST_WORK:
            del kept[index]
        else:
            index += 1
    return tuple(cut for cut, _, _ in kept)


#: A cut, the work before it, and the bytes it moves.
_Weighed = tuple[CutPoint, int, int]


def _without_worst(cuts: Sequence[_Weighed], total: int) -> list[_Weighed]:
    """Drop the cut that moves most relative to its better neighbour, as long as one may be dropped.

    Dropping a cut affects only its two neighbours, so candidates are kept in a heap: O(n log n) for n cuts.
    """
    last = len(cuts)
    before = [index - 1 for index in range(last)]
    after = [index + 1 for index in range(last)]
    gone = [False] * last

    def excess(index: int) -> float | None:
        """Ratio of its bytes to those of its better neighbour; None if it may not be dropped."""
        left, right = before[index], after[index]
        gap = (cuts[right][1] if right < last else total) - (cuts[left][1] if left >= 0 else 0)
        sizes = [cuts[at][2] for at in (left, right) if 0 <= at < last]
        found = cuts[index][2] / min(sizes) if sizes else 1.0
        return found if found > _TOLERATED and gap <= total * _MOST_WORK else None

    heap = [(-found, index) for index in range(last) if (found := excess(index)) is not None]
    heapify(heap)
    while heap:
        waiting, index = heappop(heap)
        if gone[index] or excess(index) != -waiting:
            continue  # stale: its neighbours have changed, and it was queued again if it is still a candidate
        gone[index] = True
        left, right = before[index], after[index]
        if left >= 0:
            after[left] = right
        if right < last:
            before[right] = left
        for at in (left, right):
            if 0 <= at < last and (found := excess(at)) is not None:
                heappush(heap, (-found, at))
    return [cut for cut, is_gone in zip(cuts, gone, strict=True) if not is_gone]
