"""Latents with an entry for each group, of which a record reads one."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.ops.pyro_model import model_of_module

RECORDS, GROUPS, SLOPES = 30, 7, 2


def data(*more):
    group = torch.randint(GROUPS, (RECORDS,))
    return (group, torch.randn(RECORDS, SLOPES), *more, torch.randint(2, (RECORDS,)).float())


def normal(*shape):
    return dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))


def observed(logits, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def intercepts(group, x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", GROUPS):
        effect = pyro.sample("effect", dist.Normal(0.0, scale))
    observed(effect[group] + x @ pyro.sample("slope", normal(SLOPES)), y)


def slopes_too(group, x, y):
    effect, slope = pyro.sample("effect", normal(GROUPS)), pyro.sample("slope", normal(GROUPS))
    observed(effect[group] + slope[group] * x[:, 0], y)


def rows(group, x, y):
    weights = pyro.sample("weights", normal(GROUPS, SLOPES))
    observed((weights[group] * x).sum(1), y)


def columns(group, x, y):
    weights = pyro.sample("weights", normal(SLOPES, GROUPS))
    observed((weights[:, group].T * x).sum(1), y)


def pairs(group, x, y):
    """Of a home and an away team."""
    strength = pyro.sample("strength", normal(GROUPS))
    observed(strength[group] - strength[group.flip(0) if y is None else (group + 1) % GROUPS], y)


def crossed(group, x, other, y):
    """Other groups, as many, that go with any of these."""
    one, two = pyro.sample("one", normal(GROUPS)), pyro.sample("two", normal(GROUPS))
    observed(one[group] + two[other] * x[:, 0], y)


def intercept_too(group, x, y):
    """What all groups have in common may as well be in the intercept."""
    effect, mean = pyro.sample("effect", normal(GROUPS)), pyro.sample("mean", normal(1))
    observed(mean + effect[group], y)


def not_centred(group, x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    effect, mean = pyro.sample("effect", normal(GROUPS)), pyro.sample("mean", normal(1))
    observed(mean + scale * effect[group], y)


def classes(group, y):
    """The gradients of a group's classes add up to 0: that is another matter."""
    weights = pyro.sample("weights", normal(GROUPS, 3))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(logits=weights[group]), obs=y.long())


def both_dimensions(group, x, y):
    """Entries on the diagonal belong to one group along either dimension."""
    effect, matrix = pyro.sample("effect", normal(3)), pyro.sample("matrix", normal(3, 3))
    observed(effect[group % 3] + matrix[group % 3, group % 3], y)


def none(group, x, y):
    observed(x @ pyro.sample("slope", normal(SLOPES)), y)


def constant(group, x, y):
    """One of two entries is read by every record."""
    weights = pyro.sample("weights", normal(2))
    observed(weights[0] * x[:, 0], y)


def groups_of(model, *more):
    density = RecordDensity(model, data(*more), count_is_public=True)
    names = density.prior.unflatten(torch.arange(density.prior.dimension))
    return density.groups(), names


@pytest.mark.parametrize(
    "model, expected",
    [
        (intercepts, lambda at: at["effect"][:, None]),
        (slopes_too, lambda at: torch.stack([at["effect"], at["slope"]], 1)),
        (rows, lambda at: at["weights"]),
        (columns, lambda at: at["weights"].T),
        (both_dimensions, lambda at: torch.cat([at["effect"][:, None], at["matrix"]], 1)),
        (pairs, lambda at: None),
        (intercept_too, lambda at: None),
        (not_centred, lambda at: None),
        (none, lambda at: None),
        (constant, lambda at: None),
    ],
)
def test_what_belongs_to_one_group_is_found(model, expected):
    found, at = groups_of(model)
    wanted = expected(at)
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert torch.equal(found, wanted)


def test_classes_of_each_group_are_found():
    group, y = torch.randint(GROUPS, (RECORDS,)), torch.randint(3, (RECORDS,))
    density = RecordDensity(classes, (group, y), count_is_public=True)
    assert density.groups().shape == (GROUPS, 3)


def test_groups_that_cross_and_go_with_each_other_are_none():
    def model(group, x, other, y):
        one, two = pyro.sample("one", normal(GROUPS)), pyro.sample("two", normal(GROUPS + 1))
        observed(one[group] + two[other], y)

    found, _ = groups_of(model, torch.randint(GROUPS + 1, (RECORDS,)))
    assert found is None


def test_groups_that_cross_are_not_taken_for_the_same():
    found, at = groups_of(crossed, torch.randint(GROUPS, (RECORDS,)))
    assert torch.equal(found, at["one"][:, None])


def test_the_layers_of_a_network_are_no_groups():
    net = nn.Sequential(nn.Linear(SLOPES, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))
    model = model_of_module(net, lambda outputs, y: (outputs - y).square(), 1.0)
    density = RecordDensity(model, data()[1:], count_is_public=True)
    assert density.groups() is None
