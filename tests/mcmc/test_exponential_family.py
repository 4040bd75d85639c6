"""What the exponential-family kernel does with the data: once, clipped, record by record. Its
invariant law is tested with the other kernels'.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from scipy.stats import kstest, norm

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import ExponentialFamilyPenalty

LEVEL = 1e-6 / 4
THERE = 0.4  # where the proposal leads, from 0


def prior():
    return pyro.sample("mean", dist.Normal(0.0, 10.0))


def make(neighboring="add_or_remove_one", accountant=None, **options):
    """For x ~ N(mean, 1), with the redundant statistics (x, 2): η = (mean, 0), A = mean²/2."""
    settings = {
        "sufficient_statistics": lambda x: torch.stack([x, torch.full_like(x, 2.0)]),
        "natural_parameters": lambda theta: torch.stack([theta["mean"], torch.zeros(())]),
        "log_normalizer": lambda theta: theta["mean"] ** 2 / 2,
        "max_statistic_norm": 1e6,
        "noise_multiplier": 0.0,
        "proposal_scale": 0.1,
        "target_accept_prob": None,
        **options,
    }
    return ExponentialFamilyPenalty(
        prior, accountant=accountant or dpb.PrivacyAccountant(neighboring=neighboring), **settings
    )


class There:
    event = events.NoOpDpEvent()

    def propose(self, params):
        return {"mean": torch.tensor(THERE)}, -math.inf  # never accepted


def ratios(data, count=1, **options):
    """Noisy log-likelihood ratios between 0 and THERE."""
    kernel = make(proposal=There(), proposal_scale=None, **options)
    kernel.setup(0, data)
    for _ in range(count):
        kernel.sample({"mean": torch.tensor(0.0)})
    return kernel.diagnostics()["noisy log ratios"]


def test_the_ratio_is_that_of_the_likelihood():
    x = torch.randn(50)
    expected = norm.logpdf(x, THERE).sum() - norm.logpdf(x, 0).sum()
    # of the terms, which may cancel; one record more would change it by .08
    rounding = 1e-6 * (THERE * float(x.abs().sum()) + 50 * THERE**2 / 2)
    assert ratios(x) == [pytest.approx(expected, abs=rounding)]
    assert ratios(x, num_data=70) == [pytest.approx(expected - 20 * THERE**2 / 2, abs=rounding)]


def test_each_record_s_statistics_are_clipped_and_what_is_no_number_counts_as_zero():
    x = torch.tensor([3.0, -0.1, math.nan, math.inf, 5e30])
    bound = 2.5
    expected = (
        sum(v * min(1.0, bound / math.hypot(v, 2.0)) for v in (3.0, -0.1, 5e30)) * THERE
        - 5 * THERE**2 / 2
    )
    assert ratios(x, max_statistic_norm=bound) == [pytest.approx(expected, rel=1e-5)]


def test_a_record_whose_statistics_cannot_be_computed_counts_as_zero():
    table = torch.tensor([0.5, 1.0, 2.0])
    kernel = make(
        sufficient_statistics=lambda x: torch.stack([table[x], torch.zeros(())]), num_data=4
    )
    kernel.setup(0, torch.tensor([0, 2, 99, 2]))  # 99 is out of range
    torch.testing.assert_close(kernel._sum, torch.tensor([4.5, 0.0], dtype=torch.float64))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "neighboring, num_data, std",
    [
        ("add_or_remove_one", 20, 0.05 * THERE),
        ("add_or_remove_one", None, 0.05 * THERE + THERE**2 / 2),
        ("replace_one", None, 0.05 * THERE),
    ],
)
def test_the_noise_is_what_is_charged(neighboring, num_data, std):
    """Standard deviation = multiplier · (C‖Δη‖, and |ΔA| where the number of records is
    private); one Gaussian an iteration.
    """
    x = 0.02 * torch.randn(20).clamp(-2, 2)  # none is clipped
    settings = {
        "sufficient_statistics": lambda x: torch.stack([x, torch.zeros(())]),
        "max_statistic_norm": 0.05,
        "noise_multiplier": 0.7,
    }
    exact = norm.logpdf(x, THERE).sum() - norm.logpdf(x, 0).sum()
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    found = ratios(x, 1000, accountant=accountant, num_data=num_data, **settings)
    assert kstest(found, norm(exact, 0.7 * std).cdf).pvalue > LEVEL
    ((event, count, *_),) = accountant.history
    assert (event.noise_multiplier, count) == (0.7, 1000)


@pytest.mark.parametrize(
    "neighboring, num_data, change",
    [
        ("add_or_remove_one", 20, "leave out"),
        ("add_or_remove_one", None, "leave out"),
        ("replace_one", None, "exchange"),
    ],
)
def test_a_neighbour_moves_the_ratio_by_no_more_than_the_noise_is_scaled_to(
    neighboring, num_data, change
):
    x, bound = 10 * torch.randn(20), 2.5
    kernel = make(
        neighboring=neighboring,
        num_data=num_data,
        max_statistic_norm=bound,
        proposal=There(),
        proposal_scale=None,
    )
    other = x[1:] if change == "leave out" else torch.cat([-x[:1], x[1:]])
    found = []
    for data in (x, other):
        kernel.setup(0, data)
        kernel.sample({"mean": torch.tensor(0.0)})
        found += kernel.diagnostics()["noisy log ratios"]
    allowed = bound * THERE + (
        THERE**2 / 2 if num_data is None and neighboring == "add_or_remove_one" else 0.0
    )
    assert abs(found[0] - found[1]) <= (2 if change == "exchange" else 1) * allowed * (1 + 1e-6)


def test_the_data_are_looked_at_once():
    calls, x = [], torch.randn(30)

    def counted(row):
        calls.append(None)
        return torch.stack([row, row])

    kernel = make(sufficient_statistics=counted, noise_multiplier=1.0)
    kernel.setup(0, x)
    before, total = len(calls), kernel._sum.clone()
    x.fill_(math.nan)
    params = kernel.initial_params
    for _ in range(20):
        params = kernel.sample(params)
    assert len(calls) == before and torch.equal(kernel._sum, total)
    state = kernel.__getstate__()
    assert state["_sum"] is state["_count"] is state["_current"] is None
    kernel.cleanup()
    assert kernel._sum is None


def test_more_rows_than_are_taken_at_once(monkeypatch):
    monkeypatch.setattr("torch_dpbayes.density.record_statistics._ROWS_AT_ONCE", 7)
    x = torch.randn(50)
    kernel = make()
    kernel.setup(0, x)
    torch.testing.assert_close(
        kernel._sum, torch.stack([x.double().sum(), torch.tensor(100.0, dtype=torch.float64)])
    )


def needs_all_records(x):
    return torch.stack([x - x.mean(), x])


@pytest.mark.parametrize(
    "options, data, message",
    [
        ({}, (), "tensors of one length"),
        ({}, (torch.zeros(3), torch.zeros(4)), "tensors of one length"),
        ({}, ([1.0, 2.0],), "tensors of one length"),
        (
            {"sufficient_statistics": lambda x: x},
            (torch.zeros(3),),
            "natural_parameters has 2 entries, sufficient_statistics 1",
        ),
        ({"sufficient_statistics": lambda x: x.item()}, (torch.zeros(3),), "cannot be mapped"),
        ({"sufficient_statistics": lambda x: x[0]}, (torch.zeros(3),), "cannot be mapped"),
        ({"neighboring": "replace_one", "num_data": 5}, (torch.zeros(3),), "num_data = 5"),
        ({"proposal_scale": torch.ones(3)}, (torch.zeros(3),), "is for 3 coordinates"),
        (
            {"log_normalizer": lambda theta: theta["mean"] * math.nan},
            (torch.zeros(3),),
            "cannot be evaluated",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_a_charge(options, data, message):
    kernel = make(**options)
    with pytest.raises(ValueError, match=message):
        MCMC(kernel, num_samples=1, disable_progbar=True).run(*data)
    assert kernel.accountant.history == ()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_statistic_norm": 0.0}, "max_statistic_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"num_data": 0}, "num_data"),
        ({"num_data": 2.5}, "num_data"),
        ({"proposal_scale": None}, "either proposal_scale"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_records_cannot_see_each_other():
    """A mean over the records is one over the single record that the function is given."""
    kernel = make(sufficient_statistics=needs_all_records)
    x = torch.randn(10)
    kernel.setup(0, x)
    torch.testing.assert_close(
        kernel._sum, torch.stack([torch.zeros(()), x.sum()]).double(), atol=1e-5, rtol=1e-5
    )
