"""DP-SGLD: stochastic gradient Langevin dynamics whose noise is the privacy noise."""

from __future__ import annotations

import torch

from ..release.layout import GroupGradient
from .base import PrivateOptimizer


class DPSGLD(PrivateOptimizer):
    r"""Differentially private stochastic gradient Langevin dynamics.

    .. math::
        S = \sum_{i \in \mathrm{batch}} g_i \min(1, C / \|g_i\|) + z C \xi, \qquad
        \hat g = S / B + \nabla r(\theta) / N, \qquad
        \theta \leftarrow \theta - \eta \hat g

    with z = max(``noise_multiplier``, z_L) and z_L = (B/C)·√(2T/(ηN)): at z_L the noise has the
    variance 2Tη/N that Langevin dynamics (Welling and Teh 2011) needs to sample ∝ exp(−U/T), U =
    −log prior − Σ_i log p(x_i | θ). A larger z samples the temperature ηN z²C²/(2B²). On a
    quadratic U/N of curvature κ, full batch, nothing clipped, the variance is T/(κN)·1/(1 − ηκ/2).

    Source: Wang, Fienberg and Smola (2015), Algorithm 2. Their (4.1) pairs a drift of η with a
    noise variance of η, which samples temperature ½; here it is 2Tη/N for a drift of η on the mean.

    Args:
        params: parameters, ``model.named_parameters()`` or parameter groups.
        lr: step size η on the *mean* loss, the one that SGD would take; ``"free"`` is
            :attr:`free_lr`.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; the sum is divided by it, never by the number of
            records that came.
        max_grad_norm: clip norm C of one record's gradient of −log p. None: the one at which
            ``noise_multiplier`` is the sampler's own noise, C = (B/z)·√(2T/(ηN)); ε then buys less
            clipping in the place of less noise.
        noise_multiplier: floor z_min of the noise std on the sum, in units of C.
        temperature: T. 0 turns the sampler's own noise off, which is plain DP-SGD. None: 1, or
            where ``max_grad_norm`` and a floor are given what they sample,
            :attr:`effective_temperature`.
        prior_std: standard deviation of the Gaussian prior; ``math.inf`` for a flat one,
            ``"fan_in"`` for √(2/fan-in) of weights and 1 of biases and norms, or a dictionary of
            these by the names of parameters or modules. SGD's ``weight_decay`` λ is 1/√(Nλ).
        prior_mean: its mean.
        log_prior: ``{name: parameter} -> log p(θ)`` instead of the Gaussian; must not look at data.
        sampling: ``"poisson"``, ``"recordwise"`` or None, see
            :class:`~torch_dpbayes.optim.base.PrivateOptimizer`; ``make_private`` sets it.
        accountant: where steps are charged; None: one of its own, ``optimizer.accountant``.
        generator: source of the noise; None: operating-system entropy.
        assume_independent_records: you vouch for per-sample gradients that ``make_private`` did
            not record.

    Raises:
        ValueError: an argument is out of range; the message says what would do.

    **Privacy.** One step releases S. Adding or removing a record moves the clipped sum by at most
    C, replacing one by at most 2C. The event is ``PoissonSampledDpEvent(B/N, GaussianDpEvent(z))``
    under Poisson sampling, ``GaussianDpEvent(z)`` on full batches, on any others
    ``UnspecifiedBatchGaussianDpEvent(z)`` (replace-one) or, if so stated,
    ``RecordwiseBatchGaussianDpEvent(z)``; ``NonPrivateDpEvent()`` at z = 0.
    """

    def _update(self, parts: list[GroupGradient]) -> None:
        for part in parts:
            torch._foreach_add_(part.parameters, part.gradients, alpha=-float(part.group["lr"]))
