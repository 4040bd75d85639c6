"""Data parallelism: real gloo groups on loopback. What ranks release, charge and refuse is
what one process does, or an error on all of them.
"""

import io
import math
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import socket
import time
import traceback
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import distributed
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.noise import GaussianNoise

TIMEOUT = 60.0  # seconds; of a process group, where no test is about it

# -- ranks: forked from one process that has imported everything, to start in milliseconds ----


def _rank(function, rank, size, folder, pipe, arguments):
    torch.set_num_threads(1)
    try:
        if size > 1 and not arguments.pop("torchrun", False):
            timeout = timedelta(seconds=TIMEOUT)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}", rank=rank, world_size=size, timeout=timeout
            )
        pipe.send(("ok", pickle.dumps(globals()[function](rank, **arguments))))  # tensors by value
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
    os._exit(0)


def _serve(requests):
    context = multiprocessing.get_context("fork")
    while True:
        function, size, folder, arguments = requests.recv()
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            processes.append(
                context.Process(
                    target=_rank,
                    args=(function, rank, size, folder, theirs, pickle.loads(arguments)),
                )
            )
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        answers = []
        for pipe in pipes:
            try:
                answers.append(pipe.recv() if pipe.poll(2 * TIMEOUT) else ("error", "no answer"))
            except EOFError:
                answers.append(("died", None))
        for process in processes:
            process.kill()
            process.join()
        requests.send(answers)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run("function", size, **arguments)``: what each rank returned; None of a rank that died."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    server.start()
    folder = tmp_path_factory.mktemp("groups")
    counter = iter(range(10**6))

    def run(function, size, **arguments):
        ours.send(
            (function.__name__, size, str(folder / str(next(counter))), pickle.dumps(arguments))
        )
        answers = ours.recv()
        for kind, value in answers:
            assert kind != "error", value
        return [None if value is None else pickle.loads(value) for _, value in answers]

    yield run
    server.kill()
    server.join()


# -- what the ranks do -----------------------------------------------------------------------------

RECORDS, FEATURES, CLASSES = 41, 5, 3

ALGORITHMS = {
    "DPSGLD": partial(dpb.optim.DPSGLD, lr=0.3),
    "DPSGHMC": partial(dpb.optim.DPSGHMC, lr=0.1),
    "DPSGNHT": partial(dpb.optim.DPSGNHT, lr=0.01),
    "DPSGFS full": partial(dpb.optim.DPSGFS, lr=0.1),
    "DPSGFS diagonal": partial(dpb.optim.DPSGFS, lr=0.1, fisher="diagonal"),
    "DPSGFS scaled": partial(
        dpb.optim.DPSGFS, lr=0.1, sensitivity_scale=torch.linspace(0.5, 2.0, 57)
    ),
}


def records(seed, num_records=RECORDS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_records, FEATURES, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(CLASSES, (num_records,), generator=generator))


def network(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)


def world():
    return dist.group.WORLD if dist.is_initialized() else None


def make(
    seed,
    *,
    optimizer=ALGORITHMS["DPSGLD"],
    batch_size=6,
    engine=None,
    net=None,
    data=None,
    draws=None,
    **options,
):
    engine = dpb.PrivacyEngine(process_group=world()) if engine is None else engine
    generator = None if draws is None else torch.Generator().manual_seed(draws)
    loader = DataLoader(
        records(seed) if data is None else data, batch_size=batch_size, generator=generator
    )
    given = {"max_grad_norm": 0.7, "noise_multiplier": 0.8, **options}
    return engine, *engine.make_private(
        module=network(seed) if net is None else net,
        optimizer=optimizer,
        data_loader=loader,
        **given,
    )


def one_step(net, optimizer, x, y, reduction="mean"):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y, reduction=reduction).backward()
    optimizer.step()


def train(net, optimizer, loader, steps, **options):
    taken = 0
    while taken < steps:
        for x, y in loader:
            one_step(net, optimizer, x, y, **options)
            taken += 1
            if taken == steps:
                return


def flat(net):
    return torch.cat([p.detach().reshape(-1).double() for p in net.parameters()])


