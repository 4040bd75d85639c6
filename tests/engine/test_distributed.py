"""Data parallelism: real gloo groups on loopback. What ranks release, charge and refuse is
what one process does, or an error on all of them.
"""

import copy
import itertools
import math
import os
import random
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import steps
from support.ranks import TIMEOUT, Server
from support.steps import one
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import distributed, noise
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.noise import GaussianNoise

RECORDS, FEATURES, CLASSES = 41, 5, 3
SGLD, FULL = partial(dpb.optim.DPSGLD, lr=0.3), partial(dpb.optim.DPSGFS, lr=0.1)
DIAGONAL = partial(FULL, fisher="diagonal")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run(function, size, **arguments)``: what each rank returned."""
    server = Server(__name__, tmp_path_factory.mktemp("groups"))
    yield server.run
    server.close()


@pytest.fixture
def seed():
    return torch.seed() % 2**31


# -- what the ranks do -----------------------------------------------------------------------------


def records(seed, num_records=RECORDS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_records, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (num_records,), generator=generator))


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def engine_of(accountant=None):
    return dpb.PrivacyEngine(accountant, dist.group.WORLD if dist.is_initialized() else None)


def make(seed, *, batch_size=6, engine=None, data=None, draws=None, **options):
    engine = engine_of() if engine is None else engine
    generator = None if draws is None else torch.Generator().manual_seed(draws)
    data = records(seed) if data is None else data
    given = {
        "module": options.pop("module", None) or network(seed),
        "optimizer": SGLD,
        "data_loader": DataLoader(data, batch_size, generator=generator),
        "max_grad_norm": 0.7,
        "noise_multiplier": 0.8,
    }
    return engine, *engine.make_private(**{**given, **options})


def flat(net):
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


def answer(call):
    """The class of what the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def fix_noise(seed, first=0):
    """Noise that is a function of the seed and of how many releases there were."""
    counter = itertools.count(first)

    def next_stream(self, device, hides):
        return torch.Generator().manual_seed(hash((seed, next(counter))) % 2**63)

    GaussianNoise.next_stream = next_stream


# -- the same numbers as on one process ------------------------------------------------------------


def trained(rank, seed, path, first, number, mode=None, size=RECORDS, part=None, **options):
    """A run's next steps after ``first``, with the noise and the draws of a seed: parameters, sizes
    of this rank's batches, and charges. Rank 0 saves it, with a draw that waits.
    """
    fix_noise(seed, first)
    options |= {"data": records(seed, size), "draws": seed + 1, **recorded(mode)}
    engine, net, optimizer, loader = make(seed, **options)
    if first > 0:
        engine.load_checkpoint(path, module=net, optimizer=optimizer)
    reduction, sizes = options.get("loss_reduction", "mean"), []
    if part is not None:  # ranks have different numbers of them
        loader = steps.in_parts(loader, optimizer, part + rank).__enter__()
    passes = itertools.chain.from_iterable(itertools.repeat(loader))
    while len(engine.accountant) < first + number:
        x, y = next(passes)
        one(net, optimizer, (x, y), partial(nn.functional.cross_entropy, reduction=reduction))
        sizes.append(len(x))
    if rank == 0:
        engine.save_checkpoint(path, module=net, optimizer=optimizer)
    return flat(net), sizes, [(repr(c.event), c.count) for c in engine.accountant.history]


def trained_each(rank, seed, folder, first, number):
    return [
        trained(rank, seed + 10 * i, f"{folder}/{i}.pt", first, number, **case)
        for i, case in enumerate(CASES)
    ]


CASES = [
    {},
    {"optimizer": partial(dpb.optim.DPSGNHT, lr=0.01), "loss_reduction": "sum"},
    {"optimizer": FULL},
    {"optimizer": DIAGONAL, "mode": "hooks"},
    {"batch_size": 20, "part": 3},
    # one rank never has a record, most batches are empty
    {"optimizer": DIAGONAL, "size": 2, "batch_size": 1},
]


def test_several_ranks_give_the_numbers_of_one_and_go_on_on_another_number(run, seed, tmp_path):
    given = {"seed": seed, "folder": str(tmp_path)}
    (alone,) = run(trained_each, 1, **given, first=0, number=5)
    run(trained_each, 2, **given, first=0, number=2)
    ranks = run(trained_each, 3, **given, first=2, number=3)
    for case, (theta, sizes, history), *together in zip(CASES, alone, *ranks):
        for own in together:
            assert own[0] == together[0][0]  # bit for bit
            assert own[0] == pytest.approx(theta, rel=1e-6, abs=1e-6), case
            assert own[2] == history  # one charge a step, on every rank's accountant
        if "part" not in case:
            assert [sum(of) for of in zip(*(own[1] for own in together))] == sizes[2:], case


