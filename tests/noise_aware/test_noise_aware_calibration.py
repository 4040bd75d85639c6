"""Coverage of central intervals over simulated data sets. Significance 1e-6 a test, corrected
for two levels and for the number of cells.
"""

import math

import pytest
from calibration_noise_aware import SIMULATE, Cell, Totals, add
from scipy.stats import norm

SIGNIFICANCE = 1e-6
MISFIT = 0.04  # of the approximations, which is what coverage may be wrong by


def coverage_errors(cell: Cell, data_sets: int) -> dict[float, tuple[float, float]]:
    """How far the coverage at each level lies from nominal, and its standard error."""
    totals = Totals()
    for _ in range(data_sets):
        add(totals, SIMULATE[cell.model](cell), 0.0)
    found = {}
    for level, name in ((0.5, "inside_50"), (0.9, "inside_90")):
        mean = getattr(totals, name) / data_sets
        variance = max(
            getattr(totals, f"{name}_squared") / data_sets - mean**2, level * (1 - level) / 8
        )
        found[level] = mean - level, math.sqrt(variance / data_sets)
    return found


def assert_calibrated(cell: Cell, data_sets: int, comparisons: int) -> None:
    threshold = norm.isf(SIGNIFICANCE / (2 * comparisons))
    for error, standard_error in coverage_errors(cell, data_sets).values():
        assert abs(error) < MISFIT + threshold * standard_error


def test_a_small_cell_covers():
    assert_calibrated(Cell("logistic", 1000, 1.0), 15, 2)


CELLS = [
    Cell("logistic", 1_000, 0.3),
    Cell("logistic", 1_000, 1.0, 3.0),
    Cell("logistic", 10_000, 1.0),
    Cell("logistic", 10_000, 1.0, 3.0),
    Cell("logistic", 10_000, 1.0, neighboring="replace_one"),
    Cell("logistic", 10_000, 1.0, features="binary"),
    Cell("logistic", 10_000, 1.0, features="student"),
    Cell("pyro_logistic", 10_000, 1.0),
    Cell("pyro_logistic", 10_000, 1.0, 3.0),
    Cell("pyro_logistic", 10_000, 1.0, 3.0, "correlated"),
    Cell("hierarchical", 10_000, 1.0),
    Cell("linear", 10_000, 0.3),
    Cell("linear", 10_000, 3.0),
    Cell("poisson", 10_000, 1.0),
    Cell("beta_bernoulli", 1_000, 0.1),
    Cell("beta_bernoulli", 10_000, 3.0),
]


DATA_SETS = {"beta_bernoulli": 400, "hierarchical": 30}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_intervals_cover_what_they_say(cell):
    assert_calibrated(cell, DATA_SETS.get(cell.model, 150), 2 * len(CELLS))
