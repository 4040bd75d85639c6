"""One sequence of draws, at the rate that is charged, each for one step: nobody chooses
batches by what they hold.
"""

import copy
import itertools
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from support.children import in_child
from support.examples import examples
from support.steps import one as step_on
from support.training import values
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.poisson_sampling import DenseSubset
from torch_dpbayes.batches.sampler import PoissonSampler

FALSE_ALARM = 1e-6  # of each statistical test


def private(rows=40, batch_size=8, dataset=None, accountant=None, **loader_options):
    if dataset is None:
        dataset = TensorDataset(torch.arange(float(rows))[:, None] / rows, torch.zeros(rows, 1))
    return dpb.PrivacyEngine(accountant).make_private(
        module=nn.Linear(1, 1),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(dataset, batch_size=batch_size, **loader_options),
        max_grad_norm=1.0,
    )


one = partial(step_on, loss=nn.functional.mse_loss)


def records(batch, rows=40):
    return tuple((values(batch[0])[:, 0] * rows).round().int().tolist())


def in_a_fresh_interpreter(function):
    """Run one of this file's functions in a child of a process in which nothing started threads of
    autograd: torch refuses a backward pass in the children of one that has some.
    """
    program = f"import conftest, test_poisson_loader as tests; tests.{function.__name__}()"
    folders = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# -- one sequence of draws -------------------------------------------------------------------------


def test_a_batch_that_got_no_step_comes_again():
    """Looking, leaving a pass and evaluating are harmless; ``if y.sum() == 0: continue`` does
    not draw anew.
    """
    net, optimizer, loader = private()
    first = records(next(iter(loader)))
    assert all(records(next(iter(loader))) == first for _ in range(5))
    whole = [records(batch) for batch in loader]
    assert (
        whole[0] == first and [records(batch) for batch in loader] == whole and len(set(whole)) > 1
    )
    used = []
    for batch in loader:
        if len(used) == 3:
            break
        one(net, optimizer, batch)
        used.append(records(batch))
    for batch in itertools.islice(loader, 2):
        one(net, optimizer, batch)
        used.append(records(batch))
    assert used == whole[:5] and len(optimizer.accountant) == 5


@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["pass", "peek", "parts"]), st.lists(st.booleans(), max_size=6)),
        max_size=8,
    )
)
@examples(40)
def test_step_k_is_taken_on_draw_k_whatever_is_looked_at(plan):
    net, optimizer, loader = private(rows=12, batch_size=4)
    drawn, used = [], []
    original = loader.sampler_of_draws._next_draw
    loader.sampler_of_draws._next_draw = lambda: drawn.append(original()) or drawn[-1]
    for kind, steps in plan:
        if kind == "peek":
            next(iter(loader))
        elif kind == "pass":
            for batch, is_used in zip(loader, steps):
                if is_used:
                    try:
                        one(net, optimizer, batch)
                    except RuntimeError as error:
                        assert "got no step" in str(error)
                    else:
                        used.append(sorted(records(batch, 12)))
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as parts:
                seen = []
                for batch, is_used in zip(parts, steps):
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


def test_a_loop_that_waits_for_another_batch_is_told_and_may_step_then():
    net, optimizer, loader = private()
    first = records(next(iter(loader)))
    with pytest.raises(dpb.DPBayesError, match=r"100 times.*whatever is in it.*DataLoader") as told:
        while records(next(iter(loader))) == first:
            pass
    assert told.value.code == "loader-no-step"
    again = next(iter(loader))
    assert records(again) == first
    one(net, optimizer, again)
    assert len(optimizer.accountant) == 1 and records(next(iter(loader))) != first


@pytest.mark.parametrize("workers", [0, 2])
def test_two_passes_at_a_time_are_refused(workers):
    net, optimizer, loader = private(
        num_workers=workers, **({"multiprocessing_context": "fork"} if workers else {})
    )
    outer = iter(loader)
    one(net, optimizer, next(outer))
    seen = records(next(iter(loader)))
    with pytest.raises(RuntimeError, match=r"two passes over one private loader.*end this pass"):
        next(outer)
    batches = iter(loader)
    batch = next(batches)
    assert records(batch) == seen
    one(net, optimizer, batch)
    one(net, optimizer, next(batches))


def test_batches_of_workers_that_nobody_saw_come_again():
    net, optimizer, loader = private(num_workers=2, multiprocessing_context="fork")
    drawn, used = [], []
    original = loader.sampler_of_draws._next_draw
    loader.sampler_of_draws._next_draw = lambda: drawn.append(original()) or drawn[-1]
    for _ in range(3):
        for batch in itertools.islice(loader, 2):
            one(net, optimizer, batch)
            used.append(list(records(batch)))
    assert used == [draw.records.tolist() for draw in drawn[:6]]


