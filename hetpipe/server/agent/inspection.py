"""Inspection of the user's code before planning: imports, consistency, sizes.

It also proves that the layers compute the same as the model (`docs/semantics/proof.md`), and for a job that is planned
without a profile it measures the model, like `hetpipe profile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hetpipe.clock import Clock
from hetpipe.errors import CallableError
from hetpipe.job.file import Job
from hetpipe.phases import report_phase
from hetpipe.pipeline.activating import check_activations
from hetpipe.pipeline.callables import (
    MapDataset,
    build_eval_data,
    build_model,
    build_train_data,
    call_loss,
    epoch_order,
    load_loss,
    load_metrics,
)
from hetpipe.pipeline.chain import Layer, SeedKey, Values, device_of, forbidden_in, run_layers, tensor_spec
from hetpipe.pipeline.cut_proof import prove_cut_model
from hetpipe.pipeline.data import read_evaluation_minibatch, read_minibatch
from hetpipe.pipeline.frozen_cache import digest_of
from hetpipe.pipeline.layering import why_one_layer
from hetpipe.pipeline.model_file import prove_construction, write_model_file
from hetpipe.pipeline.model_work import model_work
from hetpipe.pipeline.precision import autocast
from hetpipe.pipeline.proof import PROVEN_SAMPLES, Proof, UncutFailure, prove_data, prove_jump, prove_model
from hetpipe.pipeline.seeds import layer_seed, seed_generators
from hetpipe.profiler.order import ProfileOrder
from hetpipe.profiler.profiling import measured, targets_of
from hetpipe.profiler.subject import (
    MINIBATCH,
    VIRTUAL_WORKER,
    Subject,
    has_unequal_lengths,
    load_subject,
    tokens_per_sample,
)
from hetpipe.server.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex
from hetpipe.values.measurement import CPU_TYPE, ProfileStep
from hetpipe.values.plan import LayerReport, ModelReport, ModelWork, ProofReport
from hetpipe.values.policies import POLICIES, policies_where
from hetpipe.values.precision import AUTOCAST_DTYPES, Precision
from hetpipe.values.rewinds import MODEL_FILE
from hetpipe.values.suggest import join_names

#: Names of a proof's comparisons in reports, in order.
CHECKED = (
    "data read twice and made twice",
    "model made twice",
    "outputs, loss, gradients and buffers",
    "the same on other weights",
    "registered parameters only",
    "two minibatches in flight",
    "each layer alone",
    "evaluation mode",
    "loss without memory",
)

#: Remark for a job without tokens/s.
UNEQUAL_LENGTHS = (
    "samples have different numbers of tokens, so tokens/s are not reported (`tokens_per_sample` sets their mean), and "
    "operations are those of the first minibatch"
)


def carry_out(order: InspectionOrder, clock: Clock, on_step: Callable[[ProfileStep], None]) -> InspectionAnswer:
    """Import everything the job names, report the model, and measure it if requested.

    Args:
        order: the request.
        clock: takes the times.
        on_step: called before each layer is measured.

    Raises:
        CallableError, JobError: unusable callables, by their path in the job.
    """
    report_phase("importing the user's code and building model and data")
    job = Job.model_validate(order.job)
    with _explain_missing_kernels(job.precision):
        return _carry_out(order, job, clock, on_step)


def _carry_out(
    order: InspectionOrder, job: Job, clock: Clock, on_step: Callable[[ProfileStep], None]
) -> InspectionAnswer:
    import_path = Path(order.import_path)
    subject = load_subject(job, import_path)
    profile = ProfileOrder(
        job=order.job,
        import_path=order.import_path,
        cache_folder=order.cache_folder,
        with_cpu=CPU_TYPE in order.measure,
        types=order.measure,
    )
    # Before more of the user's modules are imported, so that `hetpipe profile` and runs share measurements.
    targets = targets_of(subject, profile) if order.measure else {}
    model = None
    if order.with_model:
        load_metrics(subject.job, import_path)
        report_phase("proving that the layers compute the same as the model")
        proof = prove_subject(subject, import_path, clock)
        digest = ""
        if order.run_folder:
            report_phase("writing the model from which stages build theirs")
            digest, notices = hand_over(subject, import_path, Path(order.run_folder), samples=proof.samples)
            proof = replace(proof, notices=(*proof.notices, *notices))
        report_phase("running one minibatch through the layers")
        check_activations(subject.job, subject.chain, subject.batch, subject.loss)
        report = inspect_subject(subject, import_path)
        model = replace(report, proof=replace(proof, work=work_of(subject)), digest=digest)
    report_phase("measuring the layers")
    return InspectionAnswer(model, measured(subject, targets, profile, clock, on_step).measurements)


@contextmanager
def _explain_missing_kernels(precision: Precision) -> Iterator[None]:
    """Explain the error of an operation for which torch has no kernel of the precision on the CPU.

    Raises:
        CallableError: with the fix.
    """
    try:
        yield
    except CallableError as error:
        dtype = AUTOCAST_DTYPES.get(precision)
        names = {"float16": "'Half'", "bfloat16": "'BFloat16'"}
        if dtype is None or not any(sign in str(error) for sign in (f"for {names[dtype]}", "primitive descriptor")):
            raise
        others = "bf16 or fp32" if precision == "fp16" else "fp32"
        raise CallableError(
            f"precision: is {precision}, and torch has no {dtype} kernel of an operation of the model on this CPU, "
            f"where jobs are inspected: {error}; use {others}, or let the module compute in float32, inside "
            "`with torch.autocast(device_type, enabled=False)` in its forward"
        ) from error


def hand_over(subject: Subject, import_path: Path, folder: Path, *, samples: int) -> tuple[str, tuple[str, ...]]:
    """Write the model into the folder of the run, so that no stage has to build or record the whole model.

    Args:
        subject: the job's code, with a proven, unmodified model.
        import_path: folder from which it was imported.
        folder: of the run.
        samples: of a minibatch for the model.

    Returns:
        The file's digest, empty without a file; and remarks for the user.
    """
    job = subject.job
    build = partial(build_model, job, import_path)
    inputs = read_minibatch(subject.train, range(samples), seed=job.seed, vw=VIRTUAL_WORKER, p=MINIBATCH).inputs
    construction, why = prove_construction(build, subject.chain, inputs, seed=job.seed)
    notices: tuple[str, ...] = ()
    if construction != "meta":
        why = (
            f"The model cannot be built without its weights ({why}), so each stage builds the whole model, one at a "
            "time on a node, and then keeps its own part"
        )
        notices = (why,)
    if construction is None:
        return "", notices
    try:
        return write_model_file(folder / MODEL_FILE, subject.chain, construction), notices
    except OSError as error:
        why = f"{folder / MODEL_FILE} cannot be written ({error}), so each stage builds the whole model"
        return "", (*notices, why)


def inspect_subject(subject: Subject, import_path: Path) -> ModelReport:
    """Import the job's other callables, run the minibatch through the model, and report sizes.

    Raises:
        CallableError, JobError: unusable callables, by their path in the job.
    """
    evaluation = build_eval_data(subject.job, import_path)
    load_metrics(subject.job, import_path)
    sizes: list[int] = []
    with torch.enable_grad():
        outputs = _run(subject, sizes)
        _loss_of(subject, outputs)
    reports = tuple(_report(layer, size) for layer, size in zip(subject.chain, sizes, strict=True))
    return ModelReport(reports, len(subject.train), None if evaluation is None else len(evaluation))


def work_of(subject: Subject) -> ModelWork:
    """The work of one sample, in tokens and operations."""

    def compute_loss() -> torch.Tensor:
        outputs = _run(subject, [])
        return _loss_of(subject, outputs)

    parameters = [layer.module.get_parameter(local) for layer in subject.chain for local in layer.parameters]
    return model_work(
        subject.batch.num_samples,
        compute_loss,
        parameters,
        tokens_per_sample=tokens_per_sample(subject),
        precision=subject.job.precision,
    )


def _loss_of(subject: Subject, outputs: Values) -> torch.Tensor:
    with autocast(subject.job.precision, device_of(outputs)):
        return call_loss(subject.loss, outputs[0] if len(outputs) == 1 else outputs, subject.batch.target)


def prove_subject(subject: Subject, import_path: Path, clock: Clock) -> ProofReport:
    """Prove the job's data and its model.

    Args:
        subject: whose model has not run yet.
        import_path: the folder it was imported from.
        clock: for durations.

    Raises:
        CallableError, JobError: the layers do not compute the same; with the first difference and the fix.
    """
    started = clock.monotonic()
    check_stages(subject)
    _prove_data(subject, import_path)
    remarks: list[str] = []
    proof = _prove_model(subject, import_path, remarks.append)
    notices = (*dict.fromkeys(remarks), *proof.notices)
    if subject.job.tokens_per_sample is None and has_unequal_lengths(subject):
        notices = (*notices, UNEQUAL_LENGTHS)
    return ProofReport(
        scope="whole model",
        equality="bits" if proof.is_exact else "rounding",
        samples=proof.samples,
        seconds=round(clock.monotonic() - started, 3),
        checked=CHECKED,
        notices=notices,
    )


def check_stages(subject: Subject) -> None:
    """Reject more stages than a model that is cut by its own forward has layers, and report what prevents cuts.

    Raises:
        CallableError: naming the fix.
    """
    job, chain = subject.job, subject.chain
    cut = chain[0].cut
    if cut is None or job.workers.stages == "auto":
        return
    asked = max(job.num_stages(VirtualWorkerIndex(vw)) for vw in range(job.num_ever))
    if asked <= len(chain):
        return
    tied = ""
    if not POLICIES[job.weights].splits_ties and any(
        each.name.startswith("parameter:") for place in cut.survey.cuts for each in place.crossing
    ):
        others = join_names(policies_where(lambda policy: policy.splits_ties))
        tied = f"under `weights: {job.weights}` tied weights stay on one stage: use {others}, or "
    if len(chain) == 1:
        raise CallableError(
            f"workers.stages: gives a virtual worker {asked} stages, but the model {why_one_layer(cut)}; {tied}train "
            "the model with `workers: {stages: 1}`"
        )
    raise CallableError(
        f"workers.stages: gives a virtual worker {asked} stages, but the model has {len(chain)} layers between its "
        f"cuts{''.join(f' ({why})' for why in cut.survey.whole[:1])}; {tied}give it at most {len(chain)}"
    )


def _trains_whole(job: Job) -> bool:
    """Whether each virtual worker has one stage."""
    if job.workers.stages == "auto":
        return False
    return all(job.num_stages(VirtualWorkerIndex(vw)) == 1 for vw in range(job.num_ever))


def _prove_data(subject: Subject, import_path: Path) -> None:
    job = subject.job
    read = partial(read_minibatch, seed=job.seed, vw=VIRTUAL_WORKER, p=MINIBATCH)
    prove_data(
        "data.train",
        str(job.data.train),
        lambda: build_train_data(job, import_path),
        subject.train,
        lambda dataset: read(dataset, range(job.batch_size)),
    )
    prove_jump("data.train", subject.train, lambda dataset: read(dataset, _from_second(dataset, job.batch_size)))
    _prove_order(job, import_path, subject.train)
    if job.freeze.cache == "on":
        _prove_cached(job, subject.train)
    evaluation = build_eval_data(job, import_path)
    if evaluation is None or job.data.eval is None:
        return
    samples = range(min(job.batch_size, len(evaluation)))
    read_evaluation = partial(read_evaluation_minibatch, seed=job.seed, vw=VIRTUAL_WORKER, number=1)

    def build() -> MapDataset:
        again = build_eval_data(job, import_path)
        assert again is not None, "the job names one"
        return again

    prove_data("data.eval", str(job.data.eval), build, evaluation, lambda dataset: read_evaluation(dataset, samples))
    prove_jump("data.eval", evaluation, lambda dataset: read_evaluation(dataset, _from_second(dataset, job.batch_size)))


def _from_second(dataset: MapDataset, batch_size: int) -> range:
    """A minibatch that begins with the second sample, if there is one."""
    return range(min(1, len(dataset) - 1), min(batch_size + 1, len(dataset)))


def _prove_order(job: Job, import_path: Path, train: MapDataset) -> None:
    """Check that every process gets the samples in the same order.

    Raises:
        CallableError: the sampler fails, or gives another order when it is called again.
    """
    orders = [epoch_order(job, import_path, each) for each in (train, build_train_data(job, import_path))]
    for epoch in range(min(2, job.epochs or 2)):
        once, again = (None if order is None else order(epoch) for order in orders)
        if once != again:
            raise CallableError(
                f"data.sampler: `{job.data.sampler}` gives another order when it is called again for epoch "
                f"{epoch + 1}; the first and the last stage of every virtual worker call it themselves: make its draws "
                "from torch, `random` or NumPy's global functions, which are seeded by (seed, epoch), or from a "
                "generator that it seeds by `epoch`"
            )


def _prove_cached(job: Job, train: MapDataset) -> None:
    """Check that a minibatch is the same in the next pass over the data.

    Raises:
        CallableError: its inputs differ, so that a cache behind frozen layers would never be read.
    """
    samples = range(min(job.batch_size, len(train)))
    passes = (
        read_minibatch(train, samples, seed=job.seed, vw=VIRTUAL_WORKER, p=Minibatch(MINIBATCH + epoch), epoch=epoch)
        for epoch in range(2)
    )
    once, again = (digest_of(batch.inputs) for batch in passes)
    if once != again:
        raise CallableError(
            "freeze.cache: is on, but the inputs of one minibatch differ between two passes over data.train "
            f"(`{job.data.train}`), as those of augmented data do, so that no pass finds in the cache what an earlier "
            "one has kept: set `freeze.cache: off`, or have the model augment behind its frozen layers"
        )


def _prove_model(subject: Subject, import_path: Path, remark: Callable[[str], None]) -> Proof:
    """Prove the model on few samples, or on a whole minibatch if it does not accept fewer.

    `remark` is that of `build_model`.
    """
    job = subject.job
    whole = job.batch_size
    for count in dict.fromkeys((min(PROVEN_SAMPLES, whole), whole)):
        # The second minibatch has other samples, if there are enough.
        first, second = (
            read_minibatch(
                subject.train,
                [(start + index) % len(subject.train) for index in range(count)],
                seed=job.seed,
                vw=VIRTUAL_WORKER,
                p=Minibatch(p),
            )
            for p, start in ((1, 0), (2, count))
        )
        try:
            if subject.chain[0].cut is not None:
                return prove_cut_model(
                    lambda: build_model(job, import_path, remark=remark),
                    subject.chain,
                    given_loss=load_loss(job, import_path),
                    loss=subject.loss,
                    batches=(first, second),
                    seed=job.seed,
                    trains_whole=_trains_whole(job),
                )
            return prove_model(
                lambda: build_model(job, import_path, remark=remark),
                subject.chain,
                loss=subject.loss,
                batches=(first, second),
                seed=job.seed,
            )
        except UncutFailure:
            if count == whole:
                raise
    raise AssertionError("the last count is that of a whole minibatch")


def _run(subject: Subject, sizes: list[int]) -> Values:
    """Run one minibatch layer by layer, with the seeds of stages: all layers skip the same ones at random.

    Args:
        subject: what to run.
        sizes: receives the number of output elements of each layer.
    """

    def seed(key: SeedKey) -> None:
        seed_generators(layer_seed(subject.job.seed, VIRTUAL_WORKER, MINIBATCH, key))

    # The first layer may modify its input, and the minibatch may be needed again.
    values = tuple(value.clone() for value in subject.batch.inputs)
    for layer in subject.chain:
        weights: Mapping[str, torch.Tensor] = {
            name: layer.module.get_parameter(local) for local, name in layer.parameters.items()
        }
        shapes = ", ".join(str(list(value.shape)) for value in values)
        try:
            values = run_layers((layer,), weights, values, seed)
        except CallableError:
            raise
        except Exception as error:
            raise CallableError(
                f"model: layer {layer.index} ({layer.name}) failed on input of shape {shapes}: "
                f"{type(error).__name__}: {error}"
            ) from error
        sizes.append(sum(value.numel() for value in values))
    return values


def _report(layer: Layer, activation_elements: int) -> LayerReport:
    return LayerReport(
        layer.index,
        layer.name,
        tuple(tensor_spec(name, layer.module.get_parameter(local)) for local, name in layer.parameters.items()),
        tuple(tensor_spec(name, layer.module.get_buffer(local)) for local, name in layer.buffers.items()),
        activation_elements,
        forbidden_in(layer),
        is_tied=layer.cut is not None and layer.cut.is_tied(layer.index),
    )
