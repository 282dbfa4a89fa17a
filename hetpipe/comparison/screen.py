"""Terminal output of a comparison: two tables and the conclusions the seeds support. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetpipe.comparison.view import ComparisonView
from hetpipe.comparison.view import Table as TableView


def show_comparison(view: ComparisonView, console: Console) -> None:
    """Print the comparison; cells wrap on narrow terminals, except policy names."""
    console.print(Text(view.title, style="bold"))
    console.print(Text(view.subtitle, style="dim"))
    for table in view.tables:
        console.print()
        console.print(_drawn(table))
    if view.remarks:
        console.print()
    for remark in view.remarks:
        console.print(Text(remark))


def _drawn(view: TableView) -> Table:
    table = Table(title=view.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, heading in enumerate(view.headings):
        table.add_column(
            heading, justify="right" if index else "left", header_style="dim", overflow="fold", no_wrap=not index
        )
    for row in view.rows:
        table.add_row(
            *(Text(cell, style="bold green" if index in row.best else "") for index, cell in enumerate(row.cells))
        )
    return table
