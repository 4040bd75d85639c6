#!/usr/bin/env python3
"""Epsilon and seconds of this library's accountant, beside those of other libraries.

    python bench_accounting.py [--others] [--scattered] [--limit SECONDS]

Everything runs on one core. ``--scattered`` measures only schedules in which every release has its
own noise and rate, against the integral over their cumulant (``random_compositions.py``).
``--others`` also runs dp_accounting (PLD and RDP) and Opacus (RDP and PRV); some of these take
minutes. ``--limit`` stops any one of them after so many seconds.
"""

import argparse
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import dp_accounting as dpa
import numpy as np
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier as opacus_noise_multiplier
from random_compositions import of_poisson, truth

from torch_dpbayes.accounting import PrivacyAccountant, get_noise_multiplier
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

DELTA = 1e-5
Case = tuple[str, float, float, int, str, float]

# name, noise multiplier, sampling rate, steps, neighbouring relation, reference epsilon (theory:
# extrapolated PLD)
HOMOGENEOUS: list[Case] = [
    ("z = 1, q = .01, 10⁴ steps", 1.0, 0.01, 10_000, "add_or_remove_one", 6.1877124),
    ("z = .8, q = .004, 10⁵ steps", 0.8, 0.004, 100_000, "add_or_remove_one", 13.0703166),
    ("z = 4, full batch, 10⁴ steps", 4.0, 1.0, 10_000, "add_or_remove_one", 418.19930968),
    ("z = 20, q = .0055, 3.3·10⁴ steps", 20.0, 0.0055, 33_000, "add_or_remove_one", 0.160073095),
    ("z = 1, q = .01, 10⁴ steps, replace-one", 1.0, 0.01, 10_000, "replace_one", 10.8807815),
    ("z = .8, q = .004, 10⁵ steps, replace-one", 0.8, 0.004, 100_000, "replace_one", 22.4133611),
    ("z = 4, full batch, 10⁴ steps, replace-one", 4.0, 1.0, 10_000, "replace_one", 1462.28501596),
]
SCHEDULE_REFERENCE = 2.2444


def ours(noises: Iterable[float], rate: float, each: int, neighboring: Any) -> float:
    accountant = PrivacyAccountant(neighboring=neighboring)
    for noise in noises:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), each)
    return accountant.get_epsilon(DELTA)


def dp_accounting(
    kind: Callable[..., Any], noises: Iterable[float], rate: float, each: int, neighboring: str
) -> float:
    """At its default discretisation or orders. RDP refuses Poisson sampling under replace_one."""
    accountant = kind(neighboring_relation=dpa.NeighboringRelation[neighboring.upper()])
    for noise in noises:
        accountant.compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise)), each)
    return float(accountant.get_epsilon(DELTA))


def opacus(kind: str, noises: Iterable[float], rate: float, each: int, neighboring: str) -> float:
    if neighboring != "add_or_remove_one":
        raise ValueError("Opacus knows add_or_remove_one only")
    accountant: Any = create_accountant(kind)
    accountant.history = [(noise, rate, each) for noise in noises]
    return float(accountant.get_epsilon(DELTA))


Accountants = Mapping[str, Callable[..., float]]
OTHERS: Accountants = {
    "dp_accounting PLD": partial(dp_accounting, dpa.pld.PLDAccountant),
    "Opacus RDP": partial(opacus, "rdp"),
    "Opacus PRV": partial(opacus, "prv"),
}


