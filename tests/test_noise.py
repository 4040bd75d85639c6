"""Noise has its law into the tails, and none is drawn twice; masks of dropout are as unknown as it,
though torch's seed is known.
"""

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
from support.children import another_thread_in, in_child
from support.refusals import refused
from support.training import private
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.noise import GaussianNoise, PrivateRandomness, add_gaussian, fresh_generator

RECORDS = 40
CPU = torch.device("cpu")


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


draw = partial(GaussianNoise.standard_normal, size=5, dtype=torch.float64, device=CPU)


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


# -- random numbers of models and records ----------------------------------------------------------


def masks(mode, generator):
    """Which outputs each of two steps dropped, and numbers that the loop's own loss drew."""
    net, data = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), torch.ones(RECORDS, 8)
    options = {"optimizer": partial(dpb.optim.DPSGLD, lr=0.1, generator=generator)}
    options |= {"noise_multiplier": 1.0, "grad_sample_mode": mode}
    net, opt, loader = private(net, TensorDataset(data), RECORDS, **options)
    for _ in range(2):
        torch.manual_seed(42)
        for (x,) in loader:
            before = torch.get_rng_state()
            out = net(x)
            drawn = torch.randn_like(x)
            assert torch.equal(torch.get_rng_state(), before)
            # of values that several records make a seeded run computes metrics, too
            largest = (out.detach() - out.detach().mean(0)).abs().max()
            (out.square().sum(1) + drawn.sum(1) * 0).mean().backward()
            opt.step()
            assert largest.item() > 0
            yield torch.cat([(out == 0).double(), drawn], 1)


@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_masks_do_not_follow_the_programs_seed(mode, is_seeded):
    runs = [torch.Generator() if is_seeded else None for _ in range(2)]
    for generator in filter(None, runs):
        generator.seed()
    rows = torch.cat([drawn for generator in runs for drawn in masks(mode, generator)])
    assert 0.4 < rows[:, :64].mean() < 0.6
    assert len(rows.unique(dim=0)) == len(rows) == 4 * RECORDS  # 2⁻⁶⁴ for two rows of masks


def test_numbers_repeat_with_the_callers_generator_and_differ_otherwise():
    seed, data = torch.seed() % 2**62, torch.rand(3)

    def drawn(rank=0, hides=data):
        noise._blocks_at.clear()  # as in another process
        generator = torch.Generator().manual_seed(seed)
        models = [PrivateRandomness(generator, rank) for _ in range(2)]
        found = []
        for _ in range(2):
            for randomness in (*models, *models):
                with randomness([CPU], [hides]), randomness([CPU]):
                    found.append(torch.rand(8))
            torch.rand(1, generator=generator)  # a release
        return torch.stack(found)

    assert torch.equal(drawn(), drawn())
    all_of_them = torch.cat([drawn(), drawn(rank=1), drawn(hides=2 * data)])
    assert len(all_of_them.unique(dim=0)) == 24


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_seed_inside_is_forgotten_and_the_programs_stream_goes_on(is_broken):
    found = []
    for _ in range(2):
        before, randomness = torch.get_rng_state(), PrivateRandomness()
        with contextlib.suppress(KeyError), randomness([CPU]):
            found.append(torch.rand(8))
            torch.manual_seed(0)
            if is_broken:
                raise KeyError
        assert torch.equal(torch.get_rng_state(), before)
        with randomness([CPU]):
            found.append(torch.rand(8))
        assert not copy.deepcopy(randomness)._streams
    assert len(torch.stack(found).unique(dim=0)) == 4


def test_a_process_forked_inside_a_block_has_numbers_of_its_own():
    randomness = PrivateRandomness()

    def drawn(wait=None):
        with randomness([CPU]):
            return wait() if wait else torch.rand(8).tolist()

    drawn()
    with another_thread_in(drawn):
        theirs = in_child(drawn)
    assert len(theirs) == 8 and theirs != drawn()
