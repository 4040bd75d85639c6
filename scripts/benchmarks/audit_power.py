#!/usr/bin/env python3
"""How often audits of whole runs of this library catch a fault that was put into it.

    python audit_power.py [--repeats 40] [--sound 120] [--only NAME]

Each run trains an embedding of 20,001 weights by DPSGLD, four full batches at a stated ε of 2, on
10,000 canaries: records whose gradients are 100 times longer than the clip norm. For each fault,
the table counts how many of ``--repeats`` runs refute ε = 2 at 99 % confidence and δ = 1e-5, by
each of two bounds. It counts the same for ``--sound`` runs without a fault. A second table has the
bounds of the median run of a sound Gaussian release with 1,000 canaries, at 95 % confidence.
"""

import argparse
import logging
import time
from functools import cache, partial
from itertools import count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torch_dpbayes as dpb
from torch_dpbayes import release
from torch_dpbayes.audit import from_scores
from torch_dpbayes.audit.bounds import Guesses, LowerBound, gaussian_mu
from torch_dpbayes.audit.transcripts import guess
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.per_sample import contributions

BOUNDS = ("gaussian", "independent")
DELTA, STATED, STEPS, BOUND = 1e-5, 2.0, 4, 1.0
CANARIES = 10_000


class Rows(Dataset):
    """Each record is one row of an embedding. It changes from step to step; row 0 is nobody's."""

    def __init__(self, included, rng):
        self.included, self._rng, self._step = included, rng, 0
        self.turn()

    def turn(self):
        self.rows = 1 + 2 * self._rng.permutation(len(self.included)) + self._step % 2
        self._shown = torch.from_numpy(np.where(self.included, self.rows, 0))
        self._step += 1

    def __len__(self):
        return len(self.included)

    def __getitem__(self, index):
        return (self._shown[index],)


def seen_of_rows(fault, charged_steps):
    """A run at a stated ε of 2; which canaries are in, the engine, and for each step what all rows
    show and which row each canary had.
    """
    rng = np.random.default_rng()
    data = Rows(rng.random(CANARIES) < 0.5, rng)
    engine, steps = dpb.PrivacyEngine(), []
    net = nn.Embedding(2 * CANARIES + 1, 1, padding_idx=0)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=1e-4, temperature=1e-9),
        data_loader=DataLoader(data, batch_size=CANARIES),
        max_grad_norm=BOUND,
        noise_multiplier=charged_steps**0.5 / gaussian_mu(STATED, DELTA),
    )

    def watch(layout):
        total = layout.gradient.double().numpy() * optimizer.expected_batch_size
        steps.append((-total / BOUND, data.rows))
        data.turn()

    optimizer.release.watch = watch
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)  # after the checks of the model, some of which would see it
        for _ in range(STEPS):
            for (row,) in loader:
                (-100 * BOUND * net(row)).mean().backward()
                optimizer.step()
    return SimpleNamespace(included=data.included, engine=engine, steps=steps)


def sums(run):
    return sum(seen[rows] for seen, rows in run.steps)


def differences(run):
    """Scores from differences of consecutive releases: noise that is used twice cancels there. A
    canary that is in moves a score by 2. We divide by the variance of the noise, which is
    their own less 1, that of random inclusion.
    """
    changes = [
        now[rows] - last[rows] + last[before] - now[before]
        for (last, before), (now, rows) in pairwise(run.steps)
    ]
    return sum(change / max(np.var(change) - 1, 0.01) for change in changes)


# -- faults, each of which makes the stated ε too small ----------


def halve_noise(patch):
    add = release.add_gaussian

    def halved(out, std, by, stream):
        add(out, std / 2, by, stream)

    patch.setattr(release, "add_gaussian", halved)


def use_noise_twice(patch):
    """The second step has the noise of the first, the fourth that of the third."""
    kept, draw = [], GaussianNoise.next_stream

    def again(self, device, hides):
        if kept:
            return torch.Generator().set_state(kept.pop())
        stream = draw(self, device, hides)
        kept.append(stream.get_state())
        return stream

    patch.setattr(GaussianNoise, "next_stream", again)


