"""What all samplers share: the law of their draws, that a sequence goes on where it was, and what
they take of a caller's generator.
"""

import copy
import itertools
import math
import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_poisson_sampling import requires_independent, seeded

from torch_dpbayes import noise
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.batches.poisson_sampling import DenseSubset
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.batches.sampling_schemes import (
    FixedSizeSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
    Users,
    UserSampler,
)

FALSE_ALARM = 1e-6  # of each test


def of_users(num_data, *settings, most=1):
    """Users who have one record, two, three, one, two …"""
    ids = [i for i in range(num_data) for _ in range(1 + i % 3)][:num_data]
    users = Users(ids, num_data, most)
    return UserSampler(users.counted_records, *settings, users=users)


KINDS = {
    "poisson": PoissonSampler,
    "truncated": partial(TruncatedPoissonSampler, max_batch_size=60),
    "fixed size": FixedSizeSampler,
    "random allocation": RandomAllocationSampler,
    "users": of_users,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
RATES = pytest.mark.parametrize("rate", [0.01, 0.1])  # darts, a number for every record


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    monkeypatch.setattr(noise, "_used_positions", set())


def draws_of(sampler, number):
    """Draws, each used up before the next is drawn."""
    found = []
    for batch in itertools.chain.from_iterable(itertools.repeat(sampler)):
        sampler.delivered()
        sampler.use()
        sampler.mark_used()
        found.append(batch)
        if len(found) == number:
            return found


# -- the laws that are charged ---------------------------------------------------------------------


def alike(num_data, size):
    sets = list(itertools.combinations(range(num_data), size))
    return dict.fromkeys(sets, 1 / len(sets))


def truncated_sets(num_data, rate, most):
    law = Counter()
    for size in range(num_data + 1):
        for drawn in itertools.combinations(range(num_data), size):
            kept = list(itertools.combinations(drawn, min(size, most)))
            for batch in kept:
                law[batch] += rate**size * (1 - rate) ** (num_data - size) / len(kept)
    return law


def sets_of_users(rate, most):
    """Of users with the records 0; 1, 2; 3, 4, 5."""
    law = Counter()
    brought = [
        list(itertools.combinations(own, min(most, len(own)))) for own in ([0], [1, 2], [3, 4, 5])
    ]
    for joins in itertools.product([False, True], repeat=3):
        chosen = [sets if join else [()] for sets, join in zip(brought, joins, strict=True)]
        chance = math.prod(rate if join else 1 - rate for join in joins)
        for sets in itertools.product(*chosen):
            law[tuple(itertools.chain(*sets))] += chance / math.prod(map(len, chosen))
    return law


LAWS = {
    "truncated": (
        lambda: TruncatedPoissonSampler(4, 0.5, None, 0, max_batch_size=2),
        truncated_sets(4, 0.5, 2),
    ),
    "fixed size": (lambda: FixedSizeSampler(5, 3 / 5, None, 0), alike(5, 3)),
    "users": (lambda: of_users(6, 0.4, None, 0, most=2), sets_of_users(0.4, 2)),
}


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_law_that_is_charged_and_are_independent(name):
    make, law = LAWS[name]
    requires_independent([*map(tuple, draws_of(make(), 3000))], law)


@pytest.mark.chance(FALSE_ALARM)
def test_a_pass_gives_every_record_one_batch_each_independently():
    """Joint law of the batches of three records, and of those in two passes."""
    passes, steps = 2000, 3
    draws = draws_of(RandomAllocationSampler(3, 1 / steps, None, 0), passes * steps)
    places = []
    for start in range(0, len(draws), steps):
        batches = draws[start : start + steps]
        assert sorted(itertools.chain(*batches)) == [0, 1, 2]
        places.append(tuple(next(j for j in range(steps) if r in batches[j]) for r in range(3)))
    requires_independent(places, dict.fromkeys(itertools.product(range(3), repeat=3), 1 / 27))


# -- a sequence goes on, is copied and shared ------------------------------------------------------


@every_kind
@RATES
@pytest.mark.parametrize("steps", [5, 13])
def test_a_resumed_sequence_is_that_of_a_whole_run(kind, rate, steps):
    """Also with a draw that waited for its step, and on whatever device tensors are made."""

    def made():
        noise._used_positions.clear()  # as in a new process
        return kind(200, rate, seeded(), 0)

    whole, first = draws_of(made(), 25), made()
    begun = draws_of(first, steps)
    waiting = next(iter(first))
    resumed = made()
    resumed.require_position(first.position())
    resumed.resume(first.position())
    with torch.device("meta"):
        assert begun + draws_of(resumed, 25 - steps) == whole and whole[steps] == waiting
        draws_of(kind(200, rate, None, 0), 2)


@every_kind
def test_draws_that_wait_are_not_drawn_again_from_other_data_or_batches(kind):
    """They would take random numbers of later draws. Without such draws one may change both."""
    first = kind(400, 0.1, torch.Generator(), 0)
    before = first.position()
    next(iter(first))
    for num_data, rate in ((410, 0.1), (400, 0.05)):
        other = kind(num_data, rate, torch.Generator(), 0)
        other.require_position(before)
        with pytest.raises(ValueError):
            other.require_position(first.position())
    kind(400, 0.1, torch.Generator(), 0).require_position(first.position())


@every_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_draws_its_own_by_the_same_law(kind, copied):
    sampler = kind(200, 0.2, None, 0)
    next(iter(sampler))
    other = copied(sampler)
    gaussian = GaussianDpEvent(1.0)
    assert other.event(gaussian) == sampler.event(gaussian) and other.steps == sampler.steps
    first, second = draws_of(sampler, 8), draws_of(other, 8)
    assert all(a != b for a in first for b in second)
    assert all(len(batch) <= 60 for batch in second) or kind is not KINDS["truncated"]
    with pytest.raises(TypeError) as refused:
        copied(kind(200, 0.2, torch.Generator(), 0))
    assert refused.value.code == "copied"


@every_kind
@RATES
def test_ranks_share_the_draws_of_one_process(kind, rate):
    draws = []
    for ranks in (None, *(SimpleNamespace(rank=rank, size=3) for rank in range(3))):
        noise._used_positions.clear()  # as in a process of its own
        draws.append(draws_of(kind(400, rate, seeded(), 0, ranks), 12))
    whole, *shares = draws
    assert len(set(map(tuple, whole))) > 1
    assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == [
        sorted(batch) for batch in whole
    ]


# -- the caller's generator ------------------------------------------------------------------------


@every_kind
def test_every_draw_takes_256_bits(kind):
    """Of the caller's generator, whatever it draws; random allocation takes them for a pass."""
    generator, other = seeded(), seeded()
    sampler = kind(1000, 0.1, generator, 0)
    draws_of(sampler, 2 * sampler.steps)
    keys = 2 * (1 if kind is RandomAllocationSampler else sampler.steps)
    torch.empty(keys * 4, dtype=torch.int64).random_(-(2**63), None, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_streams_that_overlap_have_nothing_in_common():
    """Of generators one to three numbers ahead of another, from which noise and draws are taken."""
    numbers, draws = [], []
    for ahead in range(4):
        for_noise, for_draws = seeded(), seeded()
        for generator in (for_noise, for_draws):
            torch.empty(ahead, dtype=torch.int64).random_(-(2**63), None, generator=generator)
        source, device = noise.GaussianNoise(for_noise), torch.device("cpu")
        draws.append(DenseSubset(64, 0.5).draw(source.next_stream(device, ())).tolist())
        numbers += source.standard_normal(64, dtype=torch.float64, device=device).tolist()
        draws += draws_of(PoissonSampler(64, 0.5, for_draws, 0), 3)
    assert len(set(map(tuple, draws))) == 16 and len(set(numbers)) == 256


def test_a_pass_has_as_many_draws_as_one_over_the_rate():
    """Which rounding may put a little below a whole number."""
    assert 1 / (1 / 93) < 93 and PoissonSampler(930, 1 / 93, None, 0).steps == 93


def test_settings_from_which_nothing_can_be_drawn():
    settings = [(10, rate, None, 0) for rate in (0.0, 1.5, math.nan, 2.0**-64)]
    on_a_gpu = SimpleNamespace(device=torch.device("cuda:0"))
    for wrong in (*settings, (2**53 + 1, 2.0**-53, None, 0), (10, 0.1, on_a_gpu, 0)):
        with pytest.raises(ValueError):
            PoissonSampler(*wrong)
