"""The noise that a published theorem prescribes, for comparison: nothing in the library adds
noise by it.
"""

from __future__ import annotations

import math

from torch_dpbayes.accounting.events import check_delta, check_epsilon


def wang_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    num_data: int,
    expected_batch_size: float,
    passes: float,
) -> float:
    r"""The noise multiplier of DP-SGLD by Wang, Fienberg and Smola (2015), to see what exact
    accounting saves.

    .. math::
        z = \frac1\varepsilon \sqrt{128\, \frac{T B}{N}\, \log\frac{5NT}{2B\delta}
        \, \log\frac2\delta}

    with N records, batches of B and T passes over the data. The paper (Theorem 4 with Algorithm 2)
    states the variance of the noise on the estimate (N/B)·Σ g of the full gradient,
    128·NTL²/(Bε²)·log(5NT/(2Bδ))·log(2/δ) for gradients of norm at most L, times the squared step
    size; here it is on the batch sum, in units of L = C: multiplied by (B/N)².

    The theorem splits ε and δ evenly over the k = NT/B steps. What that loses: strong composition
    and amplification by sampling enter as inequalities with rounded-up constants, the Gaussian
    mechanism by its tail bound, and δ is paid once a step. For B = T = √N and δ = 1e-5 the noise is
    17 to 31 times what protects the replacement of a record, the relation of the paper.
    ``free_lr``, up to which the sampler's own noise pays for privacy, shrinks by the square of
    that. The library therefore calibrates with :func:`torch_dpbayes.get_noise_multiplier` and
    charges what was really added; use this function for comparison only.

    Source: Wang, Fienberg and Smola (2015), "Privacy for free: posterior sampling and stochastic
    gradient Monte Carlo", Theorem 4.

    Args:
        target_epsilon: ε of the whole run.
        target_delta: δ of the whole run.
        num_data: number of records N.
        expected_batch_size: B.
        passes: T, how often the data are gone through; need not be whole.

    Returns:
        Noise standard deviation on the sum of the batch's clipped gradients / clip norm.

    Raises:
        ValueError: an argument is out of range, or T < ε²N/(32·B·log(2/δ)): below it the theorem
            claims nothing, because one step alone would cost more than its amplification by
            sampling allows.

    **Privacy.** A number from public numbers: nothing is released or charged.
    """
    epsilon, delta = check_epsilon(target_epsilon), check_delta(target_delta)
    if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
        raise ValueError(
            f"num_data must be a positive integer, the public number of records; got {num_data!r}"
        )
    if not 0 < expected_batch_size <= num_data:
        raise ValueError(
            f"expected_batch_size must be positive and at most num_data = {num_data}, got"
            f" {expected_batch_size}"
        )
    fewest = epsilon**2 * num_data / (32 * expected_batch_size * math.log(2 / delta))
    if not fewest <= passes < math.inf:
        raise ValueError(
            f"passes = {passes} is outside what the theorem covers, at least {fewest:.3g} at"
            f" epsilon = {epsilon:g}, delta = {delta:g} and this batch size. get_noise_multiplier"
            " has no such limit."
        )
    steps = num_data * passes / expected_batch_size
    variance = (
        128
        * passes
        * expected_batch_size
        / num_data
        * math.log(2.5 * steps / delta)
        * math.log(2 / delta)
    )
    return math.sqrt(variance) / epsilon