def test_a_step_that_fails_leaves_the_batch_waiting():
    """``except RuntimeError: continue`` around a step that some records make fail would
    choose batches by what they hold.
    """
    net, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(dpb.DPBayesError) as refused:
        one(net, optimizer, (torch.cat([x, x, x[:1] * 0]), torch.cat([y, y, y[:1] * 0])))
    assert refused.value.code == "model-input"
    with pytest.raises(RuntimeError, match="got no step"):
        one(net, optimizer, next(batches))
    again = next(iter(loader))
    assert torch.equal(values(again[0]), values(x)) and len(optimizer.accountant) == 0
    one(net, optimizer, again)
    assert len(optimizer.accountant) == 1


def test_a_step_that_was_released_and_undone_is_not_taken_again():
    """Another release on the same draw would cost more than an independent one."""
    net, optimizer, loader = private()
    first = next(iter(loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            optimizer,
            "_update",
            lambda parts: (_ for _ in ()).throw(FloatingPointError("overflow")),
        )
        with pytest.raises(FloatingPointError):
            one(net, optimizer, first)
    assert len(optimizer.accountant) == 1 and records(next(iter(loader))) != records(first)


# -- the rate --------------------------------------------------------------------------------------


@given(st.floats(1e-9, 1.0) | st.sampled_from([2**-24, 2**-30, 3 * 2**-31, 1.0, 1 / 3]))
@examples(300)
def test_the_rate_in_force_is_the_declared_one_and_never_above(rate):
    """Where every record has a number; that of darts is in test_poisson_sampling.py."""
    cells = DenseSubset(5, rate)
    in_force = Fraction(cells.cell) + Fraction(cells.place, 2**77)
    assert Fraction(rate) * (1 - Fraction(1, 10**9)) <= in_force <= Fraction(rate)


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize("cells", [2**24, 4])
def test_records_join_at_the_rate_in_force_whatever_the_default_dtype(monkeypatch, cells):
    """Also where every record, or every fourth one, falls into the cell that the rate divides."""
    uniform = torch.rand
    if cells < 2**24:
        monkeypatch.setattr("torch_dpbayes.batches.poisson_sampling._CELLS", cells)
        monkeypatch.setattr(
            torch,
            "rand",
            lambda *size, **options: (uniform(*size, **options) * cells).floor() / cells,
        )
    before = torch.get_default_dtype()
    for dtype, rate in (
        (torch.bfloat16, 0.001),
        (torch.float16, 0.0001),
        (torch.float32, 0.3),
        (torch.float64, 0.0001),
    ):
        torch.set_default_dtype(dtype)
        try:
            way = DenseSubset(200_000, rate)
            stream = torch.Generator().manual_seed(torch.initial_seed())
            joined = sum(len(way.draw(stream)) for _ in range(20))
        finally:
            torch.set_default_dtype(before)
        assert stats.binomtest(joined, 20 * 200_000, rate).pvalue > FALSE_ALARM / 12, (
            dtype,
            joined / 20 / 200_000,
        )


def test_a_full_batch_is_all_records():
    assert next(iter(PoissonSampler(1000, 1.0, None, 0))) == list(range(1000))


def test_the_rate_cannot_be_changed_behind_the_accountant():
    _, _, loader = private()
    for target, name, value in (
        (loader.batch_sampler, "sample_rate", 0.9),
        (loader.batch_sampler, "num_samples", 10),
        (loader.batch_sampler, "generator", torch.Generator()),
        (loader.batch_sampler, "steps", 1),
        (loader, "sample_rate", 0.9),
        (loader, "num_workers", 2),
    ):
        with pytest.raises(AttributeError, match=f"property {name!r} of .* has no setter"):
            setattr(target, name, value)
    assert loader.sample_rate == loader.batch_sampler.sample_rate == 0.2


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan"), 5e-324, 2.0**-64])
def test_rates_that_are_no_probabilities_or_at_which_a_pass_never_ends(rate):
    with pytest.raises(dpb.errors.ArgumentError):
        PoissonSampler(10, rate, None, 0)


def test_more_records_than_doubles_can_count():
    assert len(next(iter(PoissonSampler(2**53, 2.0**-53, None, 0)))) < 40
    with pytest.raises(ValueError, match=r"more than 2\*\*53.*Subset"):
        PoissonSampler(2**53 + 1, 2.0**-53, None, 0)


class Growing(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.tensor([float(i)]), torch.zeros(1)


@pytest.mark.parametrize(("size", "num_workers"), [(39, 0), (41, 1)])
def test_a_data_set_of_another_length_in_a_later_pass_is_refused(size, num_workers):
    dataset = Growing(40)
    net, optimizer, loader = private(dataset=dataset, num_workers=num_workers)
    for batch in loader:
        one(net, optimizer, batch)
    dataset.size = size
    for of in (loader, copy.deepcopy(loader)):
        with pytest.raises(RuntimeError, match=f"has {of.dataset.size} records now, and had 40"):
            of.dataset.size = size
            next(iter(of))
    if num_workers == 0:
        with (
            BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as parts,
            pytest.raises(RuntimeError, match="records now, and had 40"),
        ):
            next(iter(parts))
    assert len(optimizer.accountant) == 5
    dataset.size = 40
    one(net, optimizer, next(iter(loader)))


# -- randomness ------------------------------------------------------------------------------------


def test_the_library_s_own_generator_is_at_no_name_that_others_seed():
    """accelerate and Fabric look for ``generator`` on samplers and loaders."""
    _, _, loader = private()
    sampler = loader.batch_sampler
    places = (loader, sampler, loader.sampler, getattr(loader, "_batched", None))
    assert not any(getattr(place, "generator", None) for place in places)
    given = torch.Generator().manual_seed(torch.seed())
    assert PoissonSampler(10, 0.1, given, 0).generator is given


def test_a_generator_on_another_device():
    with pytest.raises(ValueError, match=r"lives on cuda:0: pass torch.Generator\(\)"):
        PoissonSampler(10, 0.1, SimpleNamespace(device=torch.device("cuda:0")), 0)


def test_forked_children_draw_batches_of_their_own():
    net, optimizer, loader = private(rows=200, batch_size=50)
    one(net, optimizer, next(iter(loader)))
    waiting = records(next(iter(loader)), 200)
    seen = [in_child(lambda: [records(batch, 200) for batch in loader]) for _ in range(2)]
    seen.append([records(batch, 200) for batch in loader])
    assert seen[2][0] == waiting
    assert len(set(itertools.chain(*seen))) == sum(map(len, seen)) == 12


def one_process_steps(parts):
    folder = tempfile.mkdtemp()
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=f"{folder}/budget.db")
    net, optimizer, loader = private(accountant=accountant, batch_size=20)
    if parts:
        loader = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ).__enter__()
    batches = iter(loader)
    batch = next(batches)

    def step_on_it():
        try:
            one(net, optimizer, batch)
        except RuntimeError as error:
            refused = str(error)
        if parts:  # what is left of the parent's draw is none of the child's
            with pytest.raises(RuntimeError, match="forked"):
                next(batches)
        accountant.close()
        return refused, len(accountant)

    refused, charged = in_child(step_on_it)
    assert "since this process was forked" in refused and charged == 0
    one(net, optimizer, batch)
    if not parts:
        assert len(accountant) == 1

        def go_on():
            # the parent's loop goes on in the child with draws of the child's own
            fresh = next(batches)
            one(net, optimizer, fresh)
            accountant.close()
            return records(fresh)

        theirs, ours = in_child(go_on), next(batches)
        assert theirs != records(ours)
        one(net, optimizer, ours)
        assert len(accountant) == 3
    accountant.close()


