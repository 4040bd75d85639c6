"""Channels made equally strong, by a release whose charge is that of its noise."""

import math

import pytest
import torch
from scipy.stats import norm

import torch_dpbayes as dpb
from torch_dpbayes.heads import whitening

DOUBLE = torch.float64


def accountant(**options):
    return dpb.PrivacyAccountant(8.0, 1e-5, **options)


def exact(features):
    """The sum of normalised second moments, record by record."""
    total = torch.zeros(features.shape[1], features.shape[1], dtype=DOUBLE)
    for record in features.double():
        columns = record.flatten(1)
        moments = columns @ columns.T
        total += moments / moments.trace()
    return total


def test_it_is_the_inverse_root_of_the_released_moments(monkeypatch):
    features = torch.randn(50, 4, 3) * torch.tensor([9.0, 1.0, 1.0, 0.1])[:, None]
    monkeypatch.setattr(whitening, "noisy_matrix", lambda total, std, draws: total)
    found = dpb.heads.private_whitening(
        features, accountant=dpb.PrivacyAccountant(), noise_multiplier=1e-9, floor=0.01
    )
    total = exact(features)
    values, vectors = torch.linalg.eigh(total + 0.01 * total.trace() / 4 * torch.eye(4))
    wanted = (vectors * values.rsqrt()) @ vectors.T
    wanted /= torch.linalg.matrix_norm(wanted, 2)
    torch.testing.assert_close(found.matrix, wanted.float(), rtol=1e-4, atol=1e-6)


def test_whitened_channels_vary_alike_and_rows_have_one_norm():
    """4,000 records of six positions: the moments are known to a few hundredths."""
    turn = torch.linalg.qr(torch.randn(5, 5)).Q
    mixing = turn * torch.tensor([3.0, 1.0, 1.0, 0.5, 0.3])
    features = torch.einsum("dc,ncp->ndp", mixing, torch.randn(4000, 5, 6))
    found = dpb.heads.private_whitening(
        features, accountant=dpb.PrivacyAccountant(), noise_multiplier=0.1, floor=0.0
    )(features)
    moments = exact(found) / 4000 * 5
    torch.testing.assert_close(moments, torch.eye(5, dtype=DOUBLE), rtol=0, atol=0.2)
    torch.testing.assert_close(found.flatten(1).norm(dim=1), torch.full((4000,), math.sqrt(30)))


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_the_charge_is_that_of_a_gaussian_whose_bound_no_record_passes(neighboring):
    """Closed form: mu = 1/z where a record is added, √2/z where one is replaced."""
    mine = accountant(neighboring=neighboring)
    dpb.heads.private_whitening(torch.randn(20, 3, 2), accountant=mine, noise_multiplier=4.0)
    mu = (1.0 if neighboring == "add_or_remove_one" else math.sqrt(2)) / 4.0
    epsilon = mine.get_epsilon(1e-5)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)
    assert len(mine) == 1


HOSTILE = {
    "infinite": torch.full((3, 4), math.inf, dtype=DOUBLE),
    "not a number": torch.tensor([[math.nan, 1.0, 1.0, 1.0]] * 3, dtype=DOUBLE),
    "huge": torch.full((3, 4), 1e300, dtype=DOUBLE),
    "large": torch.full((3, 4), 1e15, dtype=DOUBLE),
    # the square of the first is the smallest number that there is, those of the others are zero
    "tiny": torch.tensor([[2.3e-162] + [1.5e-162] * 3] + [[1.5e-162] * 4] * 2, dtype=DOUBLE),
    "denormal": torch.full((3, 4), 5e-324, dtype=DOUBLE),
    "zero": torch.zeros(3, 4, dtype=DOUBLE),
    "one channel": torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4], dtype=DOUBLE),
}


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.first_cases(8)
def test_no_record_moves_the_moments_by_more_than_1(record):
    others = torch.randn(5, 3, 4, dtype=DOUBLE)
    without = whitening._second_moments(others)
    apart = whitening._second_moments(torch.cat([others, HOSTILE[record][None]])) - without
    assert float(torch.linalg.matrix_norm(apart)) <= 1 + 1e-9
    assert bool(without.isfinite().all())


def test_the_noise_is_what_is_charged():
    """Of 400 releases of nothing: variances of the diagonal z², off it z²/2, by chi-square; it
    fails in fewer than one run in 10⁶.
    """
    found = []

    def caught(total, std, draws):
        found.append(noisy(total, std, draws))
        return found[-1]

    noisy = whitening.noisy_matrix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whitening, "noisy_matrix", caught)
        for _ in range(400):
            dpb.heads.private_whitening(
                torch.zeros(2, 3, 2), accountant=dpb.PrivacyAccountant(), noise_multiplier=5.0
            )
    draws = torch.stack(found)
    of_diagonal = draws.diagonal(dim1=1, dim2=2).square().sum() / 25.0
    off = draws[:, [0, 0, 1], [1, 2, 2]].square().sum() / 12.5
    for statistic in (of_diagonal, off):
        assert abs(float(statistic) - 1200) < 5 * math.sqrt(2 * 1200)


def test_a_budget_stops_it_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(whitening, "noisy_matrix", lambda *_: pytest.fail("drawn"))
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        dpb.heads.private_whitening(
            torch.randn(20, 3, 2),
            accountant=dpb.PrivacyAccountant(0.1, 1e-5),
            noise_multiplier=1.0,
        )


def test_head_and_whitening_share_one_budget():
    images, labels = torch.randn(300, 6, 4), torch.randint(0, 3, (300,))
    mine = dpb.PrivacyAccountant(3.0, 1e-5)
    whiten = dpb.heads.private_whitening(images, accountant=mine)
    head = dpb.heads.PrivateLinear(
        3, method=dpb.heads.SGHMC(epochs=2, batch_size=100), accountant=mine
    )
    posterior = head.fit(whiten(images).flatten(1), labels)
    assert 2.9 < mine.get_epsilon(1e-5) <= 3.0
    assert posterior.predict(whiten(images).flatten(1)).shape == (300, 3)


def test_half_precision_and_other_widths():
    features = torch.randn(30, 4, 2).half()
    whiten = dpb.heads.private_whitening(features, accountant=accountant())
    assert whiten(features).dtype == torch.half
    assert whiten(features[:, :, 0]).shape == (30, 4)
    with pytest.raises(ValueError, match="is of 4 channels"):
        whiten(torch.randn(3, 5, 2))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"features": torch.randn(5)}, "n, channels"),
        ({"features": torch.randint(0, 2, (5, 3))}, "floating-point"),
        ({"features": torch.empty(0, 3)}, "with records"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be positive"),
        ({"floor": -1.0}, "floor must be finite"),
    ],
)
@pytest.mark.first_cases(6)
def test_what_is_out_of_range_is_refused_and_nothing_is_charged(options, words):
    mine = accountant()
    with pytest.raises(ValueError, match=words):
        dpb.heads.private_whitening(**{"features": torch.randn(5, 3), "accountant": mine} | options)
    assert len(mine) == 0


def test_without_an_accountant_it_says_which():
    with pytest.raises(TypeError, match="the head the same one"):
        dpb.heads.private_whitening(torch.randn(5, 3), accountant="mine")