# -- budgets, checkpoints and streams --------------------------------------------------------------


def until_the_budget_ends(rank, seed, path):
    accountant = dpb.PrivacyAccountant(3.0, 1e-5, path=path)
    net, optimizer, loader = engine_of(accountant).make_private_with_epsilon(
        module=network(seed),
        optimizer=partial(FULL, temperature=1e-4),
        data_loader=DataLoader(records(seed), batch_size=6),
        max_grad_norm=0.7,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
    )
    steps.train(net, optimizer, loader)
    before = flat(net)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        one(net, optimizer, next(iter(loader)))
    assert before == flat(net)
    found = len(loader), len(accountant), accountant.get_epsilon(1e-5), optimizer.noise_multiplier
    if rank == 0:
        accountant.close()
    return found


def test_ranks_are_calibrated_and_stopped_as_one_process_is(run, seed, tmp_path):
    (alone,) = run(until_the_budget_ends, 1, seed=seed, path=str(tmp_path / "1.db"))
    together = run(until_the_budget_ends, 2, seed=seed, path=str(tmp_path / "2.db"))
    assert together == [alone] * 2
    assert 2.9 < alone[2] <= 3.0 and alone[0] == alone[1]


def going_back(rank, seed):
    """Rank 0's checkpoint, loaded by all ranks onto accountants that went on; then that of
    another run.
    """
    engine, net, optimizer, loader = make(seed)
    steps.train(net, optimizer, loader, 2)
    saved = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    steps.train(net, optimizer, loader, 2)
    optimizer.load_state_dict(saved[0])
    steps.train(net, optimizer, loader, 2)
    _, net, other, loader = make(seed)
    steps.train(net, other, loader, 2)
    return len(engine.accountant), answer(lambda: other.load_state_dict(saved[0]))


def test_ranks_go_back_to_a_checkpoint_of_their_own_run_only(run, seed):
    # without rank 0 no noise is added and nothing released
    assert run(going_back, 2, seed=seed) == [(6, "ArgumentError"), (6, "nothing")]


def seeded(rank, seed):
    """Of four runs that seed their noise, of which two change a record, of rank 0 and of rank 1:
    the parameters after a step, the first number of the noise, and where the generator stands.
    """
    found = []
    for change in (None, None, 0, 1):
        noise._used_positions.clear()  # as in processes of their own
        data = records(seed)
        if change is not None:
            data.tensors[0][change] += 1.0
        given = {"draws": seed + 1, "data": data, "batch_size": 41}
        given["optimizer"] = partial(SGLD, generator=torch.Generator().manual_seed(seed + 2))
        _, net, optimizer, loader = make(seed, **given)
        streams, next_stream = [], optimizer.release.noise.next_stream

        def watch(device, hides, next_stream=next_stream, streams=streams):
            stream = next_stream(device, hides)
            streams.append(float(torch.randn(1, generator=stream.clone_state())))
            return stream

        optimizer.release.noise.next_stream = watch
        steps.train(net, optimizer, loader, 1)
        state = optimizer.state_dict()["private_step"]["noise"].tolist()
        found.append((flat(net), state, streams[0]))
    return found


def test_a_seeded_run_repeats_bit_for_bit_and_noise_differs_where_any_rank_s_records_do(run, seed):
    of_0, of_1 = run(seeded, 2, seed=seed)
    assert of_0[0] == of_0[1] and of_1[0] == of_1[1] and of_0[0][:2] == of_1[0][:2]
    assert len({stream for _, _, stream in of_0}) == 3


# -- ranks that differ, fail, stall or die ---------------------------------------------------------


class Changing(Dataset):
    """Records with noise of torch's global generator, or of one that no global seed repeats."""

    own = torch.Generator()

    def __init__(self, data, generator=None, is_reversed=False, is_named=True):
        self.data, self.generator = data, generator
        self.is_reversed, self.is_named = is_reversed, is_named

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[len(self.data) - 1 - i if self.is_reversed else i]
        noise = torch.randn(FEATURES, generator=self.generator)
        return x + noise, y if self.is_named else torch.tensor(0)


