"""Posterior samples of a network: collected in training, calibrated, saved in a file."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..batches.poisson_loader import PoissonLoader
from ..errors import ArgumentError, CheckpointError, SamplesError
from ..noise import check_positive
from . import calibration, files, outputs
from .likelihoods import likelihood_of
from .outputs import Forward, require_same_buffers
from .predictions import Predictions

_ARGUMENTS = ("likelihood", "burn_in", "thin", "max_samples", "noise_std")
_SAVED = {*_ARGUMENTS, "temperature", "num_collected", "samples"}


class PosteriorSamples(Predictions):
    r"""A bounded set of posterior samples :math:`\theta_1, \dots, \theta_S` of a network, and their
    predictions.

    The posterior predictive distribution of a record :math:`x` is the average over the samples,

    .. math:: p(y \mid x) = \frac1S \sum_{s=1}^{S} p(y \mid x, \theta_s).

    A sample is a copy of every trainable parameter; frozen ones and buffers are those of the model
    that is passed to :meth:`predict`. Shapes, for n records; a column, ``[n, 1]``, counts as
    ``[n]``:

    =============  ===============================  ==================  ==========================
    likelihood     the model's output               y                   ``predict``
    =============  ===============================  ==================  ==========================
    "categorical"  ``[n, ..., classes]``, scores    ``[n, ...]``        ``[n, ..., classes]``
    "bernoulli"    ``[n]``, ``[n, targets]``,       as the output, 0    the probability of 1, as
                   logits                           or 1                the output
    "normal"       ``[n, 2]``, mean and log         ``[n]``             the mean, ``[n]``
                   variance
    "normal",      ``[n]``, ``[n, targets]``,       as the output       the mean, as the output
    ``noise_std``  means
    =============  ===============================  ==================  ==========================

    Every ``thin``-th call of :meth:`collect` keeps a sample. The first ``burn_in`` calls are
    discarded; without ``burn_in``, the first half of all calls so far. When ``max_samples`` samples
    are kept, every second one is dropped and ``thin`` doubles: samples stay evenly spaced.

    Args:
        likelihood: "categorical", "bernoulli" or "normal". None: outputs of three columns or more
            are categorical; for other outputs, predictions raise an error.
        burn_in: number of ``collect`` calls discarded at the beginning; None: the first half.
        thin: keep every ``thin``-th call after that. The attribute shows the current value.
        max_samples: the largest number of samples in memory, at least 2.
        noise_std: the standard deviation of a normal target, if the model returns means:
            ``math.sqrt(0.5)`` if the loss was ``MSELoss()``, s if it was ``MSELoss() / (2 *
            s**2)`` (each times the number of targets).

    Raises:
        ValueError: an argument is out of range.

    **Privacy**: training has charged all iterates; copying, averaging, saving or publishing them is
    post-processing. Only :meth:`calibrate` charges. :meth:`collect` refuses a model whose buffers
    changed (BatchNorm's running statistics), because they would reveal records without noise.
    Predictions for private test inputs reveal these inputs: the guarantee does not cover them.
    """

    @classmethod
    def from_draws(
        cls,
        draws: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        *,
        noise_std: float | None = None,
    ) -> Self:
        """Samples from another method, for predictions.

        The draws have the names of a network's trainable parameters: the ``nn.Module`` of
        ``noise_aware.posterior_for_module``, :meth:`.GLM.module` or :meth:`.Softmax.module`, or the
        network in a Pyro model, whose guide gives the draws ``[guide() for _ in range(100)]``.

        Args:
            draws: a dict by parameter name, ``[draws, ...]``; or a list with one dict for each
                draw.
            likelihood, noise_std: as for the class.

        Raises:
            ValueError: there is no draw, or the numbers of draws differ.

        **Privacy**: post-processing of the draws.
        """
        if isinstance(draws, Mapping):
            whole = {
                name: torch.atleast_1d(v) if isinstance(v, Tensor) else [*map(torch.as_tensor, v)]
                for name, v in draws.items()
            }
            counts = {len(values) for values in whole.values()}
            kept = [{n: v[k] for n, v in whole.items()} for k in range(min(counts, default=0))]
        else:
            kept = [{name: v.detach() for name, v in draw.items()} for draw in draws]
            counts = {len(kept)}
        if not kept or len(counts) != 1:
            raise ArgumentError(
                "draws must hold the same number of draws, one or more, of every parameter along"
                " dimension 0, or be a list of draws."
            )
        found = cls(likelihood, burn_in=0, max_samples=max(2, len(kept)), noise_std=noise_std)
        found._samples, found._num_collected = kept, len(kept)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the samples to a file of tensors and plain numbers, which
        ``torch.load(weights_only=True)`` can read. If writing fails, an older file is unchanged.
        The file has no frozen parameters and no buffers: save the model's ``state_dict``, too.

        **Privacy**: post-processing; the file contains only released iterates.
        """
        content = {
            "format": files.FORMAT,
            **{name: getattr(self, name) for name in _ARGUMENTS},
            "temperature": self._temperature,
            "num_collected": self._num_collected,
            "samples": self._samples,
        }
        files.save(content, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file of :meth:`save`, to the CPU; you can continue to collect. No code in the
        file is run.

        Raises:
            ValueError: the file is not from :meth:`save`, is damaged, or has a later version.

        **Privacy**: nothing is charged.
        """
        content = files.load(path, "PosteriorSamples.save")
        if content.get("format") != files.FORMAT or not _SAVED <= content.keys():
            raise CheckpointError(
                f"{os.fspath(path)} has no samples of this version: it was not written by"
                " PosteriorSamples.save"
            )
        loaded = cls(**{name: content[name] for name in _ARGUMENTS})
        loaded._temperature = content["temperature"]
        loaded._num_collected = content["num_collected"]
        loaded._samples = content["samples"]
        return loaded

    @property
    def temperature(self) -> float:
        """T of predictions, 1 before :meth:`calibrate`; above 1 they are less confident than the
        samples' average.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = check_positive("temperature", value)

    def calibrate(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        accountant: PrivacyAccountant | None = None,
        forward: Forward | None = None,
    ) -> float:
        r"""Fit one temperature to the private records; later predictions use it. Its cost is
        charged first.

        Class probabilities become :math:`p_T(y\mid x) \propto p(y\mid x)^{1/T}`, so the most
        probable class stays the same. For normal targets T multiplies each sample's noise variance.
        T is the posterior mean given five noisy sums of bounded scores
        (:mod:`~torch_dpbayes.posterior.calibration`), between 1/12 and 12 (for variances
        between 1/148 and 148). ``predict``, ``log_likelihood`` and ``predictive_entropy`` use it,
        for normal targets also quantiles and ``mutual_information``; other methods ignore it.

        T is too small if the network has memorised the records of ``loader``; other records avoid
        this. A warning says if the noise is too large: the posterior standard deviation of log T is
        then above half of the prior one.

        Args:
            model, forward: as for :meth:`predict`. The model runs for each record alone; frozen
                parameters and buffers count as public.
            loader: the loader of ``make_private``, or a ``DataLoader`` of a map-style data set; all
                records are read once.
            epsilon, delta: the accountant's total ε at δ after the calibration. None: the share
                that ``make_private_with_epsilon(..., calibrate=0.02)`` reserved, else the rest of
                the accountant's budget.
            accountant: the accountant to charge; None: that of ``make_private``.

        Returns:
            T, which :attr:`temperature` keeps and :meth:`save` writes.

        Raises:
            PrivacyBudgetExceeded: the charge does not fit the budget; nothing has changed.
            ValueError, TypeError: model, loader or targets do not fit; nothing was charged. An
                error caused by a record's values is raised after the charge, and does not show
                them.

        **Privacy.** A record's score lies in [-1, 1], and is zero if a value is not finite or the
        label is not a class. Adding or removing a record moves each sum by at most 1, replacing one
        by at most 2. Five events ``GaussianDpEvent(z_k)``, for noise of standard deviation z_k, are
        charged together, before the first sum is drawn. T is post-processing of the sums.
        """
        require_same_buffers(model, self._buffers)
        accountant, total = calibration.charged_to(loader, accountant, epsilon, delta)

        def compact(batch: Any) -> Tensor:
            return self._by_likelihood(
                model, [batch], forward, lambda of, forms: of.compact(forms), is_private=True
            )

        def score_of(batches: Iterable[Any]) -> Callable[[float], float]:
            pairs = [(outputs.target_of(batch), compact(batch)) for batch in batches]
            if not pairs:
                raise SamplesError("the loader has no record to calibrate on")
            targets, forms = map(torch.cat, zip(*pairs, strict=True))
            of = likelihood_of(self.likelihood, forms.shape, self.noise_std)
            return calibration.score_of(of, forms, targets)

        records = PoissonLoader.every_record(loader)
        # on synthetic records, to find errors of model and batches before the charge
        score_of([outputs.synthetic_like(batch) for batch in itertools.islice(records, 1)])
        try:
            accountant.compose(calibration.event_of(total), label="calibration of predictions")
        except PrivacyBudgetExceeded as refused:
            raise PrivacyBudgetExceeded(
                "calibrating would exceed the accountant's budget; nothing was released. Calibrate"
                " once, after the planned steps; epsilon= is for everything on the accountant."
            ) from refused
        is_normal = self.likelihood == "normal"
        unit = 2 if is_normal else 1  # log T = unit · t
        t, std = calibration.estimate(score_of(records), total, is_normal)
        self._temperature = math.exp(unit * t)
        if std > calibration.UNDETERMINED:
            warnings.warn(
                "the noise of this calibration is too large to determine the temperature: log T ="
                f" {unit * t:.2f} ± {unit * std:.2f}, and without data ±"
                f" {unit * calibration.PRIOR_STD:g}. Use a larger share of the budget, or set"
                " samples.temperature = 1.",
                stacklevel=2,
            )
        return self._temperature
