"""Canaries that are records: their gradients go through the model and are 100 times too long."""

import logging
import os
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torch_dpbayes as dpb
from torch_dpbayes.audit import from_scores
from torch_dpbayes.audit.bounds import LowerBound, gaussian_mu
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.per_sample import contributions
from torch_dpbayes.release import query

DELTA, STATED, STEPS, BOUND = 1e-5, 2.0, 4, 1.0


class Rows(Dataset):
    """Each record is a row of an embedding, another one in each step; row 0 stands for nobody."""

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


def seen_of_rows(
    number,
    *,
    epsilon=STATED,
    factory=None,
    rate=1.0,
    process_group=None,
    rng=None,
    charged_steps=STEPS,
    fault=lambda: None,
):
    """Run it; the included, the engine, z, and for each step what all rows show and which row each
    canary had.
    """
    rng = np.random.default_rng() if rng is None else rng
    data = Rows(rng.random(number) < 0.5, rng)
    engine = dpb.PrivacyEngine(process_group=process_group)
    net = nn.Embedding(2 * number + 1, 1, padding_idx=0)
    z = charged_steps**0.5 / gaussian_mu(epsilon, DELTA)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=factory or partial(dpb.optim.DPSGLD, lr=1e-4, temperature=1e-9),
        data_loader=DataLoader(data, batch_size=round(rate * number)),
        max_grad_norm=BOUND,
        noise_multiplier=z,
    )
    assert optimizer.effective_noise_multiplier == z
    fault()  # after the checks of the model, some of which would see it
    steps = []

    def watch(layout):
        total = layout.gradient.double().numpy() * optimizer.expected_batch_size
        steps.append((-total / BOUND, data.rows))
        data.turn()

    optimizer.release.watch = watch
    while len(steps) < STEPS:
        for (row,) in loader:
            (-100 * BOUND * net(row)).mean().backward()
            optimizer.step()
            if len(steps) == STEPS:
                break
    return SimpleNamespace(included=data.included, engine=engine, z=z, steps=steps)


def sums(run):
    return sum(seen[rows] for seen, rows in run.steps)


def differences(run):
    """Scores of differences of consecutive releases, in which noise that is used twice cancels. A
    canary that is in moves them by 2. They are divided by the variance of their noise, which is
    their own less 1, that of random inclusion.
    """
    changes = [
        now[rows] - last[rows] + last[before] - now[before]
        for (last, before), (now, rows) in zip(run.steps, run.steps[1:])
    ]
    return sum(change / max(np.var(change) - 1, 0.01) for change in changes)


@cache
def number_of_guesses(number, confidence, bound):
    """By public numbers: the same for all runs."""
    return LowerBound(bound, DELTA, confidence).best_guesses(number, STATED).made


def audit_rows(number, scores=sums, confidence=0.99, bounds=("gaussian",), **options):
    """The result, or one for each of several bounds."""
    run = seen_of_rows(number, **options)
    results = [
        from_scores(
            scores(run),
            run.included,
            epsilon=run.engine.get_epsilon(DELTA),
            delta=DELTA,
            confidence=confidence,
            bound=bound,
            num_guesses=number_of_guesses(number, confidence, bound),
        )
        for bound in bounds
    ]
    return results[0] if len(results) == 1 else results


# -- faults, each of which makes the stated ε too small ----------


def halve_noise(patch):
    add = query.add_gaussian
    patch.setattr(query, "add_gaussian", lambda out, std, by, stream: add(out, std / 2, by, stream))


def use_noise_twice(patch):
    """The second step has the noise of the first, the fourth that of the third."""
    kept = []
    draw = GaussianNoise.next_stream

    def again(self, device, hides):
        if kept:
            return torch.Generator().set_state(kept.pop())
        stream = draw(self, device, hides)
        kept.append(stream.get_state())
        return stream

    patch.setattr(GaussianNoise, "next_stream", again)


def leave_a_layer_unclipped(patch):
    add = contributions.Tokens.add_sum
    patch.setattr(
        contributions.Tokens,
        "add_sum",
        lambda self, factor, out: add(self, torch.ones_like(factor), out),
    )


def count_records_twice(patch):
    draw = PoissonSampler._next_draw

    def doubled(self):
        drawn = draw(self)
        return drawn._replace(records=drawn.records.repeat(2))

    patch.setattr(PoissonSampler, "_next_draw", doubled)


def release_without_a_charge(patch, charged=1):
    """Of four steps, so many are charged."""
    compose = dpb.PrivacyAccountant.compose
    taken = []

    def sometimes(self, *args, **options):
        taken.append(None)
        return compose(self, *args, **options) if len(taken) <= charged else self

    patch.setattr(dpb.PrivacyAccountant, "compose", sometimes)


def no_noise_on_rank_0(patch):
    add = query.ClippedSum.add_noise
    patch.setattr(
        query.ClippedSum, "add_noise", lambda self, layout, least, _: add(self, layout, least, None)
    )


FAULTS = {  # what looks for it, and for how many steps the noise is made
    "noise halved": (halve_noise, sums, STEPS),
    "noise used twice": (use_noise_twice, differences, STEPS),
    "a layer unclipped": (leave_a_layer_unclipped, sums, STEPS),
    "records counted twice": (count_records_twice, sums, STEPS),
    "releases not charged": (release_without_a_charge, sums, 1),
}


def audited_with(fault, number=10_000, **options):
    """At a stated ε of 2; ``fault`` is a name, or a line like those above."""
    make, scores, charged_steps = FAULTS[fault] if isinstance(fault, str) else fault
    with pytest.MonkeyPatch.context() as patch:
        return audit_rows(
            number, scores, charged_steps=charged_steps, fault=partial(make, patch), **options
        )


# -- two ranks -------------------------------------------------------------------------------------


def _rank(rank, size, folder, seed, numbers, is_faulty, options, out):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size
    )
    with pytest.MonkeyPatch.context() as patch:
        if is_faulty:
            no_noise_on_rank_0(patch)
        for repeat, number in enumerate(numbers):
            torch.manual_seed(seed)
            rng = np.random.default_rng([seed, repeat])  # of one auditor, who sits at both
            world = torch.distributed.group.WORLD
            result = audit_rows(number, rng=rng, process_group=world, **options)
            if rank == 0:
                found = result if isinstance(result, list) else [result]
                out.put((*(one.epsilon_lower_bound for one in found), found[0].epsilon))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def audited_on_two_ranks(folder, numbers, *, is_faulty=False, **options):
    """(lower bound, stated ε) for each number of canaries; one lower bound for each of several."""
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    torch.multiprocessing.spawn(
        _rank, (2, str(folder), torch.seed() % 2**31, numbers, is_faulty, options, out), nprocs=2
    )
    return [out.get(timeout=300) for _ in numbers]
