"""DP-penalty: Metropolis-Hastings on noisy log-likelihood ratios, corrected for the noise."""

from __future__ import annotations

from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import noise_multiplier_or_0
from ..density import Model
from .kernel import Candidate, PrivateKernel
from .proposals import Proposal, RandomWalk


class DPPenalty(PrivateKernel):
    r"""Differentially private random-walk Metropolis-Hastings with the penalty correction.

    .. math::
        \tilde R = \sum_i \mathrm{clip}_{\pm c d}\big(\log p(x_i|\theta') - \log p(x_i|\theta)\big)
        + \sigma\xi, \qquad
        \sigma = z c d, \quad d = \|\theta' - \theta\|

    Accepts θ' iff log u < R̃ + log prior ratio + log proposal ratio − σ²/2, u uniform. σ is equal
    in both directions. So the stationary distribution is exactly the posterior if no ratio is
    clipped (Ceperley and Dewing 1999). d is the distance in unconstrained space, where the prior
    has the Jacobian terms, over the coordinates on which the likelihood depends. The other
    coordinates move without cost. One iteration moves farthest for its cost at σ ≈ 2.4. Then 23 %
    of small steps are accepted if all have the same length. Short steps have less noise. So of
    steps with Gaussian lengths more are accepted: 28 % in 5 dimensions, 35 % in 2, 44 % in one.

    Source: Yıldırım and Ermiş (2019), Algorithm 1; the clipped form is DP-penalty in Räisä, Koskela
    and Honkela (2021).

    Args:
        model: Pyro model with one vectorised data plate, see
            :class:`~torch_dpbayes.density.RecordDensity`.
        proposal_scale: standard deviation of the random walk: a number, or a tensor (dimension,)
            for each coordinate on which the likelihood depends (sites sorted by name), or a lower
            triangular factor (dimension, dimension) of its covariance. It must be public, or
            computed from earlier releases.
        log_ratio_slope: c, the clip bound of one record's log-likelihood ratio for each unit of
            distance. Clip few records: clipping a twentieth of them moved the posterior of a
            Poisson regression by 1.7 standard deviations.
        noise_multiplier: z, noise standard deviation / clip bound. 0: no noise, charged as not
            private.
        accountant: where every iteration is charged.
        data_plate: name of the data plate.
        proposal: a :class:`Proposal` instead of the random walk; leave out ``proposal_scale``. It
            is not adapted.
        target_accept_prob: acceptance rate that warm-up adapts the random walk's scale to. None: no
            adaptation.

    Raises:
        ValueError: an argument is out of range, or, in ``MCMC.run``, the model is not fit for it.

    **Privacy.** An iteration releases R̃, whose sum moves by c·d when a record is added or removed
    and by 2c·d when one is replaced, whatever θ and θ' are: ``GaussianDpEvent(z)``, plus the event
    of ``proposal``. Warm-up and rejected proposals are charged, too.
    """

    _told = (("noise_multiplier", "_multiplier"), ("log_ratio_slope", "_slope"))

    def __init__(
        self,
        model: Model,
        *,
        proposal_scale: float | Tensor | None = None,
        log_ratio_slope: float,
        noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        proposal: Proposal | None = None,
        target_accept_prob: float | None = 0.23,
    ) -> None:
        self._walk = RandomWalk(proposal_scale, proposal)
        super().__init__(model, accountant, target_accept_prob, self._walk)
        self._read_records(log_ratio_slope, data_plate)
        self._multiplier = noise_multiplier_or_0(noise_multiplier)

    def _candidate(self, theta: Tensor) -> Candidate:
        moved, log_proposal_ratio = self._propose(self._walk, theta)
        log_prior = self._log_prior_there(moved)
        total, bound, kept = self._ratio(theta, moved)
        rest = log_prior - self._log_prior + log_proposal_ratio
        return Candidate(moved, log_prior, total, rest, bound, kept)
