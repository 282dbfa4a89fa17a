"""The formulas of `wsp.md` and `policies.md` written a second time, for the second simulator."""

from __future__ import annotations

from tests.decide.simulator.case import Case

_PICOSECONDS = 10**9
_BY_WAVE = {"flush", "double_buffer"}


def picoseconds(milliseconds: float) -> int:
    """Whole picoseconds."""
    return round(milliseconds * _PICOSECONDS)


def most_in_flight(case: Case, i: int, k: int) -> int:
    """S_i."""
    n = case.n
    if case.weights == "flush":
        return n if case.schedule == "gpipe" else min(n, k - i)
    if case.weights != "wave":
        return k - i
    if k == 1:
        return 1
    return min(n, k - i) if n <= k else (k - i) + ((n - k) * (k - 1 - i)) // (k - 1)


def ends_filling(case: Case, p: int) -> int:
    """The last minibatch that enters together with p, before the pipeline is empty again."""
    wave_end = ((p - 1) // case.n + 1) * case.n
    return min(wave_end, case.minibatches) if case.weights == "flush" else case.minibatches


def required(case: Case, p: int) -> int:
    """The published clock that minibatch p needs."""
    if case.staleness is None:
        return 0
    n, d = case.n, case.staleness
    if case.weights == "flush":
        return max(0, (p - 1) // n - d)
    if case.weights == "double_buffer":
        return max(0, (p - 1) // n - 1 - d)
    return max(0, (p + 1 + n - 1) // n - (d + 2))


def is_switch(case: Case, p: int) -> bool:
    """Whether the published clock in use may change at p, past the first minibatch that could see an update."""
    if case.weights in _BY_WAVE:
        return p > 1 and (p - 1) % case.n == 0
    return p > case.n and p % case.n == 0


def newest(case: Case, p: int, published: int) -> int:
    """The newest published clock W with W·N ≤ v(p)."""
    if case.weights == "flush":
        return min(published, (p - 1) // case.n)
    if case.weights == "double_buffer":
        return min(published, max((p - 1) // case.n - 1, 0))
    return min(published, max(0, p - case.n) // case.n)


def decided(case: Case, p: int, in_use: int, published: int) -> int | None:
    """W*(p) at a switch point; None: not published yet."""
    awaited = required(case, p)
    if case.pull == "required":
        if in_use >= awaited:
            return in_use
        if case.deterministic:
            awaited = newest_of_all(case, p)
    if published < awaited:
        return None
    return awaited if case.deterministic else newest(case, p, published)


def worth_fetching(case: Case, p: int, in_use: int, published: int) -> int | None:
    """What is asked for before switch point p is met."""
    usable = newest(case, p, published)
    if case.pull == "required":
        clock = newest_of_all(case, p) if in_use < required(case, p) else 0
    else:
        clock = required(case, p) if case.deterministic else usable
    return clock if in_use < clock <= usable else None


def newest_of_all(case: Case, p: int) -> int:
    """The newest clock that p may ever use."""
    return newest(case, p, p)