def leave_a_layer_unclipped(patch):
    add = contributions.Tokens.add_sum

    def unclipped(self, factor, *out):
        add(self, torch.ones_like(factor), *out)

    patch.setattr(contributions.Tokens, "add_sum", unclipped)


def count_records_twice(patch):
    draw = PoissonSampler._next_draw

    def doubled(self):
        return (drawn := draw(self))._replace(records=drawn.records.repeat(2))

    patch.setattr(PoissonSampler, "_next_draw", doubled)


def charge_only(number, patch):
    """So many of the steps."""
    compose, taken = dpb.PrivacyAccountant.compose, count()

    def sometimes(self, *args, **options):
        return compose(self, *args, **options) if next(taken) < number else self

    patch.setattr(dpb.PrivacyAccountant, "compose", sometimes)


# what is done, what looks for it, and for how many steps the noise is made
FAULTS = {
    "noise halved": (halve_noise, sums, STEPS),
    "noise used twice": (use_noise_twice, differences, STEPS),
    "a layer unclipped": (leave_a_layer_unclipped, sums, STEPS),
    "records counted twice": (count_records_twice, sums, STEPS),
    "3 of 4 steps not charged": (partial(charge_only, 1), sums, 1),
    "2 of 4 steps not charged": (partial(charge_only, 2), sums, 2),
    "1 of 4 steps not charged": (partial(charge_only, 3), sums, 3),
    "none": (lambda patch: None, sums, STEPS),
    "none, by differences": (lambda patch: None, differences, STEPS),
}


@cache
def number_of_guesses(bound):
    """By public numbers: the same for all runs."""
    return LowerBound(bound, DELTA, 0.99).best_guesses(CANARIES, STATED).made


def audited_with(fault, bounds=("gaussian",)):
    """The result by each of the bounds, at 99 % confidence."""
    make, scores, charged_steps = FAULTS[fault]
    run = seen_of_rows(make, charged_steps)
    options = {"epsilon": run.engine.get_epsilon(DELTA), "delta": DELTA, "confidence": 0.99}
    seen = partial(from_scores, scores(run), run.included, **options)
    return [seen(bound=bound, num_guesses=number_of_guesses(bound)) for bound in bounds]


def median_bound(kind, epsilon, rng, canaries=1000, runs=1000):
    """Of the median run of a full-batch Gaussian release that is exactly (ε, δ)-private."""
    bound, mu, right = LowerBound(kind, DELTA, 0.95), gaussian_mu(epsilon, DELTA), []
    made = bound.best_guesses(canaries, epsilon).made
    for _ in range(runs):
        included = rng.random(canaries) < 0.5
        scores = rng.normal(size=canaries) + mu * included
        right.append(guess(scores, included, made).correct)
    return bound(Guesses(canaries, made, int(np.median(right))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--sound", type=int, default=120)
    parser.add_argument("--only", choices=FAULTS, help="one line of the table")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if options.only is None:
        print('| stated ε | `bound="gaussian"` | `bound="independent"` |\n|---|---|---|')
        for epsilon in (8.0, 2.0):
            found = [median_bound(kind, epsilon, np.random.default_rng()) for kind in BOUNDS]
            print(f"| {epsilon:g} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)
    print("\n| fault | runs | refuted, `gaussian` | refuted, `independent` | seconds a run |")
    print("|---" * 5 + "|")
    for name in FAULTS if options.only is None else [options.only]:
        repeats = options.sound if name.startswith("none") else options.repeats
        start = time.process_time()
        runs = [audited_with(name, BOUNDS) for _ in range(repeats)]
        seconds, cells = (time.process_time() - start) / repeats, []
        for results in zip(*runs, strict=True):
            refuted = sum(result.is_refuted for result in results)
            sure = stats.binomtest(refuted, repeats).proportion_ci(0.95, "exact")
            cells.append(f"{refuted} ({sure.low:.1%} to {sure.high:.1%})")
        print(f"| {name} | {repeats} | {' | '.join(cells)} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
