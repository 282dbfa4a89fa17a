"""The search finds the same architecture as its twin in one process: its supernet has the same weights, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.architecture_search import search, twin
from examples.architecture_search.model import PLACES, active_layers, build
from hetpipe.checker import check_run
from hetpipe.job.file import load_job
from tests.numerics.compare import ROOT, trained
from tests.support.in_process import InProcessRun, run_in_process

SEED = 5

#: Of a shorter run.
WAVES = 3 * search.WAVES_EACH


def test_the_supernet_has_the_bits_of_its_twin_and_the_search_finds_the_same(tmp_path: Path) -> None:
    elastic = search.section(search.sampled(SEED)[: WAVES // search.WAVES_EACH])
    num = WAVES * twin.MINIBATCHES_PER_WAVE
    job = load_job(search.JOB, {"seed": SEED, "minibatches": num, "elastic": elastic})
    run_in_process(InProcessRun(job=job, run_dir=tmp_path, import_path=ROOT))
    report = check_run(tmp_path, require_complete=True)
    assert report.ok, "\n".join(report.lines())
    expected, found = twin.trained(SEED, WAVES), trained(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    supernet = build()
    supernet.load_state_dict(found)
    best = search.found(supernet.eval(), SEED)
    assert best == search.found(expected.eval(), SEED)
    assert len(best) == len(PLACES)


def test_the_job_and_the_search_agree() -> None:
    job = load_job(search.JOB)
    assert job.minibatches == search.NUM_WAVES * twin.MINIBATCHES_PER_WAVE
    assert (job.sync.minibatches_per_wave, job.batch_size) == (twin.MINIBATCHES_PER_WAVE, twin.BATCH_SIZE)
    assert job.optimizer.arguments == {"lr": twin.RATE}
    assert len(search.sampled(SEED)) * search.WAVES_EACH == search.NUM_WAVES
    names = [name for name, _ in build().named_children()]
    assert all(set(active_layers(each)) <= set(names) for each in search.sampled(SEED))


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_both_programs_print_the_same_architecture(tmp_path: Path) -> None:
    printed = []
    for program in ("search", "twin"):
        result = subprocess.run(
            [sys.executable, "-m", f"examples.architecture_search.{program}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        )
        printed.append(result.stdout.splitlines()[-1].partition("}")[0])
    assert printed[0] == printed[1]
    assert printed[0].startswith("{'a': ")
