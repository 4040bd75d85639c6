"""Hybrid runs: one posterior sample, then a chain."""

import math
from functools import partial

import pytest
import torch
from support.ledgers import later_job
from support.one_draw import problem
from support.refusals import refused
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.ops.models import Limits

FAMILIES = {"gaussian": {"noise_std": 0.5}, "bernoulli": {}, "poisson": {"max_count": 4.0}}


def run_hybrid(**options):
    x, y = options.pop("data", None) or problem(200)
    settings = {
        "certificate": ops.FiniteRunLangevin(steps=50),
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.05),
        "epsilon": 2.0,
        "delta": 1e-5,
        "epochs": 2,
        "batch_size": 40,
    }
    return ops.hybrid(options.pop("model", None) or ops.GLM(), x, y, **{**settings, **options})


def test_of_a_job_that_came_later_no_target_is_promised(tmp_path):
    budget = {"neighboring": "replace_one", "path": tmp_path / "budget.db"}
    PrivacyAccountant(5.0, 1e-5, **budget).compose(GaussianDpEvent(100.0)).close()
    later, run = later_job(**budget), ops.FiniteRunLangevin(steps=5)
    with refused("budget-whole"):
        ops.OnePosteriorSample(ops.GLM(), run, 1.0, 1e-5, later).sample(*problem())
    with pytest.raises(dpb.errors.ArgumentError):
        run_hybrid(accountant=later)
    held = len(later)
    ops.OnePosteriorSample(ops.GLM(prior_std=0.1), run, accountant=later).sample(*problem())
    assert len(later) == held + 1 and later.get_epsilon() <= 5.0
    later.close()


@pytest.mark.parametrize(
    ("method", "share", "optimizer", "lr"),
    [
        ("pld", 0.9, dpb.optim.DPSGNHT, 0.05),
        ("rdp", 0.2, dpb.optim.DPSGLD, 0.05),
        # a chain that is noisy by the accountant, not by itself: the budget is used up
        ("rdp", 0.5, dpb.optim.DPSGLD, 30.0),
    ],
)
def test_start_and_chain_together_keep_the_target(method, share, optimizer, lr):
    accountant = PrivacyAccountant(neighboring="replace_one", method=method)
    chain = partial(optimizer, lr=lr)
    run = run_hybrid(start_share=share, optimizer=chain, accountant=accountant)
    assert (0.995 if lr == 30.0 else 0.0) * 2.0 <= accountant.get_epsilon(1e-5) <= 2.0
    assert len(accountant) == 1 + 2 * 5 and run.accountant is accountant
    alone = PrivacyAccountant(neighboring="replace_one", method=method)
    alone.compose(accountant.history[0].event)
    assert alone.get_epsilon(1e-5) <= share * 2.0 * (1 + 1e-9)
    assert len(run.samples) == 5 and run.start["weights"].shape == (3,)
    rates = run.samples.predict(run.module, 50 * torch.randn(4, 3), transform=torch.sigmoid)
    assert rates.shape == (4,) and ((rates > 0) & (rates < 1)).all()


@pytest.mark.chance(2e-8)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_of_the_chain_descends_the_potential_of_the_model(family):
    """From the start, on all records: loss, scale and prior of the chain are those of the GLM. The
    noise that is left has a standard deviation of 1, where prior and likelihood are hundreds.
    """
    x = torch.randn(2000, 3, dtype=torch.float64)
    y = (3.0 if family == "poisson" else 1.0) * (x[:, 0] > 0)
    for prior_std in (0.03, torch.tensor([0.03, 0.7, 2.0])):
        glm = ops.GLM(family, prior_std=prior_std, **FAMILIES[family])
        run = run_hybrid(
            model=glm,
            data=(x, y),
            epsilon=1e12,
            max_grad_norm=100.0,
            certificate=ops.FiniteRunLangevin(steps=20, max_grad_norm=100.0),
            optimizer=partial(dpb.optim.DPSGLD, lr=2e-3, temperature=0.0),
            epochs=1,
            batch_size=len(x),
        )
        start = run.start["weights"]
        slope = glm.target((x, y), Limits(1.0, 100.0)).gradient(start)
        moved = run.module.weights.detach().reshape(-1) - start
        assert glm.prior_precision.max() * start[0] > 100
        assert float((moved * len(x) / 2e-3 + slope).abs().max()) < 6


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_a_record_stops_a_hybrid_run(family):
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    x[:4, 1] = y[4:8] = torch.tensor([math.nan, math.inf, -math.inf, 1e300])
    glm = ops.GLM(family, **FAMILIES[family])
    run = run_hybrid(model=glm, data=(x, y), batch_size=40, epochs=3)
    assert torch.isfinite(run.module.weights).all() and len(run.accountant) == 4
    rates = {"transform": torch.exp} if family == "poisson" else {}
    assert torch.isfinite(run.samples.predict(run.module, x[:4], **rates)).all()
    assert run.samples.noise_std == FAMILIES[family].get("noise_std")
    assert "ASSUMED" not in run.guarantee


def test_a_run_that_does_not_fit_any_more_is_refused_before_its_start():
    """Others charge after the noise was calibrated; or the caller's budget is below the target."""

    class Late(dpb.optim.DPSGLD):
        def __init__(self, *arguments, **options):
            late.compose(GaussianDpEvent(1.0), 3)
            super().__init__(*arguments, **options)

    late = PrivacyAccountant(neighboring="replace_one")
    with pytest.raises((PrivacyBudgetExceeded, dpb.errors.ArgumentError)):
        run_hybrid(accountant=late, optimizer=partial(Late, lr=0.05))
    assert len(late) == 3
    small = PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    with pytest.raises(PrivacyBudgetExceeded):
        run_hybrid(accountant=small)
    assert len(small) == 0


def test_where_the_number_of_records_is_private_a_hybrid_run_is_refused():
    accountant = PrivacyAccountant()
    with pytest.raises(dpb.errors.ArgumentError, match="replace_one"):
        run_hybrid(accountant=accountant)
    assert len(accountant) == 0


WRONG = [
    *({"start_share": value} for value in (0.0, 1.0)),
    *({"batch_size": value} for value in (0, 300)),
    {"epochs": 0},
    {"model": nn.Linear(3, 1)},
    {"optimizer": partial(dpb.optim.DPSGNHT, lr=1e9)},
    {"max_grad_norm": -1.0},
]


def test_nothing_is_charged_when_a_hybrid_run_cannot_begin():
    accountant = PrivacyAccountant(neighboring="replace_one")
    for options in WRONG:
        with pytest.raises(dpb.errors.DPBayesError):
            run_hybrid(accountant=accountant, **options)
            pytest.fail(f"accepted: {options}")
    assert len(accountant) == 0
