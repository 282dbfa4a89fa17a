"""The job's key `log`: names, or options by name."""

from __future__ import annotations

import pytest

from hetpipe.errors import JobError
from tests.cli.fakes import small_job


def test_a_list_of_names_is_short_for_no_options() -> None:
    assert small_job(log=["tensorboard", "wandb"]) == small_job(log={"tensorboard": {}, "wandb": {}})
    assert small_job(log="mlflow") == small_job(log={"mlflow": {}})
    assert dict(small_job().log.options) == {}
    assert set(small_job(log=["mlflow", "tensorboard"]).log.options) == {"tensorboard", "mlflow"}


def test_an_unknown_logger_is_refused_with_a_suggestion() -> None:
    with pytest.raises(JobError, match=r"log: there is no logger the text 'tensorbord'; did you mean `tensorboard`"):
        small_job(log=["tensorbord"])


def test_a_tracking_server_is_an_address() -> None:
    assert small_job(log={"mlflow": {"uri": "https://mlflow.example"}}).log.options["mlflow"]["uri"]
    with pytest.raises(JobError, match=r"log\.mlflow\.uri: must be the address of a tracking server"):
        small_job(log={"mlflow": {"uri": "/etc"}})
