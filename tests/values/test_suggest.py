"""Which unknown names get a suggestion, and which do not: a wrong one sends the reader to the wrong section."""

from __future__ import annotations

import pytest

from hetpipe.job.model import Job
from hetpipe.job.sections import CheckpointSection, DataSection, WorkersSection
from hetpipe.values.catalogue import CATALOGUE
from hetpipe.values.policies import WEIGHT_POLICIES
from hetpipe.values.suggest import closest, did_you_mean

JOB = tuple(Job.model_fields)
SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach")


@pytest.mark.parametrize(
    ("typed", "allowed", "meant"),
    [
        ("modle", JOB, "model"),
        ("epoch", JOB, "epochs"),
        ("epocs", JOB, "epochs"),
        ("optimiser", JOB, "optimizer"),
        ("otpimizer", JOB, "optimizer"),
        ("batchsize", JOB, "batch_size"),
        ("batch-size", JOB, "batch_size"),
        ("BatchSize", JOB, "batch_size"),
        ("batch", JOB, "batch_size"),
        ("minibatch", JOB, "minibatches"),
        ("schedular", JOB, "schedule"),
        ("weigths", JOB, "weights"),
        ("snyc", JOB, "sync"),
        ("predicton", JOB, "prediction"),
        ("worker", JOB, "workers"),
        ("parameterserver", JOB, "parameter_servers"),
        ("parameter_sever", JOB, "parameter_servers"),
        ("checkpoints", JOB, "checkpoint"),
        ("stashed", WEIGHT_POLICIES, "stash"),
        ("stage", tuple(WorkersSection.model_fields), "stages"),
        ("trian", tuple(DataSection.model_fields), "train"),
        ("everywaves", tuple(CheckpointSection.model_fields), "every_waves"),
        ("momentm", SGD, "momentum"),
        ("decay", SGD, "weight_decay"),
        ("LR", SGD, "lr"),
        ("sgd", ("SGD", "Adam"), "SGD"),
        ("Adma", ("SGD", "Adam", "Adamax"), "Adam"),
        ("RTX2060", tuple(CATALOGUE), "RTX_2060"),
    ],
)
def test_a_slip_of_the_pen_is_told(typed: str, allowed: tuple[str, ...], meant: str) -> None:
    assert closest(typed, allowed) == meant


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("precision", ("prediction",)),
        ("device", JOB),
        ("dataset", JOB),
        ("momentum", JOB),
        ("lr", JOB),
        ("amp", JOB),
        ("fp16", JOB),
        ("dropout", JOB),
        ("accelerator", JOB),
        ("distributed", JOB),
        ("strategy", JOB),
        ("gpus", JOB),
        ("betas", SGD),
        ("eps", SGD),
        ("amsgrad", SGD),
        ("N", ("D",)),
        ("", JOB),
        ("zebra", ("SGD", "Adam")),
    ],
)
def test_another_word_suggests_nothing(typed: str, allowed: tuple[str, ...]) -> None:
    assert closest(typed, allowed) is None


def test_without_a_likely_name_all_are_listed() -> None:
    assert did_you_mean("betas", ("momentum", "lr")) == "use lr or momentum"
