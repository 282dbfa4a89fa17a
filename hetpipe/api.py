"""`hetpipe.train` and what one does with runs: the system from a Python program. `planning` has what precedes them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetpipe.checker import Report
from hetpipe.checkpoint.export import Exported
from hetpipe.cli.run.export import export_run
from hetpipe.cli.run.summary import summary_lines
from hetpipe.cli.study.compare import train_all
from hetpipe.comparison.progress import CompareLines, CompareLive
from hetpipe.comparison.record import ComparisonFolder, TrialRecord
from hetpipe.comparison.trainer import train_trial
from hetpipe.comparison.trials import trials_of
from hetpipe.comparison.view import PolicySummary, summaries_of
from hetpipe.decide.elastic.script import member_changes, wave_changes
from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.segment import ScriptedChanges, first_progress, planned_segments, wave_change_at
from hetpipe.errors import JobError
from hetpipe.job.file import Job, load_job
from hetpipe.model.packed import unpack
from hetpipe.pipeline.callables import MapDataset, build_train_data, check_not_importing, epoch_order
from hetpipe.pipeline.data import read_minibatch
from hetpipe.pipeline.seeds import preserved_generators
from hetpipe.planning import naming_keywords
from hetpipe.report.view import CallbackView, LineView, SilentView, View
from hetpipe.runs.callbacks import Callback, CallbacksView
from hetpipe.runs.interrupts import Interrupts
from hetpipe.runs.replay import Replayed, replay_of_run
from hetpipe.runs.requests import JobSource, given_job, given_run
from hetpipe.runs.result import LossRange, Staleness, Traffic, TrainResult
from hetpipe.runs.run import Run
from hetpipe.runs.run_folder import RUNS, RunFolder, run_of_job_file
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import Training
from hetpipe.values.document import dotted
from hetpipe.values.events import JobEvent, JobState
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.policies import WeightPolicy

__all__ = [
    "Callback", "Comparison", "LossRange", "Progress", "Staleness", "Traffic", "TrainResult", "check", "compare",
    "export", "minibatch", "replay", "train",
]  # fmt: skip

#: The display of `train`: `lines` on standard error, a `live` table there (with rich), `none`, or
#: a function that is called with every event, in the thread of `train`.
Progress = Literal["lines", "live", "none"] | Callable[[JobEvent], None]


def train(
    job: JobSource | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    coordinator: str | None = None,
    progress: Progress = "lines",
    callbacks: Sequence[Callback] = (),
    **overrides: object,
) -> TrainResult:
    """Train a job to its end, like the command `hetpipe train`.

    The job may be given by keys alone, and functions and classes by themselves, with arguments by `functools.partial`:
    `train(model=build, data=samples, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=3)`. The processes
    of the run import them again: from their modules; from the file of the running script, which must then call `train`
    under `if __name__ == "__main__":`; or, of a notebook, from the definitions in its cells that they need. Modules
    named by texts are imported from the folder of these functions first, or else
    from the current one. Ctrl-C in the main thread stops the run at a barrier with a checkpoint and
    then raises `KeyboardInterrupt`; a second Ctrl-C stops it immediately.

    Args:
        job: a job file, a mapping with its content, or a `Job`; optional with `resume`.
        run_dir: folder for the run, new or empty; by default `runs/NAME-TIME`.
        resume: folder or URL of a run to continue from its newest checkpoint.
        coordinator: `HOST:PORT` of a running cluster; by default one is started on this machine for this run. If the
            cluster has TLS, the environment variable `HETPIPE_TLS` names the folder of an operator's certificates.
        progress: the display of events. After `lines` and `live` the result of the run follows, as the command prints
            it: speed, loss, evaluation, where the run is, and the next command; `none` and functions print nothing.
        callbacks: called at waves, epochs, evaluations, checkpoints and other events.
        overrides: keys of the job, or those of `job` to change: `epochs=2, sync={"D": 4}`.

    Returns:
        The result; `result.run_dir` is the folder of the run.

    Raises:
        UserError: the job (`JobError`, which lists every mistake), something it refers to, or an argument is invalid.
        JobFailed: the run failed; the message names the failed process, and how to resume. Another error of
            `hetpipe.errors` if the cause is known more precisely: `NonFiniteUpdate`; `PeerUnreachable`, `UnknownJob`
            and `NobodyLeads` if the run had no leader on its cluster for minutes; the run may continue.
        KeyboardInterrupt: the run was stopped by Ctrl-C.
    """
    check_not_importing()
    shell = Shell()
    request, folder = given_run(job, overrides, run_dir=run_dir, resume=resume, coordinator=coordinator, shell=shell)
    view = _view(progress, request.job.name, shell)
    if callbacks:
        view = CallbacksView(view, callbacks, folder)
    # Ctrl-C only: SIGTERM is left to the program.
    with Interrupts([signal.SIGINT]) as interrupts:
        try:
            end = Training(request, folder, shell, view=view, interrupts=interrupts).run()
        finally:
            view.close()
            shell.fork_server.close()
    if end.state is JobState.FINISHED and end.result is not None:
        if progress in ("lines", "live"):
            lines = [*end.sentences, *summary_lines(end, current=shell.current)]
            sys.stderr.write("".join(f"{line}\n" for line in lines))
        return end.result
    if end.interrupted:
        raise KeyboardInterrupt("; ".join(end.sentences))
    raise end.exception()


def check(run: str | Path | Run | None = None) -> dict[str, Report]:
    """Verify the histories of a run, as `hetpipe check` does: staleness bound, exactly-once, sample accounting.

    Args:
        run: a run or its folder; None: the newest one in `runs/`.

    Returns:
        A report by folder; one for each rewind after which it trained. `all(report.ok for report in found.values())`.

    Raises:
        UserError: there is no such run, or a history cannot be read.
    """
    return _run(run).check()


def export(
    run: str | Path | Run | None,
    out: str | Path,
    *,
    to: Literal["safetensors", "hf"] = "safetensors",
    best: bool = False,
) -> Exported:
    """Write the weights of a run's newest checkpoint, or of its best one, as `hetpipe export` does.

    Args:
        run: a run, or its folder or URL; None: the newest one in `runs/`.
        out: the file or URL to write; with `hf` a folder that `from_pretrained` reads.
        to: format; `hf` builds the job's model with the code of the run.
        best: the best checkpoint, by `checkpoint.best` or `early_stopping`.

    Raises:
        UserError: there is no such run, or `out` cannot be written.
        CheckpointError: the run has no complete checkpoint, or one of its files is corrupted.
    """
    name = None if run is None else str(run.path if isinstance(run, Run) else run)
    with naming_keywords():
        written, _ = export_run(name, str(out), is_hugging_face=to == "hf", is_best=best, runs_dir=RUNS, shell=Shell())
    return written


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job under several weight policies."""

    path: Path
    """Its folder, with the folders of the runs."""
    policies: tuple[PolicySummary, ...]
    """Each policy over its seeds, in the requested order."""
    runs: tuple[TrialRecord, ...]
    """Each run, with its curves."""


