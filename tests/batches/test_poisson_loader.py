"""One sequence of draws, each for one step, in one process: nobody chooses batches by what they
hold.
"""

import copy
import gc
import itertools
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import steps
from support.children import in_child
from support.examples import examples
from support.refusals import refused
from support.training import private as made_private
from support.training import values
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.errors import CheckpointError, StateError

# where a pass is left, torch closes the pipes of its workers while threads of its own still write
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
# torch refuses a backward pass in the children of a process that has threads of autograd
on_the_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="autograd has threads")
FORK = {"multiprocessing_context": "fork"}


@pytest.fixture(autouse=True)
def _threads_of_a_left_pass_end_in_the_test_that_left_it():
    yield
    if multiprocessing.active_children():  # of a left pass; to collect takes long late in a run
        gc.collect()
    until = time.monotonic() + 2
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(max(0.0, until - time.monotonic()))


def private(rows=40, batch_size=8, dataset=None, accountant=None, **loader):
    if dataset is None:
        dataset = TensorDataset(torch.arange(float(rows))[:, None] / rows, torch.zeros(rows, 1))
    engine = dpb.PrivacyEngine(accountant)
    return made_private(nn.Linear(1, 1), dataset, batch_size, engine=engine, loader=loader)


one = partial(steps.one, loss=nn.functional.mse_loss)
train = partial(steps.train, loss=nn.functional.mse_loss)
parts_of = partial(steps.in_parts, size=2)


def records(batch, rows=40):
    return (values(batch[0])[:, 0] * rows).round().int().tolist()


def watched(loader):
    """Every draw of the loader from now on, in their order."""
    drawn, original = [], loader.sampler_of_draws._next_draw
    loader.sampler_of_draws._next_draw = lambda: drawn.append(original()) or drawn[-1]
    return drawn


# -- one sequence of draws -------------------------------------------------------------------------


@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["pass", "peek", "parts"]), st.lists(st.booleans(), max_size=6)),
        max_size=8,
    )
)
@examples(40)
def test_step_k_is_taken_on_draw_k_whatever_is_looked_at(plan):
    """Looking, leaving a pass and ``if y.sum() == 0: continue`` do not draw anew."""
    net, optimizer, loader = private(rows=12, batch_size=4)
    drawn, used = watched(loader), []
    for kind, taken in plan:
        if kind == "peek":
            next(iter(loader))
        elif kind == "pass":
            for batch, is_used in zip(loader, taken):
                if is_used:
                    try:
                        one(net, optimizer, batch)
                    except dpb.DPBayesError as error:
                        assert error.code == "loader-no-step"
                    else:
                        used.append(sorted(records(batch, 12)))
        else:
            with parts_of(loader, optimizer) as parts:
                seen = []
                for batch, is_used in zip(parts, taken):
                    if not is_used:
                        break
                    charged = len(optimizer.accountant)
                    one(net, optimizer, batch)
                    seen += records(batch, 12)
                    if len(optimizer.accountant) > charged:
                        used.append(sorted(seen))
                        seen = []
    assert used == [draw.records.tolist() for draw in drawn[: len(used)]]
    assert len(optimizer.accountant) == len(used)