def exact(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(a, b):
    return torch.allclose(exact(a), exact(b), rtol=1e-6, atol=1e-6)


def message(call):
    """(type, text) of what the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def fix_noise(seed):
    """Noise that is a function of the seed and of how many releases there were."""
    counter = iter(range(10**6))

    def next_stream(self, device, hides):
        return torch.Generator().manual_seed(hash((seed, next(counter))) % 2**63)

    GaussianNoise.next_stream = next_stream


# -- the same numbers as on one process ------------------------------------------------------------


def trained(
    rank,
    seed,
    name,
    mode="bookkeeping",
    reduction="mean",
    steps=7,
    dtype="float64",
    records_in_all=RECORDS,
    batch_size=6,
    part=None,
):
    fix_noise(seed)
    dtype = getattr(torch, dtype)
    data = records(seed, records_in_all, dtype)
    options = {
        "net": network(seed, dtype),
        "data": data,
        "draws": seed + 1,
        **recorded(mode),
        "loss_reduction": reduction,
    }
    options["batch_size"] = batch_size
    engine, net, optimizer, loader = make(seed, optimizer=ALGORITHMS[name], **options)
    sizes = []
    if part is not None:  # ranks have different numbers of them
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=part + rank, optimizer=optimizer
        )
        with manager as parts:
            for x, y in parts:
                one_step(net, optimizer, x, y, reduction)
        return flat(net).tolist(), [], [(repr(c.event), c.count) for c in engine.accountant.history]
    for _ in range(2):
        for x, y in loader:
            if len(sizes) < steps:
                one_step(net, optimizer, x, y, reduction)
                sizes.append(len(x))
    return flat(net).tolist(), sizes, [(repr(c.event), c.count) for c in engine.accountant.history]


def trained_each(rank, seed, cases):
    return [trained(rank, seed + 10 * i, **case) for i, case in enumerate(cases)]


CASES = [
    *({"name": n, "steps": 4} for n in ("DPSGLD", "DPSGNHT", "DPSGFS full", "DPSGFS scaled")),
    {"name": "DPSGLD", "mode": "hooks", "steps": 4},
    {"name": "DPSGFS diagonal", "mode": "hooks", "steps": 4},
    {"name": "DPSGLD", "reduction": "sum", "dtype": "float32"},
    {"name": "DPSGLD", "records_in_all": 6, "batch_size": 1},  # most ranks' batches are empty
    {"name": "DPSGLD", "batch_size": 20, "part": 3, "steps": 2},  # all of one pass
    # one rank never has a record
    {"name": "DPSGFS diagonal", "records_in_all": 2, "steps": 1, "batch_size": 1},
]


@pytest.mark.thorough
def test_several_ranks_give_the_numbers_of_one(run):
    seed = torch.seed() % 2**31
    (alone,) = run(trained_each, 1, seed=seed, cases=CASES)
    ranks = run(trained_each, 3, seed=seed, cases=CASES)
    for case, one, *together in zip(CASES, alone, *ranks):
        for theta, _, history in together:
            assert theta == together[0][0]  # bit for bit
            assert close(theta, one[0]), case
            # one charge a step, on every rank's accountant
            assert history == one[2] and history[0][1] == case.get("steps", 7)
        assert [sum(sizes) for sizes in zip(*(t[1] for t in together))] == one[1], case


# -- what is released ------------------------------------------------------------------------------


def captured_each(rank, seed, cases):
    return [captured(rank, seed + 10 * i, *case) for i, case in enumerate(cases)]


def captured(rank, seed, name, mode):
    """Every step's S/B as the algorithm gets it and the noise, as vectors; the draw and the
    parameters before it.
    """
    fix_noise(seed)
    engine, net, optimizer, loader = make(
        seed, optimizer=ALGORITHMS[name], **recorded(mode), draws=seed + 1
    )
    released, before, update = [], [], optimizer._update

    def watch(parts):
        layout = optimizer._current_layout()
        priors = torch.cat([p.detach().reshape(-1) for p in layout.parameters]) / optimizer.num_data
        before.append(flat(net).tolist())
        released.append(
            [
                (layout.gradient - priors).tolist(),
                layout.extra.tolist(),
                optimizer.effective_noise_multiplier,
            ]
        )
        update(parts)

    optimizer._update = watch
    train(net, optimizer, loader, 4)
    return released, before


@pytest.mark.parametrize(
    "cases",
    [[("DPSGLD", "bookkeeping"), ("DPSGFS diagonal", "hooks"), ("DPSGFS full", "bookkeeping")]],
)
def test_the_release_is_the_clipped_sum_over_the_whole_draw_and_one_noise(cases, run):
    """Against torch's own gradients, one record at a time, clipped by hand."""
    seed = torch.seed() % 2**31
    ranks = run(captured_each, 3, seed=seed, cases=cases)
    for i, (name, _) in enumerate(cases):
        assert all(rank[i] == ranks[0][i] for rank in ranks)
        check_releases(seed + 10 * i, name, *ranks[0][i])


def check_releases(seed, name, released, before):
    sampler = PoissonSampler(RECORDS, 6 / RECORDS, torch.Generator().manual_seed(seed + 1), 0)
    x, y = records(seed).tensors
    net, clip = network(seed), 0.7
    for step, ((gradient, second, z), theta, draw) in enumerate(zip(released, before, sampler)):
        torch.nn.utils.vector_to_parameters(exact(theta), net.parameters())
        clipped = []
        for i in draw:
            net.zero_grad()
            nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
            g = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
            clipped.append(g * min(1.0, clip / g.norm().item()))
        clipped = (
            torch.stack(clipped) if clipped else torch.zeros(0, len(theta), dtype=torch.float64)
        )
        stream = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
        noise = torch.empty(len(theta), dtype=torch.float64).normal_(
            0.0, z * clip / 6, generator=stream
        )
        assert torch.allclose(exact(gradient), clipped.sum(0) / 6 + noise, atol=1e-12)
        if name != "DPSGLD":
            moment = (
                clipped.square().sum(0)
                if name == "DPSGFS diagonal"
                else (clipped.T @ clipped).reshape(-1)
            )
            noise = torch.empty(len(moment), dtype=torch.float64).normal_(
                0.0, z * clip**2 / math.sqrt(0.5) / 6, generator=stream
            )
            assert torch.allclose(exact(second), moment / 6 + noise, atol=1e-12)


# -- budgets and ledgers ---------------------------------------------------------------------------


def until_the_budget_ends(rank, seed, path):
    accountant = dpb.PrivacyAccountant(3.0, 1e-5, path=path)
    engine = dpb.PrivacyEngine(accountant, process_group=world())
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=network(seed),
        optimizer=partial(ALGORITHMS["DPSGFS full"], temperature=1e-4),
        data_loader=DataLoader(records(seed), batch_size=6),
        max_grad_norm=0.7,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
    )
    steps = 0
    try:
        while True:
            for batch in loader:
                before = flat(net)
                one_step(net, optimizer, *batch)
                steps += 1
    except dpb.PrivacyBudgetExceeded as error:
        told = str(error)
    assert torch.equal(before, flat(net)) and steps == len(loader)
    found = steps, len(accountant), accountant.get_epsilon(1e-5), optimizer.noise_multiplier, told
    if rank == 0:
        accountant.close()
    if world() is not None:
        dist.barrier()
    return found, flat(net).tolist()


