"""The models of the script run, and its table is that of its formulas."""

import math

import pyro_examples
import pytest
import torch
from reproduction import Run

from torch_dpbayes.mcmc import RecordDensity


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", pyro_examples.examples())
def test_every_model_has_a_density_at_its_truth(name):
    example = pyro_examples.examples()[name]
    density = RecordDensity(example.model, example.records(60))
    sites = {
        site: transform(torch.as_tensor(example.truth[site]))
        for site, transform in density.prior.transforms.items()
    }
    theta = density.prior.flatten(sites)
    assert math.isfinite(density.prior.log_density(theta))
    assert density.log_likelihoods(theta).isfinite().all()


def test_errors_are_in_standard_errors_of_the_difference():
    def result(mean, sd, size):
        return {"mean": mean, "sd": sd, "size": size, "warned": False, "seconds": 1.0}

    job = {"model": "a", "what": "x", "records": 5}
    both = {
        "NUTS": result([0.0, 1.0], [1.0, 2.0], [100.0, 100.0]),
        "no noise": result([0.3, 1.0], [1.1, 1.0], [50.0, 400.0]),
    }
    _, row = pyro_examples.summary([Run(job, both, 1.0, "", "")])
    assert row["error"] == pytest.approx(0.3 / math.sqrt(1 / 100 + 1.1**2 / 50))
    assert row["in sds"] == pytest.approx(0.3) and row["size"] == 50
    assert (row["narrowest"], row["widest"]) == pytest.approx((0.5, 1.1))
