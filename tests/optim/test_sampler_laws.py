"""What DP-SGHMC, DP-SGNHT and DP-SGFS sample, against closed forms; and that each published mistake
would be seen.

Full batch and nothing clipped unless said otherwise. Replicas are coordinates of one parameter, so
an estimate of a variance from R of them has a relative standard error of √(2/R). All tolerances are
5 of them, two-sided 6e-7 for each estimate, and there are about fifty of those. Where the law is
exactly Gaussian, it is compared as a whole: Kolmogorov-Smirnov at 1e-6 for each of about thirty
tests.
"""

import math

import pytest
import scipy.stats
import torch
from support.steps import without_noise
from torch import nn

from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.per_sample.hooks import HooksGradientSource

REPLICAS = 20_000
RECORDS = 4
SIGMAS = 5.0


def data(records, clip, batch=None):
    """What a sampler is told of batches; all records are one unless another size is given."""
    return {
        "num_data": records,
        "expected_batch_size": records if batch is None else batch,
        "max_grad_norm": clip,
        "assume_independent_records": True,
    }


class GivenGradients(HooksGradientSource):
    """Σ g_i as a function of the parameter, on ``records`` records; nothing is clipped."""

    def __init__(self, sum_of_gradients, records):
        super().__init__()
        self.sum_of_gradients, self.records = sum_of_gradients, records

    def add_clipped_sum(
        self, named_parameters, max_grad_norm, out, *, scale=None, second_moment=None
    ):
        for (_, p), o in zip(named_parameters, out):
            o.add_(self.sum_of_gradients(p).flatten())
        return self.records

    def discard(self, parameters):
        pass


def sampled(
    kind,
    lr,
    *,
    curvatures=(1.0,),
    noise=1.0,
    temperature=1.0,
    steps=300,
    replicas=REPLICAS,
    **options,
):
    """States after ``steps`` on U/N = Σ κ/2 θ², of shape (replicas, number of curvatures);
    ``noise`` in units of SGLD's own.
    """
    kappa = torch.tensor(curvatures, dtype=torch.float64)
    theta = nn.Parameter(torch.zeros(replicas, len(kappa), dtype=torch.float64))
    own = math.sqrt(2 * RECORDS * temperature / lr)  # z_L of SGLD at C = 1
    optimizer = kind(
        [theta],
        lr,
        **data(RECORDS, 1.0),
        prior_std=math.inf,
        temperature=temperature,
        noise_multiplier=noise * own,
        **options,
    )
    optimizer.release.source = GivenGradients(lambda p: RECORDS * kappa * p, RECORDS)
    for _ in range(steps):
        optimizer.step()
    return theta.detach(), optimizer


def relative_error(sample, variance):
    return float(sample.square().mean() / variance - 1)


def tolerance(number):
    return SIGMAS * math.sqrt(2 / number)


def assert_normal(sample, variance):
    """The whole law, N(0, variance), and its variance within five standard errors, at 20,000
    replicas 5 %.
    """
    assert abs(relative_error(sample, variance)) < tolerance(sample.numel())
    assert (
        scipy.stats.kstest(sample.flatten().numpy(), "norm", args=(0.0, math.sqrt(variance))).pvalue
        > 1e-6
    )


# -- the law of every sampler ----------------------------------------------------------------------

# η, noise in units of SGLD's own, T asked for, 1 − friction, and how the sampler is made
LAWS = {
    "SGLD": (0.8, 0.0, 0.3, 0.0, DPSGLD, {}),
    "SGLD under privacy noise": (0.2, 3.0, 1.0, 0.0, DPSGLD, {}),
    "SGHMC": (0.5, 0.0, 0.3, 0.5, DPSGHMC, {"momentum": 0.5}),
    "SGHMC, little friction": (0.2, 0.0, 1.0, 0.9, DPSGHMC, {"momentum": 0.9}),
    "SGHMC, large steps": (1.5, 0.0, 2.0, 0.9, DPSGHMC, {"momentum": 0.9}),
    "SGHMC under privacy noise": (0.3, 3 * math.sqrt(0.2), 1.0, 0.8, DPSGHMC, {"momentum": 0.8}),
    **{
        f"matched, {a}": (0.1, math.sqrt(a), 1.0, 1 - a, DPSGHMC, {"momentum": "matched"})
        for a in (1.0, 0.3, 0.05)
    },
    **{
        f"SGNHT, {a}": (0.02, math.sqrt(a), t, 1 - a, DPSGNHT, {"momentum": 0.99, "steps": 1000})
        for a, t in ((0.1, 1.0), (0.5, 0.3), (1.0, 2.0))
    },
}
HOLDS_TEMPERATURE = ("matched", "SGNHT")  # whatever the privacy noise


