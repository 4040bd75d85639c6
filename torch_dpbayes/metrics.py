"""Measure predictions and their uncertainties. Each function gets predictions and targets (tensors,
arrays or lists), and returns a float.

``probabilities`` are what ``PosteriorSamples.predict`` returns. For classes: ``[n, classes]``, rows
summing to one, and ``labels`` ``[n]``, integers from 0 to ``classes - 1``. For targets that are 0
or 1: the probability of 1, ``[n]`` or ``[n, targets]``, and labels of the same shape; each label
counts as a record. The NLL of any likelihood, also with normal targets, is
``-samples.log_likelihood(net, x, y).mean()``.

**Privacy**: a metric is an exact function of the records that it is evaluated on. On private
records it is a release without noise that nobody charges. Evaluate on public records, or on
held-out ones whose disclosure is accepted. Do not tune on a metric of the training set.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor
from torch.nn import functional

from .errors import ArgumentError

__all__ = [
    "ReliabilityCurve",
    "accuracy",
    "area_under_roc",
    "brier_score",
    "expected_calibration_error",
    "interval_coverage",
    "negative_log_likelihood",
    "reliability_curve",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def negative_log_likelihood(probabilities: Tensor, labels: Tensor) -> float:
    r"""Mean of :math:`-\log p_{i, y_i}`, in nats.

    A probability that underflowed to zero counts as the smallest normal number of its dtype, so the
    result is finite.
    """
    probabilities, labels = _by_class(probabilities, labels)
    least = torch.finfo(probabilities.dtype).tiny
    return float(functional.nll_loss(probabilities.clamp_min(least).double().log(), labels.long()))


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Share of records whose most probable class is the label."""
    probabilities, labels = _by_class(probabilities, labels)
    return float((probabilities.argmax(1) == labels).double().mean())


def brier_score(probabilities: Tensor, labels: Tensor) -> float:
    r"""Mean of :math:`\sum_c (p_{ic} - 1[y_i = c])^2`, from 0 to 2 (Brier, 1950)."""
    probabilities, labels = _by_class(probabilities, labels)
    size = probabilities.shape[1]
    right = functional.one_hot(labels.long(), size).double()
    return size * float(functional.mse_loss(probabilities.double(), right))


class ReliabilityCurve(NamedTuple):
    """For each bin of confidence: mean confidence, accuracy and number of records. In an empty bin
    the first two are NaN.
    """

    confidence: Tensor
    accuracy: Tensor
    num_records: Tensor


def reliability_curve(
    probabilities: Tensor, labels: Tensor, num_bins: int = 15
) -> ReliabilityCurve:
    """Accuracy against confidence (the largest probability), in bins of equal width
    ((b-1)/num_bins, b/num_bins].
    """
    probabilities, labels = _by_class(probabilities, labels)
    if not isinstance(num_bins, int) or num_bins < 1:
        raise ArgumentError(f"num_bins must be a whole number from 1 on, got {num_bins}.")
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).double()
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(bins, minlength=num_bins)
    confidence, correct = (
        torch.bincount(bins, weights=values, minlength=num_bins) / count
        for values in (confidence.double(), correct)
    )
    return ReliabilityCurve(confidence, correct, count)


def expected_calibration_error(probabilities: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    r"""Mean absolute difference of confidence and accuracy over the bins of
    :func:`reliability_curve`, weighted by the number of records.

    :math:`\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|` (Guo et al., 2017, equation 3).
    """
    curve = reliability_curve(probabilities, labels, num_bins)
    gaps = (curve.accuracy - curve.confidence).abs().nan_to_num(0.0)
    return float((gaps * curve.num_records).sum() / curve.num_records.sum())


def area_under_roc(in_distribution: Tensor, out_of_distribution: Tensor) -> float:
    """Probability that an out-of-distribution record has a higher score than an in-distribution
    one; a tie counts half.

    Args:
        in_distribution, out_of_distribution: one-dimensional scores that are higher for records
            unlike the training data, such as predictive entropy or mutual information.
    """
    inside, outside = (_tensor(t).double().cpu() for t in (in_distribution, out_of_distribution))
    for name, scores in (("in_distribution", inside), ("out_of_distribution", outside)):
        if scores.dim() != 1 or len(scores) == 0 or bool(scores.isnan().any()):
            raise ArgumentError(
                f"{name} must be a one-dimensional tensor of at least one score, without NaN."
            )
    counted = mannwhitneyu(outside.numpy(), inside.numpy(), method="asymptotic").statistic
    return float(counted) / (len(outside) * len(inside))


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Share of targets inside their interval, bounds included: near 0.9 for a good 90 %
    interval.
    """
    lower, targets = _of_same_shape("lower", lower, targets)
    upper, targets = _of_same_shape("upper", upper, targets)
    return float(((lower <= targets) & (targets <= upper)).double().mean())


def _tensor(values: Any) -> Tensor:
    """A tensor, from an array or a list if necessary. Python numbers become 64-bit."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _by_class(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``[n, classes]`` and labels ``[n]``, also for targets that are 0 or 1."""
    probabilities, labels = _tensor(probabilities), _tensor(labels)
    if probabilities.dim() > 0 and probabilities.shape == labels.shape:
        probabilities, labels = probabilities.flatten(), labels.flatten()
        probabilities = torch.stack([1 - probabilities, probabilities], 1)
        if bool((labels == labels.long()).all()):
            labels = labels.long()  # BCEWithLogitsLoss needs float labels
    if probabilities.dim() != 2 or not probabilities.is_floating_point():
        raise ArgumentError(
            "probabilities must be floats of shape [n, classes], or of the labels' shape; got"
            f" {list(probabilities.shape)} and labels {list(labels.shape)}."
        )
    is_integer = not labels.is_floating_point() and labels.dtype != torch.bool
    if not is_integer or labels.shape != probabilities.shape[:1] or len(labels) == 0:
        raise ArgumentError(
            f"labels must be integers of shape {list(probabilities.shape[:1])}, not empty; got"
            f" {labels.dtype} of shape {list(labels.shape)}."
        )
    if bool(((labels < 0) | (labels >= probabilities.shape[1])).any()):
        raise ArgumentError(f"labels must be between 0 and {probabilities.shape[1] - 1}.")
    # a tolerance for rows of low precision; raw scores do not pass it in every row
    if not bool(((probabilities >= 0).all(1) & ((probabilities.sum(1) - 1).abs() < 0.01)).all()):
        raise ArgumentError(
            "Rows of probabilities must be non-negative and sum to one: apply softmax to scores"
            " first."
        )
    return probabilities, labels


def _of_same_shape(name: str, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    values, targets = _tensor(values), _tensor(targets)
    # broadcasting [n, 1] against [n] would compare every record with every other
    if values.shape != targets.shape:
        raise ArgumentError(
            f"{name} and targets must have the same shape, got {list(values.shape)} and"
            f" {list(targets.shape)}."
        )
    if targets.numel() == 0:
        raise ArgumentError("There are no targets to evaluate.")
    return values, targets
