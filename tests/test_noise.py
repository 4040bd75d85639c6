"""The law of the noise, into its tails."""

import copy
import math
import os
import pickle
from functools import partial

import pytest
import torch
from scipy.stats import kstest, norm
from support.children import in_child

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.noise import GaussianNoise, add_gaussian, fresh_generator


@pytest.mark.chance(1e-6)
# torch has two ways to draw them
@pytest.mark.parametrize(
    ("size", "dtype"), [(7, torch.float32), (100_000, torch.float32), (100_000, torch.float64)]
)
def test_noise_is_gaussian_of_the_stated_size(dtype, size):
    target, stream, draws = torch.full((size,), 5.0, dtype=dtype), fresh_generator(), []
    for _ in range(-(-20_000 // size)):
        target.fill_(5.0)
        add_gaussian(target, 3.0, 7.0, stream)
        draws.append(target.double().clone())
    assert kstest(torch.cat(draws).numpy(), norm(5 / 7, 3 / 7).cdf).pvalue > 1e-6 / 8


def test_pieces_of_a_long_vector_have_noise_of_their_own():
    target = torch.zeros(2**18, dtype=torch.float64)
    add_gaussian(target, 1.0, 1.0, fresh_generator())
    assert len(target.unique()) == len(target)


@pytest.mark.chance(1e-6)
@pytest.mark.parametrize("std", [1.0, 1e-3])
def test_what_lies_beyond_the_tail_is_drawn_again_from_the_law_there(monkeypatch, std):
    """With a tail that begins at 1 most numbers are: they have the law of the normal, and the
    rest stays as it was.
    """
    monkeypatch.setattr(noise, "_TAIL", 1.0)
    monkeypatch.setattr(noise, "_BEYOND_TAIL", norm.sf(1))
    stream = fresh_generator()
    state = stream.get_state()
    own = torch.empty(200_000).normal_(0.0, std, generator=stream)
    stream.set_state(state)
    found = noise._normal_(torch.empty(200_000), std, stream)
    beyond = own.abs() > std
    assert torch.equal(found[~beyond], own[~beyond]) and torch.equal(found.sign(), own.sign())
    assert int((found == own)[beyond].sum()) < 6  # by chance one of 63,000 is in one run of 100
    assert float(found[beyond].abs().min()) >= std
    assert kstest(found.double().numpy() / std, "norm").pvalue > 1e-6 / 8
    assert (
        kstest(norm.sf(found[beyond].double().abs().numpy() / std) / norm.sf(1), "uniform").pvalue
        > 1e-6 / 8
    )


def test_the_tail_is_that_of_the_normal():
    assert noise._BEYOND_TAIL == pytest.approx(norm.sf(noise._TAIL), rel=1e-12)
    assert len(noise._normal_(torch.empty(0), 1.0, fresh_generator())) == 0


# -- no noise is drawn twice -----------------------------------------------------------------------

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
    for refused in (lambda: GaussianNoise(seeded(seed + 2**32)), lambda: draw(late)):
        with pytest.raises(dpb.DPBayesError) as caught:
            refused()
        assert caught.value.code == "noise-repeats"


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


@pytest.mark.chance(1e-3, looks=3)
def test_tails_without_a_look_at_how_many_there_are():
    """As on a GPU: what lies beyond 5 is drawn anew there, with its sign, and nothing else is."""
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(10_000, generator=generator).clamp(-4.9, 4.9)
    vector[::2] = 5.5 * torch.where(vector[::2] < 0, -1.0, 1.0)
    vector[1] = -5.5
    with_tails = torch.cat([noise._with_tails(v.clone(), 1.0, generator) for v in vector.split(20)])
    is_beyond = vector.abs() > 5
    assert torch.equal(with_tails[~is_beyond], vector[~is_beyond])
    assert torch.equal(with_tails.sign(), vector.sign())
    lengths = with_tails[is_beyond].abs().double()
    assert float(lengths.min()) >= 5 * (1 - 1e-6)
    # given beyond 5, the share that is further out is uniform: off by 1.95/√n once in 1,000
    shares = torch.special.ndtr(-lengths) / torch.special.ndtr(torch.tensor(-5.0).double())
    places = torch.arange(1, len(shares) + 1) / len(shares)
    assert float((shares.sort().values - places).abs().max()) < 1.95 / len(shares) ** 0.5 + 1e-3
