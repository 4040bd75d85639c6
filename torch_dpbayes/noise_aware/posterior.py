"""What a user gets: draws, moments and a density of the parameters given what was released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.func import vmap

from .modes import Likelihood, mode
from .priors import GaussianPrior, LatentPrior
from .sampling import CHAINS, Chains, WeightedDraws
from .warn import warn

_DRAWS = 4000
_CHAIN = 1024
_LARGEST_CHAIN = 200  # dimensions; beyond, the Gaussian approximation is all that is offered
# where that approximation is a good one, and a chain of hours no better
_LARGEST_CHAIN_UNDER_A_GAUSSIAN_PRIOR = 50
_NUMBERS = 2**24  # of draws held at once
_LITTLE_LEARNT = 0.95  # the posterior's standard deviations over the prior's
_LEAST_AGREEMENT = 1e-5
_LARGEST_R_HAT = 1.3  # of chains; above, draws are worth less than two for each


class Coordinates(Protocol):
    """Between a flat unconstrained vector and the user's sites."""

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values by site of one vector ``[d]``."""

    def unconstrained(self, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """The vector, and log |∂θ/∂values|."""


class Mixture(Protocol):
    """A density with known moments and exact draws."""

    mean: Tensor
    variance: Tensor

    def log_density(self, theta: Tensor) -> Tensor:
        """``[...]`` for θ ``[..., d]``."""

    def draws(self, count: int) -> Tensor:
        """``[count, d]``."""

    def agreement(self) -> float:
        """How well the last releases agree with it, a tail probability."""


class NoiseAwarePosterior:
    r"""p(θ | what was released): as wide as the records *and* the noise make it.

    Made by :func:`~torch_dpbayes.noise_aware.laplace` and its siblings. Draws are of the density
    log p(θ) + log p(transcript | θ): exactly, by importance resampling or Hamiltonian Monte Carlo,
    with the approximations that :meth:`guarantee` names in the likelihood alone. It may be pickled
    and saved by ``torch.save``, if the caller's own functions in it can be.

    **Privacy.** Post-processing of charged releases: draw as often as you like.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        prior: LatentPrior,
        coordinates: Coordinates,
        statement: Sequence[str],
        *,
        transcript: Any = None,
        agreement: Callable[[Tensor, Tensor], float] | None = None,
        little_left: str | None = None,
    ) -> None:
        self._likelihood, self._prior, self._coordinates = likelihood, prior, coordinates
        self._statement = list(statement)
        self.transcript = transcript
        """The releases themselves, which were paid for and may be published."""
        gaussian = prior.gaussian()
        self._mode = mode(likelihood, gaussian)
        precision, product = likelihood.precision(self._mode)
        self._precision = precision + gaussian.matrix
        if agreement is not None:
            self._note_agreement(agreement(self._mode, precision))
        if len(self._mode) <= _LARGEST_CHAIN:
            self._note_prior(*told_and_surprise(precision, product, gaussian))
        self._draws = self._weighted()
        self._chains: Chains | None = None
        self._moments: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._warn_of_little_learnt(little_left)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._mode)} parameters): guarantee() says what it is"

    # --- draws ------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How draws are made: ``"importance"``, ``"hamiltonian"``, or ``"gaussian"`` where the
        dimension is too high for either.
        """
        # candidates cannot tell that they miss the narrow part of a hierarchical prior
        if self._draws.are_good and not self._prior.frames:
            return "importance"
        limit = (
            _LARGEST_CHAIN_UNDER_A_GAUSSIAN_PRIOR
            if isinstance(self._prior, GaussianPrior)
            else _LARGEST_CHAIN
        )
        return "hamiltonian" if len(self._mode) <= limit else "gaussian"

    def sample(self, num_samples: int = 1000) -> dict[str, Tensor]:
        """Draws by site, ``[num_samples, ...]``, in the supports of the model's
        distributions: what ``pyro.infer.Predictive`` takes.
        """
        return self._constrained(self._unconstrained(num_samples))

    @property
    def mean(self) -> dict[str, Tensor]:
        """Posterior means by site."""
        return self._both_moments()[0]

    @property
    def stddev(self) -> dict[str, Tensor]:
        """Posterior standard deviations by site."""
        return self._both_moments()[1]

    @property
    def unconstrained_stddev(self) -> Tensor:
        """Standard deviations in unconstrained space ``[d]``, sites sorted by name: what
        ``mcmc.plan(...).expected_sample_size`` takes.
        """
        return self._unconstrained(_DRAWS).std(0)

    def log_density(self, values: Mapping[str, Tensor]) -> float:
        """log p(values | releases) up to a constant, as a density of the sites' own values.

        Args:
            values: one value of every site, in the shapes that ``mean`` has.

        Raises:
            ValueError: a site is missing, or its value has another shape.
        """
        expected = self._coordinates.constrain(self._mode)
        if any(
            name not in values or torch.as_tensor(values[name]).shape != value.shape
            for name, value in expected.items()
        ):
            raise ValueError(
                f"log_density takes one value of every site, {_in_words(expected)}; got"
                f" {_in_words(values)}. Of draws: [post.log_density({{name: v[i] for name, v in"
                " draws.items()}) for i in range(num_samples)]."
            )
        theta, log_jacobian = self._coordinates.unconstrained(values)
        return float(self._log_density(theta[None])[0]) + log_jacobian

    def guarantee(self) -> str:
        """What was charged, and what the width of this posterior rests on, in words."""
        method = self.method
        if method == "importance":
            drawn = "draws are importance-resampled from the density itself"
        elif method == "hamiltonian":
            drawn = (
                "draws come from Hamiltonian chains on the density, which agree to R-hat ="
                f" {self._all_chains().r_hat:.2f}"
            )
        else:
            drawn = (
                "draws are of a Gaussian at the mode: the dimension is too high for an exact"
                " sampler"
            )
        return "\n".join([*self._statement, f"  drawn       {drawn}"])

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Draws as ArviZ's data structure, one chain.

        Returns:
            ``arviz.InferenceData``, from ArviZ 1 on ``xarray.DataTree``.

        Raises:
            ModuleNotFoundError: ArviZ is not installed.
        """
        try:
            import arviz
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_arviz needs ArviZ, which is not installed: pip install arviz", name="arviz"
            ) from error
        posterior = {
            name: values[None].numpy() for name, values in self.sample(num_samples).items()
        }
        if int(arviz.__version__.split(".")[0]) < 1:
            return arviz.from_dict(posterior=posterior)
        return arviz.from_dict({"posterior": posterior})

    def _warn_of_little_learnt(self, little_left: str | None) -> None:
        if self._width_left() > _LITTLE_LEARNT:
            why = little_left or (
                "the posterior returned is nearly the prior. More records or a larger epsilon"
                " would change that."
            )
            warn(f"the budget is too small for these records to move the prior: {why}")

    def _note_agreement(self, probability: float) -> None:
        if probability >= _LEAST_AGREEMENT:
            self._statement.append(
                "  checked     the last releases agree with the fitted curvature (chi-square tail"
                f" {probability:.2g})"
            )
            return
        self._statement.append(
            "  NOT REACHED the last releases contradict the fitted curvature (chi-square tail"
            f" {probability:.2g}): intervals may be too narrow"
        )
        warn(
            "the run has not arrived: its last releases contradict the fitted curvature, and"
            " intervals may be too narrow. Scale the features, or narrow the prior.",
        )

    def _note_prior(self, told: int, surprise: float) -> None:
        size = len(self._mode)
        self._statement.append(
            f"  prior       of {size} directions the releases tell {told} better than the prior"
        )
        # quantiles of another prior say nothing of its tails
        if surprise >= _LEAST_AGREEMENT or not isinstance(self._prior, GaussianPrior):
            return
        self._statement.append(
            "  NOT LIKELY  the releases contradict the prior (chi-square tail"
            f" {surprise:.2g}): where noise hides the records it draws the mean to itself"
        )

    # --- inside -----------------------------------------------------------------------------------

    def _log_density(self, theta: Tensor) -> Tensor:
        return self._likelihood.log_likelihood(theta) + self._prior.log_density(theta)

    def _weighted(self, count: int = 0) -> WeightedDraws:
        return WeightedDraws(
            self._log_density, self._mode, self._precision, count, self._prior.gaussian()
        )

    def _width_left(self) -> float:
        """The posterior's standard deviations over the prior's, in the mean."""
        if not self._draws.are_good:
            variances = torch.linalg.inv(self._precision).diagonal()
            return float((variances * self._prior.gaussian().precision).mean().sqrt())
        # the same candidates, weighted for either, so that their randomness cancels
        prior = self._draws.weighted_for(self._prior.log_density)
        if not prior.are_good:
            return 0.0
        return float((self._draws.variances / prior.variances).mean().sqrt())

    def _unconstrained(self, count: int) -> Tensor:
        _require_count(count)
        if self.method == "importance":
            if 4 * count <= len(self._draws.weights):
                return self._draws.resampled(count)
            return self._weighted(4 * count).resampled(count)
        if self.method == "gaussian":
            factor = torch.linalg.cholesky(self._precision)
            normal = torch.randn(len(self._mode), count, dtype=torch.float64)
            return self._mode + torch.linalg.solve_triangular(factor.T, normal, upper=True).T
        return self._all_chains().draws(count)

    def _all_chains(self) -> Chains:
        if self._chains is None:
            starts = (
                self._draws.starts(CHAINS) if self._draws.worth else self._mode.repeat(CHAINS, 1)
            )
            self._chains = Chains(self._log_density, starts, self._precision, self._prior.frames)
            self._chains.draws(_CHAIN)
            if self._chains.r_hat > _LARGEST_R_HAT:
                warn(
                    f"the chains that draw from this posterior do not agree (R-hat ="
                    f" {self._chains.r_hat:.2f}): its means and widths may be wrong. Give the model"
                    " priors with fewer modes, or centre its hierarchy otherwise.",
                )
        return self._chains

    def _constrained(self, draws: Tensor) -> dict[str, Tensor]:
        values: dict[str, Tensor] = vmap(self._coordinates.constrain)(draws)
        return values

    def _both_moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if self._moments is None:
            if self.method == "importance":
                weights = self._draws.weights
                # a candidate without weight may be so far away that its value is infinite
                draws = torch.where(weights[:, None] > 0, self._draws.values, self._mode)
            else:
                draws = self._unconstrained(_DRAWS if self.method == "gaussian" else _CHAIN)
                weights = torch.full((len(draws),), 1 / len(draws), dtype=torch.float64)
            values = self._constrained(draws)
            means = {
                name: torch.einsum("m,m...->...", weights.to(v.dtype), v)
                for name, v in values.items()
            }
            squares = {
                name: torch.einsum("m,m...->...", weights.to(v.dtype), (v - means[name]).square())
                for name, v in values.items()
            }
            self._moments = means, {name: square.sqrt() for name, square in squares.items()}
        return self._moments


