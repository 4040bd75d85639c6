"""DP-SGLD against closed forms: theory of a linear-Gaussian target, and torch.optim.SGD at
temperature 0.
"""

import math

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

import torch_dpbayes as dpb

# independent chains, one coordinate each; a variance estimate has relative standard error sqrt(2 /
# REPLICAS) = 0.3 %
REPLICAS = 200_000
SIGMAS = 5.0  # two-sided 6e-7 for each of the handful of estimates here


def final_states(lr, *, curvature=1.0, records=4, steps=40, spread=0.3, **options):
    """States after ``steps`` of full-batch DP-SGLD on U = Σ_i κ/2 (θ − x_i)² − log prior, in
    independent coordinates.
    """
    theta = nn.Parameter(torch.zeros(REPLICAS, dtype=torch.float64))
    x = spread * torch.arange(records, dtype=torch.float64)[:, None]
    options = {
        "prior_std": math.inf,
        "max_grad_norm": 1e9,
        "expected_batch_size": records,
        **options,
    }
    optimizer = dpb.optim.DPSGLD(
        [theta], lr, assume_independent_records=True, num_data=records, **options
    )
    for _ in range(steps):
        theta.grad_sample = curvature * (theta.detach() - x)
        optimizer.step()
    return theta.detach(), optimizer, x.mean().item()


def assert_gaussian(sample, mean, variance):
    n = len(sample)
    assert abs(sample.mean().item() - mean) < SIGMAS * math.sqrt(variance / n)
    assert abs(sample.var().item() / variance - 1) < SIGMAS * math.sqrt(2 / n)


@pytest.mark.chance(2e-6)
def test_prior_is_exact():
    lr, records, curvature, std, prior_mean = 0.1, 4, 1.0, 0.5, -2.0
    sample, _, data_mean = final_states(
        lr, curvature=curvature, records=records, prior_std=std, prior_mean=prior_mean, steps=150
    )
    precision = records * curvature + 1 / std**2
    mean = (records * curvature * data_mean + prior_mean / std**2) / precision
    assert_gaussian(sample, mean, 1 / precision / (1 - lr * precision / records / 2))


def test_log_prior_is_the_same_prior():
    def log_prior(parameters):
        return -0.5 * (((parameters["theta"] + 2.0) / 0.5) ** 2).sum()

    records = 4
    theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    twin = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    common = {
        "assume_independent_records": True,
        "num_data": records,
        "expected_batch_size": records,
        "max_grad_norm": 1.0,
        "temperature": 0.0,
    }
    a = dpb.optim.DPSGLD([("theta", theta)], 0.1, log_prior=log_prior, **common)
    b = dpb.optim.DPSGLD([twin], 0.1, prior_std=0.5, prior_mean=-2.0, **common)
    for _ in range(5):
        for p, optimizer in ((theta, a), (twin, b)):
            p.grad_sample = torch.ones(records, 3, dtype=torch.float64) * p.detach()
            optimizer.step()
    torch.testing.assert_close(theta, twin)
    assert theta.abs().max() > 0.1


def test_prior_mean_is_released_from_the_batch_size():
    """The prior is divided by N and the clipped sum by the expected batch size, whatever
    batch came.
    """
    theta = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    optimizer = dpb.optim.DPSGLD(
        [theta],
        0.5,
        assume_independent_records=True,
        num_data=100,
        expected_batch_size=10,
        max_grad_norm=1e3,
        temperature=0.0,
        prior_std=2.0,
        sampling="poisson",
    )
    theta.grad_sample = torch.ones(7, 2, dtype=torch.float64)
    optimizer.step()
    expected = 3.0 - 0.5 * (7 / 10 + 3.0 / 4 / 100)
    torch.testing.assert_close(theta.detach(), torch.full((2,), expected, dtype=torch.float64))


def test_free_lr_is_where_both_noises_meet():
    theta = nn.Parameter(torch.zeros(2))
    common = {
        "assume_independent_records": True,
        "num_data": 1000,
        "expected_batch_size": 50,
        "max_grad_norm": 0.7,
        "noise_multiplier": 1.3,
        "temperature": 0.8,
    }
    optimizer = dpb.optim.DPSGLD([theta], 0.1, **common)
    at_free = dpb.optim.DPSGLD([theta], optimizer.free_lr, **common)
    assert at_free.langevin_noise_multiplier == pytest.approx(1.3)
    assert optimizer.free_lr == pytest.approx(2 * 0.8 * 50**2 / (1000 * 0.7**2 * 1.3**2))
    assert math.isinf(
        dpb.optim.DPSGLD(
            [theta],
            0.1,
            assume_independent_records=True,
            num_data=10,
            expected_batch_size=10,
            max_grad_norm=1.0,
        ).free_lr
    )


def test_temperature_zero_is_torch_sgd_step_for_step():
    torch.set_default_dtype(torch.float64)
    try:
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        twin = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        twin.load_state_dict(net.state_dict())
        x, y = torch.randn(12, 5), torch.randint(3, (12,))
        hooked = GradSampleModule(net)
        ours = dpb.optim.DPSGLD(
            net.parameters(),
            0.3,
            assume_independent_records=True,
            num_data=12,
            expected_batch_size=12,
            max_grad_norm=1e6,
            temperature=0.0,
            prior_std=math.inf,
        )
        theirs = torch.optim.SGD(twin.parameters(), 0.3)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (ours, theirs)]
        for _ in range(20):
            for model, optimizer in ((hooked, ours), (twin, theirs)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            for schedule in schedules:
                schedule.step()
            for p, q in zip(net.parameters(), twin.parameters()):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


def test_weight_decay_is_a_prior():
    """SGD's weight_decay λ is the Gaussian prior of standard deviation 1/√(Nλ)."""
    theta, twin = (nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64)) for _ in range(2))
    decay, records = 0.05, 8
    ours = dpb.optim.DPSGLD(
        [theta],
        0.2,
        assume_independent_records=True,
        num_data=records,
        expected_batch_size=records,
        max_grad_norm=1e6,
        temperature=0.0,
        prior_std=1 / math.sqrt(records * decay),
    )
    theirs = torch.optim.SGD([twin], 0.2, weight_decay=decay)
    for _ in range(10):
        theta.grad_sample = theta.detach().expand(records, 4) * 0.3
        twin.grad = twin.detach() * 0.3
        ours.step()
        theirs.step()
    torch.testing.assert_close(theta, twin)
