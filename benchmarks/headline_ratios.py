"""(w) The contenders of `headline` whose bound, where they have one, is D = 0: ratios of their speeds, in rounds."""

from __future__ import annotations

from benchmarks.headline import MODELS, contenders

_BEST = "auto, D = 0"
_NAIVE = "NP, D = 0"


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Of each model, by name: ratios of measured speeds, errors of the simulator, and the load, round by round."""
    found: dict[str, dict[str, list[float]]] = {model: {} for model in MODELS}
    for _ in range(rounds):
        for model, ratios in found.items():
            for name, ratio in _round(model).items():
                ratios.setdefault(name, []).append(round(ratio, 3))
    return found


def _round(model: str) -> dict[str, float]:
    found = {name: run() for name, run in contenders(model).items() if "D = " not in name or "D = 0" in name}
    rates = {name: one.measured for name, one in found.items()}
    ratios = {f"{_BEST} / {name}": rates[_BEST] / rate for name, rate in rates.items() if name != _BEST}
    if (proportional := f"{_NAIVE}, proportional") in rates:
        ratios[f"{proportional} / {_NAIVE}"] = rates[proportional] / rates[_NAIVE]
    ratios |= {f"{name}, simulated / measured": one.simulated_of_measured for name, one in found.items()}
    return ratios | {"processor seconds per emulated second, most": max(one.processor for one in found.values())}