def assert_law(name, kind=None, replicas=REPLICAS):
    """Theory: T/(κN) · 1/(1 − ηκ/(2(2 − a))) with friction a, at the temperature of the noise."""
    lr, noise, temperature, left, made, options = LAWS[name]
    theta, optimizer = sampled(
        kind or made, lr, noise=noise, temperature=temperature, replicas=replicas, **options
    )
    if not name.startswith(HOLDS_TEMPERATURE):
        temperature *= max(1.0, noise**2 / (1 - left))
    assert optimizer.effective_temperature == pytest.approx(temperature)
    if name.startswith("SGNHT"):
        assert optimizer.friction == pytest.approx(1 - left, rel=0.02)
    assert_normal(theta, temperature / RECORDS / (1 - lr / (2 * (1 + left))))


@pytest.mark.chance(2e-6)
@pytest.mark.parametrize("name", LAWS)
def test_the_law_on_a_quadratic(name):
    assert_law(name)


# -- SGHMC -----------------------------------------------------------------------------------------


def test_velocities_follow_the_step_size():
    """Where η changes, a matched velocity is rescaled by √(η_new/η_old): v' = (1 − b̂)v/2 of no
    gradient at a quarter of η, b̂ = 0.02/4.
    """
    _, optimizer = sampled(
        DPSGHMC, 0.02, noise=math.sqrt(0.02), momentum="matched", steps=3, replicas=10
    )
    ((theta,),) = (group["params"] for group in optimizer.param_groups)
    before = optimizer.state[theta]["velocity"].clone()
    optimizer.param_groups[0]["lr"] = 0.005
    optimizer.release.query.add_noise = lambda layout, smallest, stream: layout.buffer.zero_()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[theta]["velocity"], (1 - 0.005) * before / 2)


# -- SGNHT -----------------------------------------------------------------------------------------


def test_thermostat_survives_a_start_far_from_the_posterior():
    """30 posterior standard deviations away the drift's kinetic energy is a thousand times n:
    α must not leave the stable range.
    """
    x = torch.randn(1000, 10, dtype=torch.float64)
    y = x.sum(1)
    theta = nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = DPSGNHT(
        [theta],
        0.05,
        **data(1000, 20.0),
    )
    for _ in range(1000):
        theta.grad_sample = x * (x @ theta.detach() - y)[:, None]
        optimizer.step()
    assert float((theta.detach() - 1).abs().max()) < 10 / math.sqrt(1000)
    assert optimizer.friction == pytest.approx(0.1, abs=0.2)


@pytest.mark.slow
@pytest.mark.chance(2e-6)
def test_thermostat_absorbs_isotropic_minibatch_noise():
    """Noise that nobody declared, as large as the privacy noise: SGLD would sample 2T, the
    thermostat holds T.
    """
    kappa, lr, replicas = 1.0, 0.02, 50_000
    theta = nn.Parameter(torch.zeros(replicas, dtype=torch.float64))
    z = 0.5 * math.sqrt(2 * RECORDS / lr)
    optimizer = DPSGNHT(
        [theta],
        lr,
        **data(RECORDS, 1.0),
        prior_std=math.inf,
        noise_multiplier=z,
        temperature=1.0,
        momentum=0.99,
    )
    optimizer.release.source = GivenGradients(
        lambda p: RECORDS * kappa * p + z * torch.randn_like(p), RECORDS
    )
    for _ in range(1500):
        optimizer.step()
    assert optimizer.friction == pytest.approx(2 * 0.25, rel=0.03)
    assert abs(relative_error(theta.detach(), 1 / RECORDS)) < 0.02 + tolerance(replicas)


# -- SGFS ------------------------------------------------------------------------------------------


def known_fisher(kind, information):
    """``kind`` with the true Fisher information in the place of its estimate."""

    class Known(kind):
        def _update(self, parts):
            state = self.state[self._layout.parameters[0]]
            state["fisher"], state["fisher_steps"], state["fisher_noise"] = (
                information.clone(),
                1,
                0.0,
            )
            super()._update(parts)

    return Known


