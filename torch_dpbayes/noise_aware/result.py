"""The posterior from a private run: draws, moments, density, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..accounting.events import positive_count
from ..errors import ArgumentError, ArgumentTypeError
from ..ops.glm import GLM
from ..ops.linear_model import LinearPredictor, expected_targets
from ..ops.softmax import Softmax
from ..posterior.files import arviz_of
from ..posterior.outputs import Transform
from ..posterior.samples import PosteriorSamples
from .covariates import FeatureShape
from .drawing import Draws
from .latents import Latents
from .likelihood import Likelihood

_NAMES: dict[str, Any] = {"bernoulli": "bernoulli", "gaussian": "normal"}  # of families


class NoiseAwarePosterior:
    """p(θ | releases); it includes the noise of the releases.

    ``noise_aware.posterior`` and similar functions return it. It holds weighted draws. They depend
    on the records only through charged releases.

    Attributes:
        pareto_k: Pareto k̂ of the draws' importance weights; 0 if all weights are equal. Do not
            rely on the draws if it is above .7.
        effective_sample_size: number of independent draws with the same precision.
        r_hat: the largest R̂ of Hamiltonian chains; 1 for independent draws.
        transcript: everything that was released.
        checks: p values of each release given the others, and of the prior; None if not computed.
        likelihood, noise_std: of a network's output, after ``posterior_for_module``.
    """

    def __init__(
        self,
        draws: Draws,
        values: dict[str, Tensor],
        statement: Sequence[str],
        transcript: Any,
        checks: tuple[list[float], float] | None = None,
        density: tuple[Latents, Likelihood] | None = None,
        shape: FeatureShape | None = None,
    ) -> None:
        self._density, self._values, self._statement = density, values, list(statement)
        self._theta, self._weights = draws.theta, draws.weights
        self.pareto_k, self.effective_sample_size = draws.pareto_k, draws.effective
        self.r_hat, self.method = draws.r_hat, draws.method
        self.transcript, self._shape = transcript, shape
        self.checks = checks
        self.likelihood: Literal["categorical", "bernoulli", "normal"] | None = None
        self.noise_std: float | None = None

    def __repr__(self) -> str:
        sites = ", ".join(f"{k} {list(v.shape[1:])}" for k, v in self._values.items())
        return f"NoiseAwarePosterior({sites}; pareto_k={self.pareto_k:.2g})"

    def sample(self, num_samples: int = 1000) -> dict[str, Tensor]:
        """Draws by site, ``[num_samples, ...]``, in the supports of the model's distributions, as
        for ``pyro.infer.Predictive``. They refer to rows that are scaled down as in the run:
        :meth:`predict` does this, ``Predictive`` and :meth:`.PosteriorSamples.from_draws` do not.
        """
        num_samples = positive_count(num_samples, "num_samples")
        chosen = torch.multinomial(self._weights, num_samples, replacement=True)
        return {name: value[chosen] for name, value in self._values.items()}

    def predict(
        self,
        model: nn.Module | GLM | Softmax,
        x: Any,
        transform: Transform | Literal["likelihood"] | None = "likelihood",
        *,
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        num_samples: int = 100,
    ) -> Tensor:
        """The average prediction over draws, as in :meth:`.PosteriorSamples.predict`. Rows of
        floats (``x``, or the inputs of the last layer) are scaled down as in the run.

        Args:
            model: a network whose trainable parameters are the posterior's sites, as after
                ``posterior_for_module``; or the GLM or Softmax of the run.
            x: rows ``[n, ...]`` as for the run, or a ``DataLoader`` for a network.
            transform, likelihood: of a network's output, as for :class:`.PosteriorSamples`; the
                default is that of ``posterior_for_module``. A GLM or Softmax has its own.
            num_samples: number of draws.

        Returns:
            ``[n, ...]``.

        Raises:
            ArgumentError: the model's parameters or output do not fit the run, or the rows have
                other columns than in the run.

        **Privacy.** Post-processing; but a prediction reveals something about its own input.
        """
        if isinstance(model, GLM | Softmax):
            rows = self._shortened(_features(x))
            draws = self.sample(num_samples)["weights"]
            return torch.stack([expected_targets(model, w, rows) for w in draws]).mean(0)
        with self._samples_for(model, likelihood, num_samples) as (network, samples):
            return samples.predict(network, x, transform)

    def predictive_quantiles(
        self,
        model: nn.Module | GLM | Softmax,
        x: Any,
        quantiles: Sequence[float],
        *,
        likelihood: Literal["categorical", "bernoulli", "normal"] | None = None,
        num_samples: int = 100,
    ) -> Tensor:
        """Quantiles of a normal target, as in :meth:`.PosteriorSamples.predictive_quantiles`; of
        discrete targets those of the probabilities. Rows are scaled down as in the run.

        Args:
            model, x, likelihood, num_samples: as for :meth:`predict`, with its errors. A GLM for
                counts is refused.
            quantiles: probabilities strictly between 0 and 1.

        Returns:
            ``[len(quantiles), n, ...]``.

        **Privacy.** As for :meth:`predict`.
        """
        with self._samples_for(model, likelihood, num_samples) as (network, samples):
            if isinstance(model, GLM | Softmax):
                x = _features(x)
            return samples.predictive_quantiles(network, x, quantiles)

    @contextmanager
    def _samples_for(
        self, model: Any, likelihood: Any, num_samples: int
    ) -> Iterator[tuple[nn.Module, PosteriorSamples]]:
        """A network that reads rows as the run did, and the samples of its parameters."""
        named, noise_std = likelihood or self.likelihood, self.noise_std
        if isinstance(model, GLM | Softmax):
            named = "categorical"
            if isinstance(model, GLM):
                named, noise_std = _NAMES.get(model.family), model.noise_std
            if named is None:
                raise ArgumentError(
                    "quantiles of counts are not computed: pass sample() to"
                    " pyro.infer.Predictive, or use predict for the expected count."
                )
            model = LinearPredictor(self._values["weights"].shape[1:], torch.clone)
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                "model must be a torch.nn.Module, ops.GLM or ops.Softmax; for a Pyro model pass"
                " sample() to pyro.infer.Predictive."
            )
        if isinstance(model, LinearPredictor):  # it would scale rows by its own rule
            model = LinearPredictor(model.weights.shape, torch.clone).to(model.weights)
        draws = self.sample(num_samples)
        noise_std = noise_std if named == "normal" else None
        samples = PosteriorSamples.from_draws(draws, named, noise_std=noise_std)
        with self._as_in_the_run(model):
            yield model, samples

    @contextmanager
    def _as_in_the_run(self, network: nn.Module) -> Iterator[None]:
        """Inside, scale down input rows of the last layer, or of the network of another model."""
        name = next(iter(self._values)).rpartition(".")[0] if self.likelihood else ""
        reader = dict(network.named_modules(remove_duplicate=False)).get(name)
        if reader is None:  # the prediction raises an error on missing parameters
            yield
            return

        def shortened(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
            by_name = {name: self._shortened(x) for name, x in named.items()}
            return tuple(map(self._shortened, given)), by_name

        handle = reader.register_forward_pre_hook(shortened, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _shortened(self, x: Any) -> Any:
        """Rows of floats ``[n, ...]``, scaled down as in the run."""
        if self._shape is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        rows = x.reshape(len(x), math.prod(x.shape[1:]))
        if rows.shape[1] != sum(self._shape.widths):
            raise ArgumentError(
                f"rows have {rows.shape[1]} numbers, but {sum(self._shape.widths)} were scaled"
                " down together in the run: pass the input of its model; for several arguments"
                " pass sample() to pyro.infer.Predictive."
            )
        return self._shape.shortened(rows).reshape(x.shape)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Posterior means by site."""
        return {name: self._average(v) for name, v in self._values.items()}

    @property
    def stddev(self) -> dict[str, Tensor]:
        """Posterior standard deviations by site."""
        mean = self.mean
        return {
            name: self._average((v - mean[name]).square()).sqrt()
            for name, v in self._values.items()
        }

    def _average(self, values: Tensor) -> Tensor:
        return torch.einsum("m,m...->...", self._weights.to(values.dtype), values)

    @property
    def unconstrained_stddev(self) -> Tensor:
        """Standard deviations in unconstrained space ``[D]``, sites sorted by name, for
        ``mcmc.plan(...).expected_sample_size``.
        """
        mean = self._weights @ self._theta
        return (self._weights @ (self._theta - mean).square()).sqrt()

    def log_density(self, values: Mapping[str, Any]) -> float:
        """log p(values | releases) up to a constant, as a density of the constrained values.

        Args:
            values: one value of every site, in the shapes of ``mean``.

        Raises:
            ValueError: a site is missing, or its value has another shape; or this is a layer with
                more than 50 parameters.
        """
        if self._density is None:
            raise ArgumentError(
                "a large last layer has draws but no density: use sample or predict."
            )
        latents, likelihood = self._density
        expected = {name: v.shape[1:] for name, v in self._values.items()}
        found = {name: torch.as_tensor(v).shape for name, v in values.items()}
        if found != expected:
            raise ArgumentError(
                f"log_density needs one value of every site, of shapes"
                f" { ({k: list(v) for k, v in expected.items()}) }; got"
                f" { ({k: list(v) for k, v in found.items()}) }."
            )
        theta, log_jacobian = latents.unconstrain(dict(values))
        theta = theta[None]
        return float(likelihood(theta)[0] + latents.log_density(theta)[0]) + log_jacobian

    def guarantee(self) -> str:
        """A text that states the charges, and the assumptions of this posterior's width."""
        return "\n".join(self._statement)

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Draws as ArviZ's data structure, one chain.

        Returns:
            ``arviz.InferenceData``, from ArviZ 1 on ``xarray.DataTree``.

        Raises:
            ModuleNotFoundError: ArviZ is not installed.
        """
        draws = self.sample(num_samples)
        return arviz_of({name: values[None].numpy() for name, values in draws.items()})


def _features(x: Any) -> Tensor:
    """Features of a GLM or Softmax, as floats."""
    if not isinstance(x, Tensor) or x.dim() != 2:
        raise ArgumentError("x must be a tensor of features [n, d], as in the run.")
    return x.to(torch.promote_types(x.dtype, torch.float32))