def set_ups(rank, seed):
    """What make_private says on this rank where rank 1 does something else."""
    data, sgld, nht, own = records(seed), dpb.optim.DPSGLD, dpb.optim.DPSGNHT, Changing.own

    def other(first, second):
        return second if rank == 1 else first

    def raises(**options):
        net = options.setdefault("module", network(seed))
        torch.manual_seed(seed + rank)  # ranks augment their records differently
        told = answer(lambda: make(seed, **options))
        # nothing is left behind
        is_bare = not any("forward" in m.__dict__ or m._forward_hooks for m in net.modules())
        assert is_bare or told == "nothing"
        return told

    used = dpb.PrivacyAccountant()
    if rank == 1:
        used.step(noise_multiplier=1.0, sample_rate=0.1)
    differing = {
        "records": {"data": Subset(data, range(other(41, 40)))},
        "order": {"data": other(data, Subset(data, range(40, -1, -1)))},
        "order of augmented records": {"data": Changing(data, is_reversed=other(False, True))},
        "order of what no seed repeats": {"data": Changing(data, own, other(False, True))},
        "shapes": {"module": other(network(seed), nn.Linear(FEATURES, CLASSES).double())},
        "initial parameters": {"module": network(seed + rank)},
        "sampling rate": {"batch_size": other(6, 7)},
        "parameter groups": {"optimizer": partial(sgld, lr=other(0.1, 0.2))},
        "clip norm": {"max_grad_norm": other(1.0, 2.0)},
        "a setting": {"optimizer": partial(nht, lr=0.01, thermostat_gain=other(0.1, 0.2))},
        "algorithm": {"optimizer": partial(other(sgld, nht), lr=0.1)},
        "reduction": {"loss_reduction": other("mean", "sum")},
        "accountant": {"engine": engine_of(dpb.PrivacyAccountant(other(1.0, 2.0), 1e-5))},
        "history": {"engine": engine_of(used)},
        "seeds": {"draws": seed + rank},
    }
    found = {name: raises(**options) for name, options in differing.items()}
    broken = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    found["one fails"] = raises(**other({}, {"module": broken}))
    fine = [{}, {"data": Changing(data)}, {"data": Changing(data, own)}]
    alike = raises(data=Changing(data, own, is_named=False))
    return found, [raises(**options) for options in fine], alike


def test_ranks_that_differ_are_told_so_before_anything_is_charged(run, seed):
    for rank, (found, fine, alike) in enumerate(run(set_ups, 2, seed=seed)):
        assert found.pop("one fails") == ("ModelError" if rank == 1 else "RankError")
        assert set(found.values()) == {"RankError"}, found
        assert fine == ["nothing"] * 3
        assert alike == "ArgumentError"


# what the step says on rank 1, and what that does before
DEPARTURES = {
    "lr": ("RankError", lambda run: run.optimizer.param_groups[0].update(lr=0.7)),
    "parameters": ("RankError", lambda run: run.net[0].weight.data.mul_(1.5)),
    "frozen": ("RankError", lambda run: run.net[2].bias.requires_grad_(False)),
    "draw": ("RankError", lambda run: torch.rand(1, generator=run.draws)),
    "charge": ("RankError", lambda run: run.accountant.compose(GaussianDpEvent(9.0))),
    "not finite": ("DivergedError", lambda run: run.net[0].bias.data.fill_(math.nan)),
    "skipped": ("StateError", lambda run: next(run.batches)),
    "closure": ("MemoryError", lambda run: None),
}


def departures(rank, seed):
    """What each step says, and that all ranks go on when they are in line again."""
    told = {}
    for kind, (_, departs) in DEPARTURES.items():
        # half of all records: two draws are the same with probability 2**-41
        own = {"draws": seed, "batch_size": 20} if kind == "draw" else {}
        engine, net, optimizer, loader = make(seed, **own)
        if rank == 1 and kind != "draw":
            list(loader)  # looking is no departure
        batches = iter(loader)
        one(net, optimizer, next(batches))
        charged, before = len(engine.accountant), copy.deepcopy(net.state_dict())
        if kind == "charge":  # compared where a pass begins
            batches = iter(loader)
        if rank == 1:
            parts = {"net": net, "optimizer": optimizer, "batches": batches}
            draws = loader.sampler_of_draws.generator
            departs(SimpleNamespace(**parts, accountant=engine.accountant, draws=draws))
        x, y = next(batches)

        def closure(net=net, x=x, y=y, fails=(kind, rank) == ("closure", 1)):
            if fails:
                raise MemoryError("no memory on this rank")
            total = nn.functional.cross_entropy(net(x), y)
            total.backward()
            return total

        told[kind] = answer(partial(optimizer.step, closure))
        if kind == "charge":
            continue
        assert len(engine.accountant) == charged
        if kind == "draw":  # the ranks have no draw in common any more
            continue
        if rank == 0 or kind not in ("parameters", "not finite"):
            assert all(torch.equal(before[name], p) for name, p in net.state_dict().items())
        optimizer.param_groups[0]["lr"] = 0.3
        net.load_state_dict(before)
        net.requires_grad_(True)
        one(net, optimizer, next(iter(loader)))
        assert len(engine.accountant) == charged + 1
    return told


