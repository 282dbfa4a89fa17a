"""The loggers: TensorBoard, Weights & Biases, MLflow. Only the logging process imports their packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hetpipe.job.log import LOGGERS
from hetpipe.loggers.message import Opening, Values

#: Logger → the module that it needs.
_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
assert set(_MODULES) == set(LOGGERS)

#: MLflow takes values of at most so many characters, and so many keys at once.
_MLFLOW_TEXT, _MLFLOW_KEYS = 500, 100


class Logger(Protocol):
    """One logger of one run."""

    def log(self, values: Values) -> None:
        """Log values at a step. Steps may decrease from one call to the next, but not within a name."""
        ...

    def flush(self) -> None:
        """Make the logged values visible to readers."""
        ...

    def close(self) -> None:
        """Finish the run."""
        ...


#: State of a logger by which a later process continues the same run.
Kept = dict[str, str]


def missing(names: Mapping[str, object]) -> list[str]:
    """A sentence for each logger whose package is not installed here."""
    return [
        f"log.{name}: the package {_MODULES[name]} is not installed where the coordinator runs; install it there: "
        f"pip install 'hetpipe[{name}]'"
        for name in names
        if find_spec(_MODULES[name]) is None
    ]


class TensorBoard(Logger):
    """Event files in `RUN_DIR/tensorboard`; a resumed run begins with a copy of those of the run that it resumes."""

    def __init__(self, opening: Opening, options: Mapping[str, Any], kept: Kept) -> None:
        from tensorboard.summary import Writer
        from tensorboard.summary._output import DirectoryOutput

        folder = Path(opening.run_dir) / "tensorboard"
        earlier = Path(opening.previous) / "tensorboard" if opening.previous else None
        if earlier is not None and earlier.is_dir() and not folder.exists():
            shutil.copytree(earlier, folder)
        self._writer = Writer(DirectoryOutput(str(folder)))
        kept["folder"] = str(folder)

    def log(self, values: Values) -> None:
        """Implement `Logger.log`."""
        for name, value in values.values.items():
            self._writer.add_scalar(name, value, values.step, wall_time=values.wall)

    def flush(self) -> None:
        """Implement `Logger.flush`."""
        self._writer.flush()

    def close(self) -> None:
        """Implement `Logger.close`."""
        self._writer.close()


class WeightsAndBiases(Logger):
    """A run of Weights & Biases, whose x-axis is `minibatches`; a resumed run has the same id."""

    def __init__(self, opening: Opening, options: Mapping[str, Any], kept: Kept) -> None:
        import wandb

        folder = Path(opening.run_dir)
        settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        self._run = wandb.init(
            project=options["project"],
            entity=options.get("entity"),
            name=options.get("name") or folder.name,
            mode=options.get("mode"),
            id=kept.get("id"),
            resume="allow",
            dir=str(folder),
            config=dict(opening.keys),
            settings=settings,
        )
        kept["id"] = self._run.id
        self._run.define_metric("*", step_metric="minibatches")

    def log(self, values: Values) -> None:
        """Implement `Logger.log`."""
        self._run.log({**values.values, "minibatches": values.step, "_timestamp": values.wall})

    def flush(self) -> None:
        """No-op: its own process sends."""

    def close(self) -> None:
        """Implement `Logger.close`."""
        self._run.finish()


class MLflow(Logger):
    """A run of MLflow; a resumed run is the same run. Without a server its files are in `RUN_DIR/mlflow`."""

    def __init__(self, opening: Opening, options: Mapping[str, Any], kept: Kept) -> None:
        uri = kept.get("uri") or options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (Path(opening.run_dir) / "mlflow").as_uri()
        if uri.startswith("file:"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Callable[..., Any] = Metric
        self._client = MlflowClient(uri)
        run_id = kept.get("run_id")
        if run_id is None:
            found = self._client.get_experiment_by_name(options["experiment"])
            experiment = self._client.create_experiment(options["experiment"]) if found is None else found.experiment_id
            name = options.get("name") or Path(opening.run_dir).name
            run_id = self._client.create_run(experiment, run_name=name).info.run_id
            parameters = [Param(key, value[:_MLFLOW_TEXT]) for key, value in opening.keys.items()]
            for first in range(0, len(parameters), _MLFLOW_KEYS):
                self._client.log_batch(run_id, params=parameters[first : first + _MLFLOW_KEYS])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        kept["uri"], kept["run_id"] = uri, run_id

    def log(self, values: Values) -> None:
        """Implement `Logger.log`."""
        at = int(1000 * values.wall)
        metrics = [self._metric(name, value, at, values.step) for name, value in values.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def flush(self) -> None:
        """No-op: every call is sent at once."""

    def close(self) -> None:
        """Implement `Logger.close`."""
        with suppress(Exception):  # every value was sent already
            self._client.set_terminated(self._run_id)


#: Logger → its class.
KINDS: Mapping[str, Callable[[Opening, Mapping[str, Any], Kept], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
