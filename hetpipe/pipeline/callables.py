"""Import, call and validation of the user's `module:callable` references, with errors that name the fix.

All calls into user code go through this module, which turns every failure into one sentence. Modules are imported from
the user's folder first; it stays first on `sys.path`, because user code may import its neighbours later.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from hetpipe.errors import CallableError, UserError
from hetpipe.job.file import Job
from hetpipe.job.sections import CallSpec
from hetpipe.model.user_errors import place_of, raised_text
from hetpipe.pipeline.allowed_modules import check_attribute, check_module
from hetpipe.pipeline.initial_weights import load_initial_weights
from hetpipe.pipeline.metrics import IGNORED, Ratio
from hetpipe.pipeline.seeds import dataset_seed, preserved_generators, sampler_seed, seed_generators
from hetpipe.pipeline.streams import StreamDataset, is_stream
from hetpipe.pipeline.torchvision_operators import prepare_import
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.run import MAX_RATIO_ENTRIES, RatioSums
from hetpipe.values.suggest import closest, did_you_mean

#: Takes the model's output and the target of one minibatch.
LossFunction = Callable[[Any, Any], object]

#: Takes the target of one minibatch; its weight in a mean over several (job key `mean_over`).
MinibatchWeight = Callable[[Any], int]

_OWN_PACKAGE = __name__.partition(".")[0]

#: Packages that models and data often need and hetpipe does not depend on; the first ones are in its extra.
_OF_MODELS = frozenset({"peft", "timm", "torchvision", "transformers"})
_KNOWN_PACKAGES = _OF_MODELS | {"datasets", "torchaudio"}


#: The user's module that is being imported.
_importing: ContextVar[str | None] = ContextVar("importing", default=None)


class _RunWhileImporting(UserError):
    """A module that is imported begins a run."""


class MapDataset(Protocol):
    """A map-style dataset: `dataset[i]` is the (input, target) pair of sample i, 0 ≤ i < len(dataset).

    One that also has `__getitems__`, as those of Hugging Face and `torch.utils.data.Subset` do, is asked for all
    samples of a minibatch in one call.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


#: Makes a minibatch of the list of its samples.
CollateFunction = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class CollatedDataset:
    """A data set whose minibatches are made by the job's `data.collate_fn`; its samples may be anything."""

    dataset: MapDataset
    collate_fn: CollateFunction

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Any:
        """One sample, not collated."""
        return self.dataset[index]


def stream_of(dataset: MapDataset) -> StreamDataset | None:
    """The stream behind a data set; None if it is map-style."""
    inner = dataset.dataset if isinstance(dataset, CollatedDataset) else dataset
    return inner if isinstance(inner, StreamDataset) else None


def in_place_of(dataset: MapDataset, inner: MapDataset) -> MapDataset:
    """`inner`, with the `data.collate_fn` of `dataset`."""
    return replace(dataset, dataset=inner) if isinstance(dataset, CollatedDataset) else inner


def load_callable(reference: str, import_path: Path, key: str = "model") -> Callable[..., Any]:
    """Load the object named by `module:callable`; dots after the colon are attribute lookups.

    Args:
        reference: the text in the job file.
        import_path: folder searched before the installed packages.
        key: the job key of the reference; begins every message.

    Raises:
        CallableError: malformed reference, a module that is not allowed in this process, missing module or attribute,
            an error during import, or an object that is not callable.
    """
    module_name, colon, attributes = reference.partition(":")
    if not colon or not module_name or not attributes:
        raise CallableError(f"{key}: {reference!r} must be `module:callable`, for example `model:build`")
    check_module(module_name, key)
    found: Any = _import(module_name, import_path.resolve(), key)
    place = module_name
    for attribute in attributes.split("."):
        check_attribute(attribute, key)
        try:
            found = getattr(found, attribute)
        except AttributeError:
            names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            help_text = did_you_mean(attribute, names) if closest(attribute, names) else "define it there"
            raise CallableError(f"{key}: `{place}` has no `{attribute}`; {help_text}") from None
        except (Exception, SystemExit) as error:  # packages with lazy attributes import them here
            raise CallableError(f"{key}: looking up `{attribute}` in `{place}` raised {raised_text(error)}") from error
        if isinstance(found, ModuleType):
            check_module(found.__name__, key)
        place += f".{attribute}"
    if not callable(found):
        raise CallableError(
            f"{key}: `{reference}` is of type {type(found).__name__} and cannot be called; name a function or class"
        )
    return cast("Callable[..., Any]", found)


