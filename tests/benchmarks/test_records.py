"""Ratios by commit: what is kept, and the table of it on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer
from typer.testing import CliRunner

from benchmarks import records
from benchmarks.__main__ import PARTS, main
from benchmarks.records import PAGE, Record, flat, keep, kept, record_of, table, with_ratios

RECORD = Record(
    date="2026-01-02",
    commit="abc",
    machine="x86_64, 2 cores",
    torch="2.13.0",
    rounds=5,
    benchmark="pipeline",
    ratios={"a": 0.5, "b": 1.25},
)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "ratios.jsonl"
    assert kept(path) == []
    later = replace(RECORD, commit="def")
    keep(RECORD, path)
    keep(later, path)
    assert kept(path) == [RECORD, later]


def test_a_column_for_each_of_the_newest_runs() -> None:
    runs = [replace(RECORD, commit=f"c{number}", ratios={f"r{number}": number / 10}) for number in range(6)]
    other = replace(RECORD, benchmark="wire", ratios={"push": 0.4})
    first, second = table([*runs, other]).split("\n\n")
    assert [cell.split(",")[0].strip() for cell in first.splitlines()[0].split("|")[2:-1]] == ["c2", "c3", "c4", "c5"]
    assert first.splitlines()[2:] == [
        "| r2 | 0.200 |  |  |  |",
        "| r3 |  | 0.300 |  |  |",
        "| r4 |  |  | 0.400 |  |",
        "| r5 |  |  |  | 0.500 |",
    ]
    assert second.splitlines()[-1] == "| push | 0.400 |"


def test_names_are_paths() -> None:
    assert flat({"a": 1, "b": {"c": 2.5, "d": {"e": 3}}}) == {"a": 1.0, "b, c": 2.5, "b, d, e": 3.0}


def test_the_table_of_the_page_is_that_of_the_records() -> None:
    """`python -m benchmarks.records` rewrites it."""
    page = PAGE.read_text()
    assert with_ratios(page, kept()) == page
    assert {record.benchmark for record in kept()} <= set(PARTS)


def test_a_record_names_this_commit() -> None:
    found = record_of("wire", {"push": 0.5}, rounds=5, date="2026-01-02")
    assert len(found.commit.rstrip("+")) == 9
    assert found.column.startswith(f"{found.commit}, 2026-01-02, ")


def test_a_smoke_run_is_not_kept() -> None:
    before = records.kept()
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--smoke", "--record"])
    assert done.exit_code == 2
    assert "smoke run" in done.output
    assert records.kept() == before
