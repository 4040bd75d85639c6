r"""What one release of sufficient statistics says about θ.

A sum s of n statistics is nearly Gaussian given θ, N(m(θ), C(θ)), and the noise on it is exactly
so: s̃ | θ ~ N(m(θ), C(θ) + V), whose density needs no data. Source: Bernstein and Sheldon (2018),
"Differentially private Bayesian inference for exponential families", with Gaussian instead of
Laplace noise, so that the sum over the unknown s is in closed form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

# θ [d] -> mean [k] and covariance [k, k] of what was released
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


class Summary:
    """log p(released statistics | θ), in the form that
    :class:`~torch_dpbayes.noise_aware.surrogate.Surrogate` has.

    Args:
        released: s̃, ``[k]``.
        moments: of s̃ given θ, privacy noise included.
        centre: a θ near which the likelihood is large, or a prior's: where the search for the mode
            begins.
    """

    def __init__(self, released: Tensor, moments: Moments, centre: Tensor) -> None:
        self.released, self.moments, self.centre = released, moments, centre

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(s̃ | θ) up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""
        if theta.dim() == 1:
            return self.log_likelihood(theta[None])[0]
        means, covariances = vmap(self.moments)(theta)
        factor, failed = torch.linalg.cholesky_ex(covariances)
        whitened = torch.linalg.solve_triangular(
            factor, (self.released - means)[..., None], upper=False
        )[..., 0]
        value = -0.5 * whitened.square().sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where(failed == 0, value, -torch.inf).nan_to_num(-torch.inf)

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood exp(−½(θ−θ̂)ᵀH(θ−θ̂)) that is tangent to this
        one at ``theta``, the covariance held fixed.
        """
        mean, covariance = self.moments(theta)
        slope = jacrev(lambda at: self.moments(at)[0])(theta)
        weighted = torch.linalg.solve(covariance, slope).T
        precision = weighted @ slope
        return (precision + precision.T) / 2, precision @ theta + weighted @ (self.released - mean)
