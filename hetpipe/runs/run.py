"""A run's folder for a Python program: what it trains, how it went, and its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.checker import Report, check_run
from hetpipe.checkpoint.best import Best, find_best
from hetpipe.checkpoint.export import TrainedState, read_trained_state
from hetpipe.errors import CheckpointError, UserError
from hetpipe.job.file import Job
from hetpipe.observe.metrics import read_metrics
from hetpipe.runs.judge import histories_of
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell
from hetpipe.runs.status import RunStatus, status_of_run
from hetpipe.server.coordinator.job_hosts import EVALUATIONS
from hetpipe.values.rewinds import run_folders

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


class Run:
    """A run, finished or not; everything is read anew from its folder at each call.

    `Run().metrics().plot(x="t", y="loss")` draws the latest run; `Run(path).load_into(model)` loads its weights.
    """

    def __init__(self, path: str | Path | None = None, *, shell: Shell | None = None) -> None:
        """Open the run in the folder `path`; None: the latest one in `runs/`.

        Raises:
            UserError: there is none.
        """
        self._shell = shell or Shell()
        self._folder = find_run(None if path is None else Path(path), runs_dir=self._shell.current / RUNS)
        self._folder.read_record()

    def __repr__(self) -> str:
        """The expression that opens it."""
        return f"hetpipe.Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Its folder; absolute."""
        return self._folder.path

    @property
    def job(self) -> Job:
        """Its job.

        Raises:
            JobError: the file was changed and is no job any more.
        """
        return self._folder.read_job()

    @property
    def result(self) -> TrainResult | None:
        """The return value of `hetpipe.train`; None while it runs, or if it failed.

        Raises:
            UserError: it cannot be read.
        """
        found = self._folder.read_result()
        values = {} if found is None else found.values  # noqa: PD011 - no frame
        return TrainResult.from_json(values) if "waves" in values else None

    def status(self) -> RunStatus:
        """Its state now, as `hetpipe status` prints it: asks its coordinator while it runs.

        Raises:
            UserError: the folder cannot be read.
        """
        return status_of_run(self._folder, self._shell)

    def metrics(self) -> pd.DataFrame:
        """Training metrics, one row per wave of a virtual worker, in the order of time.

        Columns: `rewinds` (how often the job had gone back to a checkpoint by then; rows that a rewind has undone are
        kept), `t` (seconds since the first row), `wave`, `p` (its last minibatch), `minibatches` and `samples` (of the
        wave), `weight`, `loss`, `learning_rate`, `gradient_norm`, `max_norm`, and `losses.NAME` for several losses. Of
        long runs a row stands for several waves in a row.

        Raises:
            UserError: pandas is not installed.
        """
        waves = [(rewinds, timed) for rewinds, at in enumerate(run_folders(self.path)) for timed in read_metrics(at)]
        rows = []
        for rewinds, timed in waves:
            values = asdict(timed.wave)
            losses = {f"losses.{name}": value for name, value in values.pop("losses").items()}
            rows.append({"rewinds": rewinds, "t": timed.t - waves[0][1].t, **values, **losses})
        return _frame(rows)

    def evaluations(self) -> pd.DataFrame:
        """Evaluations, one row each, in order, those that a rewind has undone too.

        Columns: `epoch`, `clock`, `minibatches`, `samples`, `rewinds`, `within_epoch`, `whole`, and `loss` and the
        job's metrics.

        Raises:
            UserError: pandas is not installed, or the file cannot be read.
        """
        path = self.path / EVALUATIONS
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            objects = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return _frame([{**{k: v for k, v in each.items() if k != "values"}, **each["values"]} for each in objects])

    def best(self) -> Best | None:
        """Its best evaluation so far, by the metric of `checkpoint.best` or `early_stopping`; None without any."""
        try:
            return find_best(self.path)[1]
        except CheckpointError:
            return None

    def weights(self, *, best: bool = False) -> TrainedState:
        """The tensors of its newest complete checkpoint, or of the best one, named as in the model's `state_dict`.

        Raises:
            CheckpointError: there is none, or one of its files is corrupted.
        """
        return read_trained_state(self.path if best else self._folder.place, is_best=best)

    def load_into(self, model: nn.Module, *, best: bool = False) -> TrainedState:
        """Load the newest complete checkpoint, or the best one, into `model`, strictly; returns what was loaded.

        Raises:
            CheckpointError: there is no checkpoint, or one of its files is corrupted.
            UserError: the model is another one.
        """
        state = self.weights(best=best)
        try:
            model.load_state_dict(state.tensors)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint {state.checkpoint} does not fit the model: {error}; build the model as the job's "
                f"`model` does: {self.job.model}"
            ) from error
        return state

    def check(self) -> dict[str, Report]:
        """Verify its histories, as `hetpipe check` does; by folder, one for each rewind after which it trained.

        Raises:
            UserError: a history cannot be read.
        """
        return {where.name: check_run(where) for where in histories_of(self.path)}


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise UserError("pandas is not installed; install it: pip install pandas") from None
    return pd.DataFrame(rows)
