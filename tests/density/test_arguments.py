"""Which arguments of a model are data."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from support.pyro_models import gaussian, gaussian_rows, weights

from torch_dpbayes.density import RecordDensity, RecordStatistics, UnfitModel

pytestmark = pytest.mark.usefixtures("double")


def test_data_have_to_be_tensors():
    with pytest.raises(TypeError):
        RecordDensity(gaussian_rows, (np.zeros((4, 2)),))

    def model(y, batch):
        gaussian(y, pyro.sample("m", dist.Normal(batch.y.mean(), 1e-3)))

    y = torch.randn(4)
    with pytest.raises(TypeError, match=r"a SimpleNamespace.*functools\.partial"):
        RecordDensity(model, (y, SimpleNamespace(y=y)))


def test_data_have_to_be_dense():
    with pytest.raises(UnfitModel, match="dense"):
        RecordDensity(gaussian_rows, (torch.eye(4).to_sparse(),))
    with pytest.raises(UnfitModel, match="dense"):
        RecordStatistics(lambda x: x, (torch.eye(4).to_sparse(),))


def pairs(k, y):
    gaussian(y, k @ weights("a", k.shape[1]))


def columns(x, y):
    gaussian(y, torch.stack(x, 1) @ weights("a", len(x)))


def test_a_matrix_of_pairs_is_refused_and_the_way_around_it_works():
    x, y, theta = torch.randn(9, 9), torch.randn(9), torch.randn(9)
    with pytest.raises(UnfitModel, match=r"unbind.*functools\.partial"):
        RecordDensity(pairs, (x @ x.T, y))
    found = RecordDensity(columns, (x.unbind(1), y), gradients=False).log_likelihoods(theta)
    torch.testing.assert_close(found, dist.Normal(x @ theta, 1.0).log_prob(y))
    bound = partial(lambda matrix, rows, y: pairs(rows @ matrix, y), x)
    RecordDensity(bound, (torch.randn(8, 9), y[:8]), gradients=False)


# --- where the number of records is private -------------------------------------------------------


def with_location(x, y, location):
    gaussian(y, x @ pyro.sample("w", dist.Normal(location, 1.0).to_event(1)))


WRONG = [
    # public arguments (or means of private ones), a width, the last dimension, a constant size, two
    # lengths
    (with_location, lambda n: (torch.randn(n, 4), torch.randn(n), torch.ones(4))),
    (
        lambda x, centre: gaussian(x, pyro.sample("m", dist.Normal(centre, 1e-3))),
        lambda n: (x := torch.randn(n), x.mean()),
    ),
    (lambda x, y: gaussian(y, x @ weights("w", 3)), lambda n: (torch.randn(n, 4), torch.randn(n))),
    (lambda x: gaussian(x[0], weights("mean")), lambda n: (torch.randn(3, n or 1),)),
    (lambda x: gaussian(x[:, 0], weights("mean"), size=5), lambda n: (torch.randn(n, 3),)),
    (
        lambda x, y: gaussian(y, x @ weights("w", 4)),
        lambda n: (torch.randn(n, 4), torch.randn(n + 1)),
    ),
]


def test_a_private_number_of_records_decides_about_no_error_nor_its_text():
    for model, data in WRONG:
        texts = set()
        for n in (0, 1, 3, 4, 5, 19):
            with pytest.raises(UnfitModel) as caught:
                RecordDensity(model, data(n), count_is_public=False)
            assert caught.value.__cause__ is None
            texts.add(str(caught.value))
        assert len(texts) == 1
