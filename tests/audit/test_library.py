"""The library audits itself: what it states is not refuted, and is where faults are made."""

from functools import partial

import numpy as np
import pytest
import torch
from support.audits import FAULTS, STATED, audited_with

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.audit import from_scores

CAUGHT = [name for name in FAULTS if name[0] not in "12"]  # of one or two charges, not always


@pytest.mark.chance(0.01, looks=4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUGHT)
def test_faults_are_caught(fault):
    """They double μ at least, of which the bound shows three fifths and more in all but one of a
    hundred thousand runs; a sound run, whose canaries are records 100 times longer than the clip
    norm, is refuted in one of a hundred, and shows more than a third of ε.
    """
    (result,) = audited_with(fault)
    assert result.epsilon == pytest.approx(STATED)
    assert result.is_refuted is not fault.startswith("none")
    assert result.epsilon_lower_bound > STATED / 3 or fault == "none, by differences"


FAR = 1e6  # of a record whose ratios and gradients are all clipped
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
def test_no_certificate_of_a_draw_states_too_little(name):
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
    audit = partial(from_scores, draw.numpy(), included, accountant=accountant, delta=1e-5)
    assert not audit(bound="independent", confidence=1 - 1e-7).is_refuted
    bound = "basic" if name == "bounded" else "independent"
    result = audit(bound=bound, confidence=0.99)
    assert result.epsilon_lower_bound > share * result.epsilon