def sgfs_diagonal(kind, rate, *, records=2000, replicas=20_000, temperature=1.0, scale=None):
    """Relative errors of the variance in three coordinates, records ±1/√κ so that the Fisher
    information is κ; real Poisson batches.
    """
    kappa = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64).repeat(replicas, 1)
    prior_precision = records * 0.5
    theta = nn.Parameter(torch.zeros_like(kappa))
    batch = rate * records
    # z = 1 puts the privacy noise at the curvature of the posterior
    clip = math.sqrt(records) * rate
    unit = kappa.flatten() if scale is None else kappa.flatten() / scale**2
    optimizer = known_fisher(kind, unit)(
        [theta],
        1.0,
        **data(records, clip, batch),
        noise_multiplier=1.0,
        temperature=temperature,
        prior_std=1 / math.sqrt(prior_precision),
        sampling="poisson",
        fisher="diagonal",
        fisher_share=1e6,
        sensitivity_scale=(
            None if scale is None else scale * torch.ones(kappa.numel(), dtype=torch.float64)
        ),
    )
    half = torch.full_like(kappa, records / 2)

    def poisson_sum(p):
        above, below = (
            torch.binomial(half, half.new_tensor(rate)),
            torch.binomial(half, half.new_tensor(rate)),
        )
        total = kappa * ((above + below) * p.detach() - (above - below) / kappa.sqrt())
        return total if scale is None else total / scale

    optimizer.release.source = GivenGradients(poisson_sum, records if rate == 1.0 else 0)
    optimizer.param_groups[0]["lr"] = 2 * temperature * batch**2 / (records * clip**2)  # z_L = 1
    contractions = []
    for curvature in (0.25, 1.0, 4.0):
        weight = temperature * (curvature + 0.5)
        contractions.append(
            abs(
                1
                - 2
                * weight
                / (weight + (1 - rate) / rate * curvature + (1 if scale is None else scale**2))
            )
        )
    for _ in range(5 + math.ceil(4 / -math.log(max(contractions)))):
        optimizer.step()
    exact = temperature / (records * kappa[0] + prior_precision)
    whitened = theta.detach() / exact.sqrt()
    return [relative_error(column, 1.0) for column in whitened.T], [
        scipy.stats.kstest(column.numpy(), "norm").pvalue for column in whitened.T
    ]


@pytest.mark.chance(6e-6)
@pytest.mark.parametrize("rate, temperature", [(0.05, 1.0), (0.3, 0.5), (1.0, 3.0)])
def test_fisher_scoring_samples_the_posterior_covariance(rate, temperature):
    errors, pvalues = sgfs_diagonal(DPSGFS, rate, temperature=temperature)
    assert max(map(abs, errors)) < tolerance(20_000), errors
    assert min(pvalues) > 1e-6, pvalues


@pytest.mark.chance(2e-6)
def test_fisher_scoring_with_a_sensitivity_scale():
    errors, _ = sgfs_diagonal(DPSGFS, 0.5, scale=2.0)
    assert max(map(abs, errors)) < tolerance(20_000), errors


def correlated(dimension):
    rotation = torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64))[0]
    return (rotation * torch.linspace(0.5, 2.0, dimension, dtype=torch.float64)) @ rotation.T


def test_one_full_step_is_the_formula():
    """θ − 2T(T·A + K)⁻¹Nĝ with two groups, a non-flat prior and an F, the long way round."""
    dimension, records, rate, temperature = 5, 300, 0.2, 0.7
    information = correlated(dimension)
    theta = [
        nn.Parameter(torch.randn(2, dtype=torch.float64)),
        nn.Parameter(torch.randn(3, dtype=torch.float64)),
    ]
    before = torch.cat([p.detach().clone() for p in theta])
    scale = torch.rand(dimension, dtype=torch.float64) + 0.3
    stds, lrs, clip = (0.3, 0.05), (0.1, 0.4), 3.0
    units = scale.diag()
    inside = torch.linalg.solve(units, torch.linalg.solve(units, information).T)
    optimizer = known_fisher(DPSGFS, inside)(
        [{"params": [p], "lr": lr, "prior_std": std} for p, lr, std in zip(theta, lrs, stds)],
        1.0,
        **data(records, clip, rate * records),
        temperature=temperature,
        sampling="poisson",
        fisher_share=1e9,
        sensitivity_scale=scale,
    )
    released = []
    add_noise = optimizer.release.query.add_noise

    def recording(layout, smallest, stream):
        add_noise(layout, smallest, stream)
        released.append(layout.gradient.clone())

    optimizer.release.query.add_noise = recording
    gradients = torch.randn(60, dimension, dtype=torch.float64)
    theta[0].grad_sample, theta[1].grad_sample = gradients[:, :2], gradients[:, 2:]
    optimizer.step()
    wanted = [60 / clip * math.sqrt(2 * temperature / (lr * records)) for lr in lrs]
    z = torch.tensor(wanted, dtype=torch.float64).repeat_interleave(torch.tensor([2, 3]))
    precision = (
        torch.tensor(stds, dtype=torch.float64).repeat_interleave(torch.tensor([2, 3])) ** -2
    )
    posterior = records * information + torch.diag(precision)
    noise = units @ torch.diag((z * clip / rate) ** 2) @ units.T
    covariance = (1 - rate) / rate * records * information + noise
    gradient = records * released[0] + precision * before
    expected = before - 2 * temperature * torch.linalg.solve(
        temperature * posterior + covariance, gradient
    )
    torch.testing.assert_close(
        torch.cat([p.detach() for p in theta]), expected, rtol=1e-6, atol=1e-9
    )


