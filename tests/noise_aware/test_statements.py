"""What ``guarantee()`` says of the records that a posterior is of."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware

HOW = {"epsilon": 1.0, "delta": 1e-5}
SHORTENED = (
    "  features    rows longer than 2.5 (max_feature_norm) are shortened to it: the weights are"
)


def regression(x, y):
    weights = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def of_glm(x, y):
    return noise_aware.laplace(dpb.ops.GLM(max_feature_norm=2.5), x, y, **HOW)


def of_diagonal(x, y):
    model = dpb.ops.GLM(max_feature_norm=2.5)
    return noise_aware.laplace(model, x, y, curvature="diagonal", **HOW)


def of_classes(x, y):
    model = dpb.ops.Softmax(3, max_feature_norm=2.5)
    return noise_aware.laplace(model, x, y.long(), **HOW)


def of_linear_regression(x, y):
    model = noise_aware.LinearRegression(target_bound=2.0, max_feature_norm=2.5)
    return noise_aware.sufficient_statistics(model, x, y, **HOW)


def records():
    x = 4 * torch.randn(300, 2)
    return x, (x[:, 0] > 0).float()


@pytest.mark.parametrize("way", [of_glm, of_classes, of_linear_regression, of_diagonal])
def test_that_rows_are_shortened_is_said(way):
    (line,) = (s for s in way(*records()).guarantee().splitlines() if "features  " in s)
    assert line.startswith(SHORTENED)


def test_a_model_that_shortens_none_does_not_say_so():
    post = noise_aware.laplace(regression, *records(), max_grad_norm=4.0, **HOW)
    assert "shortened" not in post.guarantee()
    counts = noise_aware.sufficient_statistics(noise_aware.beta_bernoulli(), records()[1], **HOW)
    assert "shortened" not in counts.guarantee()