def _import(name: str, folder: Path, key: str) -> Any:
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    if name not in sys.modules:  # else nothing is looked for, and it takes a millisecond or two
        importlib.invalidate_caches()
    _refuse_namesake(name.partition(".")[0], folder, key)
    prepare_import()
    token = _importing.set(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name:  # raised by a package that imports lazily, for another reason
            raise CallableError(f"{key}: importing `{name}` raised {raised_text(error)}; fix the module") from error
        missing = error.name
        if name == missing or name.startswith(f"{missing}."):
            neighbours = [path.stem for path in folder.glob("*.py")]
            if missing in _KNOWN_PACKAGES:
                raise CallableError(
                    f"{key}: `{name}` is part of the package `{missing}`, which is not installed; "
                    f"{_how_to_install(missing)}"
                ) from None
            likely = closest(missing, neighbours) if "." not in missing else None
            hint = f"did you mean `{likely}`?" if likely else "check the name, or run from the folder that holds it"
            raise CallableError(
                f"{key}: there is no module `{missing}`; looked in {folder}, then among the installed packages; {hint}"
            ) from None
        raise CallableError(
            f"{key}: importing `{name}` needs the module `{missing}`, which is not installed{place_of(error)}; "
            f"{_how_to_install(missing)}"
        ) from error
    except _RunWhileImporting as error:
        raise CallableError(f"{key}: {error}") from None
    except (Exception, SystemExit) as error:
        raise CallableError(f"{key}: importing `{name}` raised {raised_text(error)}; fix the module") from error
    finally:
        _importing.reset(token)


def check_not_importing() -> None:
    """Refuse to begin a run while a process of another one imports the user's module.

    Raises:
        UserError: the module calls it at its top level.
    """
    if (name := _importing.get()) is not None:
        raise _RunWhileImporting(
            f"`{name}` starts a run while it is imported by a process of the run; put the call under "
            '`if __name__ == "__main__":`'
        )


def _how_to_install(package: str) -> str:
    what = "'hetpipe[models]'" if package in _OF_MODELS else package
    return f"install it on every node: pip install {what}" if package in _KNOWN_PACKAGES else "install it"


def _refuse_namesake(top: str, folder: Path, key: str) -> None:
    """Reject a user module that is shadowed by an imported module of the same name: other code would run.

    A checkout of hetpipe around the job is exempt: a job that refers to hetpipe means the running one.
    """
    loaded = sys.modules.get(top)
    if top == _OWN_PACKAGE or loaded is None or loaded.__spec__ is None:
        return
    here = importlib.machinery.PathFinder.find_spec(top, [str(folder)])
    taken = loaded.__spec__.origin
    if here is None or here.origin is None or (taken and Path(taken).resolve() == Path(here.origin).resolve()):
        return
    raise CallableError(
        f"{key}: the module `{top}` of {folder} is shadowed by the one already imported from {taken}; rename your "
        "module"
    )


def _arguments(call: CallSpec, import_path: Path, key: str) -> dict[str, Any]:
    """Evaluate the arguments of a call; nested calls are called."""

    def resolved(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            if "call" in value and value.keys() <= {"call", "args"}:
                try:
                    inner = CallSpec.model_validate(value)
                except ValidationError as error:
                    raise CallableError(f"{path}: {error.errors()[0]['msg']}") from None
                return _call(inner, import_path, path)
            return {name: resolved(entry, f"{path}.{name}") for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [resolved(entry, f"{path}.{index}") for index, entry in enumerate(value)]
        return value

    return {name: resolved(value, f"{key}.args.{name}") for name, value in call.args.items()}


def _call(named: str | CallSpec, import_path: Path, key: str, *given: Any, **offered: Any) -> Any:
    """Call what a job key refers to, with its arguments if any.

    Args:
        named: value of the key.
        import_path: folder searched first.
        key: the key.
        given: positional arguments, which come first.
        offered: keyword arguments that are passed where the callable has a parameter of that name.
    """
    reference = str(named)
    function = load_callable(reference, import_path, key)
    if isinstance(function, nn.Module):
        raise CallableError(f"{key}: `{reference}` is a module itself; name a function that returns a new one")
    arguments = _arguments(named, import_path, key) if isinstance(named, CallSpec) else {}
    try:
        signature = inspect.signature(function)
        arguments = {name: value for name, value in offered.items() if name in signature.parameters} | arguments
        signature.bind(*given, **arguments)
    except TypeError as error:
        how = "with these arguments" if arguments else "with the data set alone" if given else "without arguments"
        fix = "mend them" if arguments else "give it defaults"
        raise CallableError(
            f"{key}: `{reference}` is called {how}, but {error}; {fix}, or name it as "
            "{call: module:callable, args: {…}}"
        ) from None
    except ValueError:
        pass  # Some built-in callables have no signature; a mismatch raises in the call itself.
    try:
        return function(*given, **arguments)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        fix = f"; {_how_to_install(missing.partition('.')[0])}" if missing else ""
        raise CallableError(f"{key}: `{reference}()` raised {raised_text(error)}{fix}") from error


def build_model(job: Job, import_path: Path, *, remark: Callable[[str], None] | None = None) -> nn.Module:
    """Build the user's model under the job's seed, which all generators continue from, with its initial weights.

    A model that is in evaluation mode as a whole, as `from_pretrained` of Hugging Face returns it, is put into training
    mode, as any training loop does.

    Args:
        job: the job.
        import_path: folder that is prepended to `sys.path`.
        remark: called with a sentence for the user if the model was in evaluation mode.

    Raises:
        UserError: `init_from` cannot be read, or does not fit the model.
        CallableError: building fails, or the result is not an `nn.Module`.
    """
    if (
        torch.accelerator.current_accelerator() is not None
    ):  # else torch keeps a stack trace of each call, for no device
        torch.manual_seed(job.seed)
    seed_generators(job.seed)
    model = _call(job.model, import_path, "model")
    if not isinstance(model, nn.Module):
        raise CallableError(f"model: `{job.model}()` returned {_type_name(model)}; it must return a torch.nn.Module")
    if not any(module.training for module in model.modules()):
        model.train()
        if remark is not None:
            remark(
                f"`{job.model}()` returned the model in evaluation mode; it is trained in training mode, with dropout "
                "and running statistics, as by model.train() in any training loop; modules that should stay in "
                "evaluation mode need eval() after a train() of the model"
            )
    if job.init_from is not None:
        load_initial_weights(model, job.init_from, import_path)
    return model


def build_train_data(job: Job, import_path: Path) -> MapDataset:
    """Build the training set, of at least `batch_size` samples, under a seed of its own.

    Raises:
        CallableError: building fails, or the result is not a map-style dataset of pairs or has too few samples.
    """
    dataset = _build_dataset(job, job.data.train, import_path, "data.train")
    if job.batch_size > len(dataset):
        raise CallableError(
            f"batch_size: is {job.batch_size}, but data.train (`{job.data.train}`) has only {len(dataset)} samples; "
            f"set it to {len(dataset)} or less"
        )
    return dataset


def build_eval_data(job: Job, import_path: Path) -> MapDataset | None:
    """Build the evaluation set under a seed of its own; None if the job has none.

    Raises:
        CallableError: building fails, or the result is not a map-style dataset of pairs.
    """
    return _build_dataset(job, job.data.eval, import_path, "data.eval") if job.data.eval is not None else None


def build_datasets(job: Job, import_path: Path) -> tuple[MapDataset, MapDataset | None]:
    """Build the training and the evaluation set.

    Raises:
        CallableError: as in `build_train_data` and `build_eval_data`.
    """
    return build_train_data(job, import_path), build_eval_data(job, import_path)


class EpochOrder:
    """The order of the samples in each epoch, of a job that does not have them shuffled. For one thread."""

    def __init__(self, job: Job, import_path: Path, dataset: MapDataset) -> None:
        """Call nothing yet.

        Args:
            job: has a `data.sampler`, or `data.shuffle: false`.
            import_path: folder searched first.
            dataset: the training set.
        """
        self._job = job
        self._import_path = import_path
        self._dataset = dataset.dataset if isinstance(dataset, CollatedDataset) else dataset
        #: The newest epoch, and its order.
        self._newest: tuple[int, Sequence[int]] = (-1, ())

    def __call__(self, epoch: int) -> Sequence[int]:
        """Every sample of `epoch` (from 0), once. The sampler is called once per epoch, under a seed of its own.

        Raises:
            CallableError: it raised, or its result is no order of the samples.
        """
        if self._newest[0] != epoch:
            self._newest = (epoch, self._order(epoch))
        return self._newest[1]

    def _order(self, epoch: int) -> Sequence[int]:
        job, count, key = self._job, len(self._dataset), "data.sampler"
        if job.data.sampler is None:
            return range(count)
        where = f"{key}: in epoch {epoch + 1}, `{job.data.sampler}`"
        with preserved_generators():
            seed_generators(sampler_seed(job.seed, epoch))
            named = _call(job.data.sampler, self._import_path, key, self._dataset, epoch=epoch)
            try:
                # One more than there are: a sampler may be endless.
                given = list(islice(iter(named), count + 1))
            except (Exception, SystemExit) as error:
                raise CallableError(f"{where} raised {raised_text(error)}") from error
        return _checked_order(given, count, where)


def _checked_order(given: Sequence[Any], count: int, where: str) -> Sequence[int]:
    """The indices as plain numbers.

    Raises:
        CallableError: they are not each of 0 to `count` - 1 once.
    """
    places: dict[int, int] = {}
    for place, value in enumerate(given):
        try:
            index = operator.index(value)
        except TypeError:
            raise CallableError(
                f"{where} gives {_type_name(value)} at position {place}; a sampler gives the indices of samples, one "
                "by one, which are then dealt in blocks of batch_size"
            ) from None
        if not 0 <= index < count:
            raise CallableError(
                f"{where} gives sample {index} at position {place}, but data.train has {count} samples, numbered from 0"
            )
        if index in places:
            raise CallableError(
                f"{where} gives sample {index} twice, at positions {places[index]} and {place}; each sample counts "
                "once per epoch: give every index once (to see a sample more often, let the data set repeat it)"
            )
        places[index] = place
    if len(places) < count:
        first = next(index for index in range(count) if index not in places)
        raise CallableError(
            f"{where} gives {len(places)} of the {count} samples of data.train; sample {first} is the first that is "
            "missing: give every index once (to leave samples out, let the data set leave them out, for example by "
            "torch.utils.data.Subset)"
        )
    return tuple(places)


def epoch_order(job: Job, import_path: Path, dataset: MapDataset) -> EpochOrder | None:
    """The order of the samples that the job states; None if they are shuffled."""
    return None if job.data.is_shuffled else EpochOrder(job, import_path, dataset)


def load_collate_fn(job: Job, import_path: Path) -> CollateFunction | None:
    """Load `data.collate_fn`: the function named, or what a call with arguments returns; None if the job has none.

    Raises:
        CallableError: the import or the call fails, or it cannot take the list of samples.
    """
    named, key = job.data.collate_fn, "data.collate_fn"
    if named is None:
        return None
    if isinstance(named, CallSpec):
        function = _call(named, import_path, key)
        if not callable(function):
            raise CallableError(
                f"{key}: `{named}(…)` returned {_type_name(function)}, which cannot be called; with `call` and `args`, "
                "name a callable that returns the function"
            )
    else:
        function = load_callable(named, import_path, key)
        if isinstance(function, type):
            raise CallableError(
                f"{key}: `{named}` is a class, and calling it with the samples would only construct it; name a "
                f"function, or an instance of it as {{call: {named}, args: {{…}}}}"
            )
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise CallableError(f"{key}: `{named}` must take one argument, the list of samples, but {error}") from None
    except ValueError:
        pass  # Some built-in callables have no signature; a mismatch raises in the first call.
    return cast("CollateFunction", function)


def _build_dataset(job: Job, reference: str | CallSpec, import_path: Path, key: str) -> MapDataset:
    collate_fn = load_collate_fn(job, import_path)
    seed_generators(dataset_seed(job.seed, key))
    dataset = _call(reference, import_path, key)
    place = f"{key}: `{reference}()`"
    dataset = _by_position(job, dataset, place, key)
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if lacking or isinstance(dataset, Mapping):
        raise CallableError(
            f"{place} returned {_type_name(dataset)}{' without ' + ' and '.join(lacking) if lacking else ''}; return a "
            "map-style dataset: len(dataset) samples, dataset[i] for 0 <= i < len; or a stream: an object with __iter__"
        )
    found = cast("MapDataset", dataset)
    try:
        num_samples = len(found)
        sample = found[0] if num_samples else None
    except CallableError:
        raise  # already converted by a stream
    except (Exception, SystemExit) as error:
        raise CallableError(f"{place}: reading its length and first sample raised {raised_text(error)}") from error
    if not num_samples:
        raise CallableError(f"{place} is empty; a dataset needs at least one sample")
    if isinstance(dataset, StreamDataset):
        dataset.rewind()
    if collate_fn is not None:
        return CollatedDataset(found, collate_fn)
    is_pair = isinstance(sample, tuple | list) and len(sample) == len(("input", "target"))
    if not (is_pair or isinstance(sample, Mapping)):
        raise CallableError(
            f"{place}: sample 0 is {_type_name(sample)}; each sample must be a pair (input, target), or a mapping of "
            "the model's arguments; a `data.collate_fn` may take other samples"
        )
    return found


def _by_position(job: Job, dataset: Any, place: str, key: str) -> Any:
    """A stream as a data set of its first positions; anything else as it is.

    Raises:
        CallableError: the number of samples is unknown, or stated and not so, or the job asks for an order.
    """
    length, length_key = (
        (job.data.length, "data.length") if key == "data.train" else (job.data.eval_length, "data.eval_length")
    )
    what = place.removeprefix(f"{key}: ")
    if not is_stream(dataset):
        if length is not None and hasattr(dataset, "__len__"):
            raise CallableError(
                f"{length_key}: is {length}, but {what} returned a map-style dataset, which has a length; remove it, "
                "and leave samples out in the dataset, for example by torch.utils.data.Subset"
            )
        return dataset
    if key == "data.train":
        _check_stream_order(job, what)
    own = _own_length(dataset)
    samples = own if length is None else length
    if samples is None:
        raise CallableError(
            f"{place} returned a stream ({type(dataset).__name__}), which does not say how long it is; state the "
            f"number of samples of an epoch as {length_key}"
        )
    if own is not None and samples > own:
        raise CallableError(
            f"{length_key}: is {samples}, but the stream of {what} says that it has {own} samples; set it to {own} or "
            "less"
        )
    return StreamDataset(dataset, samples, key=key, length_key=length_key, seed=job.seed)


def _own_length(stream: Any) -> int | None:
    """The result of `len()` of a stream; None if it has none."""
    try:
        return len(stream)
    except Exception:  # noqa: BLE001 - there are many ways not to know it
        return None


def _check_stream_order(job: Job, what: str) -> None:
    """Refuse another order than the stream's own.

    Raises:
        CallableError: the job asks for one.
    """
    if job.data.sampler is not None:
        raise CallableError(
            f"data.sampler: is `{job.data.sampler}`, but {what} returned a stream, which is read in its own order; "
            "replace it by `shuffle: false`"
        )
    if job.data.shuffle:
        raise CallableError(
            f"data.shuffle: is true, but {what} returned a stream, which is read in its own order; set "
            "`shuffle: false`, and shuffle in the stream where that is wanted"
        )


def _type_name(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def load_loss(job: Job, import_path: Path) -> LossFunction | None:
    """Load the loss, called with (output, target) (`call_loss`); None if the model computes it.

    Raises:
        CallableError: the import fails, it cannot take two arguments, or it has parameters of its own.
    """
    if job.loss is None:
        return None
    if isinstance(job.loss, str):
        return _load_one_loss(job.loss, import_path, "loss")
    return WeightedLosses(
        {
            name: (
                None if term.call is None else _load_one_loss(term.call, import_path, f"loss.{name}.call"),
                term.weight,
            )
            for name, term in job.loss.items()
        }
    )


def _load_one_loss(reference: str, import_path: Path, key: str) -> LossFunction:
    function = _load_two_argument(reference, import_path, key, "torch.nn.functional:cross_entropy")
    parameters = function.named_parameters() if isinstance(function, nn.Module) else ()
    trainable = [name for name, parameter in parameters if parameter.requires_grad]
    if trainable:
        raise CallableError(
            f"{key}: `{reference}` has parameters of its own, which no optimizer would ever train: "
            f"{', '.join(trainable)}; put them into the last layer of the model, and give the loss what that layer "
            "returns, or set requires_grad=False if they are constants"
        )
    return function


class WeightedLosses:
    """Several losses by name: a loss that returns Σ weight · value, in the job's order.

    Attributes:
        values: each loss by name, as the last call found it.
    """

    def __init__(self, terms: Mapping[str, tuple[LossFunction | None, float]]) -> None:
        """Take name → (function, weight); None is the loss that the model computes itself."""
        self._terms = terms
        self.values: dict[str, float] = {}

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The weighted sum of one minibatch.

        Raises:
            CallableError: a function raised, or returned something else than one floating-point number.
        """
        found = {name: self._value(name, output, target) for name in self._terms}
        self.values = {name: float(value.detach()) for name, value in found.items()}
        weighted = [value * self._terms[name][1] for name, value in found.items()]
        return reduce(torch.add, weighted)

    @property
    def functions(self) -> dict[str, LossFunction]:
        """Each loss by itself, by name."""
        return {name: partial(self._value, name) for name in self._terms}

    @property
    def computed_by_model(self) -> str | None:
        """The first one that the model computes itself; None if there is none."""
        return next((name for name, (function, _) in self._terms.items() if function is None), None)

    def _value(self, name: str, output: Any, target: Any) -> Tensor:
        function, key = self._terms[name][0], f"loss.{name}"
        return _checked_scalar(
            own_loss(output, key) if function is None else _called(function, output, target, key), key
        )


def own_loss(output: Any, key: str = "loss") -> Tensor:
    """The loss that a model has computed itself.

    Args:
        output: what the model returned.
        key: the job key of the loss; begins every message.

    Raises:
        CallableError: the output has none.
    """
    absence = "is not set" if key == "loss" else "has no `call`"
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    has_key = "loss" in output if isinstance(output, Mapping) else hasattr(output, "loss")
    if found is None and has_key:
        raise CallableError(
            f"{key}: {absence}, and the model's output ({type(output).__name__}) has `loss: None`: it computes a loss "
            "only if it receives the targets; add its `labels` to every sample of `data.train`, or name a "
            "loss, for example `loss: model:loss`"
        )
    if not isinstance(found, Tensor):
        raise CallableError(
            f"{key}: {absence}, and the model's output ({type(output).__name__}) has no tensor `loss`; name a loss, "
            "or give the model what it needs to compute one, such as `labels`"
        )
    return found


def load_minibatch_weight(job: Job, import_path: Path) -> MinibatchWeight | None:
    """Load what weights a minibatch in means (job key `mean_over`); None for its samples.

    Raises:
        CallableError: the import fails, or the callable cannot take one argument.
    """
    if job.mean_over == "samples":
        return None
    if job.mean_over in _COUNTS:
        return partial(_counted_targets, job.mean_over)
    function = load_callable(job.mean_over, import_path, "mean_over")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise CallableError(f"mean_over: `{job.mean_over}` must take the target or batch, but {error}") from None
    except ValueError:
        pass  # Some built-in callables have no signature; a mismatch raises in the first call.
    return partial(_own_weight, job.mean_over, function)


#: Word of `mean_over` → the first position of a sequence that counts.
_COUNTS = {"tokens": 0, "next_tokens": 1}


def _counted_targets(word: str, target: Any) -> int:
    labels = target.get("labels") if isinstance(target, Mapping) else target
    first = _COUNTS[word]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex() or labels.ndim < first:
        found = "None" if labels is None else _described(labels)
        raise CallableError(
            f"mean_over: `{word}` counts the entries of an integer target that are not {IGNORED}, in a batch those of "
            f"`labels`, and found {found}; name a callable that returns the number, for example "
            "`mean_over: model:tokens`"
        )
    return int((labels[..., first:] != IGNORED).sum())


def _described(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else _type_name(value)


def _own_weight(reference: str, function: Callable[[Any], Any], target: Any) -> int:
    try:
        found = function(target)
    except (Exception, SystemExit) as error:
        raise CallableError(f"mean_over: `{reference}` raised {raised_text(error)}") from error
    value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < MAX_COUNT or value != int(value):
        raise CallableError(
            f"mean_over: `{reference}` returned {found!r:.80}; return a whole number of at least 0, the number of "
            "entries that the minibatch's loss is the mean of"
        )
    return int(value)


def load_metrics(job: Job, import_path: Path) -> dict[str, LossFunction]:
    """Load the job's metrics: name → function (`call_metric`), in the job's order.

    Raises:
        CallableError: an import fails, or a metric cannot take two arguments.
    """
    example = "hetpipe.pipeline.metrics:accuracy"
    return {
        name: _load_two_argument(reference, import_path, f"metrics.{name}", example)
        for name, reference in job.metrics.items()
    }


def _load_two_argument(reference: str, import_path: Path, key: str, example: str) -> LossFunction:
    function = load_callable(reference, import_path, key)
    if isinstance(function, type):
        raise CallableError(
            f"{key}: `{reference}` is a class, and calling it with (output, target) would only construct it; name a "
            f"function, for example `{example}`"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise CallableError(f"{key}: `{reference}` must take (output, target), but {error}") from None
    except ValueError:
        pass  # Some built-in callables have no signature; a mismatch raises in the first call.
    return function


def call_loss(function: LossFunction, output: Any, target: Any) -> Tensor:
    """Loss of one minibatch as a zero-dimensional tensor, ready for `backward`.

    Raises:
        CallableError: the function raised, or did not return one floating-point number that depends on the output.
    """
    result = _scalar(function, output, target, "loss")
    outputs = output if isinstance(output, tuple | list) else (output,)
    if not result.requires_grad and any(isinstance(value, Tensor) and value.requires_grad for value in outputs):
        raise CallableError(
            "loss: its result does not depend on the output; do not detach it or call .item() in the loss"
        )
    return result


def call_metric(name: str, function: LossFunction, output: Any, target: Any) -> float | RatioSums:
    """Metric `name` of one minibatch: its mean, or the sums of a `Ratio`.

    Raises:
        CallableError: the function raised, or did not return one number or a `Ratio` of as many numerators as
            denominators.
    """
    key = f"metrics.{name}"
    with torch.no_grad():
        found = _called(function, output, target, key)
        return _ratio_sums(found, key) if isinstance(found, Ratio) else _checked_scalar(found, key).item()


def _ratio_sums(ratio: Ratio, key: str) -> RatioSums:
    numerators, denominators = (
        torch.as_tensor(each).double().reshape(-1).tolist() for each in (ratio.numerators, ratio.denominators)
    )
    if len(numerators) != len(denominators) or not 1 <= len(numerators) <= MAX_RATIO_ENTRIES:
        raise CallableError(
            f"{key}: returned a Ratio of {len(numerators)} numerators and {len(denominators)} denominators; return as "
            f"many of each, at least one and at most {MAX_RATIO_ENTRIES}"
        )
    return RatioSums(tuple(numerators), tuple(denominators), ratio.exponential)


def _called(function: LossFunction, output: Any, target: Any, key: str) -> object:
    try:
        return function(output, target)
    except CallableError:
        raise  # one of several losses, which names itself
    except (Exception, SystemExit) as error:
        raise CallableError(f"{key}: raised {raised_text(error)}") from error


def _scalar(function: LossFunction, output: Any, target: Any, key: str) -> Tensor:
    return _checked_scalar(_called(function, output, target, key), key)


def _checked_scalar(result: object, key: str) -> Tensor:
    if isinstance(result, int | float) and not key.startswith("loss"):
        return torch.tensor(float(result))
    if not isinstance(result, Tensor):
        raise CallableError(f"{key}: returned {_type_name(result)}; return a tensor with the mean over the samples")
    if result.numel() != 1:
        raise CallableError(
            f"{key}: returned a tensor of shape {list(result.shape)}; return one number, the mean over the samples "
            "(reduction='mean' in torch's own)"
        )
    if not result.is_floating_point():
        raise CallableError(f"{key}: returned a tensor of {result.dtype}; return a floating-point tensor")
    return result if result.ndim == 0 else result.reshape(())
