"""DP-SGLD: stochastic gradient Langevin dynamics whose noise is the privacy noise."""

from __future__ import annotations

import torch

from ..release import GroupGradient
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

    Source: Wang, Fienberg and Smola (2015), Algorithm 2. Their (4.1) has drift η and noise variance
    η, which samples temperature ½. Here the drift is η on the mean, and the noise variance 2Tη/N.

    Args:
        params: parameters, ``model.named_parameters()`` or parameter groups.
        lr: step size η on the *mean* loss, as for SGD; ``"free"`` is :attr:`free_lr`.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; the sum is divided by B, not by the number of
            records in the batch.
        max_grad_norm: clip norm C of one record's gradient of −log p, over all parameters together;
            at least 1e-12. None: C is derived, so that the sampler needs exactly
            ``noise_multiplier`` at T and the lr of construction: C = C'·z_L(C')/z for any C', the
            smallest of all groups. Then a larger ε means less clipping, not less noise. Schedules
            do not change C. Construct with the schedule's largest lr: the temperature is then
            always T, and ε stays below the target. A later, larger lr gives a temperature above T.
        noise_multiplier: z_min, the least noise std on the sum, in units of C.
        temperature: T of the target. 0: the sampler adds no noise of its own (plain DP-SGD). None:
            1 if C is derived, z_min is 0 or lr is ``"free"``, else the temperature that z_min
            gives, :attr:`effective_temperature`. If T and C are given, the larger noise is used.
        prior_std: standard deviation of the Gaussian prior; ``math.inf`` for a flat one;
            ``"fan_in"`` for √(2/fan-in) of weights (parameters with two or more dimensions; the
            fan-in is the size of one row) and 1 of biases and norms; or a dictionary by names of
            parameters or modules, ``{"0": "fan_in", "norm": math.inf}``, which needs named
            parameters: the longest matching name counts; without a match the value is 1. For SGD's
            ``weight_decay=λ`` write 1/√(Nλ).
        prior_mean: mean of the Gaussian prior.
        log_prior: ``{name: parameter} -> log p(θ)``, a scalar, instead of the Gaussian prior; needs
            named parameters. It must not use data.
        sampling: what is known about batches with B < N. ``"poisson"`` asserts that every batch is
            an independent Poisson draw at rate B/N, stepped on once (``PrivacyEngine.make_private``
            sets this and verifies it). ``"recordwise"`` asserts that whether a record is in a batch
            depends only on this record, public values and independent randomness: a hash of the
            record's name is fine, a shuffled loader is not. None asserts only that the contents of
            records do not determine which records are in a batch. The last two are charged at
            sensitivity 2C without amplification. None is refused under add-or-remove-one, because
            one added record may change whole batches. Full batches, B = N, are charged as such, and
            their length is checked. You always assert that a batch contains a record at most once:
            a record that is in it k times (a sampler with replacement) moves the sum by kC.
        accountant: where steps are charged. None: a new one, ``optimizer.accountant``.
        generator: source of the noise, for runs that repeat bit for bit; keep its seed secret.
            None: operating-system entropy.
        assume_independent_records: you vouch that each per-sample gradient in ``p.grad_sample``
            depends on one record alone. You need this for gradients that ``make_private`` did not
            record; the accountant's summary says so.

    Raises:
        ValueError: an argument is out of range; the message says what to write.

    **Privacy.** One step releases S. Adding or removing a record moves the clipped sum by at most
    C, replacing one by at most 2C. The event is ``PoissonSampledDpEvent(B/N, GaussianDpEvent(z))``
    under Poisson sampling, ``GaussianDpEvent(z)`` on full batches, on other batches
    ``UnspecifiedBatchGaussianDpEvent(z)`` (replace-one) or, with ``sampling="recordwise"``,
    ``RecordwiseBatchGaussianDpEvent(z)``; ``NonPrivateDpEvent()`` at z = 0.
    """

    def _update(self, parts: list[GroupGradient]) -> None:
        for part in parts:
            torch._foreach_add_(part.parameters, part.gradients, alpha=-float(part.group["lr"]))