@pytest.mark.thorough
def test_ranks_are_calibrated_and_stopped_as_one_process_is(run, tmp_path):
    seed = torch.seed() % 2**31
    (alone,) = run(until_the_budget_ends, 1, seed=seed, path=str(tmp_path / "1.db"))
    together = run(until_the_budget_ends, 2, seed=seed, path=str(tmp_path / "2.db"))
    assert together[0] == together[1]
    assert together[0][0] == alone[0] and 2.9 < alone[0][2] <= 3.0 and alone[0][0] == alone[0][1]


# -- ranks that differ, fail, stall or die ---------------------------------------------------------


class Reversed(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[len(self.data) - 1 - i]


class Augmented(Reversed):
    def __getitem__(self, i):
        x, y = self.data[i]
        return x + torch.randn(FEATURES), y


class Restless(Reversed):
    """Whose augmentation no global seed repeats."""

    generator = torch.Generator()

    def __getitem__(self, i):
        x, y = self.data[i]
        return x + torch.randn(FEATURES, generator=self.generator), y


class Anonymous(Restless):
    """Without any part that tells records apart."""

    def __getitem__(self, i):
        return super().__getitem__(i)[0], torch.tensor(0)


def set_ups(rank, seed):
    """What make_private says on this rank where rank 1 does something else, and that nothing
    is left behind.
    """
    data, sgld = records(seed), dpb.optim.DPSGLD

    def other(first, second):
        return second if rank == 1 else first

    def raises(**options):
        net = options.pop("net", None) or network(seed)
        torch.manual_seed(seed + rank)  # ranks augment their records differently
        told = message(lambda: make(seed, net=net, **options))
        assert (
            not net._forward_hooks and not any("forward" in m.__dict__ for m in net.modules())
        ) or told[0] == "nothing"
        return told

    def engine(*arguments, **options):
        return dpb.PrivacyEngine(
            dpb.PrivacyAccountant(*arguments, **options), process_group=world()
        )

    used = engine()
    if rank == 1:
        used.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    found = {
        "nothing": raises(),
        "number of records": raises(data=Subset(data, range(other(41, 40)))),
        "their order": raises(data=other(data, Reversed(data))),
        "the records or their order": raises(data=Augmented(other(data, Reversed(data)))),
        "or their order (pass": raises(data=Restless(other(data, Reversed(data)))),
        "shapes": raises(net=other(network(seed), nn.Linear(FEATURES, CLASSES).double())),
        "initial parameters": raises(net=network(seed + rank)),
        "sampling rate": raises(batch_size=other(6, 7)),
        "parameter groups": raises(optimizer=partial(sgld, lr=other(0.1, 0.2))),
        "settings of the optimizer": raises(max_grad_norm=other(1.0, 2.0)),
        "the settings of the optimizer": raises(
            optimizer=partial(dpb.optim.DPSGNHT, lr=0.01, thermostat_gain=other(0.1, 0.2))
        ),
        "the algorithm": raises(
            optimizer=other(partial(sgld, lr=0.1), partial(dpb.optim.DPSGNHT, lr=0.1))
        ),
        "loss_reduction": raises(loss_reduction=other("mean", "sum")),
        "accountant's settings": raises(engine=engine(other(1.0, 2.0), 1e-5)),
        "accountant's history": raises(engine=used),
        "seeds must be equal": raises(draws=seed + rank),
        "rank 1 failed": raises(
            net=other(
                None, nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
            )
        ),
        "make_private_with_epsilon": message(
            lambda: (
                make(seed)
                if rank == 0
                else dpb.PrivacyEngine(process_group=world()).make_private_with_epsilon(
                    module=network(seed),
                    optimizer=ALGORITHMS["DPSGLD"],
                    data_loader=DataLoader(data, 6),
                    max_grad_norm=1.0,
                    target_epsilon=1.0,
                    target_delta=1e-5,
                    epochs=1,
                )
            )
        ),
    }
    fine = [raises(data=Augmented(data)), raises(data=Restless(data))]
    state = torch.get_rng_state()
    raises()
    assert torch.equal(state, torch.get_rng_state())
    return found, fine, raises(data=Anonymous(data))


def test_ranks_that_differ_are_told_in_what_before_anything_is_charged(run):
    for rank, (found, fine, anonymous) in enumerate(run(set_ups, 3, seed=torch.seed() % 2**31)):
        for expected, (kind, text) in found.items():
            if expected == "rank 1 failed" and rank == 1:
                assert "BatchNorm" in text
            else:
                assert kind == ("nothing" if expected == "nothing" else "RankError") and (
                    expected == "nothing" or expected in text
                ), (kind, text)
        assert fine == [("nothing", "")] * 2
        assert (
            anonymous[0] == "ArgumentError" and "the records differ at every look" in anonymous[1]
        )


def departures(rank, seed, kind):
    """What the step says after rank 1 departed from the others, and after all of them are in
    line again.
    """
    engine, net, optimizer, loader = make(seed)
    list(loader) if rank == 1 else None  # looking is no departure
    batches = iter(loader)
    one_step(net, optimizer, *next(batches))
    charged, before = len(engine.accountant), flat(net)

    def again():
        one_step(net, optimizer, *next(batches))

    def undo():
        return None

    if rank == 1:
        if kind == "lr":
            optimizer.param_groups[0]["lr"] = 0.7
            undo = lambda: optimizer.param_groups[0].update(lr=0.3)  # noqa: E731
        elif kind == "parameters":
            saved = net[0].weight.detach().clone()
            net[0].weight.data.mul_(1.5)
            undo = lambda: net[0].weight.data.copy_(saved)  # noqa: E731
        elif kind == "frozen":
            net[2].bias.requires_grad_(False)
            undo = lambda: net[2].bias.requires_grad_(True)  # noqa: E731
        elif kind == "skipped":
            next(batches)
        elif kind == "not finite":
            saved = net[0].bias.detach().clone()
            net[0].bias.data.fill_(math.nan)
            undo = lambda: net[0].bias.data.copy_(saved)  # noqa: E731
    if kind == "closure":
        x, y = next(batches)

        def closure():
            if rank == 1:
                raise MemoryError("no memory on this rank")
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        told = message(lambda: optimizer.step(closure))
    elif kind == "charge":
        if rank == 1:
            engine.accountant.step(noise_multiplier=9.0, sample_rate=0.1)
        batches = iter(loader)
        told = message(again)
        return told, ("nothing", ""), [0.0], True
    elif kind == "twice":
        x, y = next(batches)
        if rank == 1:
            net(x)
        told = message(lambda: one_step(net, optimizer, x, y))
    else:
        told = message(again)
    assert len(engine.accountant) == charged
    undo()
    assert torch.equal(before, flat(net))
    batches = iter(loader)
    after = message(again)
    return told, after, flat(net).tolist(), len(engine.accountant) == charged + 1


DEPARTURES = {
    "lr": ("settings of the optimizer", None),
    "parameters": ("parameters of the model", None),
    "frozen": ("settings of the optimizer", None),
    "skipped": ("rank 1 failed", "got no step"),
    "charge": ("number of releases", None),
    "not finite": ("rank 1 failed", "is not finite"),
    "closure": ("MemoryError there: no memory on this rank", "no memory on this rank"),
    "twice": ("rank 1 failed", "run forward 2 times"),
}


def departures_each(rank, seed):
    return [departures(rank, seed + 10 * i, kind) for i, kind in enumerate(DEPARTURES)]


@pytest.mark.thorough
def test_what_one_rank_does_otherwise_is_an_error_on_all_and_can_be_mended(run):
    ranks = run(departures_each, 2, seed=torch.seed() % 2**31)
    for i, (expected, own) in enumerate(DEPARTURES.values()):
        for rank, answers in enumerate(ranks):
            told, after, theta, was_charged = answers[i]
            assert (own if rank == 1 and own else expected) in told[1], told
            assert after == ("nothing", "") and theta == ranks[0][i][2] and was_charged


def loses_a_rank(rank, seed, how, folder):
    """Rank 1 goes at its third step; what the others say, when, and what they and the ledger
    hold.
    """
    accountant = (
        dpb.PrivacyAccountant(50.0, 1e-5, path=f"{folder}/budget.db")
        if how != "stalled"
        else dpb.PrivacyAccountant()
    )
    group = dist.new_group(timeout=timedelta(seconds=4)) if how == "stalled" else dist.group.WORLD
    _, net, optimizer, loader = make(
        seed, engine=dpb.PrivacyEngine(accountant, process_group=group)
    )
    batches = iter(loader)
    for _ in range(2):
        one_step(net, optimizer, *next(batches))
    before, began = flat(net), time.monotonic()
    if rank == 1:
        if how == "killed":
            distributed.Ranks.all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        while how == "stalled" and not all(os.path.exists(f"{folder}/{other}") for other in (0, 2)):
            time.sleep(0.05)
        if how == "stalled":
            return None
    told = message(lambda: one_step(net, optimizer, *next(batches)))
    took = time.monotonic() - began
    Path(folder, str(rank)).touch()
    again = message(lambda: one_step(net, optimizer, *next(iter(loader))))
    optimizer.state_dict()
    return told, again, took, torch.equal(before, flat(net)), len(accountant)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_rank_stops_the_others_and_what_was_charged_stays_charged(run, tmp_path, how):
    answers = run(loses_a_rank, 3, seed=torch.seed() % 2**31, how=how, folder=str(tmp_path))
    assert answers[1] is None
    for told, again, took, unchanged, charged in (answers[0], answers[2]):
        assert told[0] == again[0] == "RankError"
        assert "died, or did not answer" in told[1] and "was lost before" in again[1]
        assert took < TIMEOUT / 2 and unchanged
        assert charged >= (3 if how == "killed" else 2)
    if how == "killed":
        assert len(dpb.PrivacyAccountant(path=tmp_path / "budget.db")) >= 2


# -- what is refused -------------------------------------------------------------------------------


ALONE = "nothing was said about the others.*process_group=torch.distributed.group.WORLD"
WRAPPED = "DistributedDataParallel.*(averages unclipped|neither clipped nor)"


def undeclared(rank, seed):
    """(pattern, what was said) of steps that ignore the other ranks, and the charges of a chain
    of this rank's own.
    """
    net = network(seed)
    bare = dpb.optim.DPSGLD(
        net.parameters(),
        lr=0.1,
        assume_independent_records=True,
        num_data=RECORDS,
        expected_batch_size=6,
        max_grad_norm=1.0,
        sampling="poisson",
    )
    for p in net.parameters():
        p.grad_sample = torch.zeros(6, *p.shape, dtype=p.dtype)
    wrapped = nn.parallel.DistributedDataParallel(network(seed))
    told = [
        (ALONE, message(bare.step)),
        (ALONE, message(lambda: make(seed, engine=dpb.PrivacyEngine()))),
        (WRAPPED, message(lambda: make(seed, net=wrapped))),
    ]
    assert len(bare.accountant) == 0
    data = records(seed)
    sampled = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    told.append(
        (
            "DistributedSampler.*also on several ranks",
            message(
                lambda: dpb.PrivacyEngine(process_group=world()).make_private(
                    module=network(seed),
                    optimizer=ALGORITHMS["DPSGLD"],
                    data_loader=sampled,
                    max_grad_norm=1.0,
                )
            ),
        )
    )
    for mode in ("bookkeeping", "hooks"):
        engine, net, optimizer, loader = make(seed, **recorded(mode))
        wrapped = nn.parallel.DistributedDataParallel(net)
        told.append((WRAPPED, message(lambda: train(wrapped, optimizer, loader, 1))))  # noqa: B023
        assert len(engine.accountant) == 0
    engine, net, optimizer, loader = make(seed)
    share = partial(dpb.private_clipped_fraction, net, optimizer, loader, noise_multiplier=3.0)
    told.append(("shared by several ranks", message(share)))
    ranks = distributed.Ranks(dist.new_group(backend="cpu:gloo"))
    for place in ("cuda", "meta"):
        check = partial(ranks.require_backend_for, torch.device(place))
        told.append(("cannot add up.*", message(check)))
    # a chain of this rank's own, on purpose
    engine, net, optimizer, loader = make(
        seed, engine=dpb.PrivacyEngine(process_group=dist.new_subgroups(1)[0])
    )
    for _ in range(rank + 1):
        train(net, optimizer, loader, 2)
    return told, len(engine.accountant)


def test_steps_that_ignore_the_other_ranks_are_refused(run):
    for rank, (told, charged) in enumerate(run(undeclared, 2, seed=torch.seed() % 2**31)):
        assert charged == 2 * (rank + 1)
        for pattern, (_, text) in told:
            assert re.search(pattern, text), text


def test_one_process_needs_no_group():
    engine = dpb.PrivacyEngine(process_group=dist.group.WORLD)  # which is None here
    _, net, optimizer, loader = make(1, engine=engine)
    train(net, optimizer, loader, 2)
    assert len(engine.accountant) == 2


# -- checkpoints, parts of batches, traffic --------------------------------------------------------


def resumed(rank, seed, name, saved, steps):
    """``steps`` steps from a checkpoint, and a new checkpoint."""
    fix_noise(seed + (0 if saved is None else saved["steps"]))
    factory = partial(ALGORITHMS[name], generator=torch.Generator().manual_seed(seed + 2))
    engine, net, optimizer, loader = make(seed, optimizer=factory, draws=seed + 1)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    train(net, optimizer, loader, steps)
    checkpoint = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    return (
        checkpoint if rank == 0 else None,
        flat(net).tolist(),
        engine.accountant.get_epsilon(1e-5),
    )


def resumed_each(rank, seed, saved):
    names = ["DPSGHMC", "DPSGNHT", "DPSGFS full"]
    return [
        resumed(rank, seed + 10 * i, name, None if saved is None else saved[i][0], 4)
        for i, name in enumerate(names)
    ]


@pytest.mark.thorough
def test_a_checkpoint_resumes_on_another_number_of_ranks(run):
    seed = torch.seed() % 2**31
    saved = run(resumed_each, 2, seed=seed, saved=None)[0]
    ((*alone,), *_), three = (
        run(resumed_each, 1, seed=seed, saved=saved),
        run(resumed_each, 3, seed=seed, saved=saved),
    )
    for (_, _, first), one, *others in zip(saved, alone, *three):
        for _, theta, epsilon in others:
            assert close(theta, one[1]) and epsilon == one[2] > first


def going_back(rank, seed):
    """Rank 0's checkpoint, loaded by all ranks onto accountants that went on; then that of
    another run.
    """
    engine, net, optimizer, loader = make(seed)
    train(net, optimizer, loader, 2)
    saved = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    train(net, optimizer, loader, 2)
    optimizer.load_state_dict(saved[0])
    train(net, optimizer, loader, 2)
    _, net, other, loader = make(seed)
    train(net, other, loader, 2)
    refused = ""
    try:
        other.load_state_dict(saved[0])
    except ValueError as error:
        refused = str(error)
    return len(engine.accountant), refused


def test_ranks_go_back_to_a_checkpoint_of_their_own_run_only(run):
    for rank, (releases, refused) in enumerate(run(going_back, 2, seed=torch.seed() % 2**31)):
        assert releases == 6
        assert bool(refused) == (rank == 0)  # without which no noise is added and nothing released


def seeded(rank, seed, change=None):
    """Noise of a caller's generator: the parameters after two steps, and the noise of rank
    0's first release.
    """
    factory = partial(ALGORITHMS["DPSGLD"], generator=torch.Generator().manual_seed(seed + 2))
    data = records(seed)
    if change is not None:
        data.tensors[0][change] += 1.0
    engine, net, optimizer, loader = make(
        seed, optimizer=factory, draws=seed + 1, data=data, batch_size=41
    )
    streams, next_stream = [], optimizer.release.noise.next_stream

    def watch(device, hides):
        stream = next_stream(device, hides)
        streams.append(float(torch.randn(1, generator=stream.clone_state())))
        return stream

    optimizer.release.noise.next_stream = watch
    train(net, optimizer, loader, 1)
    return flat(net).tolist(), streams[0], optimizer.state_dict()["private_step"]["noise"].tolist()


@pytest.mark.thorough
def test_a_seeded_run_repeats_bit_for_bit_and_noise_differs_where_any_rank_s_records_do(run):
    seed = torch.seed() % 2**31
    first, second = run(seeded, 2, seed=seed), run(seeded, 2, seed=seed)
    # the generators go on alike on all ranks
    assert first == second and first[0][0] == first[1][0] and first[0][2] == first[1][2]
    for record in (0, 1):  # of rank 0 and of rank 1
        assert run(seeded, 2, seed=seed, change=record)[0][1] != first[0][1]


def traffic(rank, seed, num_records):
    """Bytes of the tensors that this rank hands to torch.distributed in one step."""
    engine, net, optimizer, loader = make(
        seed, data=records(seed, num_records), batch_size=num_records // 4
    )
    sent, reduce, gather = [], dist.all_reduce, dist.all_gather_into_tensor
    distributed.dist.all_reduce = lambda t, **options: (
        sent.append(t.nbytes),
        reduce(t, **options),
    )[1]
    distributed.dist.all_gather_into_tensor = lambda o, t, **options: (
        sent.append(t.nbytes),
        gather(o, t, **options),
    )[1]
    train(net, optimizer, loader, 2)
    return sent, len(flat(net))


def test_what_travels_does_not_depend_on_the_number_of_records(run):
    seed = torch.seed() % 2**31
    small, large = (run(traffic, 2, seed=seed, num_records=n) for n in (40, 4000))
    assert small == large
    sent, size = small[0]
    # the message of a rank with its length, and the sum in float64 with a flag
    assert sent == [8 + 1024, 8 * (size + 1)] * 2


def example(rank, port):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    path = Path(__file__).resolve().parents[2] / "examples" / "distributed_bnn.py"
    told = io.StringIO()
    with redirect_stdout(told):
        runpy.run_path(str(path))["main"](["--epochs", "4", "--epsilon", "3"])
    return told.getvalue()


@pytest.mark.thorough
def test_the_example_trains_as_under_torchrun(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told, nothing = run(example, 2, port=port, torchrun=True)
    assert nothing == "" and "ranks                 2" in told
    assert 2.9 < float(re.search(r"epsilon +([0-9.]+)", told)[1]) <= 3 and "8 steps" in told
    assert 0 < float(re.search(r"accuracy +([0-9.]+)%", told)[1]) <= 100