def test_batches_of_workers_that_nobody_saw_come_again():
    net, optimizer, loader = private(num_workers=2, **FORK)
    drawn, used = watched(loader), []
    for _ in range(2):
        for batch in itertools.islice(loader, 2):
            one(net, optimizer, batch)
            used.append(records(batch))
    assert used == [draw.records.tolist() for draw in drawn[:4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_passes_at_a_time_are_refused(workers):
    net, optimizer, loader = private(num_workers=workers, **(FORK if workers else {}))
    outer = iter(loader)
    one(net, optimizer, next(outer))
    seen = records(next(iter(loader)))
    with refused("loader-two-passes"):
        next(outer)
    batches = iter(loader)
    one(net, optimizer, batch := next(batches))
    assert records(batch) == seen
    one(net, optimizer, next(batches))
    batches.close()  # in a heap of garbage, torch waits for workers ten seconds


def test_a_step_that_fails_leaves_the_batch_waiting():
    """``except RuntimeError: continue`` around a step that some records make fail would
    choose batches by what they hold.
    """
    net, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    with refused("model-input"):
        one(net, optimizer, (torch.cat([x, x, x[:1] * 0]), torch.cat([y, y, y[:1] * 0])))
    with refused("loader-no-step"):
        one(net, optimizer, next(batches))
    again = next(iter(loader))
    assert torch.equal(values(again[0]), values(x)) and len(optimizer.accountant) == 0
    one(net, optimizer, again)
    assert len(optimizer.accountant) == 1


def test_a_step_that_was_released_and_undone_is_not_taken_again(monkeypatch):
    """Another release on the same draw would cost more than an independent one."""
    net, optimizer, loader = private()
    first = next(iter(loader))
    monkeypatch.setattr(optimizer, "_update", lambda parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one(net, optimizer, first)
    assert len(optimizer.accountant) == 1 and records(next(iter(loader))) != records(first)


def test_parts_of_draws_need_the_main_process():
    """Workers announce batches before they deliver them, and two draws could mix in one step."""
    _, optimizer, loader = private(num_workers=1)
    with parts_of(loader, optimizer) as parts, refused("loader-memory-manager"):
        next(iter(parts))


def test_a_step_is_on_a_batch_of_its_own_loader():
    """Records of another loader are drawn at another rate, whatever their number is."""
    net, optimizer, loader = private(batch_size=40)
    *_, others = private(batch_size=40)
    next(iter(loader))
    other = next(iter(others))
    with refused("step-records"):
        one(net, optimizer, other)
    assert len(optimizer.accountant) == 0
    one(net, optimizer, next(iter(loader)))


@pytest.mark.parametrize(("parts", "size"), [(False, 2), (True, 2), (True, 4), (False, 0)])
def test_a_borrowed_collate_function_takes_no_part_of_a_draw(parts, size):
    """Also of as many records, between two parts, or with the sampler, as frameworks borrow it,
    which seed what is called ``generator`` on samplers and loaders.
    """
    net, optimizer, loader = private(rows=10, batch_size=10)
    places = (loader, loader.batch_sampler, loader.sampler, loader._batched)
    assert not any(getattr(place, "generator", None) for place in places)
    how = {"batch_size": size} if size else {"batch_sampler": loader.batch_sampler}
    other = DataLoader(loader.dataset, collate_fn=loader.collate_fn, **how)
    with parts_of(loader, optimizer) if parts else nullcontext(loader if size else [0]) as taken:
        with refused("model-input"):
            for _ in taken:
                one(net, optimizer, next(iter(other)))
    if not size:
        with refused("loader-no-batch"):
            optimizer.step()
    assert len(optimizer.accountant) == 0


def test_a_pass_belongs_to_the_thread_that_began_it():
    """Else two would take turns at the draws, and one could be released twice."""
    _, optimizer, loader = private()

    def elsewhere(work):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    batches = iter(loader)
    next(batches)
    for work in (optimizer.step, partial(next, batches), lambda: next(iter(loader))):
        with refused("loader-two-passes"):
            elsewhere(work)
    assert len(optimizer.accountant) == 0
    next(iter(loader))  # here it comes again


def test_each_pass_looks_for_records_that_repeat():
    """Those of several data sets are looked for by pass alone."""
    rows = TensorDataset(torch.rand(40, 1), torch.zeros(40, 1))
    data = Subset(rows, list(range(20)))
    _, _, loader = private(dataset=ConcatDataset([data, Subset(rows, range(20, 40))]))
    random.shuffle(data.indices)
    next(iter(loader))
    data.indices[:10] = data.indices[10:]
    for _ in range(2):
        with refused("loader-repeats"):
            next(iter(loader))


@pytest.mark.chance(4e-11)
@pytest.mark.parametrize("is_subset", [True, False])
def test_records_that_repeat_in_the_middle_of_a_pass_are_refused(is_subset):
    """With 40 records at rate 1/2 a batch has two of them but with a chance of 4e-11."""
    rows = [(x, torch.zeros(1)) for x in torch.rand(40, 1)]
    data = Subset(rows, list(range(40))) if is_subset else rows
    net, optimizer, loader = private(dataset=data, batch_size=20)
    batches = iter(loader)
    one(net, optimizer, next(batches))
    if is_subset:
        data.indices[1:] = [-40] * 39
    else:
        rows[1:] = rows[:1] * 39
    with refused("loader-repeats"):
        next(batches)


# -- what is charged for stays as it was -----------------------------------------------------------


def test_the_rate_cannot_be_changed_behind_the_accountant():
    _, _, loader = private()
    for target, names in (
        (loader.batch_sampler, ("sample_rate", "num_samples", "generator", "steps")),
        (loader, ("sample_rate", "num_workers", "collate_fn")),
    ):
        for name in names:
            with pytest.raises((AttributeError, StateError)):
                setattr(target, name, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_of_another_length_in_a_later_pass_is_refused(num_workers):
    data = [(torch.tensor([float(i)]), torch.zeros(1)) for i in range(40)]
    net, optimizer, loader = private(dataset=data, num_workers=num_workers)
    train(net, optimizer, loader)
    before = set(multiprocessing.active_children())
    for of in (loader, copy.deepcopy(loader)):
        of.dataset.append(data[0])
        with refused("data-changed"):
            next(iter(of))
        # torch would not stop workers in order
        assert set(multiprocessing.active_children()) <= before
    if num_workers == 0:
        with parts_of(loader, optimizer) as parts, refused("data-changed"):
            next(iter(parts))
    data.pop()
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 2 * len(loader)


# -- draws belong to one process -------------------------------------------------------------------


def test_forked_children_draw_batches_of_their_own(monkeypatch):
    """Also with the pid of their parent, which comes again in nested PID namespaces."""
    net, optimizer, loader = private(rows=200, batch_size=50)
    one(net, optimizer, next(iter(loader)))
    waiting, parent = records(next(iter(loader)), 200), os.getpid()

    def work(same_pid=False):
        if same_pid:
            monkeypatch.setattr(os, "getpid", lambda: parent)
        return [tuple(records(batch, 200)) for batch in loader]

    seen = [in_child(work), in_child(partial(work, same_pid=True)), work()]
    assert seen[2][0] == tuple(waiting)
    assert len(set(itertools.chain(*seen))) == sum(map(len, seen)) == 12


@on_the_cpu
@pytest.mark.parametrize("is_part", [False, True])
def test_a_step_in_a_child_is_none_on_its_parent_s_draw(is_part, tmp_path):
    """The parent's loop goes on in the child with draws of the child's own."""
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")
    net, optimizer, loader = private(accountant=accountant, batch_size=20)
    with parts_of(loader, optimizer) if is_part else nullcontext(loader) as taken:
        batches = iter(taken)
        batch = next(batches)

        def step():
            with refused("loader-no-batch"):
                one(net, optimizer, batch)
            if is_part:  # what is left of the parent's draw is none of the child's
                with refused("loader-no-batch"):
                    next(batches)
                return None
            one(net, optimizer, fresh := next(batches))
            accountant.close()
            return records(fresh)

        theirs = in_child(step)
        one(net, optimizer, batch)
        if not is_part:
            assert len(accountant) == 2 and theirs != records(batch)


@on_the_cpu
def test_a_generator_is_not_shared_with_a_child():
    net, optimizer, loader = private(generator=torch.Generator().manual_seed(torch.seed() % 2**31))
    batch = next(iter(loader))

    def refuses_all():
        for work in (
            lambda: next(iter(loader)),
            lambda: one(net, optimizer, batch),
            lambda: PoissonLoader(loader, 0.2),
        ):
            with refused("forked"):
                work()

    assert in_child(refuses_all) is None
    one(net, optimizer, batch)


def test_going_back_behind_the_accountant_does_not_draw_again():
    def made(accountant):
        noise._used_positions.clear()  # as in a fresh process
        return private(accountant=accountant, generator=torch.Generator().manual_seed(5))

    accountant = dpb.PrivacyAccountant()
    net, optimizer, loader = made(accountant)
    train(net, optimizer, loader)
    saved, charged = copy.deepcopy(optimizer.state_dict()), accountant.state_dict()
    train(net, optimizer, loader)
    for history, is_behind in ((accountant.state_dict(), True), (charged, False)):
        accountant = dpb.PrivacyAccountant()
        accountant.load_state_dict(history)
        _, optimizer, _ = made(accountant)
        with pytest.raises(CheckpointError) if is_behind else nullcontext():
            optimizer.load_state_dict(saved)
