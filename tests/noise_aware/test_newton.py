"""Which likelihood a run of Newton's method hands on, on sums that are known."""

import math

import pytest
import torch

from torch_dpbayes.noise_aware import newton
from torch_dpbayes.noise_aware.planning import general_plan
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.response import LinearResponse, OuterProductResponse

DOUBLE = torch.float64
SIZE = 12


class QuadraticSums:
    """Gradients F(θ − centre), of bound 1."""

    gradient_bound = curvature_bound = 1.0
    dimension = SIZE

    def __init__(self, level, num_records, of_gradients):
        self.curvature = level * torch.eye(SIZE, dtype=DOUBLE)
        self.num_records, self.curvature_is_of_gradients = num_records, of_gradients
        self.site, self.groups = torch.zeros(SIZE, dtype=torch.int64), None

    def is_valid(self, theta):
        return True

    def gradient_sum(self, theta):
        return self.curvature @ (theta - 0.1)

    def curvature_sum(self, theta):
        gradient = self.gradient_sum(theta)
        own = self.curvature_is_of_gradients / self.num_records
        return self.curvature + own * gradient.outer(gradient)

    def clipped_count(self, theta):
        return 0


def run(level, num_records, multiplier, of_gradients=True):
    sums = QuadraticSums(level, num_records, of_gradients)
    plan = general_plan(
        multiplier, SIZE, num_records, "add_or_remove_one", clips=sums.curvature_is_of_gradients
    )
    prior = GaussianPrior(torch.zeros(SIZE, dtype=DOUBLE), torch.ones(SIZE, dtype=DOUBLE))
    return newton.run_general(sums, plan, prior, num_records)


def test_hidden_directions_are_told_the_noise_that_the_matrix_has(monkeypatch):
    """And not what shrinkage leaves of it. 78 entries a run, of five runs: six standard errors."""
    calls = []
    monkeypatch.setattr(newton, "with_hidden_levels", lambda *given: calls.append(given))
    runs = 0
    while len(calls) < 5:  # one run in forty is not sure enough of the level
        run(400.0, 10_000, 15.0, of_gradients=False)
        runs += 1
        assert runs < 20
    squares = []
    for _, _, released, noise_std, *_ in calls:
        error = (released - 400 * torch.eye(SIZE, dtype=DOUBLE)) / noise_std
        squares += [*error.diagonal().square(), *(2 * error.tril(-1).square()).flatten()]
    mean = float(torch.stack([s for s in squares if s]).mean())
    assert mean == pytest.approx(1.0, abs=6 * math.sqrt(2 / (5 * 78)))


@pytest.mark.parametrize(
    "num_records, level, kind",
    [(20, 2.0, OuterProductResponse), (10_000, 100.0, LinearResponse)],
)
def test_the_mean_of_few_gradients_is_in_the_response(monkeypatch, num_records, level, kind):
    responses = []

    class Noted(newton.Surrogate):
        def __init__(self, gradients, response, *more):
            responses.append(response)
            super().__init__(gradients, response, *more)

    monkeypatch.setattr(newton, "Surrogate", Noted)
    _, transcript = run(level, num_records, 4.0)
    # of every step, of the estimate and of all levels
    assert len(responses) > len(transcript.gradients) + 1
    assert {type(response) for response in responses} == {kind}
