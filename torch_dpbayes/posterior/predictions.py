"""Predictions of a network under a set of posterior samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from scipy import stats
from torch import Tensor, nn

from ..errors import ArgumentError, SamplesError, StateError
from . import outputs
from .chain import Chain
from .likelihoods import Likelihood, NoiseStd, likelihood_of, require_likelihood, with_noise
from .outputs import Forward, Inputs, Transform

_LEVEL = 0.01  # of the t test that compares the halves of the samples for one prediction


class Predictions(Chain):
    """Predictions of the samples together, by one likelihood; see :class:`.PosteriorSamples`."""

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
        self.likelihood, self.noise_std, self._temperature = likelihood, noise_std, 1.0

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
                log-probabilities, ``None`` for the output itself. It must keep the first dimension,
                and needs no likelihood.
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
        noise_std, call = self.noise_std, outputs.output_of if forward is None else forward

        def with_its_noise(of_model: nn.Module, batch: Any) -> Tensor:
            output = call(of_model, batch)
            if noise_std is None or not isinstance(output, Tensor):
                return output  # the caller raises an error
            return with_noise(output, of_model, noise_std)

        def reduced(found: Iterator[Tensor]) -> Tensor:
            first = next(found)
            of = likelihood_of(self.likelihood, first.shape, noise_std)
            of.temperature = 1.0 if is_private else self._temperature
            forms = map(of.form, itertools.chain([first], found))
            return of.average(forms) if reduce is None else reduce(of, torch.stack(tuple(forms)))

        return outputs.evaluate(
            self._samples, model, x, with_its_noise, reduced, dim, is_alone=is_private
        )
