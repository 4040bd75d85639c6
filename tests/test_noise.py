"""Noise has its law into the tails, and none is drawn twice."""

import contextlib
import copy
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from scipy.stats import kstest, norm
from support.children import in_child
from support.refusals import refused

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.noise import GaussianNoise, add_gaussian, fresh_generator


@pytest.mark.chance(1e-6)
# torch has two ways to draw them
@pytest.mark.parametrize(
    ("size", "dtype"), [(7, torch.float32), (2**17, torch.float32), (2**17, torch.float64)]
)
def test_noise_is_gaussian_of_the_stated_size(dtype, size):
    target, stream, draws = torch.empty(size, dtype=dtype), fresh_generator(), []
    for _ in range(-(-20_000 // size)):
        add_gaussian(target.fill_(5.0), 3.0, 7.0, stream)
        draws.append(target.double().clone())
    found = torch.cat(draws)
    assert kstest(found.numpy(), norm(5 / 7, 3 / 7).cdf).pvalue > 1e-6 / 8
    # pieces of a long vector have noise of their own
    assert dtype is torch.float32 or len(found.unique()) == len(found)


def as_on_a_gpu(vector, std, stream):
    """Without a look at how many numbers there are beyond the tail."""
    return noise._with_tails(vector.normal_(0.0, std, generator=stream), std, stream)


@pytest.mark.chance(1e-6)
@pytest.mark.parametrize("way", [noise._normal_, as_on_a_gpu])
@pytest.mark.parametrize("std", [1.0, 1e-3])
def test_what_lies_beyond_the_tail_is_drawn_again_from_the_law_there(std, way, monkeypatch):
    """With a tail that begins at 1 most numbers are: they have the law of the normal, and the
    rest stays as it was.
    """
    assert noise._BEYOND_TAIL == pytest.approx(norm.sf(noise._TAIL), rel=1e-12)
    monkeypatch.setattr(noise, "_TAIL", 1.0)
    monkeypatch.setattr(noise, "_BEYOND_TAIL", norm.sf(1))
    stream = fresh_generator()
    state = stream.get_state()
    own = torch.empty(200_000).normal_(0.0, std, generator=stream)
    found = way(torch.empty(200_000), std, stream.set_state(state))
    beyond = own.abs() > std
    assert torch.equal(found[~beyond], own[~beyond]) and torch.equal(found.sign(), own.sign())
    assert int((found == own)[beyond].sum()) < 6  # by chance one of 63,000 is in one run of 100
    lengths = found[beyond].abs().double().numpy() / std
    assert 1 - 1e-6 < lengths.min() and lengths.max() < 9
    assert kstest(found.double().numpy() / std, "norm").pvalue > 1e-6 / 8
    assert kstest(norm.sf(lengths) / norm.sf(1), "uniform").pvalue > 1e-6 / 8


draw = partial(
    GaussianNoise.standard_normal, size=5, dtype=torch.float64, device=torch.device("cpu")
)


def seeded(seed=None):
    return torch.Generator().manual_seed(torch.seed() if seed is None else seed)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("generator", [seeded, lambda: None])
def test_a_copy_draws_its_own_noise(copied, generator):
    original = GaussianNoise(generator())
    draw(original)
    again = copied(original)
    assert again.generator is None and not torch.equal(draw(again), draw(original))


def test_a_position_of_a_callers_generator_is_used_once():
    """Of a seed torch uses 32 bits, so that two of them are one stream."""
    seed = torch.seed() % 2**32
    draw(GaussianNoise(seeded(seed)))
    late = GaussianNoise(seeded(seed + 1))
    draw(GaussianNoise(seeded(seed + 1)))
    for use in (lambda: GaussianNoise(seeded(seed + 2**32)), lambda: draw(late)):
        with refused("noise-repeats"):
            use()


def test_of_two_threads_one_alone_uses_a_position(monkeypatch):
    class Slow(set):
        def __contains__(self, position):
            found = super().__contains__(position)
            time.sleep(0.05)
            return found

    def use(noise):
        with contextlib.suppress(ValueError):
            return draw(noise)

    callers = [GaussianNoise(seeded(7)) for _ in range(2)]
    monkeypatch.setattr(noise, "_used_positions", Slow())
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(use, callers)].count(None) == 1


def test_equal_generators_give_equal_noise_only_to_equal_releases(monkeypatch):
    seed, found = torch.seed(), []
    for hides in (["a", torch.ones(2)], ["a", torch.ones(2)], ["a", torch.zeros(2)], ["b"]):
        monkeypatch.setattr(noise, "_used_positions", set())  # as in a process of its own
        found.append(draw(GaussianNoise(seeded(seed)), hides=hides))
    assert torch.equal(found[0], found[1])
    assert len({tuple(vector.tolist()) for vector in found}) == 3


def test_fresh_generators_have_more_than_a_seeds_entropy():
    one = fresh_generator()
    assert not torch.equal(one.get_state(), seeded(one.initial_seed()).get_state())


@pytest.mark.parametrize("same_pid", [False, True])
def test_a_forked_process_draws_noise_of_its_own(same_pid, monkeypatch):
    """Also with the pid of its parent, which comes again in nested PID namespaces."""
    own, callers, masks = GaussianNoise(), GaussianNoise(seeded()), noise.PrivateRandomness()
    parent = os.getpid()

    def draws():
        with masks([]):
            return draw(own).tolist(), torch.rand(3).tolist()

    def work():
        if same_pid:
            monkeypatch.setattr(os, "getpid", lambda: parent)
        try:
            draw(callers)
        except dpb.DPBayesError as error:
            return error.code, draws()

    draws()
    code, theirs = in_child(work)
    assert code == "forked" and all(a != b for a, b in zip(theirs, draws(), strict=True))


def test_a_clip_bound_whose_sums_floats_cannot_hold_is_refused():
    for bound in (1e200, 1e-200, math.inf, True):
        with pytest.raises(dpb.DPBayesError):
            noise.check_clip_bound("max_grad_norm", bound, "")
