"""Likelihoods: the distribution of the target given a network's output.

Each has one *form*, and the output of every sample is converted to it: log probabilities, or means
and log variances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from scipy.stats import norm
from torch import Tensor, distributions, nn

from ..errors import ArgumentError, SamplesError
from ..noise import check_positive
from .outputs import average

# The grid of a normal component: standard deviations to each side, and number of points. Entropies
# of mixtures have errors below 0.01 nats, even if the components' scales are very different.
_REACH, _NODES = 7.0, 97
_MOST_POINTS = 2**20  # in the grids of all records and samples together
# bound of a score's normal deviate: 90 % intervals then contain .889 and .894 of Student's t
# residuals with 3 and 5 degrees of freedom; a larger bound would need more noise
_LONGEST = 2.5
_LEAST_LOG = -1e6  # smallest log probability: −∞ would make an entropy 0·∞
_THREE = (
    'write PosteriorSamples("categorical") for classes, "bernoulli" for logits of targets that are'
    ' 0 or 1, or "normal" for means, or means and log variances'
)


def mean_square(scale: Any) -> Any:
    """E min((scale·Z)², 2.5²) of a normal Z, and its slope in the log of the scale."""
    edge = _LONGEST / scale
    beyond = 2 * norm.sf(edge)
    inside = scale**2 * (1 - beyond - 2 * edge * norm.pdf(edge))
    return inside + _LONGEST**2 * beyond, 2 * inside


class Likelihood(ABC):
    """One likelihood. Samples are the first dimension of ``forms`` and of other tensors with
    samples.

    Attributes:
        temperature: T of :meth:`PosteriorSamples.calibrate`.
    """

    temperature = 1.0

    @abstractmethod
    def form(self, output: Tensor) -> Tensor:
        """The form of one sample's output ``[n, ...]``, one row per record."""

    @abstractmethod
    def point(self, forms: Tensor) -> Tensor:
        """The quantity that is averaged for a prediction."""

    @abstractmethod
    def log_density(self, forms: Tensor, y: Tensor) -> Tensor:
        """log p(y | x, θ_s) of each target."""

    @abstractmethod
    def entropies(self, forms: Tensor) -> tuple[Tensor, Tensor]:
        """Entropy of the average over the samples, and average of their entropies."""

    @abstractmethod
    def compact(self, forms: Tensor) -> Tensor:
        """The part of the samples' forms that :meth:`scores` needs, with records in dimension 0."""

    @abstractmethod
    def scores(self, compact: Tensor, y: Tensor, t: float) -> Tensor:
        """ψ of each record, ``[n]``, at most 1 in absolute value, at log scale t
        (:mod:`.calibration`). No record's values raise an error.
        """

    def tempered(self, forms: Tensor) -> Tensor:
        """Forms whose average is the prediction."""
        return forms

    def average(self, forms: Iterator[Tensor]) -> Tensor:
        return average(map(self.point, forms))

    def entropy(self, forms: Tensor) -> Tensor:
        return self.entropies(self.tempered(forms))[0]

    def quantiles(self, forms: Tensor, quantiles: Sequence[float]) -> Tensor:
        """Quantiles of the predictive distribution; for a discrete target, quantiles of the
        probabilities.
        """
        points = self.point(forms)
        wide = points.to(torch.promote_types(points.dtype, torch.float32))
        at = torch.tensor(quantiles, dtype=wide.dtype, device=wide.device)
        return torch.quantile(wide, at, dim=0).to(points.dtype)

    def log_likelihood(self, forms: Tensor, y: Tensor) -> Tensor:
        """log (1/S) Σ_s p(y | x, θ_s) of each record, over all of its targets together."""
        found = self.log_density(self.tempered(forms).double(), y).flatten(2).sum(2)
        return found.logsumexp(0) - math.log(len(found))


