"""Numbers that user code reads only to reject values: `if torch.isnan(x).any(): raise …`, `assert x.max() < 10`.

Whatever such a number is, a forward that goes on takes the same path. Validation of arguments (`torch.distributions`,
`torch._assert`) has this form, too.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from types import FrameType

#: Line, from 1, and column in bytes, from 0.
_Position = tuple[int, int]


def only_rejects(frame: FrameType | None) -> bool:
    """Whether the expression that `frame` is executing only decides whether to raise.

    False if the source is not available.
    """
    if frame is None:
        return False
    code = frame.f_code
    line, _, column, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None, None, None, None))
    if line is None or column is None:
        return False
    linecache.lazycache(code.co_filename, frame.f_globals)
    regions = _rejecting("".join(linecache.getlines(code.co_filename)))
    return any(start <= (line, column) < end for start, end in regions)


@lru_cache(maxsize=64)
def _rejecting(source: str) -> tuple[tuple[_Position, _Position], ...]:
    """Conditions of `if` statements that end by raising, and `assert` statements, as from where to where they are."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple(_regions(tree))


def _regions(node: ast.AST) -> Iterator[tuple[_Position, _Position]]:
    """Those in `node`; none where a handler beside them may take what they raise, and go on otherwise."""
    if isinstance(node, ast.Try | ast.TryStar) and node.handlers:
        for after in (*node.handlers, *node.orelse, *node.finalbody):
            yield from _regions(after)
        return
    if isinstance(node, ast.Assert) and not _assigns(node.test):
        yield (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    elif isinstance(node, ast.If) and _raises(node.body) and not _assigns(node.test):
        # The position of a condition may be that of its whole statement, which begins with it.
        yield (node.lineno, node.col_offset), (node.body[0].lineno, node.body[0].col_offset)
    for child in filter(_has_statements, ast.iter_child_nodes(node)):
        yield from _regions(child)


def _has_statements(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Whether `body` ends by raising, and in no other way."""
    leaves = (ast.Return, ast.Break, ast.Continue)
    inner = (each for statement in body for each in ast.walk(statement))
    return isinstance(body[-1], ast.Raise) and not any(isinstance(each, leaves) for each in inner)


def _assigns(test: ast.expr) -> bool:
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(test))