def test_a_group_at_lr_0_stays_and_the_others_step_without_it():
    """Of a correlated Fisher information the block of the others is inverted, as if the noise of
    the group that stays were infinite.
    """
    information, records, temperature = correlated(5), 300, 0.7
    theta = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (2, 3)]
    before = [p.detach().clone() for p in theta]
    optimizer = known_fisher(DPSGFS, information)(
        [{"params": [p], "lr": 0.1} for p in theta],
        1.0,
        **data(records, 3.0),
        temperature=temperature,
        noise_multiplier=0.5,
        prior_std=0.1,
        fisher_share=1e9,
    )
    optimizer.param_groups[1]["lr"] = 0.0
    without_noise(optimizer)
    gradients = 0.1 * torch.randn(records, 5, dtype=torch.float64)
    theta[0].grad_sample, theta[1].grad_sample = gradients[:, :2], gradients[:, 2:]
    z = optimizer._multiplier(optimizer.param_groups[0])
    optimizer.step()
    identity = torch.eye(2, dtype=torch.float64)
    posterior = records * information[:2, :2] + 100 * identity
    gradient = gradients[:, :2].sum(0) + 100 * before[0]
    step = torch.linalg.solve(temperature * posterior + (z * 3.0) ** 2 * identity, gradient)
    torch.testing.assert_close(theta[0].detach(), before[0] - 2 * temperature * step)
    assert torch.equal(theta[1].detach(), before[1])


def fisher_scoring_chain(kind, steps, *, dimension=3, records=2000, z=3.0, **options):
    """Covariance ratios along the principal axes of the posterior, from one chain on real
    per-record gradients of a Gaussian mean.
    """
    curvature = correlated(dimension)
    x = torch.randn(records, dimension, dtype=torch.float64)
    x -= x.mean(0)
    # covariance exactly I
    x = torch.linalg.solve_triangular(torch.linalg.cholesky(x.T @ x / records), x.T, upper=False).T
    x = x @ torch.linalg.cholesky(torch.linalg.inv(curvature)).T
    clip = 1.2 * float((x @ curvature).norm(dim=1).max())
    theta = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))
    optimizer = kind(
        [theta],
        1e4,
        **data(records, clip),
        noise_multiplier=z,
        prior_std=0.03,
        **options,
    )
    samples = []
    for _ in range(steps):
        theta.grad_sample = (theta.detach() - x) @ curvature
        optimizer.step()
        samples.append(theta.detach().clone())
    sample = torch.stack(samples[steps // 5 :])
    values, vectors = torch.linalg.eigh(
        records * curvature + torch.eye(dimension, dtype=torch.float64) / 0.03**2
    )
    whitened = (sample @ vectors) * values.sqrt()
    return whitened.square().mean(0), whitened


def effective_size(chain):
    """Of an autoregressive chain's squares, from the first autocorrelation of each column:
    the smallest.
    """
    centred = chain.square() - chain.square().mean(0)
    correlation = ((centred[1:] * centred[:-1]).mean(0) / centred.square().mean(0)).clamp(min=0)
    return len(chain) * float(((1 - correlation) / (1 + correlation)).min())


@pytest.mark.slow
def test_fisher_scoring_with_its_own_noisy_estimate():
    """Covariance within 10 % of the posterior's once the estimate has settled, at privacy
    noise well above what the gradient is worth.
    """
    ratios, chain = fisher_scoring_chain(DPSGFS, 6000)
    assert float((ratios - 1).abs().max()) < 0.1 + tolerance(effective_size(chain))


def assert_fisher_noise(kind):
    """W: σ_F on the diagonal, σ_F/√2 off it, and M symmetric."""
    dimension, z, clip, share = 40, 0.7, 1.5, 0.25
    theta = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))
    optimizer = kind(
        [theta],
        1e9,
        **data(10, clip),
        noise_multiplier=z,
        fisher_share=share,
        fisher_decay=0.0,
    )
    sums = []
    for step in range(30):
        theta.grad_sample = torch.zeros(10, dimension, dtype=torch.float64)
        optimizer.step()
        weight = max(1.0, 1 / (step + 2))  # decay 0: the estimate is the last M/B
        sums.append(optimizer.state[theta]["fisher"] * 10 / weight)
    noise = torch.stack(sums) / (z * clip**2 / math.sqrt(share))
    torch.testing.assert_close(noise, noise.mT)
    diagonal = noise.diagonal(dim1=1, dim2=2)
    above = noise[:, *torch.triu_indices(dimension, dimension, 1)]
    assert abs(relative_error(diagonal, 1.0)) < tolerance(diagonal.numel())
    assert abs(relative_error(above, 0.5)) < tolerance(above.numel())


