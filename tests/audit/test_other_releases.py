"""Audits of one posterior sample, of certificates and of noisy statistics: nothing that they state
is refuted, and nearly all show more than a third of it.
"""

from functools import partial
from importlib import import_module

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.audit import from_scores
from torch_dpbayes.audit.bounds import LowerBound

DELTA = 1e-5
FAR = 1e6  # of a record whose ratios, gradients and statistics are all clipped


def check(result):
    """Above a third at 99 %, below ε at 1 − 10⁻⁷, for such a bound may be exact."""
    surely = LowerBound(result.bound, DELTA, 1 - 1e-7, is_repeated=True)(result.guesses)
    assert surely <= result.epsilon
    assert result.epsilon_lower_bound > result.epsilon / 3


# -- owners: what another one sees, with its own share subtracted ----------------------------------


# -- draws and statistics ----------------------------------------------------------------------


@pytest.mark.slow
def test_one_posterior_sample():
    """3,000 records, each along a coordinate of its own: one draw shows all of them. Not above a
    third of ε here: it is so small with that many records that 3,000 canaries hardly show it.
    """
    number = 3000
    included = np.random.default_rng().random(number) < 0.5
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    draw = ops.OnePosteriorSample(
        ops.GLM("gaussian", prior_std=1.0, noise_std=1.0),
        certificate=ops.FiniteRunLangevin(steps=30),
        accountant=accountant,
    ).sample(
        torch.eye(number, dtype=torch.float64),
        torch.where(torch.tensor(included), FAR, -FAR).double(),
    )["weights"]
    result = from_scores(
        draw.numpy(),
        included,
        epsilon=accountant.get_epsilon(DELTA),
        delta=DELTA,
        confidence=0.99,
    )
    assert not result.is_refuted


CONCAVE = ops.StronglyLogConcave(warmup_steps=100)
CERTIFICATES = {  # and the share of ε that one draw shows
    "finite run": (ops.FiniteRunLangevin(steps=60), 1 / 3),
    "concave": (CONCAVE, 1 / 3),
    "Rényi close": (
        ops.RenyiClose(CONCAVE, ops.Overdamped(400, 0.01), divergence=1e-9, order=1e5, delta=1e-6),
        1 / 3,
    ),
    "variation close": (
        ops.TotalVariationClose(CONCAVE, xi=1e-13, delta=1e-6, sampler=ops.Overdamped(400, 0.01)),
        1 / 3,
    ),
    # a draw of bounded range tells a coin with odds of e^(ε/2), so that half of ε is all there is
    "bounded": (ops.Bounded(3.0, warmup_steps=100), 1 / 5),
}


@pytest.mark.chance(1e-6)
@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFICATES)
def test_certificates(name):
    """250 posteriors of one weight in one draw, each with one record, as far up or down as records
    go: at μ = 2, 84 % of the included are guessed, and a third of ε is shown by 69 %.
    """
    certificate, share = CERTIFICATES[name]
    number = 250
    included = np.random.default_rng().random(number) < 0.5
    is_up = torch.tensor(included)
    if name == "bounded":
        model, y = ops.GLM("bernoulli", prior_std=4.0), is_up.double()
    else:
        model = ops.GLM("gaussian", prior_std=1.0, noise_std=10.0)
        y = torch.where(is_up, FAR, -FAR).double()
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    draw = ops.OnePosteriorSample(model, certificate=certificate, accountant=accountant).sample(
        torch.eye(number, dtype=torch.float64), y
    )["weights"]
    audit = partial(from_scores, draw.numpy(), included, accountant=accountant, delta=DELTA)
    assert not audit(bound="independent", confidence=1 - 1e-7).is_refuted
    bound = "basic" if name == "bounded" else "independent"
    result = audit(bound=bound, confidence=0.99)
    assert result.epsilon_lower_bound > share * result.epsilon


class Released(Exception):
    """What was released, and nothing after it."""

    def stop(self, released):
        raise Released(released)


@pytest.mark.chance(1e-6)
@pytest.mark.slow
def test_noisy_sufficient_statistics():
    """Each record moves a statistic of its own by all that is allowed: at μ = 1.67, 80 % of the
    included are guessed, and a third of ε is shown by 70 %.
    """
    number = 300
    included = np.random.default_rng().random(number) < 0.5
    accountant = dpb.PrivacyAccountant(epsilon=8.0, delta=DELTA)
    model = dpb.noise_aware.ExponentialFamily(
        lambda: pyro.sample(
            "mean", dist.Normal(torch.zeros(number, dtype=torch.float64), 1.0).to_event(1)
        ),
        statistics=lambda x: x,
        natural_parameters=lambda values: values["mean"],
        log_normalizer=lambda eta: eta.square().sum() / 2,
        max_statistic_norm=1.0,
    )
    module = import_module("torch_dpbayes.noise_aware.sufficient_statistics")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Released) as caught:
        patch.setattr(module._ClosedForm, "settle", Released.stop)
        dpb.noise_aware.sufficient_statistics(
            model,
            torch.eye(number, dtype=torch.float64)[torch.tensor(included)],
            accountant=accountant,
            num_data=number,
        )
    result = from_scores(
        caught.value.args[0].numpy(),
        included,
        accountant=accountant,
        delta=DELTA,
        confidence=0.99,
        bound="independent",
    )
    check(result)
