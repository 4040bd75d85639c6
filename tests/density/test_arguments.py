"""Which arguments of a model are data."""

from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from support.pyro_models import (
    gaussian,
    gaussian_rows,
    weights,
)

from torch_dpbayes.density import RecordDensity, UnfitModel

pytestmark = pytest.mark.usefixtures("double")


def test_data_have_to_be_tensors():
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        RecordDensity(gaussian_rows, (np.zeros((4, 2)),))


def pairs(k, y):
    gaussian(y, k @ weights("a", k.shape[1]))


def columns(x, y):
    gaussian(y, torch.stack(x, 1) @ weights("a", len(x)))


def test_a_matrix_of_pairs_is_refused_and_the_way_around_it_works():
    x, y = torch.randn(9, 9), torch.randn(9)
    with pytest.raises(UnfitModel, match=r"two dimensions as long.*unbind.*functools\.partial"):
        RecordDensity(pairs, (x @ x.T, y))
    theta = torch.randn(9)
    found = RecordDensity(columns, (x.unbind(1), y)).clipped_gradient_sum(theta, 1e9)
    torch.testing.assert_close(found, x.T @ (y - x @ theta))
    bound = partial(lambda matrix, rows, y: pairs(rows @ matrix, y), x)
    RecordDensity(bound, (torch.randn(8, 9), y[:8]))


# --- where the number of records is private -------------------------------------------------------


def with_location(x, y, location):
    w = pyro.sample("w", dist.Normal(location, 1.0).to_event(1))
    gaussian(y, x @ w)


def of_another_length(x, y):
    gaussian(y, x @ weights("w", 3))


def of_columns(x):
    gaussian(x[0], weights("mean"))


def in_a_plate_of(x):
    gaussian(x[:, 0], weights("mean"), size=5)


WRONG = {
    "public argument": (
        with_location,
        lambda n: (torch.randn(n, 4), torch.randn(n), torch.ones(4)),
    ),
    "width": (of_another_length, lambda n: (torch.randn(n, 4), torch.randn(n))),
    "last dimension": (of_columns, lambda n: (torch.randn(3, n),)),
    "constant size": (in_a_plate_of, lambda n: (torch.randn(n, 3),)),
    "two lengths": (
        with_location,
        lambda n: (torch.randn(n, 4), torch.randn(n + 1), torch.ones(4)),
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_private_number_of_records_decides_about_no_error_nor_its_text(which):
    model, data = WRONG[which]
    texts = set()
    for n in (0, 1, 2, 3, 4, 5, 7, 8, 19, 20, 1003):
        if n == 0 and which == "last dimension":
            continue  # where dimensions after the first count as public
        with pytest.raises(UnfitModel) as caught:
            RecordDensity(model, data(n), count_is_public=False)
        assert caught.value.__cause__ is None
        texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 19, 40])
def test_any_private_number_of_records_will_do(count):
    x = torch.randn(count, 3)
    density = RecordDensity(gaussian_rows, (x,), count_is_public=False)
    theta = torch.randn(3)
    assert density.num_records == count
    expected = dist.Normal(theta, 0.5).log_prob(x).sum(1)
    torch.testing.assert_close(density.log_likelihoods(theta), expected)
    found = density.clipped_gradient_sum(theta, 1e9)
    torch.testing.assert_close(found, 4 * (x - theta).sum(0))
