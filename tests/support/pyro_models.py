"""Pyro models with one term a record."""

import pyro
import pyro.distributions as dist
import pytest
import torch


def weights(name, *shape):
    return pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))


def gaussian_rows(x):
    mean = weights("mean", x.shape[1])
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 0.5).to_event(1), obs=x)


def ordered(x, y):
    slope, cut = (
        weights("slope"),
        pyro.sample("cut", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1)),
    )
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(slope * x, torch.cumsum(cut.exp(), 0)), obs=y)


def gaussian(y, mean, size=None, name="data", scale=1.0):
    with pyro.plate(name, len(y) if size is None else size):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


slogdet_raises = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="torch 2.12 gives NaN as the derivative of slogdet at 0, where 2.14 raises",
)


def singular_where_made_up(x):
    """Has terms everywhere. Around w = -30 gradients fail at made-up rows, not at x > 25."""
    w = pyro.sample("w", dist.Normal(torch.tensor(-30.0), 1.0))
    with pyro.plate("data", len(x)):
        matrix = torch.relu(w + 10 + x)[:, None, None] * torch.eye(2)
        log_det = torch.linalg.slogdet(matrix)[1]
        pyro.sample("obs", dist.Normal(log_det.clamp(-5, 50), 1.0), obs=x)


def with_and_without_a_record_that_fails(count=20):
    """Data of the model above on which all gradients are computed, and their neighbours."""
    good = 50 + torch.rand(count)
    bad = good.clone()
    bad[3] = -100.0
    return good, bad
