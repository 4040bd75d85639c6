"""A bounded set of posterior samples, which selects the iterates to keep, and its predictions."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from ..errors import ArgumentError, DivergedError, SamplesError, StateError
from . import files, outputs
from .likelihoods import Likelihood, checked_noise_std, likelihood_of, with_noise
from .outputs import Forward, Inputs, Sample, Transform

_LEVEL = 0.01  # of the t test that compares the halves of the samples for one prediction


class Chain:
    """A bounded set of samples."""

    def __init__(self, burn_in: int | None = None, thin: int = 1, max_samples: int = 100) -> None:
        counts = (("burn_in", burn_in or 0, 0), ("thin", thin, 1), ("max_samples", max_samples, 2))
        for name, value, smallest in counts:
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ArgumentError(
                    f"{name} must be an integer, at least {smallest} (collect() calls), got"
                    f" {value!r}."
                )
        self.burn_in, self.thin, self.max_samples = burn_in, thin, max_samples
        self._num_collected = 0
        self._samples: list[Sample] = []
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
        """The number of calls of :meth:`collect`, including discarded ones."""
        return self._num_collected

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Counts a call and, if a sample is due, keeps a copy of the model's trainable parameters
        (same device and dtype). You may call it after every step: calls without a sample are fast.

        Args:
            model: the network, as it is after the optimizer's last step.

        Raises:
            ValueError: the model has no trainable parameter, other parameters than at the first
                call, or a buffer that changed. The call is then not counted.
            DivergedError: a parameter is not finite.
            StateError: no batch was taken from the private loader since ``make_private``.

        **Privacy**: post-processing of the released iterate, no charge. Buffers must not have
        changed since the first batch of the private loader (for other models: since the first
        call).
        """
        start = None if self._samples else getattr(model, "_dpbayes_start", None)
        if start and start == [(id(p), p._version) for p in model.parameters() if p.requires_grad]:
            raise StateError(
                "no batch was taken since make_private, so the parameters are not a sample of"
                " the posterior: collect after an optimizer's step."
            )
        if not hasattr(model, "_dpbayes_buffers") and self._buffers is None:
            buffers = model.named_buffers(remove_duplicate=False)
            self._buffers = {name: b.detach().clone() for name, b in buffers}
        number = self._num_collected - (self.burn_in or 0)
        if number < 0 or number % self.thin:
            self._num_collected += 1
            return
        parameters = _checked_parameters(model, self.shapes())
        outputs.require_same_buffers(model, self._buffers)

        self._num_collected += 1
        # due calls have the places 0, 1, ...; without burn_in the first half is dropped
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
        return np.stack([files.array_of(sample[name]) for sample in self._samples])

    def to_arviz(self, *other_chains: Self) -> Any:
        r"""The samples as ArviZ's data structure, for effective sample size, :math:`\hat R` and
        trace plots: ``arviz.summary(first.to_arviz(second, third))``.

        Each parameter is a variable of the group ``posterior`` under its own name, ``[chain, draw,
        ...]``. :math:`\hat R` compares chains that were run independently, at least two. It counts
        permuted hidden units as different parameters; predictions (:meth:`outputs`) avoid this.

        Args:
            other_chains: samples of the same parameters from other runs: equally many, with the
                same ``thin``.

        Returns:
            ``arviz.InferenceData``; with ArviZ 1 or later an ``xarray.DataTree``.

        Raises:
            ValueError: a chain has no sample, other parameters, another length or spacing.

        **Privacy**: post-processing. Each chain is a training run with its own charges. If you
        decide by these figures whether to run longer, this is an adaptive choice (see
        :class:`~torch_dpbayes.PrivacyAccountant`).
        """
        chains, shapes = (self, *other_chains), self.shapes()
        if taken := shapes.keys() & {"chain", "draw"}:
            raise SamplesError(
                f"A parameter is called {taken.pop()!r}, which ArviZ uses for a dimension and"
                " drops: rename it in the model."
            )
        first = (shapes, len(self), self.thin)
        for number, chain in enumerate(chains, 1):
            is_empty = not isinstance(chain, Chain) or not len(chain)
            if is_empty or (chain.shapes(), len(chain), chain.thin) != first:
                raise SamplesError(
                    f"chain {number}, {chain!r}, differs from the first one, {self!r}: pass runs of"
                    " one model with the same burn_in, thin, max_samples and number of collect()"
                    " calls."
                )
        return files.arviz_of({n: np.stack([c.draws_of(n) for c in chains]) for n in shapes})