@pytest.mark.chance(2e-6)
def test_the_fisher_noise_is_symmetric_and_of_its_size():
    assert_fisher_noise(DPSGFS)


def test_the_fisher_estimate_starts_at_its_largest():
    """Î of the first step is C²·I: the first step is θ − 2T(T·A + K)⁻¹Nĝ with it, and the
    estimate forgets it as 1/(t+2).
    """
    clip, records = 0.8, 50
    theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = DPSGFS(
        [theta],
        0.1,
        **data(records, clip),
        noise_multiplier=0.5,
        temperature=1.0,
        prior_std=math.inf,
    )
    without_noise(optimizer)
    gradient = torch.full((records, 3), 0.1, dtype=torch.float64)
    theta.grad_sample = gradient
    z = optimizer.effective_noise_multiplier
    optimizer.step()
    expected = -2 * records * 0.1 / (records * clip**2 + (z * clip) ** 2)
    torch.testing.assert_close(theta.detach(), torch.full_like(theta, expected))
    moment, identity = (
        torch.full((3, 3), 0.01, dtype=torch.float64),
        torch.eye(3, dtype=torch.float64),
    )
    torch.testing.assert_close(optimizer.state[theta]["fisher"], (clip**2 * identity + moment) / 2)
    theta.grad_sample = gradient
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[theta]["fisher"], (clip**2 * identity + 2 * moment) / 3
    )


@pytest.mark.parametrize("fisher", ["full", "diagonal"])
def test_the_floor_is_the_noise_left_in_the_estimate(fisher):
    """Eigenvalues below s√(2d), entries below s√2, are raised to it; s² follows the average:
    s² ← (1−β)²s² + β²(σ_F/B)².
    """
    dimension, records, clip, share, beta = 3, 50, 0.8, 0.5, 0.125
    theta = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))
    optimizer = DPSGFS(
        [theta],
        0.1,
        **data(records, clip),
        noise_multiplier=0.5,
        temperature=1.0,
        prior_std=math.inf,
        fisher=fisher,
        fisher_share=share,
        fisher_decay=1 - beta,
    )
    without_noise(optimizer)
    left = 0.01
    level = left * math.sqrt(2 * dimension if fisher == "full" else 2)
    values = torch.tensor([-1.0, 0.5 * level, 3 * level], dtype=torch.float64)
    rotation = (
        torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64))[0]
        if fisher == "full"
        else torch.eye(3, dtype=torch.float64)
    )
    estimate = (rotation * values) @ rotation.T
    state = {
        "fisher": estimate if fisher == "full" else values,
        "fisher_steps": 1000,
        "fisher_noise": left**2,
    }
    optimizer.state[theta].update(
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
    )
    theta.grad_sample = torch.full((records, dimension), 0.1, dtype=torch.float64)
    z = optimizer.effective_noise_multiplier
    optimizer.step()
    raised = (rotation / (records * values.clamp(min=level) + (z * clip) ** 2)) @ rotation.T
    torch.testing.assert_close(
        theta.detach(), -2 * records * raised @ torch.full((dimension,), 0.1, dtype=torch.float64)
    )
    added = (z * clip**2 / math.sqrt(share) / records) ** 2
    assert optimizer.state[theta]["fisher_noise"] == pytest.approx(
        (1 - beta) ** 2 * left**2 + beta**2 * added
    )
