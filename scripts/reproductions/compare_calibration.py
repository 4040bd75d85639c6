#!/usr/bin/env python3
"""What exact accounting saves over the calibration that Wang, Fienberg and Smola published with
DP-SGLD in 2015.

    python scripts/reproductions/compare_calibration.py

N records, B = √N (rounded) in an expected batch, √N passes, δ = 1e-5: the noise multiplier (std on
the sum of clipped gradients / clip norm) by their Theorem 4, and the smallest that meets the same
(ε, δ) by privacy loss distributions under Poisson sampling, for replacing a record (their relation)
and for adding or removing one. ``free_lr`` grows with the square of the ratio: the last two columns
are that factor. Takes seconds.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from published_calibration import wang_noise_multiplier

from torch_dpbayes import get_noise_multiplier

DELTA = 1e-5
NUMBERS_OF_RECORDS = (4177, 32561)
EPSILONS = (0.1, 1.0, 10.0)


class Row(NamedTuple):
    """Noise multipliers for one size and one ε."""

    num_data: int
    epsilon: float
    wang: float
    replace_one: float
    add_or_remove_one: float


def rows() -> Iterator[Row]:
    """The table, row by row."""
    for num_data in NUMBERS_OF_RECORDS:
        batch_size, passes = round(math.sqrt(num_data)), math.sqrt(num_data)
        steps = math.ceil(passes * num_data / batch_size)
        for epsilon in EPSILONS:
            published = wang_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=DELTA,
                num_data=num_data,
                expected_batch_size=batch_size,
                passes=passes,
            )
            replace, add = (
                get_noise_multiplier(
                    target_epsilon=epsilon,
                    target_delta=DELTA,
                    sample_rate=batch_size / num_data,
                    steps=steps,
                    neighboring=neighboring,
                )
                for neighboring in ("replace_one", "add_or_remove_one")
            )
            yield Row(num_data, epsilon, published, replace, add)


def main() -> None:
    print(
        f"Noise multiplier, B = √N, √N passes, δ = {DELTA:g}; free_lr grows by the factor on the"
        " right\n"
    )
    print(
        "|     N |    ε | Wang et al. | Poisson, replace | Poisson, add/remove | free_lr, replace |"
        " free_lr, add/remove |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows():
        factors = ((row.wang / row.replace_one) ** 2, (row.wang / row.add_or_remove_one) ** 2)
        print(
            f"| {row.num_data:5d} | {row.epsilon:4g} | {row.wang:11.1f} | {row.replace_one:16.2f} |"
            f" {row.add_or_remove_one:19.2f} | {factors[0]:15.0f}× | {factors[1]:18.0f}× |"
        )


if __name__ == "__main__":
    main()