class Categorical(Likelihood):
    r"""Scores of classes in the last dimension; the form has log probabilities. The average
    prediction is tempered, :math:`p_T(y) \propto p(y)^{1/T}`.
    """

    def form(self, output: Tensor) -> Tensor:
        if output.dim() < 2 or output.shape[-1] < 2:
            raise SamplesError(
                "categorical outputs need a score for each of two or more classes, got shape"
                f' {list(output.shape)}: for one logit write PosteriorSamples("bernoulli"), for'
                ' regression PosteriorSamples("normal")'
            )
        return torch.log_softmax(output, -1)

    def point(self, forms: Tensor) -> Tensor:
        return forms.exp()

    def log_density(self, forms: Tensor, y: Tensor) -> Tensor:
        y = _without_column(y) if forms.dim() == 3 else y
        _require_shape(y, forms.shape[1:-1])
        largest = forms.shape[-1] - 1
        if not bool(((y >= 0) & (y <= largest) & (y == y.long())).all()):
            raise SamplesError(f"targets must be whole numbers from 0 to {largest}")
        labels = y.long().expand(forms.shape[:-1])[..., None]
        return forms.gather(-1, labels)[..., 0].reshape(*forms.shape[:2], -1)

    def entropies(self, forms: Tensor) -> tuple[Tensor, Tensor]:
        p = forms.to(torch.promote_types(forms.dtype, torch.float32)).exp()
        return torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)

    def average(self, forms: Iterator[Tensor]) -> Tensor:
        if self.temperature == 1.0:
            return super().average(forms)
        first = next(forms)
        log_total = first.double()
        for form in forms:
            log_total = torch.logaddexp(log_total, form.double())
        return self.point(self.tempered(log_total[None]))[0].to(first.dtype)

    def compact(self, forms: Tensor) -> Tensor:
        return forms.double().logsumexp(0) - math.log(len(forms))

    def tempered(self, forms: Tensor) -> Tensor:
        if self.temperature == 1.0:
            return forms
        log_p = self.compact(forms) / self.temperature
        return torch.log_softmax(log_p, -1)[None].to(forms.dtype)

    def scores(self, compact: Tensor, y: Tensor, t: float) -> Tensor:
        log_p = (compact / math.exp(t)).clamp_min(_LEAST_LOG)
        p = torch.softmax(log_p, -1)
        bounded = ((p * log_p).sum(-1, keepdim=True) - log_p).clamp(-0.5, 0.5)
        is_class = (y >= 0) & (y < p.shape[-1]) & (y == y.round())
        chosen = bounded.gather(-1, torch.where(is_class, y, 0).long()[:, None])[:, 0]
        return torch.where(is_class, chosen - (p * bounded).sum(-1), 0.0)


class Bernoulli(Categorical):
    """One logit for each target that is 0 or 1: two classes. The prediction is the second one's
    probability.
    """

    def form(self, output: Tensor) -> Tensor:
        logit = _without_column(output)
        return nn.functional.logsigmoid(torch.stack([-logit, logit], -1))

    def point(self, forms: Tensor) -> Tensor:
        return forms[..., 1].exp()