def compare(
    job: JobSource | None = None,
    *,
    weights: Sequence[WeightPolicy] | None = None,
    vary: Mapping[str, Sequence[object]] | None = None,
    seeds: int = 3,
    only_for: Mapping[WeightPolicy, Mapping[str, object]] | None = None,
    run_dir: str | Path | None = None,
    progress: Literal["lines", "live"] = "lines",
    **overrides: object,
) -> Comparison:
    """Train a job under several weight policies, or values of its keys, in sequence, as `hetpipe compare` does.

    Args:
        job: a job file, a mapping with its content, or a `Job`; may be given by keys alone (`train`).
        weights: the policies. Default: `wave,stash,double_buffer,flush,predict`; with `vary` that of the job.
        vary: keys of the job with the values to compare: `{"sync.D": [0, 4]}`; of several keys all combinations.
        seeds: number of seeds, counted from the job's.
        only_for: keys of the job by policy: `{"flush": {"optimizer.lr": 0.1}}`.
        run_dir: folder of the comparison; its finished runs are used again. Default: `runs/compare-NAME-TIME`.
        progress: the display of runs on standard error.
        overrides: keys of the job, or those of `job` to change, under every policy.

    Raises:
        UserError: the job or an argument is invalid, under whatever policy.
        KeyboardInterrupt: Ctrl-C; with the same `run_dir` the comparison continues.
    """
    check_not_importing()
    with given_job(job, overrides, Shell()) as (loaded, shell), naming_keywords():
        own = tuple(
            f"{policy}:{key}={json.dumps(value)}"
            for policy, keys in (only_for or {}).items()
            for key, value in dotted(keys).items()
        )
        varied = tuple(f"{key}={json.dumps(list(values))[1:-1]}" for key, values in (vary or {}).items())
        trials = trials_of(loaded, _Trials(None if weights is None else ",".join(weights), seeds, own, varied))
        folder = ComparisonFolder.open(_path(run_dir), name=loaded.name, clock=shell.clock)
        kind = CompareLive if progress == "live" else CompareLines
        try:
            with kind(sys.stderr, shell.clock) as shown:
                train_all(trials, folder, shell, shown, train_trial)
        finally:
            shell.fork_server.close()
    records = tuple(record for trial in trials if (record := folder.find(trial)))
    labels = tuple(dict.fromkeys(trial.label for trial in trials))
    return Comparison(folder.path, summaries_of(labels, records), records)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Implements `TrialSettings`."""

    weights: str | None
    seeds: int
    own_settings: tuple[str, ...]
    vary: tuple[str, ...]
    settings: tuple[str, ...] = ()


def _run(run: str | Path | Run | None) -> Run:
    return run if isinstance(run, Run) else Run(run)


def replay(run: str | Path | Run | None = None, *, vw: int, p: int) -> Replayed:
    """The loss and the gradients of one minibatch of a run, computed again in this process, with the same bits.

    On the CPU. The weights of the first minibatches of the run and after each checkpoint are known; for another one a
    deterministic run is repeated, in this process, from the nearest checkpoint. User code is imported from where the
    run imported it; from the current folder where that folder does not exist.

    Args:
        run: a run or its folder; None: the newest one in `runs/`.
        vw: virtual worker.
        p: minibatch, from 1.

    Raises:
        UserError: the weights of the minibatch are not known, and the run cannot be repeated; it says why, and which
            ones are known.
    """
    return replay_of_run(RunFolder(_run(run).path), Path.cwd(), vw=vw, p=p)


def minibatch(
    job: JobSource | Run, vw: int, p: int, *, indices: Sequence[int] | None = None, epoch: int = 1
) -> tuple[Any, Any]:
    """The tensors of minibatch `p` of virtual worker `vw` in an undisturbed run of `job`, exactly.

    Each call builds the data set again. The random states of torch, `random` and NumPy are restored.

    Args:
        job: a run or its job.json, whose user code is imported from where the run imported it; or a job file, a mapping
            with its content, or a `Job`, whose user code is imported from the current folder first.
        vw: 0 ≤ vw < `workers.count`.
        p: 1, 2, …
        indices: sample indices of the minibatch in a disturbed run (a resume, a lost virtual worker), as listed in the
            message about a non-finite loss; read under the same seed. None: those of an undisturbed run.
        epoch: of `indices`, from 1, if the data are a stream.

    Returns:
        The inputs (one tensor, or a tuple if samples have several) and the target, [batch …] each.

    Raises:
        LookupError: there is no such virtual worker or minibatch: `p` is after the end, or numbering skips it because
            its wave was short (the next wave begins at the next multiple of N).
        JobError, CallableError: the job or something it refers to is invalid.
    """
    checked, code = _job_and_code(job)
    with preserved_generators():
        dataset = build_train_data(checked, code)
        block, of = _block(checked, dataset, vw, p, code=code) if indices is None else (tuple(indices), epoch - 1)
        batch = read_minibatch(dataset, block, seed=checked.seed, vw=VirtualWorkerIndex(vw), p=Minibatch(p), epoch=of)
    inputs = tuple(map(unpack, batch.inputs))
    return (inputs[0] if len(inputs) == 1 else inputs), batch.target


def _job_and_code(given: JobSource | Run) -> tuple[Job, Path]:
    """A job, and the first folder to import its user code from."""
    if isinstance(given, Run):
        return given.job, RunFolder(given.path).import_path(Path.cwd())
    run = run_of_job_file(Path(given)) if isinstance(given, str | Path) else None
    return load_job(given), Path.cwd() if run is None else run.import_path(Path.cwd())


def _block(job: Job, dataset: MapDataset, vw: int, p: int, *, code: Path) -> tuple[Block, int]:
    """The sample indices of a minibatch, and its epoch (from 0)."""
    if job.data.division == "by_node":
        raise JobError(
            "data.division: is by_node, so that the samples of a minibatch depend on the nodes of a run; give `indices`"
        )
    count = job.num_ever
    if job.freeze.compress:
        raise LookupError("who trains changes as layers freeze (freeze.compress): name the samples by `indices`")
    if not 0 <= vw < count:
        raise LookupError(f"there is no virtual worker {vw}; the job has {count}, numbered from 0")
    if p < 1:
        raise LookupError(f"there is no minibatch {p}; minibatches are numbered from 1")
    per_wave = {VirtualWorkerIndex(index): job.minibatches_of(VirtualWorkerIndex(index)) for index in range(count)}
    data, n = job.data_spec(len(dataset)), per_wave[VirtualWorkerIndex(vw)]
    changes = wave_changes(job)
    last = origin = 0
    for segment, blocks in planned_segments(
        first_progress(data),
        data,
        per_wave=per_wave,
        checkpoint_every_waves=job.checkpoint.every_waves,
        plan_clocks=job.elastic.clocks,
        scripted=ScriptedChanges(changes, member_changes(job)),
        plan_every_waves=job.freeze.waves,
        order_of=epoch_order(job, code, dataset) or (lambda _: None),
    ):
        dealt = blocks.get(VirtualWorkerIndex(vw), ())
        change = wave_change_at(changes, segment.start)
        n = n if change is None else change.of(VirtualWorkerIndex(vw))
        first = origin + 1
        if p < first + len(dealt):
            return dealt[p - first], segment.epoch
        last = first + len(dealt) - 1 if dealt else last
        origin += (segment.end - segment.start) * n
        following = origin + 1
        if p < following:
            raise LookupError(
                f"virtual worker {vw} has no minibatch {p}: numbering skips from {last}, the last one before the "
                f"barrier at clock {segment.end} ({segment.reason}), to {following}"
            )
    raise LookupError(f"virtual worker {vw} has no minibatch {p}: the last one of the run is {last}")


def _view(progress: Progress, name: str, shell: Shell) -> View:
    match progress:
        case "lines":
            return LineView(sys.stderr, shell.clock)
        case "live":
            from hetpipe.report.live import LiveView  # needs rich

            return LiveView(sys.stderr, name=name, clock=shell.clock)
        case "none":
            return SilentView()
        case callback:
            return CallbackView(callback)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
