"""The functions of `random` and NumPy that draw from their global generators.

No function mode sees them. They are intercepted where user code looks them up, as attributes of these modules, for the
duration of a forward; what user code has imported by name (`from random import random`) is not.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

#: Calls a draw again, without arguments.
Draw = Callable[[], Any]

#: Where the functions are looked up, and the methods that draw nothing.
_PLACES = {"random": {"getstate", "seed", "setstate"}, "numpy.random": {"get_state", "set_state"}}

#: Functions of NumPy that are no methods of its global generator, but draw from it.
_OF_NUMPY = ("ranf", "sample")

#: Those whose results are ordered as the numbers that the generator gives: the ends of these give their ends.
_UNIFORM = frozenset({"rand", "random", "random_sample", "ranf", "sample", "uniform"})

#: A word in the state of a Mersenne Twister of which it makes 0, and one of which it makes 2 ** 32 - 1.
_LOW, _HIGH = 0, 0x12DD9BB3
_WORDS = 624

_functions: dict[str, Any] = {}
_lock = Lock()
#: Function by name → forwards in progress that intercept it.
_uses: Counter[str] = Counter()


def drawing_functions() -> Mapping[str, Any]:
    """Name → function, of the modules imported so far."""
    for place, others in _PLACES.items():
        module = sys.modules.get(place)
        if module is None or f"{place}.random" in _functions:
            continue
        generator: Any = getattr(module.random, "__self__", None)
        for name in dir(module):
            function = getattr(module, name)
            is_method = getattr(function, "__self__", None) is generator and name not in others
            if is_method or (place != "random" and name in _OF_NUMPY):
                _functions[f"{place}.{name}"] = function
    return _functions


@contextmanager
def replaced(functions: Iterable[Any], by: Callable[[Any], Any]) -> Iterator[None]:
    """Put `by(function)` in the place of each of `functions` that draws, in this block.

    Forwards on several threads may do so at once, with one `by`.
    """
    wanted = set(functions)
    names = [name for name, function in drawing_functions().items() if function in wanted] if wanted else []
    with _lock:
        for name in names:
            _uses[name] += 1
            _put(name, by(_functions[name]))
    try:
        yield
    finally:
        with _lock:
            for name in names:
                _uses[name] -= 1
                if not _uses[name]:
                    _put(name, _functions[name])


def _put(name: str, function: Any) -> None:
    place, _, attribute = name.rpartition(".")
    setattr(sys.modules[place], attribute, function)


def is_number(result: Any) -> bool:
    """Whether the result of a draw is one number, by which user code may decide."""
    return isinstance(result, int | float) or getattr(result, "size", None) == 1


def is_uniform(function: Any) -> bool:
    """Whether its ends are all that a comparison of its result with a number depends on."""
    return str(function.__name__) in _UNIFORM


def at_end(draw: Draw, *, is_high: bool) -> Any:
    """What `draw` gives at the lowest or highest number that the generators may give next, which stay as they are."""
    word = _HIGH if is_high else _LOW
    with _kept():
        state = random.getstate()
        random.setstate((state[0], (*state[1][: _WORDS - 2], word, word, _WORDS - 2), None))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, words, *_ = numpy.random.get_state()
            words[_WORDS - 2 :] = word
            numpy.random.set_state((kind, words, _WORDS - 2))
        return draw()


def elsewhere(draw: Draw, seed: int) -> Any:
    """What `draw` gives under `seed`; the generators stay as they are."""
    with _kept():
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        return draw()


@contextmanager
def _kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        if numpy is not None:
            numpy.random.set_state(kept[1])
