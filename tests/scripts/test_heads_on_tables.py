"""A row of the private heads' table on records that come with scikit-learn."""

import pytest

pytest.importorskip("sklearn")

import heads_on_tables


@pytest.mark.thorough
def test_a_run_has_four_predictors_of_one_budget():
    found = heads_on_tables.run("", "wine", 50.0, 0)["rows"]
    assert [row["predictor"] for row in found] == list(heads_on_tables.PREDICTORS)
    for row in found:
        assert row["accuracy"] > 0.6  # a third by chance; 36 test records
        assert 49 < row["spent"] <= 50


def test_rows_are_bounded_and_parts_are_apart():
    data = heads_on_tables.load("digits", 0, "")
    assert float(data.x.norm(dim=1).max()) <= 1 + 1e-6
    assert len(data.x) + len(data.x_test) == 1797
