r"""The surrogate of a run whose own gradients say something about the curvature.

How gradients differ from each other does not depend on θ: with φ_k = φ(θ_k), releases are

.. math::
    \tilde g_k = F(\varphi_k - \varphi(\theta)) + \eta + e_k, \qquad F = \hat F + E, \qquad
    \eta \sim N(0, F), \quad e_k \sim N(0, N_k), \qquad
    N_k = V_k + c^2\, \frac{a_k^\top \hat F a_k}{d}\, \hat F, \quad a_k = \varphi_k -
    \varphi(\theta_K)

where c says what share of a way the response gets wrong. The releases' mean, weighted by N_k⁻¹, is
independent of their differences from it, which are a linear regression on E: normal, with the
released curvature's noise as its prior. So with Ê and C of that regression, W_k = (Σ_j
N_j⁻¹)⁻¹N_k⁻¹, and D(θ) the matrix of E ↦ Σ_k W_k E(φ_k − φ(θ)),

.. math::
    r = \sum_k W_k\big(\tilde g_k - (\hat F + \hat E)(\varphi_k - \varphi(\theta))\big), \qquad
    M(\theta) = F_\alpha(\theta) + \big(\textstyle\sum_k N_k^{-1}\big)^{-1} +
    D(\theta)\,C\,D(\theta)^\top

    \log p(\text{transcript} \mid \theta) = -\tfrac12 r^\top M^{-1} r - \tfrac12 \log|M_0| +
    \log p(\text{differences})

Without this, a curvature whose noise is larger than its small eigenvalues leaves a second mode at
the prior: there the gradient at the end is explained by hardly any curvature, and the large
gradients at the beginning of the run, which contradict it, are not heard.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .response import FLOOR_OF_NOISE, Response, floored
from .surrogate import AnySurrogate
from .transcript import GradientRelease

LARGEST_DIMENSION = 24  # the regression has d(d+1)/2 unknowns
# c; of these that with the largest likelihood of the differences
MISFITS = (0.03, 0.1, 0.3, 1.0)
LEAST_STD = 1e-9


class LearnedCurvatureSurrogate(AnySurrogate):
    """log p(transcript | θ), for Gaussian releases at few parameters; arguments as in
    :class:`~torch_dpbayes.noise_aware.surrogate.AnySurrogate`, and

    Args:
        units: E/v = Σ ε_n·units_n with independent standard normal ε_n, ``[n, d, d]``. None: as of
            symmetric Gaussian noise.
        least: of the eigenvalues of F̂ + Ê. None: a tenth of what is left of v.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
        units: Tensor | None = None,
        least: float | None = None,
    ) -> None:
        super().__init__(gradients, response, curvature, curvature_std, centre)
        std = max(curvature_std, LEAST_STD)
        self._units = symmetric_units(len(centre)) if units is None else units
        away = self._points - centre
        squares = ((away @ curvature) * away).sum(-1) / len(centre)
        misfits = (0.0,) if self._straight.is_linear else MISFITS
        added, multiples = self._noises.T[..., None, None]
        own = added * torch.eye(len(centre), dtype=centre.dtype)
        own = own + multiples * self._variability * curvature
        fits = [
            _Regression(
                self._points,
                self._values - self._points @ curvature,
                own + (c**2 * squares)[:, None, None] * curvature,
                self._units,
                std,
            )
            for c in misfits
        ]
        fit = max(fits, key=lambda f: f.log_evidence)
        self.log_evidence, self.noise = fit.log_evidence, fit.noise_of_mean
        at_centre = fit.design_of_mean - torch.einsum("nij,j->in", self._units, centre)
        self._spread_at_centre = at_centre @ fit.root
        self._spread_along = torch.einsum("nij,nm->jim", self._units, fit.root)
        left = self._spread_along.square().sum() / (len(centre) * (len(centre) + 1) / 2)
        self._curvature_std = float(left) ** 0.5
        learned = curvature + torch.einsum("n,nij->ij", fit.coefficients, self._units)
        if least is None:
            least = max(FLOOR_OF_NOISE * self._curvature_std, LEAST_STD)
        self.curvature = floored(learned, least)
        rest = self._values - self._points @ self.curvature
        self._mean = torch.einsum("kij,kj->i", fit.weights, rest)

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        """D(θ)·C·D(θ)ᵀ. Of many θ by its coefficients, which is less work."""
        away = moved - self.centre
        if away.dim() > 1:
            both = torch.cat([torch.ones_like(away[..., :1]), away], -1)
            rows, columns = torch.triu_indices(both.shape[-1], both.shape[-1])
            products = both[..., rows] * both[..., columns]
            return torch.einsum("...p,pij->...ij", products, self.quadratic)
        spread = self._spread_at_centre - torch.einsum("jin,j->in", self._spread_along, away)
        return spread @ spread.mT

    @cached_property
    def quadratic(self) -> Tensor:
        """Coefficients of the products of 1 and the entries of φ(θ) − c, ``[(d+1)(d+2)/2, d, d]``,
        symmetric.
        """
        parts = torch.cat([self._spread_at_centre[None], -self._spread_along])
        rows, columns = torch.triu_indices(len(parts), len(parts))
        half = torch.einsum("pin,qjn->pqij", parts, parts)[rows, columns]
        half[rows == columns] /= 2
        return half + half.mT


