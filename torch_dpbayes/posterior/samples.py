"""Posterior samples of a network: collect them during training, predict with all of them,
keep them in a file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DivergedError, SamplesError, StateError
from ..per_sample.fixed_tensors import same_values
from . import files, outputs
from .outputs import Forward, Inputs, Sample, Transform, softmax


class _Chain:
    """The bounded set of samples, and how it is kept."""

    def __init__(self, burn_in: int = 0, thin: int = 1, max_samples: int = 100) -> None:
        for name, value, smallest in (
            ("burn_in", burn_in, 0),
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
        device and dtype).

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
        parameters = _checked_parameters(model, self._shapes)
        if not hasattr(model, "_dpbayes_buffers") and self._buffers is None:
            buffers = model.named_buffers(remove_duplicate=False)
            self._buffers = {name: b.detach().clone() for name, b in buffers}
        _require_same_buffers(model, self._buffers)

        self._shapes = {name: p.shape for name, p in parameters.items()}
        since_burn_in = self._num_collected - self.burn_in
        self._num_collected += 1
        if since_burn_in < 0 or since_burn_in % self.thin:
            return
        if len(self._samples) == self.max_samples:
            self._samples = self._samples[::2]
            self.thin *= 2
            if since_burn_in % self.thin:
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
        }
        files.save(content, path)

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
        loaded = cls(content["burn_in"], content["thin"], content["max_samples"])
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

    Calls of :meth:`collect` are counted. The first ``burn_in`` are discarded, then every
    ``thin``-th is kept, beginning with the first. When ``max_samples`` are kept and another one is
    due, every second of them is dropped and ``thin`` doubles, so the samples stay evenly spaced
    over the whole chain however long it runs, whatever the data.

    Args:
        burn_in: number of ``collect`` calls discarded at the beginning.
        thin: keep every ``thin``-th call after that. The attribute shows the value in force.
        max_samples: the most samples kept in memory, at least 2.

    Raises:
        ValueError: an argument is out of range.

    **Privacy**: the iterates of a private sampler are already paid for, all of them, and copying,
    averaging, saving or publishing them is post-processing: nothing here is charged, and the number
    of samples and of predictions is free. This holds for what the optimizer released, the trainable
    parameters. A buffer that training changes (the running statistics of BatchNorm) carries the
    records without noise, so :meth:`collect` refuses a model whose buffers changed. Predictions at
    private test inputs reveal those inputs: they are covered by no guarantee of the training.
    """

    def predict(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""The posterior average :math:`\frac1S\sum_s \mathrm{transform}(f(x; \theta_s))`.

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
            transform: applied to one sample's output ``[rows, ...]`` before averaging, keeping the
                first dimension: softmax over the last dimension by default; ``torch.exp`` for
                log-probabilities; ``None`` for regression.
            forward: ``(model, batch) -> output`` where the model returns no tensor or takes its
                inputs in another way, as ``lambda model, batch: model(**batch).logits``.

        Returns:
            The average, ``[n, ...]``, on the model's device, in the dtype of the transformed
            output.

        Raises:
            RuntimeError: no sample is kept yet.
            ValueError: the model has other parameters than the samples; the output does not have
                one row a record.
            TypeError: ``x`` or the model's output is not a tensor.

        **Privacy**: post-processing; see the class about private test inputs.
        """

        return self._reduced(
            model, x, transform, forward, lambda groups: outputs.average(groups, len(self))
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

    def predictive_entropy(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Entropy of the posterior predictive distribution, :math:`H[\frac1S\sum_s p(y\mid
        x,\theta_s)]`, in nats: noise in the label as well as doubt about the parameters.

        Arguments and errors of :meth:`predict`; ``transform`` has to make probabilities over the
        last dimension, which the result, ``[n, ...]``, has not.

        **Privacy**: post-processing.
        """
        return self._reduced(
            model, x, transform, forward, lambda groups: outputs.entropies(groups, len(self))[0]
        )

    def mutual_information(
        self,
        model: nn.Module,
        x: Inputs,
        transform: Transform | None = softmax,
        *,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Mutual information of label and parameters, in nats: what the samples disagree about.

        .. math:: I[y; \theta \mid x] = H\Big[\frac1S\sum_s p(y\mid x,\theta_s)\Big]
                  - \frac1S\sum_s H[p(y\mid x,\theta_s)] \ge 0

        (Houlsby et al., 2011, equation 2). Arguments and errors of :meth:`predictive_entropy`.

        **Privacy**: post-processing.
        """

        def difference(groups: Iterator[Tensor]) -> Tensor:
            total, expected = outputs.entropies(groups, len(self))
            return (total - expected).clamp_min(0)  # rounding alone can make it negative

        return self._reduced(model, x, transform, forward, difference)

    def predictive_quantiles(
        self,
        model: nn.Module,
        x: Inputs,
        quantiles: Sequence[float],
        *,
        noise_std: float,
        forward: Forward | None = None,
    ) -> Tensor:
        r"""Quantiles of the posterior predictive distribution of a regression with Gaussian noise.

        With outputs :math:`\mu_s = f(x;\theta_s)` the predictive distribution is the mixture
        :math:`\frac1S\sum_s N(\mu_s, \sigma^2)`; a quantile solves
        :math:`\frac1S\sum_s \Phi((y-\mu_s)/\sigma) = q`, by bisection between the components' own
        quantiles.

        Args:
            model, x, forward: as in :meth:`predict`. The output is the mean of the target.
            quantiles: probabilities strictly between 0 and 1; ``(0.05, 0.95)`` bounds a 90 %
                interval.
            noise_std: standard deviation σ of the likelihood, in the units of the target, which the
                training loss states: ``MSELoss`` as −log p per record means
                ``noise_std=math.sqrt(0.5)``; ``MSELoss() / (2 * s**2)`` means ``noise_std=s``.

        Returns:
            ``[len(quantiles), n, ...]`` in the order given.

        Raises:
            ValueError: a quantile or ``noise_std`` is out of range; else as :meth:`predict`.

        **Privacy**: post-processing.
        """
        if not quantiles or not all(0 < q < 1 for q in quantiles):
            raise ArgumentError(
                f"quantiles must be probabilities strictly between 0 and 1, got {list(quantiles)}."
            )
        if not (math.isfinite(noise_std) and noise_std > 0):
            raise ArgumentError(
                f"noise_std must be positive and finite, got {noise_std}. It is the standard"
                " deviation of the likelihood: math.sqrt(0.5) for a model trained with MSELoss."
            )

        def solve(groups: Iterator[Tensor]) -> Tensor:
            means = torch.cat(list(groups))
            found = outputs.mixture_quantiles(means.double(), quantiles, noise_std)
            return found.to(means.dtype)

        return self._reduced(model, x, None, forward, solve, dim=1)

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
            raise StateError(
                f"There is no posterior sample yet: collect() was called {self._num_collected}"
                f" times and burn_in={self.burn_in} of them are discarded. Call collect(model)"
                " after burn-in, before predicting."
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
