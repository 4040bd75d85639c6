#!/usr/bin/env python3
"""Random sequences of charges, accepted and refused, against a reference that shares no code.

    python random_charges.py [--seconds 60] [--seed S]

Sequences come in groups with one budget and a few kinds of events. For each event and direction
the cumulant (``random_compositions.py``) is tabulated once on the path of the integral, so that
delta of any of its compositions is a product of matrices. There are two paths: a composition counts
if both give the same delta. Charges that were accepted must fit the budget; a refused one must
cost more than all but a small share of its epsilon.
"""

import argparse
import math
import secrets
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from random_compositions import LEAST, ROUND_OFF, Array, Drawn, Draws, Laws, Reference

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded, history

KINDS = ("gaussian", "poisson", "joint", "fixed_size", "truncated", "mu", "batch")
EACH = 50  # sequences of one group
FREQUENCIES = 2048
SAME = 1e-6  # relative, of two paths
REFUSED_ABOVE = 1 - 2e-3  # of the budget's epsilon
LEDGERS, ASKING = 0.02, 0.02  # shares of sequences at a file, and that charge what remains


class Paths:
    """delta at one epsilon of all compositions of some laws: ``counts`` has a row for each."""

    def __init__(self, laws: Laws, epsilon: float) -> None:
        self._epsilon, self._tables = epsilon, []
        for reverse in (False, True):
            if reverse and all(law.added is None for law, _ in laws):
                continue
            near, step = Reference(laws, reverse).path(epsilon)
            for theta, h in ((near, 0.7 * step), (0.8 * near, 0.5 * step)):
                w = theta + 1j * h * np.arange(FREQUENCIES)
                found = []
                for law, _ in laws:
                    blocks = Reference([(law, 1)], reverse).along(theta, h)
                    found.append(np.concatenate([*islice(blocks, FREQUENCIES // 128)]))
                self._tables.append((w, h, np.array(found)))

    def deltas(self, counts: Array) -> tuple[Array, Array]:
        """delta in the worse direction, and the slope of its logarithm; NaN: not settled."""
        found = []
        for w, h, each in self._tables:
            exponent = counts @ each - self._epsilon * w
            terms = np.exp(exponent - exponent[:, :1].real) / (w * (w + 1))
            tail = np.abs(terms[:, -128:]).max(axis=1) / np.abs(terms[:, 0])
            terms[:, 0] /= 2
            scale = h / math.pi * np.exp(exponent[:, 0].real)
            delta = np.where(tail < 1e-12, scale * terms.real.sum(axis=1), math.nan)
            found.append((delta, scale * (terms * w).real.sum(axis=1) / delta))
        both = np.array(found).reshape(-1, 2, 2, len(counts))  # direction, path
        one, other = both[:, 0, 0], both[:, 1, 0]
        is_same = np.isfinite(one) & (np.abs(one - other) <= SAME * one + LEAST)
        delta = np.where(is_same, one, math.nan)
        worse = delta.argmax(axis=0)[None]  # NaN counts as the largest
        return (
            np.take_along_axis(delta, worse, 0)[0],
            np.take_along_axis(both[:, 0, 1], worse, 0)[0],
        )


def sequence(
    rng: np.random.Generator, accountant: PrivacyAccountant, drawn: list[Drawn], usual: Array
) -> list[tuple[bool, Array]]:
    """Random charges: the last history that was accepted, and each that was refused."""
    counts, refused = np.zeros(len(drawn)), []
    first = usual * rng.uniform(0, 1.2) * rng.dirichlet(np.ones(len(drawn)))
    charges = [(i, int(n)) for i, n in enumerate(first) if n >= 1]
    if rng.random() < ASKING:
        i = int(rng.integers(len(drawn)))
        charges += [(i, int(accountant.remaining(drawn[i].event))), (i, 1)]
    largest = usual
    for k in range(20):
        if k < len(charges):
            i, n = charges[k]
        else:
            i = int(rng.integers(len(drawn)))
            n = int(np.exp(rng.uniform(0, math.log(max(largest[i], 2)))))
        if n < 1:
            continue
        try:
            accountant.compose(drawn[i].event, n)
            counts[i] += n
        except PrivacyBudgetExceeded:
            refused.append((False, counts + n * (np.arange(len(drawn)) == i)))
            largest = largest / 8
            if len(refused) == 3 or n == 1:
                break
    return [(True, counts), *refused]


def refuse(*_: object) -> None:
    """Instead of a message that says how many fit: finding them takes two thirds of the time."""
    raise PrivacyBudgetExceeded("refused")


def group(rng: np.random.Generator, folder: Path) -> dict[str, int]:
    """So many sequences for one budget, and how many were wrong."""
    replace, delta = bool(rng.integers(2)), float(10 ** rng.uniform(-9, -3))
    draws = Draws(rng, replace, delta)
    drawn = [getattr(draws, k)() for k in rng.choice(KINDS, rng.integers(1, 4))]
    laws = [one.law(fine=2) for one in drawn if one.law is not None]
    relation = "replace_one" if replace else "add_or_remove_one"
    usual = np.array([float(int(draws.log(2, 3000))) for _ in drawn])
    planned = PrivacyAccountant(neighboring=relation)
    for one, n in zip(drawn, usual, strict=True):
        planned.compose(one.event, max(int(n / len(drawn)), 1))
    epsilon = float(planned.get_epsilon(delta) * rng.uniform(0.9, 1.1))
    if not 0.02 < epsilon < 50:
        return {}
    share = usual / len(drawn)
    paths = Paths([(law, n) for law, n in zip(laws, share, strict=True)], epsilon)
    if np.isnan(paths.deltas(np.outer([0.7, 1.0], share))[0]).any():
        return {}  # losses of so few releases have no smooth density
    found: list[tuple[int, bool, Array]] = []
    for number in range(EACH):
        path = folder / secrets.token_hex(8) if rng.random() < LEDGERS else None
        with PrivacyAccountant(epsilon, delta, neighboring=relation, path=path) as accountant:
            part = sequence(rng, accountant, drawn, usual)
        found += [(number, *row) for row in part]
    sequences, accepted, counts = zip(*found, strict=True)
    true, slope = paths.deltas(np.array(counts))
    is_empty = np.array(counts).sum(axis=1) == 0
    true = np.where(is_empty, 0.0, true)
    ok = np.array(accepted)
    false = ok & (true > delta * (1 + ROUND_OFF) + LEAST)
    needless = ~ok & (np.log(true / delta) + slope * epsilon * (1 - REFUSED_ABOVE) < 0)
    for row in np.flatnonzero(false | needless):
        kind = "ACCEPTED" if ok[row] else "REFUSED"
        events = [(int(n), one.event) for n, one in zip(counts[row], drawn, strict=True)]
        print(kind, relation, epsilon, delta, events, true[row], file=sys.stderr, flush=True)
    unknown = np.isnan(true)
    close = ok & (np.log(np.maximum(true, 1e-300) / delta) > -0.1)
    return {
        "sequences": EACH,
        "settled sequences": EACH - len({s for s, u in zip(sequences, unknown, strict=True) if u}),
        "histories": len(ok),
        "histories within .1 of log(delta)": int(close.sum()),
        "refusals": int((~ok & ~unknown).sum()),
        "accepted above the budget": int(false.sum()),
        "refused below it": int(needless.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time")
    parser.add_argument("--seed", type=int, default=None, help="default: fresh")
    arguments = parser.parse_args()
    seed = secrets.randbits(60) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    np.seterr(over="ignore", invalid="ignore", divide="ignore")  # what is not settled is left out
    history.History.refuse = refuse  # type: ignore[assignment,method-assign]
    total: dict[str, int] = {}
    i, shown = 0, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        while time.process_time() < arguments.seconds:
            for name, n in group(np.random.default_rng([seed, i]), Path(folder)).items():
                total[name] = total.get(name, 0) + n
            i += 1
            if time.process_time() > shown + 60:
                print(i, total, flush=True)
                shown = time.process_time()
    print("\n".join(f"{name}: {n}" for name, n in total.items()))
    sys.exit(bool(total["accepted above the budget"] or total["refused below it"]))


if __name__ == "__main__":
    main()