class Predictions(Chain):
    """Predictions of the samples together, by one likelihood; see :class:`.PosteriorSamples`."""

    def __init__(
        self,
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        burn_in: int | None = None,
        thin: int = 1,
        max_samples: int = 100,
        *,
        noise_std: float | None = None,
    ) -> None:
        super().__init__(burn_in, thin, max_samples)
        self.likelihood, self._temperature = likelihood, 1.0
        self.noise_std = checked_noise_std(likelihood, noise_std)

    def predict(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | Literal["likelihood"] | None = "likelihood",
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""The posterior average: probabilities of classes, the probability of 1, or the mean.

        The model is evaluated in eval mode; its own mode is restored.

        Args:
            model: a network with the parameters that were collected. Its frozen parameters and
                buffers are used.
            x: ``[n, ...]``, one row per record, or a ``DataLoader``, or any other iterable of
                batches: tensors, tuples whose last item is the target, or mappings, whose entries
                are passed to the model by name. One batch at a time is moved to the model's device
                and predicted: the model must not mix rows.
            transform: is applied before averaging, :math:`\frac1S\sum_s \mathrm{transform}(f(x;
                \theta_s))`. By default the likelihood decides; ``torch.exp`` is for
                log-probabilities, ``None`` for the output itself. It must keep the first dimension.
                With a transform you need no likelihood.
            forward: ``(model, batch) -> output`` if the model returns neither a tensor nor an
                object with ``logits``, or takes its inputs in another way, such as ``lambda model,
                batch: model(**batch[0]).logits`` for batches ``(dict, y)``.

        Returns:
            The average, ``[n, ...]``, on the model's device, in the transformed output's dtype.

        Raises:
            StateError: there is no sample yet.
            ValueError, TypeError: the model has other parameters than the samples, or its output
                does not have one row per record, or fits several likelihoods and you gave none.

        **Privacy**: post-processing; see the class about private test inputs.
        """
        if transform == "likelihood":
            return self._by_likelihood(model, x, forward)
        average = outputs.of_transformed(transform, outputs.average)
        return outputs.evaluate(self._samples, model, x, forward, average)

    def outputs(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = None,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        """The output under every sample, ``[samples, n, ...]`` in the order of collection: draws of
        the function. Arguments and errors as for :meth:`predict`; by default without a transform.

        **Privacy**: post-processing.
        """

        stack = outputs.of_transformed(transform, lambda found: torch.stack(tuple(found)))
        return outputs.evaluate(self._samples, model, x, forward, stack, dim=1)

    def log_likelihood(
        self, model: nn.Module, x: Inputs, y: Tensor, *, forward: Forward | None = None
    ) -> Tensor:
        r"""Log density of the targets under the posterior predictive distribution, :math:`\log
        \frac1S\sum_s p(y \mid x, \theta_s)`, ``[n]``, in nats, over all targets of a record
        together. ``-samples.log_likelihood(net, x, y).mean()`` is the NLL.

        Args:
            model, x, forward: as in :meth:`predict`, with its errors.
            y: the targets of all of ``x``, in the same order, with the shape that the class states.

        **Privacy**: post-processing of the samples. For private targets it is a release without
        noise, which is not charged.
        """
        done, y = 0, torch.as_tensor(y)

        def densities(of: Likelihood, forms: Tensor) -> Tensor:
            nonlocal done
            rows = forms.shape[1]
            done += rows
            return of.log_likelihood(forms, y[done - rows : done].to(forms.device))

        result = self._by_likelihood(model, x, forward, densities)
        if done != len(y):
            raise SamplesError(
                f"x has {done} records and y has {len(y)} targets: pass equally many"
            )
        return result

    def predictive_entropy(
        self, model: nn.Module, x: Inputs, *, forward: Forward | None = None
    ) -> Tensor:
        r"""Entropy of the posterior predictive distribution, :math:`H[\frac1S\sum_s p(y\mid
        x,\theta_s)]`, in nats: it includes label noise and uncertainty about the parameters. One
        number for each target, ``[n, ...]``: for normal targets the differential entropy, by
        quadrature.

        Arguments and errors of :meth:`predict`.

        **Privacy**: post-processing.
        """
        return self._by_likelihood(model, x, forward, Likelihood.entropy)

    def mutual_information(
        self, model: nn.Module, x: Inputs, *, forward: Forward | None = None
    ) -> Tensor:
        r"""Mutual information of label and parameters, in nats: how much the samples disagree.

        .. math:: I[y; \theta \mid x] = H\Big[\frac1S\sum_s p(y\mid x,\theta_s)\Big]
                  - \frac1S\sum_s H[p(y\mid x,\theta_s)] \ge 0

        (Houlsby et al., 2011, equation 2). Arguments and errors of :meth:`predict`.

        **Privacy**: post-processing.
        """

        def difference(of: Likelihood, forms: Tensor) -> Tensor:
            total, expected = of.entropies(forms)
            return (total - expected).clamp_min(0)  # rounding alone can make it negative

        return self._by_likelihood(model, x, forward, difference)

    def predictive_quantiles(
        self,
        model: nn.Module,
        x: Inputs,
        quantiles: Sequence[float],
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Quantiles of the posterior predictive distribution of a normal target; if the target is
        discrete, quantiles of the probabilities.

        The predictive distribution is the mixture :math:`\frac1S\sum_s N(\mu_s, \sigma_s^2)`.

        Args:
            model, x, forward: as in :meth:`predict`, with its errors.
            quantiles: probabilities strictly between 0 and 1; ``(0.05, 0.95)`` bounds a 90 %
                interval.

        Returns:
            ``[len(quantiles), n, ...]`` in the order given.

        **Privacy**: post-processing.
        """
        found = torch.as_tensor(quantiles, dtype=torch.float64).reshape(-1).tolist()
        if not found or not all(0 < q < 1 for q in found):
            raise ArgumentError(
                f"quantiles must be probabilities strictly between 0 and 1, got {found}."
            )
        return self._by_likelihood(
            model, x, forward, lambda of, forms: of.quantiles(forms, found), dim=1
        )

    def r_hat(self, model: nn.Module, x: Inputs, *, forward: Forward | None = None) -> Tensor:
        r"""How much the two halves of the samples disagree about each prediction: near 1 for a
        chain that has settled. A warning says if they disagree about half of the predictions or
        more, by t tests at the level .01: with independent samples at most once in 50 times.

        With the halves' means :math:`\bar p_1, \bar p_2`, their variances' average W and m samples
        in each, :math:`\hat R^2 = (m-1)/m + (\bar p_1 - \bar p_2)^2/(2W)` (Gelman et al., 2013,
        section 11.4, for the halves of one chain).

        Args:
            model, x, forward: as in :meth:`predict`; use public inputs if you base decisions on the
                result.

        Returns:
            One number for each prediction.

        Raises:
            StateError: there are fewer than four samples.

        **Privacy**: post-processing of the samples. If it decides whether you train longer, this is
        an adaptive choice (see :class:`~torch_dpbayes.PrivacyAccountant`).
        """
        if len(self) < 4:
            raise StateError(f"r_hat needs at least four samples, got {len(self)}")

        def compared(of: Likelihood, forms: Tensor) -> Tensor:
            points = of.point(forms.double())
            half = len(points) // 2
            first, second = points[:half], points[-half:]
            within = (first.var(0) + second.var(0)) / 2
            between = (first.mean(0) - second.mean(0)).square() / 2
            ratio = torch.where(between == 0, 0.0, between / within)
            return ((half - 1) / half + ratio).sqrt()

        found, half = self._by_likelihood(model, x, forward, compared), len(self) // 2
        # m·(p̄₁ - p̄₂)²/2W is the square of a Student t
        squares = half * found.square() - (half - 1)
        is_apart = squares > stats.t.isf(_LEVEL / 2, 2 * half - 2) ** 2
        if float(is_apart.double().mean()) >= 0.5:
            warnings.warn(
                "the two halves of the samples disagree about most predictions (R-hat up to"
                f" {float(found.max()):.3g}): the chain has not settled. Raise burn_in= or steps.",
                stacklevel=2,
            )
        return found

    def _by_likelihood(
        self,
        model: nn.Module,
        x: Inputs,
        forward: Forward | None,
        reduce: Callable[[Likelihood, Tensor], Tensor] | None = None,
        dim: int = 0,
        *,
        is_private: bool = False,
    ) -> Tensor:
        """Apply ``reduce`` to the outputs' likelihood and to their forms under all samples. None:
        average them, with one sample's form in memory at a time.
        """
        noise_std = checked_noise_std(self.likelihood, self.noise_std)  # it may have been set
        call = outputs.output_of if forward is None else forward

        def with_its_noise(of_model: nn.Module, batch: Any) -> Tensor:
            output = call(of_model, batch)
            if noise_std is None or not isinstance(output, Tensor):
                return output  # the caller raises an error
            return with_noise(output, noise_std)

        def reduced(found: Iterator[Tensor]) -> Tensor:
            first = next(found)
            of = likelihood_of(self.likelihood, first.shape, noise_std)
            of.temperature = 1.0 if is_private else self._temperature
            forms = map(of.form, itertools.chain([first], found))
            return of.average(forms) if reduce is None else reduce(of, torch.stack(tuple(forms)))

        return outputs.evaluate(
            self._samples, model, x, with_its_noise, reduced, dim, is_alone=is_private
        )


def _checked_parameters(model: nn.Module, before: dict[str, torch.Size]) -> dict[str, nn.Parameter]:
    """The trainable parameters; raises if their shapes changed or one of them is not finite."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters.items()}
    if not parameters:
        raise SamplesError("The model has no trainable parameter to collect.")
    if before and shapes != before:
        raise SamplesError(
            "This model has other trainable parameters than the model collected before:"
            f" {outputs.difference_of(before, shapes)}. Use one PosteriorSamples for one model."
        )
    for name, p in parameters.items():
        if not torch.isfinite(p).all():
            raise DivergedError(
                f"Parameter {name!r} is not finite: the chain diverged, usually because lr is too"
                " large. This sample was not collected; restart with a smaller lr."
            )
    return parameters
