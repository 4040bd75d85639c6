"""Draws while others charge the same accountant."""

import threading
import time

import pytest
from support.one_draw import (
    Interrupted,
    problem,
)

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded


def test_a_charge_that_comes_in_between_stops_the_draw():
    drawn = []

    class Noting(ops.FiniteRunLangevin):
        def draw(self, *arguments):
            drawn.append(1)
            return super().draw(*arguments)

    accountant = Interrupted(neighboring="replace_one")
    sampler = ops.OnePosteriorSample(ops.GLM(), Noting(steps=5), 1.0, 1e-5, accountant, num_data=60)
    sampler.tempering  # noqa: B018  solved before the other charge
    with pytest.raises(PrivacyBudgetExceeded, match="Nothing was drawn, but the charge stays"):
        sampler.sample(*problem(60))
    assert not drawn and len(accountant) == 4


class Slow(PrivacyAccountant):
    """So slow that all threads have looked before the first has charged."""

    def compose(self, event, count=1, label=None, adaptive=False):
        time.sleep(0.1)
        return super().compose(event, count, label, adaptive)


def test_of_many_threads_one_gets_the_draw():
    accountant = Slow(neighboring="replace_one")
    sampler = ops.OnePosteriorSample(
        ops.GLM(), ops.FiniteRunLangevin(steps=5), 1.0, 1e-5, accountant, num_data=60
    )
    sampler.tempering  # noqa: B018
    results = []

    def run():
        try:
            results.append(sampler.sample(*problem(60)))
        except PrivacyBudgetExceeded:
            results.append(None)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and sum(result is not None for result in results) == 1
    assert len(accountant) == 1 and accountant.get_epsilon(1e-5) <= 1.0
