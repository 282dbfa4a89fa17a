"""The partition problem as a mixed-integer linear programme: a second judge, for instances too large to try everything.

One binary per stage position, class of devices (type and node) and run of layers, as far as memory allows; flows couple
the cuts of consecutive stages, and a flow over pairs of classes pays for the transfers at each cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations, product

import highspy
import numpy as np

from tests.decide.planner.partition_cases import PS_PER_MS, Case, Stage, link_between, stage_ps, transfer_ps


class Programme:
    """A minimisation in the making."""

    def __init__(self) -> None:
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call] # highspy types all but its constructor
        for option, value in (("output_flag", False), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-7), ("threads", 1)):
            self.solver.setOptionValue(option, value)
        self._num_variables = 0

    def variable(self, *, integer: bool, upper: float = 1.0) -> int:
        """A new variable from 0 to `upper`."""
        self.solver.addVar(0.0, upper)
        if integer:
            self.solver.changeColIntegrality(self._num_variables, highspy.HighsVarType.kInteger)
        self._num_variables += 1
        return self._num_variables - 1

    def row(self, lower: float, terms: Mapping[int, float], upper: float) -> None:
        """Demand lower ≤ Σ coefficient·variable ≤ upper."""
        indices = np.array(list(terms), dtype=np.int32)
        self.solver.addRow(lower, upper, len(terms), indices, np.array(list(terms.values()), dtype=np.float64))

    def balance(self, plus: Iterable[int], minus: Iterable[int]) -> None:
        """Demand Σ plus = Σ minus."""
        self.row(0.0, dict.fromkeys(plus, 1.0) | dict.fromkeys(minus, -1.0), 0.0)


def best_ms_by_milp(case: Case) -> float | None:
    """The smallest largest stage time in milliseconds, or None if nothing fits."""
    counts = Counter((kind, node.name) for node in case.cluster.nodes for kind in node.devices)
    num_layers, num_stages = len(case.profile.layers), sum(counts.values())
    programme, infinity = Programme(), highspy.kHighsInf
    longest = programme.variable(integer=False, upper=infinity)
    programme.solver.changeColCost(longest, 1.0)
    stage_terms: list[dict[int, float]] = [{longest: -1.0} for _ in range(num_stages)]
    class_terms = {found: {longest: -float(count)} for found, count in counts.items()}
    uses: dict[tuple[str, str], list[int]] = defaultdict(list)
    ends: dict[tuple[int, tuple[str, str], int], list[int]] = defaultdict(list)
    begins: dict[tuple[int, tuple[str, str], int], list[int]] = defaultdict(list)
    for index, found in product(range(num_stages), counts):
        for first, last in combinations(range(num_layers + 1), 2):
            if (first == 0) != (index == 0) or (last == num_layers) != (index == num_stages - 1):
                continue
            time = stage_ps(case, Stage(index, num_stages, *found, None, None, first, last))
            if time is not None:
                run = programme.variable(integer=True)
                stage_terms[index][run] = class_terms[found][run] = time / PS_PER_MS
                uses[found].append(run)
                ends[index, found, last].append(run)
                begins[index, found, first].append(run)
    for found, count in counts.items():
        programme.row(count, dict.fromkeys(uses[found], 1.0), count)
    for index in range(num_stages):
        runs = [run for run in stage_terms[index] if run != longest]
        programme.row(1.0, dict.fromkeys(runs, 1.0), 1.0)
    for index, cut in product(range(num_stages - 1), range(1, num_layers)):
        _couple(programme, case, ends, begins, counts, index, cut, stage_terms)
    for terms in (*stage_terms, *class_terms.values()):
        programme.row(-infinity, terms, 0.0)
    programme.solver.run()
    status = programme.solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    assert status == highspy.HighsModelStatus.kOptimal, status
    return float(programme.solver.getObjectiveValue())


def _couple(
    programme: Programme,
    case: Case,
    ends: Mapping[tuple[int, tuple[str, str], int], list[int]],
    begins: Mapping[tuple[int, tuple[str, str], int], list[int]],
    counts: Mapping[tuple[str, str], int],
    index: int,
    cut: int,
    stage_terms: list[dict[int, float]],
) -> None:
    """At one cut behind one stage: whoever ends there hands over to whoever begins there, and both pay."""
    sent: dict[tuple[str, str], list[int]] = defaultdict(list)
    received: dict[tuple[str, str], list[int]] = defaultdict(list)
    for giver, taker in product(counts, counts):
        if ends[index, giver, cut] and begins[index + 1, taker, cut] and (giver != taker or counts[giver] > 1):
            flow = programme.variable(integer=False)
            link = link_between(case.cluster, giver[1], taker[1])
            layer = case.profile.layers[cut - 1]
            stage_terms[index + 1][flow] = transfer_ps(link, layer.output_bytes) / PS_PER_MS
            stage_terms[index][flow] = transfer_ps(link, layer.backward_bytes) / PS_PER_MS
            sent[giver].append(flow)
            received[taker].append(flow)
    for found in counts:
        if ends[index, found, cut]:
            programme.balance(ends[index, found, cut], sent[found])
        if begins[index + 1, found, cut]:
            programme.balance(begins[index + 1, found, cut], received[found])
