"""Priors of each parameter: by fan-in, and by name."""

import io
import math

import pytest
import torch
from support.steps import without_noise
from torch import nn

from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT

GIVEN = {
    "assume_independent_records": True,
    "num_data": 50,
    "expected_batch_size": 50,
    "max_grad_norm": 1.0,
    "noise_multiplier": 1.0,
    "temperature": 1.0,
}
INF = math.inf
FAN_IN = {
    "0.weight": math.sqrt(2 / 18),
    "0.bias": 1.0,
    "norm.weight": 1.0,
    "norm.bias": 1.0,
    "last.weight": math.sqrt(2 / 16),
    "last.bias": 1.0,
}
CASES = [
    (0.3, dict.fromkeys(FAN_IN, 0.3)),
    ("fan_in", FAN_IN),
    (
        {"last": 0.2, "last.bias": 3.0, "norm": INF, "0": "fan_in"},
        {**FAN_IN, "last.weight": 0.2, "last.bias": 3.0, "norm.weight": INF, "norm.bias": INF},
    ),
    ({"last": "fan_in"}, {**dict.fromkeys(FAN_IN, 1.0), "last.weight": FAN_IN["last.weight"]}),
]


def network():
    net = nn.Sequential()
    net.add_module("0", nn.Conv2d(2, 4, 3))
    net.add_module("norm", nn.GroupNorm(2, 4))
    net.add_module("flat", nn.Flatten())
    net.add_module("last", nn.Linear(16, 3))
    return net.double()


@pytest.mark.parametrize(("prior_std", "wanted"), CASES, ids=["number", "fan_in", "names", "one"])
@pytest.mark.parametrize("mean", [0.0, 0.7])
@pytest.mark.parametrize("is_function", [False, True])
def test_the_gradient_is_that_of_the_log_density(prior_std, wanted, mean, is_function):
    """No record's gradient, no noise: θ moves by −η∇r/N, r = −Σ log N(θ; mean, σ²)."""
    net = network()
    named = dict(net.named_parameters())

    def log_density(named):
        at = torch.tensor(mean, dtype=torch.float64)
        laws = {name: torch.distributions.Normal(at, std) for name, std in wanted.items()}
        return sum(laws[name].log_prob(p).sum() for name, p in named.items() if wanted[name] < INF)

    expected = torch.autograd.grad(log_density(named), list(named.values()), allow_unused=True)
    before = [p.detach().clone() for p in named.values()]
    stated = {"prior_std": prior_std, "prior_mean": mean}
    stated = {"log_prior": log_density} if is_function else stated
    optimizer = DPSGLD(net.named_parameters(), 0.1, **stated, **GIVEN)
    without_noise(optimizer, 0.0)
    for p in named.values():
        p.grad_sample = torch.zeros(50, *p.shape, dtype=p.dtype)
    optimizer.step()
    for p, old, gradient in zip(named.values(), before, expected, strict=True):
        move = torch.zeros_like(p) if gradient is None else 0.1 / 50 * gradient
        torch.testing.assert_close(p.detach(), old + move, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fisher", ["full", "diagonal"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fisher_scoring_takes_the_precision_of_each_parameter(fisher, scaled):
    """The first step is −2T(T·A + K)⁻¹Nĝ with A = NC²FFᵀ + diag(1/σ²)."""
    net = nn.Linear(3, 2).double()
    size = sum(p.numel() for p in net.parameters())
    scale = torch.rand(size, dtype=torch.float64) + 0.5 if scaled else None
    optimizer = DPSGFS(
        net.named_parameters(),
        0.1,
        fisher=fisher,
        prior_std={"weight": 0.1, "bias": 4.0},
        sensitivity_scale=scale,
        **GIVEN,
    )
    without_noise(optimizer, 0.0)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    for p in net.parameters():
        p.grad_sample = torch.zeros(50, *p.shape, dtype=p.dtype)
    optimizer.step()
    precision = torch.tensor([100.0] * 6 + [1 / 16] * 2, dtype=torch.float64)
    unit = torch.ones(size, dtype=torch.float64) if scale is None else scale**2
    z = optimizer.effective_noise_multiplier
    step = 2 * precision * before / (50 * unit + z**2 * unit + precision)
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(after, before - step, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [DPSGLD, DPSGHMC, DPSGNHT, DPSGFS])
def test_steps_checkpoints_and_changes(make):
    net = network()
    stated = {"norm": INF, "last": 0.5}
    optimizer = make(net.named_parameters(), 0.01, prior_std=stated, **GIVEN)

    def step(of, model):
        for p in model.parameters():
            p.grad_sample = torch.zeros(50, *p.shape, dtype=p.dtype)
        of.step()
        return of._layout.groups[0].prior_stds

    assert step(optimizer, net) == [1.0, 1.0, INF, INF, 0.5, 0.5]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = network()
    resumed = make(other.named_parameters(), 0.01, **GIVEN)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert step(resumed, other) == [1.0, 1.0, INF, INF, 0.5, 0.5]
    resumed.param_groups[0]["prior_std"]["last.bias"] = 2.0
    assert step(resumed, other) == [1.0, 1.0, INF, INF, 0.5, 2.0]


@pytest.mark.parametrize(
    ("prior_std", "kind", "message"),
    [
        ("fan-in", TypeError, 'a number, "fan_in", or a dictionary'),
        (None, TypeError, 'a number, "fan_in", or a dictionary'),
        ({"0": "wide"}, TypeError, 'a number, "fan_in", or a dictionary'),
        ({"0": 0.0}, ValueError, "prior_std must be positive"),
        (math.nan, ValueError, "prior_std must be positive"),
        ({"first": 1.0}, ValueError, "'first', which is no parameter and no module"),
        ({"0.wei": 1.0}, ValueError, "'0.wei', which is no parameter and no module"),
    ],
)
def test_bad_priors(prior_std, kind, message):
    with pytest.raises(kind, match=message):
        DPSGLD(network().named_parameters(), 0.1, prior_std=prior_std, **GIVEN)


def test_names_are_needed_for_a_dictionary_and_a_log_prior_replaces_it():
    with pytest.raises(ValueError, match=r"model.named_parameters\(\)"):
        DPSGLD(network().parameters(), 0.1, prior_std={"0": 1.0}, **GIVEN)
    for prior_std in ("fan_in", {"0": 1.0}):
        with pytest.raises(ValueError, match="leave out prior_std"):
            DPSGLD(
                network().named_parameters(),
                0.1,
                prior_std=prior_std,
                log_prior=lambda named: sum(p.sum() for p in named.values()),
                **GIVEN,
            )
