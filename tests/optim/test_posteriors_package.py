"""The samplers against those of ``posteriors``, where no privacy is asked for."""

import functools
import math
import warnings

import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from torch_dpbayes.optim import DPSGHMC, DPSGLD, DPSGNHT

# of a comparison, not of the library
pytestmark = pytest.mark.thorough


@functools.cache
def published():
    """``posteriors``, which takes seconds to load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pytest.importorskip("posteriors")


SIGMAS = 5.0  # two-sided 6e-7

# -- ours and posteriors' on a Gaussian ------------------------------------------------------------

REPLICAS = 20_000  # independent coordinates for each curvature
N, LR, FRICTION, T = 4, 0.05, 0.2, 1.0
CURVATURES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
DATA = torch.tensor([-0.4, 0.1, 0.3, 0.9], dtype=torch.float64)


def final_ours(kind, steps, **options):
    """Full batch, nothing clipped, z = z_L: the states after ``steps``, (curvatures, replicas)."""
    theta = nn.Parameter(torch.full((3, REPLICAS), DATA.mean().item(), dtype=torch.float64))
    optimizer = kind(
        [theta],
        LR,
        assume_independent_records=True,
        num_data=N,
        expected_batch_size=N,
        max_grad_norm=1e9,
        prior_std=math.inf,
        temperature=T,
        **options,
    )
    for _ in range(steps):
        theta.grad_sample = CURVATURES[:, None] * (theta.detach() - DATA[:, None, None])
        optimizer.step()
    assert optimizer.effective_noise_multiplier == optimizer.langevin_noise_multiplier
    return theta.detach()


def final_theirs(name, steps):
    """The same of ``posteriors``, whose parametrisation is another.

    It is given the potential U/N at temperature T/N, where its SGLD's lr is our η. SGHMC and SGNHT
    move by θ ← θ + εm, m ← (1 − εA)m − ε∇U/N + N(0, 2εAT/N), so that εm is our velocity, η = ε² and
    1 − momentum = εA. The new position takes the *old* momentum, which is Euler's explicit scheme
    (ours takes the new one), and SGNHT's friction follows m², the energy at the end of the step,
    with a gain of ηT/N.
    """

    def log_posterior(theta, _batch):
        return -(
            CURVATURES[:, None] * (theta - DATA[:, None, None]).square()
        ).sum() / 2 / N, torch.empty(0)

    start = torch.full((3, REPLICAS), DATA.mean().item(), dtype=torch.float64)
    if name == "sgld":
        transform = published().sgmcmc.sgld.build(log_posterior, lr=LR, temperature=T / N)
    else:
        step = math.sqrt(LR)
        build = getattr(published().sgmcmc, name).build
        transform = build(
            log_posterior, lr=step, alpha=FRICTION / step, temperature=T / N, momenta=0.0
        )
    state = transform.init(start)
    for _ in range(steps):
        state, _ = transform.update(state, None)
    return state.params


def autoregression(first, second, noise):
    """Variance and the first two autocovariances of x_t = first·x_{t−1} + second·x_{t−2} +
    N(0, noise).
    """
    variance = noise * (1 - second) / ((1 + second) * ((1 - second) ** 2 - first**2))
    after_one = variance * first / (1 - second)
    return variance, after_one, first * after_one + second * variance


NOISE = 2 * FRICTION * LR * T / N  # of SGHMC and SGNHT, in one velocity


def our_dynamics(curvature, friction):
    """v ← (1−α)v − ηκθ + noise, θ ← θ + v: variance of θ, and of the velocity at the half
    step, (v + v')/2.
    """
    variance, one, two = autoregression(2 - friction - LR * curvature, friction - 1, NOISE)
    return variance, (variance - two) / 2


def their_dynamics(curvature, friction):
    """θ ← θ + v and v ← (1−α)v − ηκθ + noise, both from the old values: variances of θ and of v."""
    variance, one, _ = autoregression(2 - friction, friction - 1 - LR * curvature, NOISE)
    return variance, 2 * (variance - one)


def thermostat(dynamics):
    """The friction at which the kinetic energy, over all curvatures, is that of temperature T."""

    def excess(friction):
        return sum(dynamics(float(k), friction)[1] for k in CURVATURES) / 3 - LR * T / N

    return brentq(excess, 0.11, 0.9)  # explicit Euler needs more friction than ηκ = 0.1


def laws(name):
    """Variance of ours and of theirs for each curvature."""
    if name == "sgld":
        exact = [T / (N * float(k)) / (1 - LR * float(k) / 2) for k in CURVATURES]
        return exact, exact
    alphas = (
        [FRICTION] * 2
        if name == "sghmc"
        else [thermostat(our_dynamics), thermostat(their_dynamics)]
    )
    return tuple(
        [dynamics(float(k), alpha)[0] for k in CURVATURES]
        for dynamics, alpha in zip((our_dynamics, their_dynamics), alphas)
    )


@pytest.mark.chance(12 * 6e-7)
@pytest.mark.parametrize(
    ("name", "kind", "options", "steps"),
    [
        ("sgld", DPSGLD, {}, 400),
        ("sghmc", DPSGHMC, {"momentum": 1 - FRICTION}, 400),
        ("sgnht", DPSGNHT, {"momentum": 1 - FRICTION, "thermostat_gain": LR * T / N}, 400),
    ],
)
@pytest.mark.slow
def test_without_privacy_ours_match_posteriors(name, kind, options, steps):
    """SGLD is the same chain. SGHMC and SGNHT are discretised differently: the ratio of the
    variances is known, and is what is found.
    """
    ours, theirs = final_ours(kind, steps, **options), final_theirs(name, steps)
    error = math.sqrt(2 / REPLICAS)  # of a variance, relative
    for a, b, law_a, law_b in zip(ours, theirs, *laws(name)):
        assert abs(a.mean() - b.mean()).item() < SIGMAS * math.sqrt((law_a + law_b) / REPLICAS)
        assert abs(a.var().item() / law_a - 1) < SIGMAS * error
        assert abs(b.var().item() / law_b - 1) < SIGMAS * error
        assert abs((a.var() / b.var()).item() / (law_a / law_b) - 1) < SIGMAS * math.sqrt(2) * error


def test_the_known_differences_to_posteriors():
    """Ours is nearer to the target T/(κN); both have the same limit, η → 0 and for the
    end-step thermostat friction → 0, too.
    """
    for k in map(float, CURVATURES):
        target, ek = T / (k * N), LR * k
        ours, theirs = our_dynamics(k, FRICTION)[0], their_dynamics(k, FRICTION)[0]
        assert ours / target == pytest.approx(1 / (1 - ek / (2 * (2 - FRICTION))))
        m = 1 - FRICTION
        assert theirs / target == pytest.approx(
            (1 - m) / (1 - m - ek) * (1 + m + ek) / (1 + m + ek / 2)
        )
        assert abs(ours / target - 1) < 0.2 * abs(theirs / target - 1)
    assert thermostat(our_dynamics) == pytest.approx(FRICTION)  # the half-step energy is exact
    for k in map(float, CURVATURES):  # the end-step energy holds T(1 − (α − ηκ)/2)
        alpha = thermostat(their_dynamics)
        position, velocity = their_dynamics(k, alpha)
        assert position * k * N == pytest.approx(velocity * N / LR * (1 - (alpha - LR * k) / 2))
