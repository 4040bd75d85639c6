"""The penalty algorithm for exponential families: it reads the data once, whatever the number of
iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import noise_multiplier_or_0, positive_count
from ..density import (
    InvalidPoint,
    Model,
    Prior,
    RecordStatistics,
    UnfitModel,
    prior_without_data,
)
from ..noise import check_clip_bound
from .kernel import Candidate, PrivateKernel
from .proposals import Proposal, RandomWalk


class ExponentialFamilyPenalty(PrivateKernel):
    r"""Differentially private Metropolis-Hastings for a likelihood p(x | θ) = h(x)·exp(η(θ)·s(x) −
    A(θ)).

    .. math::
        \tilde R = \Delta\eta \cdot \sum_i \mathrm{clip}_C(s(x_i)) - n\,\Delta A + \sigma\xi, \qquad
        \sigma = z\,C\,\|\Delta\eta\|, \quad \Delta\eta = \eta(\theta') - \eta(\theta), \quad
        \Delta A = A(\theta') - A(\theta)

    Accepts θ' iff log u < R̃ + log prior ratio + log proposal ratio − σ²/2. This is equivalent
    to fresh noise N(0, (zC)²I) on the sum of the sufficient statistics. Only the component of this
    noise along Δη matters, so only this component is drawn. If no s(x_i) is clipped, the stationary
    distribution is exactly the posterior. Once the sum is known, an iteration takes as long for ten
    records as for ten million.

    If n is private, too, the noise must also hide n: a record then moves Δη·Σs − nΔA by at most
    C‖Δη‖ + abs(ΔA), and σ = z·(C‖Δη‖ + abs(ΔA)).

    Source: Yıldırım and Ermiş (2019), Algorithm 3, which releases the sum itself. For a private n
    this needs √((C²+1)(‖Δη‖² + ΔA²)), which is never less than C‖Δη‖ + abs(ΔA).

    Args:
        prior: Pyro model of θ alone, without arguments, observations and parameters. The data are
            the arguments of ``MCMC.run``: tensors of one length, with one row per record.
        sufficient_statistics: a function from one record (its row of every argument) to the vector
            s(x). It runs for each record alone (``torch.func.vmap``).
        natural_parameters: a function from θ, a dict of the prior's values by site, to the vector
            η(θ).
        log_normalizer: a function from θ to the number A(θ).
        max_statistic_norm: C, the bound to which ‖s(x)‖ is clipped.
        noise_multiplier: z, noise standard deviation / clip bound. 0: no noise, charged as not
            private.
        accountant: where every iteration is charged.
        num_data: n, a public constant. None: the number of rows, which is public under replace-one,
            and gets noise under add-or-remove-one.
        proposal_scale, proposal, target_accept_prob: as in
            :class:`~torch_dpbayes.mcmc.DPPenalty`.

    Raises:
        ValueError: an argument is out of range, or, in ``MCMC.run``, the data or the functions do
            not fit together.

    **Privacy.** An iteration releases R̃, whose sum moves by the clip bound σ/z when a record is
    added or removed and by at most twice that when one is replaced: ``GaussianDpEvent(z)``, plus
    the event of ``proposal``. A record whose statistics are not finite, or cannot be computed,
    counts as s(x) = 0.
    """

    _told = (("noise_multiplier", "_multiplier"), ("max_statistic_norm", "_max_norm"))

    def __init__(
        self,
        prior: Model,
        *,
        sufficient_statistics: Callable[..., Tensor],
        natural_parameters: Callable[[dict[str, Tensor]], Tensor],
        log_normalizer: Callable[[dict[str, Tensor]], Tensor],
        max_statistic_norm: float,
        noise_multiplier: float,
        accountant: PrivacyAccountant,
        num_data: int | None = None,
        proposal_scale: float | Tensor | None = None,
        proposal: Proposal | None = None,
        target_accept_prob: float | None = 0.23,
    ) -> None:
        self._walk = RandomWalk(proposal_scale, proposal)
        super().__init__(prior, accountant, target_accept_prob, self._walk)
        self._statistics = sufficient_statistics
        self._natural, self._normalizer = natural_parameters, log_normalizer
        self._max_norm = check_clip_bound(
            "max_statistic_norm",
            max_statistic_norm,
            "the clip bound of a record's sufficient statistics",
        )
        self._multiplier = noise_multiplier_or_0(noise_multiplier)
        self._num_data = None if num_data is None else positive_count(num_data, "num_data")
        self._noised_count = num_data is None and accountant.neighboring == "add_or_remove_one"

    def _forget(self) -> None:
        super()._forget()
        self._sum: Tensor | None = None
        self._count = 0
        self._current: tuple[Tensor, float] | None = None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
        prior = prior_without_data(self.model)
        are_rows = all(isinstance(arg, Tensor) and arg.dim() for arg in args)
        if kwargs or not are_rows or len({len(arg) for arg in args}) != 1:
            raise UnfitModel(
                "pass the data as positional arguments of MCMC.run: tensors of equal length with"
                " one row per record."
            )
        is_public = self._accountant.neighboring == "replace_one"
        if is_public and self._num_data not in (None, len(args[0])):
            raise UnfitModel(
                f"num_data = {self._num_data}, but the data have {len(args[0])} rows. Under"
                " replace-one leave it out."
            )
        statistics = RecordStatistics(self._statistics, args)
        zeros = torch.zeros(prior.dimension, dtype=prior.dtype, device=prior.device)
        natural, _ = self._at(prior.constrain(zeros))
        if len(natural) != statistics.size:
            raise UnfitModel(
                f"natural_parameters has {len(natural)} entries, sufficient_statistics"
                f" {statistics.size}: each statistic needs one parameter."
            )
        self._sum = statistics.clipped_sum(self._max_norm).to(natural.device)
        self._count = self._num_data or len(args[0])
        return prior

    def _reads(self, prior: Prior) -> Tensor:
        return prior.read_by(lambda values: (self._natural(values), self._normalizer(values)))

    def _is_valid(self, theta: Tensor) -> bool:
        return self._evaluate(theta) is not None

    def _start(self, theta: Tensor) -> None:
        self._current = self._evaluate(theta)

    def _candidate(self, theta: Tensor) -> Candidate:
        assert self._sum is not None and self._current is not None
        moved, log_proposal_ratio = self._propose(self._walk, theta)
        log_prior, there = self._log_prior_there(moved), self._evaluate(moved)
        if there is None:
            raise InvalidPoint
        natural, normalizer = there[0] - self._current[0], there[1] - self._current[1]
        bound = self._max_norm * float(torch.linalg.vector_norm(natural)) + (
            abs(normalizer) if self._noised_count else 0.0
        )
        # if the norm was rounded to 0, there would be no noise on the sum
        total, known = float(natural @ self._sum) if bound else 0.0, -self._count * normalizer
        if self._noised_count:
            total, known = total + known, 0.0
        rest = log_prior - self._log_prior + log_proposal_ratio
        return Candidate(moved, log_prior, total, rest, bound, {"_current": there}, known)

    # -- functions of θ ----------------------------------------------------------------------------

    def _at(self, values: dict[str, Tensor]) -> tuple[Tensor, float]:
        natural, normalizer = self._natural(values), self._normalizer(values)
        return natural.detach().double().reshape(-1), float(normalizer)

    def _evaluate(self, theta: Tensor) -> tuple[Tensor, float] | None:
        """η and A at θ, or None if they are not finite. This does not depend on the data."""
        try:
            natural, normalizer = self._at(self._prior.constrain(theta))
        except Exception:
            return None
        is_finite = natural.isfinite().all() and math.isfinite(normalizer)
        return (natural, normalizer) if is_finite else None