def a_generator_is_not_shared():
    net, optimizer, loader = private(generator=torch.Generator().manual_seed(torch.seed() % 2**31))
    batch = next(iter(loader))
    for work in (
        lambda: next(iter(loader)),
        lambda: one(net, optimizer, batch),
        lambda: PoissonLoader(loader, 0.2),
    ):
        assert "Call make_private inside the child" in in_child(work)
    one(net, optimizer, batch)


def processes():
    """Each in a child that has no threads of autograd."""
    for case in (partial(one_process_steps, False), partial(one_process_steps, True)):
        assert in_child(case) is None
    assert in_child(a_generator_is_not_shared) is None


@pytest.mark.thorough
def test_draws_belong_to_one_process():
    """Batch, parts of it, and the caller's generator."""
    in_a_fresh_interpreter(processes)


# -- going back ------------------------------------------------------------------------------------


def test_going_back_behind_the_accountant_does_not_draw_again():
    def made(accountant):
        noise._used_positions.clear()  # as in a fresh process
        return private(accountant=accountant, generator=torch.Generator().manual_seed(5))

    accountant = dpb.PrivacyAccountant()
    net, optimizer, loader = made(accountant)
    for batch in loader:
        one(net, optimizer, batch)
    saved, charged = copy.deepcopy(optimizer.state_dict()), accountant.state_dict()
    for batch in loader:
        one(net, optimizer, batch)
    for history, refused in ((accountant.state_dict(), True), (charged, False)):
        accountant = dpb.PrivacyAccountant()
        accountant.load_state_dict(history)
        _, optimizer, _ = made(accountant)
        if refused:
            with pytest.raises(ValueError, match=r"generator=.*leave it out"):
                optimizer.load_state_dict(saved)
        else:
            optimizer.load_state_dict(saved)


def test_a_count_that_failed_is_taken_on_the_same_draw():
    net, optimizer, loader = private(rows=50, batch_size=25)
    drawn = []

    def criterion(output, target, fails):
        drawn.append(len(target))
        if fails:
            raise RuntimeError("not this one")
        return nn.functional.mse_loss(output, target)

    for fails in (True, True, True, True, True, False):
        with pytest.raises(RuntimeError, match="not this one") if fails else nullcontext():
            dpb.private_clipped_fraction(
                net,
                optimizer,
                loader,
                noise_multiplier=1.0,
                criterion=partial(criterion, fails=fails),
            )
    assert len(set(drawn)) == 1
    for _ in range(8):
        dpb.private_clipped_fraction(
            net, optimizer, loader, noise_multiplier=1.0, criterion=partial(criterion, fails=False)
        )
    assert len(set(drawn)) > 1