class Normal(Likelihood):
    """Means of targets with Gaussian noise; the last dimension of the form has mean and log
    variance. The temperature multiplies every sample's noise variance.

    Args:
        has_noise_std: outputs are from :func:`with_noise`.
    """

    def __init__(self, *, has_noise_std: bool) -> None:
        self._has_noise_std, self._has_noise = has_noise_std, True

    def form(self, output: Tensor) -> Tensor:
        if not self._has_noise_std and (output.dim() < 2 or output.shape[-1] == 1):
            self._has_noise = False  # averages need only the means
            mean = _without_column(output)
            return torch.stack([mean, torch.zeros_like(mean)], -1)
        if output.shape[-1] != 2:
            raise SamplesError(
                "normal outputs must be a mean, or a mean and a log variance, got shape"
                f" {list(output.shape)}: for means of several targets pass noise_std= to"
                " PosteriorSamples"
            )
        return torch.stack([output[..., 0], output[..., 1] + math.log(self.temperature)], -1)

    def compact(self, forms: Tensor) -> Tensor:
        self._require_noise()
        return forms.double().transpose(0, 1)

    def scores(self, compact: Tensor, y: Tensor, t: float) -> Tensor:
        mean, log_variance = compact.unbind(-1)
        inside = torch.special.ndtr((y[:, None] - mean) * (-log_variance / 2 - t).exp()).mean(1)
        squares = torch.special.ndtri(inside).square().clamp_max(_LONGEST**2)
        right = float(mean_square(1.0)[0])
        return (squares - right) / (_LONGEST**2 - right)

    def point(self, forms: Tensor) -> Tensor:
        return forms[..., 0]

    def log_density(self, forms: Tensor, y: Tensor) -> Tensor:
        components = self._components(forms)
        y = _without_column(y)
        _require_shape(y, components.loc.shape[1:])
        return components.log_prob(y.to(components.loc))[..., None]

    def entropies(self, forms: Tensor) -> tuple[Tensor, Tensor]:
        """−∫ p log p of the mixture by the trapezoid rule, on the union of the grids."""
        rows = max(1, _MOST_POINTS // (_NODES * len(forms)))
        if forms.shape[1] > rows:
            parts = [self.entropies(some) for some in forms.split(rows, 1)]
            return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        components = self._components(forms)
        mean, grid = components.loc, torch.linspace(-_REACH, _REACH, _NODES).double()
        nodes = grid.to(mean.device).view(-1, 1, *[1] * (mean.dim() - 1))
        at = (mean + components.scale * nodes).flatten(0, 1).sort(0).values
        found = torch.cat(
            [components.log_prob(points[:, None]).logsumexp(1) for points in at.split(_NODES)]
        ) - math.log(len(forms))
        total = -torch.trapezoid(found.exp() * found, at, dim=0)
        return total, components.entropy().mean(0)

    def quantiles(self, forms: Tensor, quantiles: Sequence[float]) -> Tensor:
        """Quantiles of the mixture, by bisection between the components' own quantiles."""
        components, solved = self._components(forms), []
        mean, std = components.loc, components.scale
        for q in quantiles:
            own = mean + std * torch.special.ndtri(mean.new_tensor(q))
            low, high = own.amin(0), own.amax(0)
            for _ in range(50):  # double precision if means differ by less than 10⁵ stds
                middle = (low + high) / 2
                below = torch.special.ndtr((middle - mean) / std).mean(0) < q
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            solved.append((low + high) / 2)
        return torch.stack(solved).to(forms.dtype)

    def _components(self, forms: Tensor) -> distributions.Normal:
        self._require_noise()
        mean, log_variance = forms.double().unbind(-1)
        return distributions.Normal(mean, (log_variance / 2).exp(), validate_args=False)

    def _require_noise(self) -> None:
        if not self._has_noise:
            raise SamplesError(
                "the model's output is a mean, and this method also needs the noise: write"
                ' PosteriorSamples("normal", noise_std=...), math.sqrt(0.5) after MSELoss, or let'
                " the model return mean and log variance"
            )


def likelihood_of(name: str | None, shape: Sequence[int], noise_std: float | None) -> Likelihood:
    """The likelihood for outputs of this shape; by default three columns or more are classes."""
    if name is None and len(shape) > 1 and shape[-1] > 2:
        name = "categorical"
    if name is None:
        raise SamplesError(f"outputs of shape {list(shape)} fit several likelihoods: {_THREE}")
    if name == "normal":
        return Normal(has_noise_std=noise_std is not None)
    return Categorical() if name == "categorical" else Bernoulli()


def checked_noise_std(name: str | None, noise_std: Any) -> float | None:
    """``noise_std`` as a number; raises unless the arguments of PosteriorSamples are valid."""
    if name not in (None, "categorical", "bernoulli", "normal"):
        raise ArgumentError(f"likelihood={name!r}: {_THREE}")
    if noise_std is None:
        return None
    if name != "normal":
        raise ArgumentError('noise_std= belongs to likelihood="normal": write both, or neither')
    is_scalar = isinstance(noise_std, Tensor) and noise_std.numel() == 1
    what = "that of the likelihood: math.sqrt(0.5) for a model trained with MSELoss"
    return check_positive("noise_std", float(noise_std) if is_scalar else noise_std, what)


def with_noise(output: Tensor, noise_std: float) -> Tensor:
    """Means and log variances, from an output of means and ``noise_std``."""
    mean = _without_column(output)
    log_variance = 2 * mean.new_tensor(noise_std).log()
    return torch.stack([mean, log_variance.expand_as(mean)], -1)


def _without_column(values: Tensor) -> Tensor:
    """``[n, 1]`` as ``[n]``: one number per target."""
    return values[..., 0] if values.dim() > 1 and values.shape[-1] == 1 else values


def _require_shape(y: Tensor, wanted: Sequence[int]) -> None:
    if tuple(y.shape) != tuple(wanted):
        raise SamplesError(
            f"y has the shape {list(y.shape)} for predictions of the shape {list(wanted)}: pass"
            " one target for each prediction, in the order of x"
        )
