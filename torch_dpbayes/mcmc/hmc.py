"""DP-HMC: Hamiltonian Monte Carlo on clipped, noisy gradients, with a noisy accept test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import DpEvent, noise_event, noise_multiplier_or_0, positive_count
from ..density import InvalidPoint, Model, Prior
from ..errors import ArgumentError, StateError
from ..noise import check_clip_bound
from .kernel import Candidate, PrivateKernel
from .proposals import Mass


class DPHMC(PrivateKernel):
    r"""Differentially private Hamiltonian Monte Carlo.

    .. math::
        \tilde g(\theta) = -\sum_i \mathrm{clip}_b\big(\nabla\log p(x_i|\theta)\big) + z_g b\,\zeta
        - \nabla\log p(\theta)

    .. math::
        p \leftarrow p - \tfrac\eta2 \tilde g, \quad
        \theta \leftarrow \theta + \eta M^{-1}p, \quad p \leftarrow p - \tfrac\eta2 \tilde g

    A trajectory repeats this step L times from p ~ N(0, M), with one noisy gradient per point. Its
    end is accepted as by :class:`~torch_dpbayes.mcmc.DPPenalty`: iff log u < R̃ + log prior ratio −
    kinetic energy difference − σ²/2, with the noisy log-likelihood ratio R̃ and σ = z_l·c·‖θ'−θ‖.
    The prior's gradient and the kinetic energy are exact.

    The next iteration reuses the gradient at its start, so k iterations take kL + 1 gradients. This
    is exact. Let the noises ζ_0..ζ_L of a trajectory be part of the state. Then the map (θ, p,
    ζ_0..ζ_L) → (θ', −p', ζ_L..ζ_0) preserves volume and is its own inverse. The noises are
    independent with one law, so their order does not change their density.

    Source: Räisä, Koskela and Honkela (2021), Algorithm 1, which draws k(L+1) gradients
    (``reuse_gradients=False``).

    Args:
        model: Pyro model with one vectorised data plate, see
            :class:`~torch_dpbayes.density.RecordDensity`.
        step_size: η.
        num_steps: L.
        log_ratio_slope: c, the clip bound of one record's log-likelihood ratio for each unit of
            distance.
        max_grad_norm: b, the clip bound of one record's gradient, in unconstrained space.
        ratio_noise_multiplier: z_l, noise standard deviation / clip bound of the log ratio. 0: not
            private.
        grad_noise_multiplier: z_g, likewise of the gradients.
        accountant: where every iteration is charged.
        data_plate: name of the data plate.
        mass_matrix: M, (dimension,) for a diagonal one or (dimension, dimension), over the
            coordinates on which the likelihood depends, with the sites sorted by name. None:
            identity. It must be public, or computed from earlier releases.
        jitter: j, at most 1. Iteration t takes steps of η·(1 + j(2u_t − 1)), u_t a randomly shifted
            Halton sequence in (0, 1), so that trajectories are not periodic. If noise limits the
            step size, 0.2 reduces :attr:`Plan.reach` by 2 %, and 1 by a third.
        reuse_gradients: keep the gradient at the chain's current point.
        target_accept_prob: acceptance rate that warm-up adapts η to. None: no adaptation.

    Raises:
        ValueError: an argument is out of range, or, in ``MCMC.run``, the model is not fit for it.

    **Privacy.** An iteration releases R̃ and L noisy gradients (L + 1 in the first iteration, and in
    all without reuse). Adding or removing a record moves their sums by b and c·‖θ'−θ‖, replacing
    one by twice that: ``GaussianDpEvent(z_g)`` and ``GaussianDpEvent(z_l)``. They are charged
    before the trajectory starts, and also count if it diverges.
    """

    _told = (
        ("num_steps", "_num_steps"),
        ("ratio_noise_multiplier", "_multiplier"),
        ("grad_noise_multiplier", "_grad_multiplier"),
        ("log_ratio_slope", "_slope"),
        ("max_grad_norm", "_max_norm"),
    )
    _needs_gradients = True

    def __init__(
        self,
        model: Model,
        *,
        step_size: float,
        num_steps: int,
        log_ratio_slope: float,
        max_grad_norm: float,
        ratio_noise_multiplier: float,
        grad_noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        mass_matrix: Tensor | None = None,
        jitter: float = 0.2,
        reuse_gradients: bool = True,
        target_accept_prob: float | None = 0.65,
    ) -> None:
        self._mass = Mass(step_size, mass_matrix)
        super().__init__(model, accountant, target_accept_prob, self._mass)
        self._num_steps = positive_count(num_steps, "num_steps")
        self._read_records(log_ratio_slope, data_plate)
        self._max_norm = check_clip_bound(
            "max_grad_norm", max_grad_norm, "the clip bound of a record's gradient"
        )
        self._multiplier = noise_multiplier_or_0(ratio_noise_multiplier, "ratio_noise_multiplier")
        self._grad_multiplier = noise_multiplier_or_0(
            grad_noise_multiplier, "grad_noise_multiplier"
        )
        self._jitter, self._reuse = checked_jitter(jitter), bool(reuse_gradients)

    def _forget(self) -> None:
        super()._forget()
        self._gradient: Tensor | None = None
        self._shift = 0.0

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
        _require_gradients()
        return super()._prepare(args, kwargs)

    def _start(self, theta: Tensor) -> None:
        super()._start(theta)
        self._gradient = None
        normal = torch.tensor(self._standard_normal(public=True), dtype=torch.float64)
        self._shift = float(torch.special.ndtr(normal))

    def _charges(self) -> list[tuple[DpEvent, int]]:
        gradients = self._num_steps + (self._gradient is None or not self._reuse)
        return [(noise_event(self._grad_multiplier), gradients), *super()._charges()]

    def _candidate(self, theta: Tensor) -> Candidate:
        total, read = self._gradient if self._reuse else None, self._read
        if total is None:
            total = self._gradient = self._noisy_sum(theta)
        step = self._scale * (1.0 + self._jitter * (2.0 * self._halton() - 1.0))
        momentum = self._mass.vector(self._gaussian(len(read), public=True))
        kinetic = self._mass.kinetic_energy(momentum)
        moved, slope = theta, self._potential_gradient(total, theta)
        for _ in range(self._num_steps):
            momentum = momentum - step / 2 * slope
            moved = moved.clone()
            moved[read] += step * self._mass.velocity(momentum)
            if not moved.isfinite().all():
                raise InvalidPoint
            total = self._noisy_sum(moved)
            slope = self._potential_gradient(total, moved)
            momentum = momentum - step / 2 * slope
        ratio, bound, kept = self._ratio(theta, moved)
        log_prior = self._log_prior_there(moved)
        rest = log_prior - self._log_prior + kinetic - self._mass.kinetic_energy(momentum)
        return Candidate(moved, log_prior, ratio, rest, bound, {**kept, "_gradient": total})

    def _noisy_sum(self, theta: Tensor) -> Tensor:
        """The records' part of −∇U, clipped and noised, in the coordinates that records read."""
        std = self._grad_multiplier * self._max_norm

        def own() -> Tensor:
            total = self._density.clipped_gradient_sum(theta, self._max_norm)[self._read]
            return total + std * self._gaussian(len(total)) if std else total

        return self._owners.gradient_sum(own, self._read) if self._owners else own()

    def _potential_gradient(self, total: Tensor, theta: Tensor) -> Tensor:
        """∇U in the coordinates that records read; the prior's part is exact."""
        prior = self._prior.log_density_and_gradient(theta)[1][self._read]
        return -(total.to(theta.dtype) + prior)

    def _halton(self) -> float:
        """The radical inverse of the iteration's number in base 2, shifted modulo 1."""
        value, digit, rest = self._shift, 0.5, self._iteration
        while rest:
            value, digit, rest = value + digit * (rest & 1), digit / 2, rest >> 1
        return value % 1.0


def _require_gradients() -> None:
    """Refuse where torch cannot differentiate: in inference mode, and in a process that was forked
    after torch had started threads for backward passes. It starts them in the first pass if there
    is a GPU, and in deeply nested passes. A forked process does not have them.
    """
    if torch.is_inference_mode_enabled():
        raise StateError(
            "torch computes no gradients under torch.inference_mode(): call MCMC.run outside of it."
            " Nothing was released."
        )
    with torch.enable_grad():
        one = torch.ones((), requires_grad=True)
        try:
            torch.autograd.grad(one * one, one)
        except RuntimeError as error:
            raise StateError(
                "this chain was forked from a process that had computed gradients, so it cannot"
                ' compute gradients: pass mp_context="spawn" to MCMC. Nothing was released.',
                code="forked",
            ) from error


def checked_jitter(jitter: float) -> float:
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise ArgumentError(f"jitter is a share of step_size, between 0 and 1; got {jitter!r}.")
    return float(jitter)
