"""What the samplers sample, against closed forms.

Replicas are coordinates of one parameter, so the variance of R of them has a relative standard
error of √(2/R); it is allowed five of them, two-sided 6e-7. The law is Gaussian and compared as a
whole, too: Kolmogorov-Smirnov at 1e-6.
"""

import math
from functools import partial

import pytest
import scipy.stats
import torch
from support.steps import bare
from torch import nn

from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.per_sample.hooks import HooksGradientSource

SIGMAS = 5.0
CURVATURE = 0.5  # of the mean loss; the prior's is as large, so that the posterior's is 1


class OnTheLine(HooksGradientSource):
    """Σ g_i of ``records`` losses κ/2·(θ ∓ 1/√κ)², half of them on either side, whose Fisher
    information is κ; each comes with probability ``rate``, for every replica anew.
    """

    def __init__(self, records, rate):
        super().__init__()
        self.records, self.rate = records, rate

    def add_clipped_sum(self, named, clip, out, *, scale=None, second_moment=None, beta=1.0):
        ((_, theta),), (o,) = named, out
        half = torch.full_like(theta, self.records / 2)
        above, below = half, half
        if self.rate < 1:
            above, below = (torch.binomial(half, half.new_tensor(self.rate)) for _ in range(2))
        place, side = theta.detach(), 1 / math.sqrt(CURVATURE)
        o.mul_(beta).add_(CURVATURE * ((above + below) * place - (above - below) * side))
        if second_moment is not None:
            squares = above * (place - side).square() + below * (place + side).square()
            second_moment.add_(CURVATURE**2 * squares)
        return self.records if self.rate == 1 else 0

    def discard(self, parameters):
        pass


def sampled(
    make,
    lr,
    noise,
    temperature,
    *,
    steps=150,
    records=4,
    rate=1.0,
    start=0.0,
    friction=None,
    replicas=20_000,
):
    """States of all replicas after so many steps; ``noise`` in units of SGLD's own."""
    theta = nn.Parameter(torch.full((replicas,), start, dtype=torch.float64))
    own = rate * math.sqrt(2 * records * temperature / lr)  # z_L of SGLD at C = 1
    numbers = {"num_data": records, "expected_batch_size": rate * records, "max_grad_norm": 1.0}
    prior = 1 / math.sqrt(records * (1 - CURVATURE))
    settings = {"prior_std": prior, "temperature": temperature, "noise_multiplier": noise * own}
    optimizer = bare([theta], make, lr, **numbers, **settings)
    if friction is not None:
        optimizer.param_groups[0]["friction"] = friction
    optimizer.release.source = OnTheLine(records, rate)
    for _ in range(steps):
        optimizer.step()
    return theta.detach(), optimizer


HMC, NHT = partial(DPSGHMC, momentum=0.9), partial(DPSGNHT, momentum=0.99)
MATCHED = partial(DPSGHMC, momentum="matched")
FISHER = partial(DPSGFS, fisher="diagonal", fisher_share=1e6, fisher_decay=0.9)
SMALL = {"records": 2000, "rate": 0.02, "steps": 400, "replicas": 3000}
# so much kinetic energy at first that a friction without bounds would explode
FAR = {"friction": 0.01, "start": 30.0, "steps": 800, "replicas": 10_000}
# η, noise in units of SGLD's own, T asked for, friction of the law, and how the sampler is made
LAWS = {
    "SGLD": (0.8, 0.0, 0.3, 1.0, DPSGLD, {"steps": 50}),
    "SGLD under privacy noise": (0.2, 3.0, 1.0, 1.0, DPSGLD, {}),
    "SGHMC": (0.5, 0.0, 0.3, 0.5, partial(DPSGHMC, momentum=0.5), {}),
    "SGHMC, large steps": (1.5, 0.0, 2.0, 0.1, HMC, {}),
    "SGHMC under privacy noise": (0.3, 3 * math.sqrt(0.1), 1.0, 0.1, HMC, {}),
    "matched, much noise": (0.1, 1.0, 1.0, 1.0, MATCHED, {}),
    "matched, little noise": (0.1, math.sqrt(0.05), 1.0, 0.05, MATCHED, {"steps": 300}),
    "SGNHT, little noise": (0.02, math.sqrt(0.1), 1.0, 0.1, NHT, {"steps": 300}),
    "SGNHT, far start": (0.02, 1.0, 2.0, 1.0, NHT, FAR),
    # noise that nobody declared, (1 − q)/q·Nκ, half of the privacy noise 2aNT/η
    "SGNHT, batches": (0.02, math.sqrt(0.5), 1.0, 0.745, NHT, SMALL),
    **{
        f"SGFS, q = {q}": (2.0, 0.0, t, None, FISHER, {"records": 2000, "rate": q, "steps": 60})
        for q, t in ((0.3, 0.5), (1.0, 3.0))
    },
}
HOLD_TEMPERATURE = ("matched", "SGNHT", "SGFS")  # whatever the privacy noise


@pytest.mark.chance(2e-6)
@pytest.mark.parametrize("name", LAWS)
def test_the_law_on_a_quadratic(name):
    """T/N·1/(1 − η/(2(2 − a))) with friction a, at the temperature of the noise; of Fisher scoring
    T/N.
    """
    lr, noise, temperature, friction, make, options = LAWS[name]
    theta, optimizer = sampled(make, lr, noise, temperature, **options)
    if not name.startswith(HOLD_TEMPERATURE):
        temperature *= max(1.0, noise**2 / friction)
    assert optimizer.effective_temperature == pytest.approx(temperature)
    if name.startswith("SGNHT"):
        assert optimizer.friction == pytest.approx(friction, rel=0.05)
    variance = temperature / options.get("records", 4)
    if friction is not None:
        variance /= 1 - lr / (2 * (2 - friction))
    assert abs(float(theta.square().mean() / variance - 1)) < SIGMAS * math.sqrt(2 / len(theta))
    standard = theta.numpy() / math.sqrt(variance)
    assert scipy.stats.kstest(standard, "norm").pvalue > 1e-6