def test_what_one_rank_does_otherwise_is_an_error_on_all_and_can_be_mended(run, seed):
    first, second = run(departures, 2, seed=seed)
    assert set(first.values()) == {"RankError"}, first
    assert second == {kind: says for kind, (says, _) in DEPARTURES.items()}


def loses_a_rank(rank, seed, folder):
    """Rank 1 is killed in its third step; what the others say, when, and what they hold."""
    accountant = dpb.PrivacyAccountant(50.0, 1e-5, path=f"{folder}/budget.db")
    _, net, optimizer, loader = make(seed, engine=engine_of(accountant))
    batches = iter(loader)
    for _ in range(2):
        one(net, optimizer, next(batches))
    before, began = flat(net), time.monotonic()
    if rank == 1:
        distributed.Ranks.all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    told = answer(lambda: one(net, optimizer, next(batches)))
    took = time.monotonic() - began
    again = answer(lambda: one(net, optimizer, next(iter(loader))))
    return [told, again], took, before == flat(net), len(accountant)


def test_a_lost_rank_stops_the_others_and_what_was_charged_stays_charged(run, seed, tmp_path):
    first, lost, third = run(loses_a_rank, 3, seed=seed, folder=str(tmp_path))
    assert lost is None
    for told, took, unchanged, charged in (first, third):
        assert told == ["RankError"] * 2
        assert took < TIMEOUT / 2 and unchanged and charged >= 3
    assert len(dpb.PrivacyAccountant(path=tmp_path / "budget.db")) >= 2


# -- what is refused -------------------------------------------------------------------------------


REFUSED = ["ranks-alone", "ranks-alone", "ranks-wrapped", "loader-sampler"]
REFUSED += ["step-ddp", "step-ddp", "model-map", "model-map"]
REFUSED += ["ranks-alone", "argument", "argument"]


class Drawing(nn.Module):
    """Multiplies all records by one random number. Another rank would draw another one."""

    def __init__(self, draw, seed):
        super().__init__()
        self.draw, self.net = draw, network(seed)

    def forward(self, x):
        return self.net(x) * self.draw()


def undeclared(rank, seed):
    """What is said of steps that ignore the other ranks, and the charges of a chain of this rank's
    own.
    """
    net, data, told = network(seed), records(seed), []
    bare = steps.bare(net.parameters(), num_data=RECORDS)
    steps.fill(net.parameters())
    wrapped = nn.parallel.DistributedDataParallel

    def refused(call, *arguments, **options):
        with pytest.raises(dpb.DPBayesError) as caught:
            call(*arguments, **options)
        told.append(caught.value.code)

    refused(bare.step)
    refused(make, seed, engine=dpb.PrivacyEngine())
    refused(make, seed, module=wrapped(network(seed)))
    refused(make, seed, data_loader=DataLoader(data, 6, sampler=DistributedSampler(data)))
    for mode in (None, "hooks"):
        engine, net, optimizer, loader = make(seed, **recorded(mode))
        refused(steps.train, wrapped(net), optimizer, loader, 1)
    for draw in (lambda: float(torch.rand(1)), random.random):
        refused(make, seed, module=Drawing(draw, seed))
    refused(dpb.private_clipped_fraction, net, optimizer, loader, noise_multiplier=3.0)
    ranks = distributed.Ranks(dist.new_group(backend="cpu:gloo"))
    for place in ("cuda", "meta"):
        refused(ranks.require_backend_for, torch.device(place))
    assert len(bare.accountant) == len(engine.accountant) == 0
    # a chain of this rank's own, on purpose
    own = dpb.PrivacyEngine(process_group=dist.new_subgroups(1)[0])
    engine, net, optimizer, loader = make(seed, engine=own)
    steps.train(net, optimizer, loader, 2 * (rank + 1))
    return told, len(engine.accountant)


def test_steps_that_ignore_the_other_ranks_are_refused(run, seed):
    for rank, (told, charged) in enumerate(run(undeclared, 2, seed=seed)):
        assert charged == 2 * (rank + 1)
        assert told == REFUSED
