"""Posterior samples of a network: collect them during training, predict with all of them,
keep them in a file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DivergedError, SamplesError, StateError
from ..per_sample.fixed_tensors import same_values
from . import files, outputs
from .likelihoods import (
    Likelihood,
    NoiseStd,
    entropies,
    forgotten_noise_std,
    likelihood_of,
    require_likelihood,
    with_noise,
)
from .outputs import Forward, Inputs, Sample, Transform

_FUNCTION = "function"  # in a file, for a noise_std that it cannot keep


class _Chain:
    """The bounded set of samples, and how it is kept."""

    _STATED: tuple[str, ...] = ()  # what else a file holds

    def __init__(self, burn_in: int | None = None, thin: int = 1, max_samples: int = 100) -> None:
        for name, value, smallest in (
            ("burn_in", 0 if burn_in is None else burn_in, 0),
            ("thin", thin, 1),
            ("max_samples", max_samples, 2),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ArgumentError(
                    f"{name} must be an integer, at least {smallest} (collect() calls), got"
                    f" {value!r}."
                )
        self.burn_in = burn_in
        self.thin = thin
        self.max_samples = max_samples
        self._num_collected = 0
        self._samples: list[Sample] = []
        self._shapes: dict[str, torch.Size] | None = None
        self._buffers: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} samples of {self._num_collected} collect() calls, "
            f"burn_in={self.burn_in}, thin={self.thin}, max_samples={self.max_samples})"
        )

    @property
    def num_collected(self) -> int:
        """How often :meth:`collect` was called, discarded calls included."""
        return self._num_collected

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Counts a call and, if it is due, keeps a copy of the model's trainable parameters (same
        device and dtype). It may be called after every step: a call that is not due costs nothing.

        Args:
            model: the network, in the state that the optimizer's last step left.

        Raises:
            ValueError: the model has no trainable parameter, has other ones than at the first call,
                or has a buffer that changed. The call is then not counted.
            DivergedError: a parameter is not finite.

        **Privacy**: post-processing of the released iterate, no charge. Buffers are compared with
        those of a private model when its loader delivered the first batch, or else with those of
        the first call.
        """
        if not hasattr(model, "_dpbayes_buffers") and self._buffers is None:
            buffers = model.named_buffers(remove_duplicate=False)
            self._buffers = {name: b.detach().clone() for name, b in buffers}
        number = self._num_collected - (self.burn_in or 0)
        if number < 0 or number % self.thin:
            self._num_collected += 1
            return
        parameters = _checked_parameters(model, self._shapes)
        _require_same_buffers(model, self._buffers)

        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._num_collected += 1
        # the calls that were due have the places 0, 1, ..., of which the last are kept
        place = number // self.thin
        if self.burn_in is None:
            half = (place + 1) // 2
            del self._samples[: max(0, len(self._samples) - (place - half))]
        if len(self._samples) == self.max_samples:
            oldest = place - self.max_samples
            self._samples = self._samples[oldest % 2 :: 2]
            self.thin *= 2
            if number % self.thin:
                return
        self._samples.append({name: p.detach().clone() for name, p in parameters.items()})

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are sampled; empty before the first sample."""
        return {name: p.shape for name, p in self._samples[0].items()} if self._samples else {}

    def draws_of(self, name: str) -> np.ndarray[Any, Any]:
        """All samples of one parameter, one row each."""
        return np.stack([_array(sample[name]) for sample in self._samples])

    def to_arviz(self, *other_chains: Self) -> Any:
        r"""The samples as ArviZ's data structure, for effective sample size, :math:`\hat R` and
        trace pictures: ``arviz.summary(first.to_arviz(second, third))``.

        Each parameter is a variable of the group ``posterior`` under its own name, ``[chain, draw,
        ...]``, on the CPU. :math:`\hat R` (Vehtari et al., 2021, section 4) compares chains that
        were run independently, and needs at least two. Parameters that only permute hidden units
        count as different for it; the predictions, :meth:`outputs`, do not.

        Args:
            other_chains: samples of the same parameters from other runs: as many of them, collected
                with the same ``thin``.

        Returns:
            ``arviz.InferenceData``, from ArviZ 1 on ``xarray.DataTree``.

        Raises:
            ModuleNotFoundError: ArviZ is not installed.
            RuntimeError, TypeError, ValueError: a chain has no sample, other parameters, another
                length or spacing, or is there twice.

        **Privacy**: post-processing. Each chain is a training run, which pays for itself; whether
        to run longer, decided by looking at these figures, is an adaptive choice in the sense of
        :class:`~torch_dpbayes.PrivacyAccountant`.
        """
        return files.to_arviz((self, *other_chains))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the samples to a file of tensors and plain numbers, which
        ``torch.load(weights_only=True)`` can read. If writing fails, an older file stays as it was.
        Frozen parameters and buffers are not in it: save the model's own ``state_dict`` too.

        Raises:
            OSError: the file cannot be written.

        **Privacy**: post-processing; the file holds released iterates only.
        """
        content = {
            "burn_in": self.burn_in,
            "thin": self.thin,
            "max_samples": self.max_samples,
            "num_collected": self._num_collected,
            "samples": self._samples,
            **self._stated(),
        }
        files.save(content, path)

    def _stated(self) -> dict[str, Any]:
        """What else is kept in the file."""
        return {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what :meth:`save` wrote to the CPU; collecting can go on from there. No code in the
        file is run.

        Raises:
            OSError: the file cannot be read.
            ValueError: it was not written by :meth:`save`, is damaged, or is of a later version.

        **Privacy**: none is spent.
        """
        content = files.load(path)
        names = ("burn_in", "thin", "max_samples", *cls._STATED)
        stated = {name: content[name] for name in names}
        if stated.get("noise_std") == _FUNCTION:
            stated["noise_std"] = forgotten_noise_std
        loaded = cls(**stated)
        loaded._num_collected = content["num_collected"]
        loaded._samples = content["samples"]
        if loaded._samples:
            loaded._shapes = {name: s.shape for name, s in loaded._samples[0].items()}
        return loaded


class PosteriorSamples(_Chain):
    r"""A bounded set of posterior samples :math:`\theta_1, \dots, \theta_S` of a network, and what
    it predicts.

    The posterior predictive distribution of a record :math:`x` is the average over the samples,

    .. math:: p(y \mid x) = \frac1S \sum_{s=1}^{S} p(y \mid x, \theta_s).

    A sample is a copy of every trainable parameter. Frozen parameters and buffers are not part of
    it: they are taken from the model that is passed to :meth:`predict`.

    Shapes, for n records; a column of one number, ``[n, 1]``, counts as ``[n]``:

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

    Calls of :meth:`collect` are counted, and every ``thin``-th is kept: without ``burn_in`` those
    of the second half of all calls so far, with it those after the first ``burn_in``. When
    ``max_samples`` are kept and another one is due, every second of them is dropped and ``thin``
    doubles, so the samples stay evenly spaced however long the chain runs, whatever the data.

    Args:
        likelihood: "categorical", "bernoulli" or "normal". None: outputs of three columns or more
            are categorical; others are not guessed, and predictions ask for it.
        burn_in: number of ``collect`` calls discarded at the beginning; None: the first half.
        thin: keep every ``thin``-th call after that. The attribute shows the value in force.
        max_samples: the most samples kept in memory, at least 2.
        noise_std: the standard deviation of a normal target, in its units, where the model's
            output are means: ``math.sqrt(0.5)`` after ``MSELoss`` as −log p per record, s after
            ``MSELoss() / (2 * s**2)``; or of a scale that the model learns, ``lambda net:
            net.log_std.exp()``. A file keeps a number; a function has to be set again, as
            ``samples.noise_std = ...``.

    Raises:
        ValueError: an argument is out of range.

    **Privacy**: the iterates of a private sampler are already paid for, all of them, and copying,
    averaging, saving or publishing them is post-processing: nothing here is charged, and the number
    of samples and of predictions is free. This holds for what the optimizer released, the trainable
    parameters. A buffer that training changes (the running statistics of BatchNorm) carries the
    records without noise, so :meth:`collect` refuses a model whose buffers changed. Predictions at
    private test inputs reveal those inputs: they are covered by no guarantee of the training.
    """

    _STATED = ("likelihood", "noise_std")

    def __init__(
        self,
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        burn_in: int | None = None,
        thin: int = 1,
        max_samples: int = 100,
        *,
        noise_std: NoiseStd | None = None,
    ) -> None:
        super().__init__(burn_in, thin, max_samples)
        require_likelihood(likelihood, noise_std)
        if noise_std is not None and not callable(noise_std):
            noise_std = float(noise_std)
        self.likelihood, self.noise_std = likelihood, noise_std

    @classmethod
    def from_draws(
        cls,
        draws: Mapping[str, Tensor],
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        *,
        noise_std: NoiseStd | None = None,
    ) -> Self:
        """Samples that another method drew, for predictions.

        Args:
            draws: by parameter name, ``[draws, ...]``, at least two.
            likelihood, noise_std: of the class.

        Raises:
            ValueError: the numbers of draws differ, or there are fewer than two.

        **Privacy**: post-processing of the draws.
        """
        counts = {len(value) for value in draws.values()}
        if len(counts) != 1 or min(counts) < 2:
            raise ArgumentError(
                "draws must hold the same number of draws, two or more, of every parameter along"
                " dimension 0."
            )
        (count,) = counts
        found = cls(likelihood, burn_in=0, max_samples=count, noise_std=noise_std)
        found._samples = [{name: v[k] for name, v in draws.items()} for k in range(count)]
        found._shapes = {name: v.shape[1:] for name, v in draws.items()}
        found._num_collected = count
        return found

    def _stated(self) -> dict[str, Any]:
        noise_std = _FUNCTION if callable(self.noise_std) else self.noise_std
        return {"likelihood": self.likelihood, "noise_std": noise_std}

    def predict(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | Literal["likelihood"] | None = "likelihood",
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""The posterior average: probabilities of classes, the probability of 1, or the mean.

        The model is evaluated in eval mode without gradients, then put back as it was; its
        parameters are not touched.

        Args:
            model: a network with the parameters that were collected. Its frozen parameters and
                buffers are used.
            x: ``[n, ...]``, one row a record, or a ``DataLoader``, or any other iterable of
                batches: tensors, tuples whose last item is the target, or mappings, of which the
                model gets by name what it takes. Predicted chunk by chunk, a batch at a time, which
                is all that is moved to the model's device: the model must not mix rows, and the
                first dimension must be the record. A bar shows progress where it takes long.
            transform: what of the output is averaged, :math:`\frac1S\sum_s
                \mathrm{transform}(f(x; \theta_s))`: by default what the likelihood says;
                ``torch.exp`` for log-probabilities; ``None`` for the output itself. It keeps the
                first dimension, and needs no likelihood.
            forward: ``(model, batch) -> output`` where the model returns no tensor or takes its
                inputs in another way, as ``lambda model, batch: model(**batch).logits``.

        Returns:
            The average, ``[n, ...]``, on the model's device, in the dtype of the transformed
            output.

        Raises:
            RuntimeError: no sample is kept yet.
            ValueError: the model has other parameters than the samples; the output does not have
                one row a record, or fits several likelihoods and none was named.
            TypeError: ``x`` or the model's output is not a tensor.

        **Privacy**: post-processing; see the class about private test inputs.
        """
        size = len(self)
        if transform != "likelihood":
            return self._reduced(model, x, transform, forward, lambda g: outputs.average(g, size))
        return self._by_likelihood(
            model, x, forward, lambda of, g: outputs.average(map(of.point, g), size)
        )

    def outputs(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = None,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        """The output under every sample, ``[samples, n, ...]`` in the order of collection: draws of
        the function. Arguments and errors of :meth:`predict`, but not transformed by default.

        **Privacy**: post-processing.
        """
        return self._reduced(
            model, x, transform, forward, lambda groups: torch.cat(list(groups)), dim=1
        )

    def log_likelihood(
        self, model: nn.Module, x: Inputs, y: Tensor, *, forward: Forward | None = None
    ) -> Tensor:
        r"""Log density of the targets under the posterior predictive distribution, :math:`\log
        \frac1S\sum_s p(y \mid x, \theta_s)`, ``[n]``, in nats, over all targets of a record
        together. ``-samples.log_likelihood(net, x, y).mean()`` is the NLL, of every likelihood.

        Args:
            model, x, forward: as in :meth:`predict`.
            y: the targets of all of ``x``, in its order, in the shape that the class states.

        Raises:
            ValueError: ``y`` has another shape, or a label outside the classes; else as
                :meth:`predict`.

        **Privacy**: post-processing of the samples. Of private targets it is a release without
        noise, which nothing charges.
        """
        done = 0

        def densities(of: Likelihood, groups: Iterator[Tensor]) -> Tensor:
            nonlocal done
            found = list(groups)
            rows = found[0].shape[1]
            done += rows
            own = y[done - rows : done].to(found[0].device)
            return of.log_likelihood(iter(found), own, len(self))

        result = self._by_likelihood(model, x, forward, densities)
        if done != len(y):
            raise SamplesError(f"x has {done} records and y has {len(y)} targets: pass as many")
        return result

    def predictive_entropy(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | Literal["likelihood"] = "likelihood",
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Entropy of the posterior predictive distribution, :math:`H[\frac1S\sum_s p(y\mid
        x,\theta_s)]`, in nats: noise in the label as well as doubt about the parameters. One number
        a target, ``[n, ...]``; of a normal target the differential entropy, by quadrature.

        Arguments and errors of :meth:`predict`; a ``transform`` of your own has to make
        probabilities over the last dimension.

        **Privacy**: post-processing.
        """
        return self._entropies(model, x, transform, forward, lambda total, expected: total)

    def mutual_information(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | Literal["likelihood"] = "likelihood",
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Mutual information of label and parameters, in nats: what the samples disagree about.

        .. math:: I[y; \theta \mid x] = H\Big[\frac1S\sum_s p(y\mid x,\theta_s)\Big]
                  - \frac1S\sum_s H[p(y\mid x,\theta_s)] \ge 0

        (Houlsby et al., 2011, equation 2). Arguments and errors of :meth:`predictive_entropy`.

        **Privacy**: post-processing.
        """
        return self._entropies(  # rounding alone can make it negative
            model, x, transform, forward, lambda total, expected: (total - expected).clamp_min(0)
        )

    def predictive_quantiles(
        self,
        model: nn.Module,
        x: Inputs,
        quantiles: Sequence[float],
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Quantiles of the posterior predictive distribution of a normal target, of the
        probabilities under the posterior where the target is discrete.

        The predictive distribution is the mixture :math:`\frac1S\sum_s N(\mu_s, \sigma_s^2)`; a
        quantile solves :math:`\frac1S\sum_s \Phi((y-\mu_s)/\sigma_s) = q`, by bisection between the
        components' own quantiles.

        Args:
            model, x, forward: as in :meth:`predict`.
            quantiles: probabilities strictly between 0 and 1; ``(0.05, 0.95)`` bounds a 90 %
                interval.

        Returns:
            ``[len(quantiles), n, ...]`` in the order given.

        Raises:
            ValueError: a quantile is out of range, or ``noise_std`` is missing; else as
                :meth:`predict`.

        **Privacy**: post-processing.
        """
        if not quantiles or not all(0 < q < 1 for q in quantiles):
            raise ArgumentError(
                f"quantiles must be probabilities strictly between 0 and 1, got {list(quantiles)}."
            )
        return self._by_likelihood(
            model, x, forward, lambda of, g: of.quantiles(torch.cat(list(g)), quantiles), dim=1
        )

    def r_hat(self, model: nn.Module, x: Inputs, *, forward: Forward | None = None) -> Tensor:
        r"""How much the two halves of the samples disagree about each prediction: near 1 for a
        chain that has settled, above 1.1 collect later or longer.

        With the halves' means :math:`\bar p_1, \bar p_2`, their variances' average W and m samples
        in each, :math:`\hat R^2 = (m-1)/m + (\bar p_1 - \bar p_2)^2/(2W)` (Gelman et al., 2013,
        section 11.4, for the halves of one chain).

        Args:
            model, forward: as in :meth:`predict`.
            x: as in :meth:`predict`: public inputs, if the result decides anything.

        Returns:
            One number for each number that :meth:`predict` returns.

        Raises:
            RuntimeError: there are fewer than four samples.

        **Privacy**: post-processing of the samples. Whether to train on, decided by it, is an
        adaptive choice in the sense of :class:`~torch_dpbayes.PrivacyAccountant`.
        """
        if len(self) < 4:
            raise StateError(f"r_hat compares two halves of two samples or more, got {len(self)}")

        def compared(of: Likelihood, groups: Iterator[Tensor]) -> Tensor:
            points = of.point(torch.cat(list(groups)).double())
            half = len(points) // 2
            first, second = points[:half], points[-half:]
            within = (first.var(0) + second.var(0)) / 2
            between = (first.mean(0) - second.mean(0)).square() / 2
            ratio = torch.where(between == 0, 0.0, between / within)
            return ((half - 1) / half + ratio).sqrt()

        return self._by_likelihood(model, x, forward, compared)

    def _entropies(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | Literal["likelihood"],
        forward: Forward | None,
        wanted: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Of total entropy and the samples' average one, what is wanted."""
        size = len(self)
        if transform == "likelihood":
            return self._by_likelihood(
                model, x, forward, lambda of, g: wanted(*of.entropies(g, size))
            )
        return self._reduced(model, x, transform, forward, lambda g: wanted(*entropies(g, size)))

    def _by_likelihood(
        self,
        model: nn.Module,
        x: Inputs,
        forward: Forward | None,
        reduce: Callable[[Likelihood, Iterator[Tensor]], Tensor],
        dim: int = 0,
    ) -> Tensor:
        """``reduce`` of the likelihood that the outputs have, and of their form."""
        found: list[Likelihood] = []
        noise_std, call = self.noise_std, outputs.output_of if forward is None else forward

        def with_its_noise(of_model: nn.Module, batch: Any) -> Tensor:
            output = call(of_model, batch)
            if noise_std is None or not isinstance(output, Tensor):
                return output  # which the caller refuses
            return with_noise(output, of_model, noise_std)

        def form(output: Tensor) -> Tensor:
            found[:] = [likelihood_of(self.likelihood, output.shape, noise_std)]
            return found[0].form(output)

        def reduced(groups: Iterator[Tensor]) -> Tensor:
            first = next(groups)  # which says what the likelihood is
            return reduce(found[0], itertools.chain([first], groups))

        return self._reduced(model, x, form, with_its_noise, reduced, dim)

    def _reduced(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None,
        forward: Forward | None,
        reduce: Callable[[Iterator[Tensor]], Tensor],
        dim: int = 0,
    ) -> Tensor:
        if not self._samples:
            discarded = (
                "" if self.burn_in is None else f" and burn_in={self.burn_in} of them are discarded"
            )
            raise StateError(
                f"There is no posterior sample yet: collect() was called {self._num_collected}"
                f" times{discarded}. Call samples.collect(model) after burn-in, before predicting."
            )
        return torch.cat(
            outputs.evaluate(self._samples, model, x, transform, forward, reduce), dim=dim
        )


def _array(sample: Tensor) -> np.ndarray[Any, Any]:
    """On the CPU; numpy has no bfloat16, and sums in half precision would not do for a variance."""
    return np.asarray(sample.to("cpu", torch.promote_types(sample.dtype, torch.float32)))


def _checked_parameters(
    model: nn.Module, before: dict[str, torch.Size] | None
) -> dict[str, nn.Parameter]:
    """The trainable parameters, which have the shapes that they had ``before`` and are finite."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters.items()}
    if not parameters:
        raise SamplesError(
            "The model has no trainable parameter, so there is no posterior sample to collect."
        )
    if before is not None and shapes != before:
        raise SamplesError(
            "This model's trainable parameters are not those of the model collected before:"
            f" {outputs.difference_of(before, shapes)}. Use one PosteriorSamples for one model."
        )
    for name, p in parameters.items():
        if not torch.isfinite(p).all():
            raise DivergedError(
                f"Parameter {name!r} has non-finite values: the chain diverged, most often because"
                " lr is too large for the noise and the prior. This sample was not collected;"
                " restart from finite parameters with a smaller lr."
            )
    return parameters


def _require_same_buffers(model: nn.Module, first: dict[str, Tensor] | None) -> None:
    """Raise if a buffer is not as make_private, else the ``first`` call, saw it."""
    own: dict[str, Tensor] | None = getattr(model, "_dpbayes_buffers", None)
    before, since = (first or {}, "the first collect()") if own is None else (own, "make_private")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    # make_private notes frozen parameters as well
    now = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    for name in sorted(before.keys() | buffers.keys()):
        if name not in before or name not in now or not same_values(before[name], now[name]):
            raise ArgumentError(
                f"Buffer {name!r} changed since {since}, by private records and without noise."
                " Use a layer that keeps no statistics, as GroupNorm for BatchNorm"
                " (opacus.validators.ModuleValidator.fix), or InstanceNorm without"
                " track_running_stats.",
                code="model-buffer",
            )
