"""The job's section `log`: where the curves of a run are logged beside its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hetpipe.job.sections import Section
from hetpipe.values.problems import shown
from hetpipe.values.suggest import did_you_mean


def _checked_uri(uri: str) -> str:
    if not uri.startswith(("http://", "https://")):
        raise ValueError(
            f"must be the address of a tracking server, http://… or https://…, not {shown(uri)}; without it the files "
            "are in the folder of the run"
        )
    return uri


class TensorBoardSection(Section):
    """Event files in `RUN_DIR/tensorboard`."""


class WandbSection(Section):
    """A run of Weights & Biases; its key is in the coordinator's environment (`WANDB_API_KEY`)."""

    project: str = "hetpipe"
    """Its project."""
    entity: str | None = Field(default=None, examples=["my-team"])
    """User or team; None: the default of the account."""
    name: str | None = Field(default=None, examples=["baseline"])
    """Name of the run; None: that of the run's folder."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to the folder of the run only; `wandb sync` sends it later. None: `WANDB_MODE` of the
    coordinator, or `online`."""


class MlflowSection(Section):
    """A run of MLflow."""

    uri: Annotated[str, AfterValidator(_checked_uri)] | None = Field(
        default=None, examples=["https://mlflow.example:5000"]
    )
    """Address of the tracking server; None: `MLFLOW_TRACKING_URI` of the coordinator, or files in `RUN_DIR/mlflow`."""
    experiment: str = "hetpipe"
    """Its experiment, made if necessary."""
    name: str | None = Field(default=None, examples=["baseline"])
    """Name of the run; None: that of the run's folder."""


#: Names of the loggers.
LOGGERS = ("tensorboard", "wandb", "mlflow")


class LogSection(Section):
    """Loggers to which the coordinator passes losses, evaluations and speed; a list of names, or options by name."""

    tensorboard: TensorBoardSection | None = Field(default=None, examples=["{}"])
    """Event files for TensorBoard in `RUN_DIR/tensorboard`; None: none."""
    wandb: WandbSection | None = Field(default=None, examples=["{project: digits}"])
    """Weights & Biases; None: not used."""
    mlflow: MlflowSection | None = Field(default=None, examples=["{experiment: digits}"])
    """MLflow; None: not used."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A list of names, or one name, as a mapping without options."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            return value
        for name in names:
            if name not in LOGGERS:
                raise ValueError(f"there is no logger {shown(name)}; {did_you_mean(str(name), LOGGERS)}")
        return {name: {} for name in names}

    @property
    def options(self) -> Mapping[str, dict[str, Any]]:
        """Logger → its options, for those that are used."""
        return {name: found.model_dump() for name in LOGGERS if (found := getattr(self, name)) is not None}
