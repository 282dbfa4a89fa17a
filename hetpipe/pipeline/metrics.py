"""The shipped metrics, and the form in which a metric is exact over minibatches.

A metric is called like a loss, with (output, target), or (output, batch) where a sample is a mapping. It returns the
mean over the minibatch, or a `Ratio`, whose sums over all minibatches and virtual workers are taken before the quotient
(docs/semantics/losses.md). In a job file a shipped metric is named by its name alone: `metrics: [accuracy, f1]`.

Scores and class indices are found in what a model returns and what a sample holds: the output itself or its `logits`,
and the target itself or the batch's `labels`. Entries whose target is `IGNORED` do not count.

Shape suffixes: … any leading dimensions, C classes, N quotients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: The target of an entry without one, as in `torch.nn.functional.cross_entropy` and in Hugging Face's libraries.
IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """The sums of a metric over one minibatch.

    Its value over an evaluation is the mean of Σ numerators / Σ denominators over the entries whose Σ denominators is
    above 0, or e to the power of it; NaN if there are none. Every minibatch must give the same number of entries.
    """

    numerators: Tensor
    """Numbers [N], or one."""
    denominators: Tensor
    """Numbers [N], or one, at least 0."""
    exponential: bool = False
    """Whether the value is the exponential of that mean."""


def accuracy(output: Any, target: Any) -> Tensor:
    """Share of entries whose highest score belongs to the target class; a float32 scalar.

    Args:
        output: scores [… C], or what has them as `logits`.
        target: class indices […], or a batch that has them as `labels`.

    Raises:
        ValueError: the shapes do not match.
    """
    scores_xC, target_x = _entries("accuracy", output, target)
    return (scores_xC.argmax(dim=-1) == target_x).float().mean()


def f1(output: Any, target: Any) -> Ratio:
    """F1 of every class, 2·TP / (2·TP + FP + FN), averaged over the classes that occur (macro average).

    A class occurs if it is the target or the prediction of an entry; scikit-learn's `f1_score(average="macro")`.

    Args:
        output: scores [… C], or what has them as `logits`.
        target: class indices […], or a batch that has them as `labels`.

    Raises:
        ValueError: the shapes do not match.
    """
    return _f1_by_class("f1", output, target)


def f1_binary(output: Any, target: Any) -> Ratio:
    """F1 of class 1 of two; scikit-learn's `f1_score(average="binary")`. NaN if class 1 does not occur.

    Args:
        output: scores [… 2], or what has them as `logits`.
        target: class indices […], or a batch that has them as `labels`.

    Raises:
        ValueError: the shapes do not match, or there are not two classes.
    """
    found = _f1_by_class("f1_binary", output, target)
    if len(found.numerators) != 2:  # noqa: PLR2004 - binary
        raise ValueError(f"f1_binary takes scores of 2 classes, not of {len(found.numerators)}; use f1")
    return Ratio(found.numerators[1:], found.denominators[1:])


def perplexity(output: Any, target: Any) -> Ratio:
    """Exponential of the mean cross-entropy over all tokens of the evaluation, where output i scores target i.

    Args:
        output: scores [… C], or what has them as `logits`.
        target: class indices […], or a batch that has them as `labels`.

    Raises:
        ValueError: the shapes do not match.
    """
    return _perplexity(*_entries("perplexity", output, target))


def next_token_perplexity(output: Any, target: Any) -> Ratio:
    """As `perplexity`, where output i scores target i + 1: causal language models whose labels are their inputs.

    Args:
        output: scores [… T C], or what has them as `logits`.
        target: class indices [… T], or a batch that has them as `labels`.

    Raises:
        ValueError: the shapes do not match.
    """
    scores, targets = _scores(output), _targets(target)
    _check_shapes("next_token_perplexity", scores, targets)
    return _perplexity(*_counted(scores[..., :-1, :], targets[..., 1:]))


def _perplexity(scores_xC: Tensor, target_x: Tensor) -> Ratio:
    total = functional.cross_entropy(scores_xC.float(), target_x, reduction="sum")
    return Ratio(total, torch.tensor(target_x.numel()), exponential=True)


def _f1_by_class(name: str, output: Any, target: Any) -> Ratio:
    scores_xC, target_x = _entries(name, output, target)
    classes = scores_xC.shape[-1]
    predicted_x = scores_xC.argmax(dim=-1)
    hits_C = torch.bincount(target_x[predicted_x == target_x], minlength=classes)
    return Ratio(
        2 * hits_C, torch.bincount(predicted_x, minlength=classes) + torch.bincount(target_x, minlength=classes)
    )


def _entries(name: str, output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Scores [x C] and class indices [x] of the entries that count."""
    scores, targets = _scores(output), _targets(target)
    _check_shapes(name, scores, targets)
    return _counted(scores, targets)


def _counted(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != IGNORED
    return scores[counts], targets[counts]


def _scores(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("logits")
    return getattr(output, "logits", output)


def _targets(target: Any) -> Any:
    return target.get("labels") if isinstance(target, Mapping) else target


def _check_shapes(name: str, scores: Any, targets: Any) -> None:
    if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
        missing, found = ("scores", scores) if not isinstance(scores, Tensor) else ("class indices", targets)
        raise ValueError(  # noqa: TRY004 - as for shapes: the user's values do not suit the metric
            f"{name} takes a tensor of scores [..., classes], or an output with `logits`, and a tensor of class "
            f"indices [...], or a batch with `labels`; the {missing} are of type {type(found).__name__}; name a "
            "metric of yours"
        )
    if scores.shape[:-1] != targets.shape or scores.ndim == 0:
        raise ValueError(
            f"{name} takes scores [..., classes] and class indices [...], not {list(scores.shape)} and "
            f"{list(targets.shape)}; move the classes to the last dimension"
        )