class _Regression:
    """E from the differences of ``values`` = Eφ_k + η + e_k; its entries in ``units`` have the
    prior N(0, ``std``²).

    Attributes:
        weights: W_k.
        noise_of_mean: (Σ N_k⁻¹)⁻¹.
        coefficients: Ê in ``units``.
        root: C = root·rootᵀ.
        design_of_mean: Σ W_k Eφ_k as a matrix on E's coefficients.
        log_evidence: of the differences, up to a constant.
    """

    def __init__(
        self, points: Tensor, values: Tensor, noises: Tensor, units: Tensor, std: float
    ) -> None:
        precisions = torch.linalg.inv(noises)
        self.noise_of_mean = torch.linalg.inv(precisions.sum(0))
        self.weights = self.noise_of_mean @ precisions
        design = torch.einsum("nij,kj->kin", units, points)
        self.design_of_mean = torch.einsum("kij,kjn->in", self.weights, design)
        design = design - self.design_of_mean
        apart = values - torch.einsum("kij,kj->i", self.weights, values)
        weighted = precisions @ design
        total = torch.einsum("kin,kim->nm", weighted, design)
        # in units of the prior's deviation, so that small ones do no harm
        scaled = std**2 * total + torch.eye(len(units), dtype=points.dtype)
        factor = torch.linalg.cholesky(scaled)
        product = std * torch.einsum("kin,ki->n", weighted, apart)
        whitened = torch.linalg.solve_triangular(factor, product[:, None], upper=False)[:, 0]
        inverse = torch.linalg.solve_triangular(
            factor, torch.eye(len(units), dtype=points.dtype), upper=False
        )
        self.root = std * inverse.T
        self.coefficients = self.root @ whitened
        squares = torch.einsum("ki,kij,kj->", apart, precisions, apart)
        self.log_evidence = float(
            (whitened.square().sum() - squares) / 2
            - factor.diagonal().log().sum()
            - (torch.logdet(noises).sum() - torch.logdet(self.noise_of_mean)) / 2
        )


def symmetric_units(size: int) -> Tensor:
    """Symmetric matrices ``[d(d+1)/2, d, d]``, orthonormal under the Frobenius norm: the noise of a
    matrix release has independent coefficients of one deviation in them.
    """
    rows, columns = torch.triu_indices(size, size)
    units = torch.zeros(len(rows), size, size, dtype=torch.float64)
    number = torch.arange(len(rows))
    entry = torch.where(rows == columns, 1.0, math.sqrt(0.5)).to(torch.float64)
    units[number, rows, columns] = entry
    units[number, columns, rows] = entry
    return units
