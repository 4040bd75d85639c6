"""Audits of one owner among several: what another one sees of it, with its own share subtracted."""

import logging
import math
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed
from test_other_releases import DELTA, ITERATIONS, data, model

import torch_dpbayes as dpb
from torch_dpbayes.audit import repeated
from torch_dpbayes.audit.bounds import LowerBound
from torch_dpbayes.audit.transcripts import draw_inclusion, generator_of
from torch_dpbayes.mcmc import MultiOwnerHMC, MultiOwnerPenalty

REPEATS, WATCHER, AUDITED = 200, 0, 1


class HalfTheNoise:
    """A fault of the audited owner's."""

    def __init__(self, noise):
        self._noise = noise

    def standard_normal(self, *args, **options):
        return self._noise.standard_normal(*args, **options) / 2


def kernel_of(kind, rank, accountant):
    """The audited owner's releases of a stretch have μ = 2 together; the watcher's noise, which is
    known to it, hides nothing.
    """
    releases = ITERATIONS * (1 if kind == "penalty" else 4)
    z = math.sqrt(releases) / 2 if rank == AUDITED else 1.0
    options = {"log_ratio_slope": 1.0, "accountant": accountant, "target_accept_prob": None}
    if kind == "penalty":
        return MultiOwnerPenalty(model, proposal_scale=0.5, noise_multiplier=z, **options)
    return MultiOwnerHMC(
        model,
        step_size=0.3,
        num_steps=2,
        max_grad_norm=1.0,
        ratio_noise_multiplier=z,
        grad_noise_multiplier=z,
        reuse_gradients=False,
        **options,
    )


def watched(kernel):
    """What the other owner sent, in units of what one record moves it by: where it came from, for
    each sum of gradients and each ratio.
    """
    seen, way = [], {}
    owners = kernel._owners
    gradient_sum, accepts = owners.gradient_sum, owners.accepts

    def watched_gradients(own, theta):
        mine = []

        def kept():
            mine.append(own())
            return mine[0]

        total = gradient_sum(kept, theta)
        way.setdefault("start", float(theta))
        way["end"] = float(theta)
        seen.append(float(total - mine[0]))
        return total

    def watched_ratio(noisy, log_uniform, rest, bound, multiplier):
        accepted, total = accepts(noisy, log_uniform, rest, bound, multiplier)
        seen.append(way.pop("sign") * (total - noisy) / bound)
        return accepted, total

    owners.gradient_sum, owners.accepts = watched_gradients, watched_ratio
    metropolis, propose = kernel._metropolis, kernel._propose

    def with_sign(*args):
        if "start" in way:
            way["sign"] = math.copysign(1.0, way.pop("end") - way.pop("start"))
        return metropolis(*args)

    def proposed(moves, theta):
        moved, ratio = propose(moves, theta)
        way["sign"] = math.copysign(1.0, float(moved - theta))
        return moved, ratio

    kernel._metropolis, kernel._propose = with_sign, proposed
    return seen


class Chain:
    """One that goes on from release to release, with or without the record."""

    def __init__(self, kind, rank, is_in, is_faulty):
        self.accountant = dpb.PrivacyAccountant()
        self._kernel = kernel_of(kind, rank, self.accountant)
        self._seen = watched(self._kernel)
        self._kernel.setup(0, *data(is_in and rank == AUDITED))
        if is_faulty and rank == AUDITED:
            self._kernel._noise = HalfTheNoise(self._kernel._noise)
        self._params = self._kernel.initial_params
        self.end = self._kernel.cleanup  # the next chain of this group would wait for it

    def go_on(self):
        """What a few iterations show of the other owner."""
        self._seen.clear()
        for _ in range(ITERATIONS):
            self._params = self._kernel.sample(self._params)
        return self._seen


def _rank(rank, folder, kind, seed, is_faulty, out):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    chains = {is_in: Chain(kind, rank, is_in, is_faulty) for is_in in (False, True)}
    if rank == WATCHER:
        variance = ITERATIONS * (1 if kind == "penalty" else 4) / 4
        result = repeated(
            lambda is_in: sum((moved - 0.5) / variance for moved in chains[is_in].go_on()),
            epsilon=1.0,  # the audited owner says what it is
            delta=DELTA,
            repeats=REPEATS,
            confidence=0.99,
            seed=seed,
        )
        out.put((result.epsilon_lower_bound, result.guesses))
    else:
        included = draw_inclusion(REPEATS, generator_of(seed))
        for number, is_in in enumerate(included):
            chain = chains[bool(is_in)]
            chain.go_on()
            if number == 0:
                out.put(chain.accountant.get_epsilon(DELTA))
    for chain in chains.values():
        chain.end()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def audited(folder, kind, is_faulty):
    """(lower bound, guesses) of the watcher, and the ε that the audited owner states."""
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    torch.multiprocessing.spawn(
        _rank, (str(folder), kind, torch.seed() % 2**31, is_faulty, out), nprocs=2
    )
    found = [out.get(timeout=300) for _ in range(2)]
    return sorted(found, key=lambda one: isinstance(one, float))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["penalty", "HMC"])
def test_what_an_owner_sends_reveals_no_more_than_it_states(tmp_path, kind):
    """200 chains: at μ = 2, 84 % of the guesses are right; a third of ε is shown by 65 %."""
    (bound, guesses), epsilon = audited(tmp_path, kind, is_faulty=False)
    assert bound > epsilon / 3
    surely = LowerBound("gaussian", DELTA, 1 - 1e-7, is_repeated=True)(guesses)
    assert surely <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["penalty", "HMC"])
def test_half_of_an_owners_noise_is_caught(tmp_path, kind):
    """98 % of the guesses are right then, and 91 % refute."""
    (bound, _), epsilon = audited(tmp_path, kind, is_faulty=True)
    assert bound > epsilon