def told_and_surprise(
    precision: Tensor, product: Tensor, prior: GaussianPrior
) -> tuple[int, float]:
    r"""In how many directions a Gaussian likelihood is narrower than a prior, and how likely under
    the prior is a likelihood as far from it, in these directions, as this one.

    In coordinates in which the prior is N(0, I) and H = diag(h), and θ ~ N(0, I), the products Hθ̂
    are independent N(0, h + h²): the prior's part h², and the noise's.

    Args:
        precision: H.
        product: Hθ̂.
        prior: of θ.
    """
    scale = prior.precision.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    found = vectors.T @ (scale * (product - precision @ prior.mean))
    told = values > 1
    squares = found[told].square() / (values[told] + values[told].square())
    count = int(told.sum())
    return count, float(chi2.sf(float(squares.sum()), count)) if count else 1.0


class DiagonalPosterior(NoiseAwarePosterior):
    """The same where every coordinate, or contrast of outputs, is a mixture of Gaussians,
    independent of the others.

    Args:
        mixture: of all of them.
        prior: of every coordinate.
        coordinates, statement, transcript, little_left: as above.
    """

    def __init__(
        self,
        mixture: Mixture,
        prior: GaussianPrior,
        coordinates: Coordinates,
        statement: Sequence[str],
        transcript: Any,
        little_left: str | None = None,
    ) -> None:
        self._mixture, self._prior, self._coordinates = mixture, prior, coordinates
        self._mode = mixture.mean
        self._statement, self.transcript = list(statement), transcript
        self._moments = None
        self._note_agreement(mixture.agreement())
        self._warn_of_little_learnt(little_left)

    @property
    def method(self) -> str:
        """``"mixture"``: draws are exact."""
        return "mixture"

    @property
    def unconstrained_stddev(self) -> Tensor:
        """Standard deviations in unconstrained space ``[d]``, sites sorted by name."""
        return self._mixture.variance.sqrt()

    def guarantee(self) -> str:
        """What was charged, and what the width of this posterior rests on, in words."""
        drawn = "  drawn       draws are exact: a mixture of Gaussians in each coordinate"
        return "\n".join([*self._statement, drawn])

    def _log_density(self, theta: Tensor) -> Tensor:
        return self._mixture.log_density(theta)

    def _width_left(self) -> float:
        return float((self._mixture.variance * self._prior.gaussian().precision).mean().sqrt())

    def _unconstrained(self, count: int) -> Tensor:
        _require_count(count)
        return self._mixture.draws(count)

    def _both_moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if self._moments is None:
            # of draws that have the mixtures' own means and deviations, so that sites without a
            # support have them too
            count = max(100, min(_DRAWS, _NUMBERS // len(self._mixture.mean)))
            draws = self._mixture.draws(count)
            scaled = (draws - draws.mean(0)) / draws.std(0, correction=0)
            values = self._constrained(self._mixture.mean + scaled * self.unconstrained_stddev)
            self._moments = (
                {name: v.mean(0) for name, v in values.items()},
                {name: v.std(0, correction=0) for name, v in values.items()},
            )
        return self._moments


def _require_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_samples must be a positive whole number, got {count!r}.")


def _in_words(values: Mapping[str, Any]) -> str:
    """Sites and their shapes."""
    shapes = {name: list(torch.as_tensor(value).shape) for name, value in values.items()}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"


class FlatCoordinates:
    """One site that is the vector itself.

    Args:
        name: of the site.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """``{name: theta}``."""
        return {self._name: theta}

    def unconstrained(self, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """The vector; no Jacobian."""
        return torch.as_tensor(values[self._name]).to(torch.float64), 0.0


class MatrixCoordinates:
    """One site that is a matrix.

    Args:
        name: of the site.
        rows: of the matrix.
    """

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows = name, rows

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """``{name: [rows, columns]}``."""
        return {self._name: theta.reshape(self._rows, -1)}

    def unconstrained(self, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """The entries row by row; no Jacobian."""
        return torch.as_tensor(values[self._name]).to(torch.float64).reshape(-1), 0.0


class PyroCoordinates:
    """The sites of a Pyro model.

    Args:
        prior: its latents.
    """

    def __init__(self, prior: Any) -> None:
        self._prior = prior

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values in the supports of the model's distributions."""
        values = self._prior.constrain(theta.to(self._prior.device, self._prior.dtype))
        return {name: value.detach().cpu() for name, value in values.items()}

    def unconstrained(self, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """Flat and unconstrained, and the log Jacobian determinant of the map there."""
        moved, total = {}, 0.0
        for name, transform in self._prior.transforms.items():
            value = torch.as_tensor(values[name]).to(self._prior.dtype)
            moved[name] = transform(value)
            total += float(transform.log_abs_det_jacobian(value, moved[name]).sum())
        return self._prior.flatten(moved).to("cpu", torch.float64), total