def measured(
    function: Callable[..., float], arguments: tuple[Any, ...], limit: float
) -> tuple[float, float] | str:
    """Result and seconds of one call in a process of its own, or that there is none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        warnings.simplefilter("ignore")
        try:
            function([5.0], 0.1, 1, "add_or_remove_one")  # what is computed once
        except Exception:
            pass
        start = time.perf_counter()
        try:
            value = function(*arguments)
        except Exception:
            sender.send("refused")
            return
        sender.send((value, time.perf_counter() - start))

    process = context.Process(target=work)
    process.start()
    result = receiver.recv() if receiver.poll(limit) else f"none after {limit:g} s"
    process.kill()
    process.join()
    return result


def report(
    name: str, reference: float, arguments: tuple[Any, ...], others: Accountants, limit: float
) -> None:
    print(f"| {name}: ε = {reference:.4g} |", end="", flush=True)
    for function in (ours, *others.values()):
        found = measured(function, arguments, limit)
        if not isinstance(found, str):
            epsilon, seconds = found
            found = f"{100 * (epsilon / reference - 1):+.3f} %, {seconds:.2g} s"
        print(f" {found} |", end="", flush=True)
    print()


def calibration(has_others: bool, limit: float) -> None:
    theirs = partial(opacus_noise_multiplier, accountant="prv", epsilon_tolerance=1e-3)
    print(
        "\n| noise multiplier for ε = | here: ε found / ε, time | Opacus PRV |\n" + "|---" * 3 + "|"
    )
    for epsilon, rate, steps in ((1.0, 0.01, 10_000), (3.0, 0.004, 5_000), (8.0, 0.02, 1_000)):
        print(f"| {epsilon:g}, q = {rate:g}, {steps:,} steps |", end="")
        target = {"target_epsilon": epsilon, "target_delta": DELTA, "sample_rate": rate}
        for function in (get_noise_multiplier, *([theirs] if has_others else [])):
            found = measured(partial(function, **target, steps=steps), (), limit)
            if not isinstance(found, str):
                z, seconds = found
                share = ours([z], rate, steps, "add_or_remove_one") / epsilon
                found = f"{share:.5f}, {seconds:.2g} s"
            print(f" {found} |", end="", flush=True)
        print()


def scattered_excess(noise: Any, rate: Any, replace: bool, epsilon: float) -> float:
    """By how much ``epsilon`` at DELTA is above the true one, relative; NaN: not settled.

    Up to 2,000 releases are taken one by one. A release's cumulant is smooth in the logarithms of
    noise and rate: that of more is their interpolation from Chebyshev points, as many as are needed
    for two results that agree.
    """

    def interpolated(values: Any, number: int) -> tuple[Any, Any]:
        low, high = np.log(values.min()), np.log(values.max())
        angle = np.pi * (np.arange(number) + 0.5) / number
        u = (2 * np.log(values) - low - high) / (high - low)
        k = np.arange(number)
        of_nodes = np.cos(np.outer(k, angle)) * np.where(k, 2.0, 1.0)[:, None] / number
        basis = np.cos(np.outer(np.arccos(np.clip(u, -1, 1)), k))
        return np.exp((np.cos(angle) * (high - low) + low + high) / 2), basis @ of_nodes

    def excess(releases: Iterable[tuple[float, float, float]]) -> float:
        laws = [(partial(of_poisson, q, z, replace), weight) for q, z, weight in releases]
        delta, slope, _ = truth(laws, 0.0, epsilon)
        return math.log(DELTA / delta) / slope / epsilon if delta > 0 and slope > 0 else math.nan

    if len(noise) <= 2000:
        return excess((q, z, 1.0) for q, z in zip(rate.tolist(), noise.tolist(), strict=True))
    before = math.nan
    for number in (12, 16, 22, 30):
        noises, of_noise = interpolated(noise, number)
        rates, of_rate = interpolated(rate, number)
        weights = of_noise.T @ of_rate
        found = excess(
            (float(q), float(z), float(weights[i, j]))
            for i, z in enumerate(noises)
            for j, q in enumerate(rates)
        )
        if abs(found - before) < 1e-4:
            return found
        before = found
    return math.nan


def scattered(number: int, replace: bool) -> None:
    """So many releases, all different."""
    rng = np.random.default_rng()
    noise = np.exp(rng.uniform(math.log(0.6), math.log(4), number))
    rate = np.exp(rng.uniform(math.log(1e-3), math.log(0.03), number))
    neighboring = "replace_one" if replace else "add_or_remove_one"
    accountant = PrivacyAccountant(neighboring=neighboring)  # type: ignore[arg-type]
    started = time.process_time()
    for z, q in zip(noise.tolist(), rate.tolist(), strict=True):
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)))
    charged = time.process_time() - started
    epsilon = accountant.get_epsilon(DELTA)
    busy = time.process_time() - started
    excess = scattered_excess(noise, rate, replace, epsilon)
    cells = f"{epsilon:.2f} | {100 * excess:.2f} % | {busy:.1f} | {charged:.1f}"
    print(f"| {number:,} | {neighboring} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--others", action="store_true", help="run the other accountants too")
    parser.add_argument("--scattered", action="store_true", help="only scattered schedules")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one run, at most")
    arguments = parser.parse_args()
    if arguments.scattered:
        print("| releases | relation | ε | excess | seconds, all | of these for charging |")
        print("|---" * 6 + "|")
        for number in (500, 2_000, 10_000, 100_000):
            for replace in (False, True):
                scattered(number, replace)
        return
    others = OTHERS if arguments.others else {}
    print("| releases | here |", *(f"{name} |" for name in others))
    print("|---" * (2 + len(others)) + "|")
    for name, noise, rate, steps, neighboring, reference in HOMOGENEOUS:
        report(name, reference, ([noise], rate, steps, neighboring), others, arguments.limit)
    schedule = [math.sqrt(1 + step / 1000) for step in range(10_000)]
    given = schedule, 0.01, 1, "add_or_remove_one"
    report("10,000 different z, q = .01", SCHEDULE_REFERENCE, given, others, arguments.limit)
    calibration(arguments.others, arguments.limit)


if __name__ == "__main__":
    main()
