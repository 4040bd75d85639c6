"""Filters: limits that hold however charges are chosen, for they were fixed before the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from . import bounds, renyi
from .gaussian import gaussian_mu
from .pairs import Gaussian, Pair, dominating_mu

Budget = tuple[float, float]  # epsilon, delta


class Filter(NamedTuple):
    """A limit on an additive cost, fixed before the first release.

    kind "renyi": the Renyi divergence at one order (Feldman, Zrnic 2021, Theorem 4.3); kind
    "gaussian": mu^2 (Smith, Thakurta 2022).
    """

    kind: Literal["gaussian", "renyi"]
    order: float
    limit: float

    @classmethod
    def gaussian(cls, budget: Budget) -> Filter:
        """The filter of a budget for releases that are Gaussian."""
        return cls("gaussian", math.inf, gaussian_mu(*budget) ** 2)

    @classmethod
    def renyi(cls, budget: Budget, first: Mapping[Pair, int]) -> Filter:
        """The filter of a budget at the order that lets ``first`` happen most often: what is
        released first, which no output can have decided.
        """
        orders = orders_of(budget, 0.05, 2, 60)
        limits = renyi.allowed(*budget, orders)
        best = int(np.argmax(limits / np.maximum(renyi.curve(first, orders), 1e-300)))
        return cls.at(orders[best], budget)

    @classmethod
    def at(cls, order: float, budget: Budget) -> Filter:
        """The filter of a budget at this order."""
        return cls("renyi", order, float(renyi.allowed(*budget, [order])[0]))

    @classmethod
    def decoded(cls, code: str, budget: Budget | None) -> Filter | None:
        """The filter that :attr:`code` says; ``None`` for an empty one."""
        if not code or budget is None:
            return None
        if code == "gaussian":
            return cls.gaussian(budget)
        return cls.at(float(code.removeprefix("renyi ")), budget)

    @property
    def code(self) -> str:
        """The filter as a string."""
        return self.kind if self.kind == "gaussian" else f"renyi {self.order!r}"

    def cost(self, counts: Mapping[Pair, int]) -> float:
        """What the limit bounds, for these releases."""
        if self.kind == "gaussian":
            return math.fsum(count * dominating_mu(pair) ** 2 for pair, count in counts.items())
        return float(renyi.curve(counts, [self.order])[0])

    def epsilon(self, delta: float) -> float:
        """What the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_epsilon({Gaussian(math.sqrt(self.limit)): 1}, delta)
        return renyi.epsilon(np.array([self.limit]), delta, [self.order])

    def delta(self, epsilon: float) -> float:
        """What the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_delta({Gaussian(math.sqrt(self.limit)): 1}, epsilon)
        return renyi.delta(np.array([self.limit]), epsilon, [self.order])

    def describe(self) -> str:
        """What the limit is on, for a person."""
        return (
            "mu^2" if self.kind == "gaussian" else f"the Renyi divergence of order {self.order:.3g}"
        )


def orders_of(budget: Budget, low: float, high: float, number: int) -> tuple[float, ...]:
    """Orders around the one that lasts longest for Gaussians, and below it, where sampling
    makes large orders explode.
    """
    orders = np.minimum(
        1 + (renyi.filter_order(*budget) - 1) * np.geomspace(low, high, number), renyi.ORDERS[-1]
    )
    # of a whole order sampling has a closed form
    return tuple(sorted({float(round(order)) if order > 3 else float(order) for order in orders}))
