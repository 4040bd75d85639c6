"""Several chains, one after another, forked or spawned: one budget, different noise, and
their draws are kept. And Pyro's ways of keeping them.
"""

import math
import multiprocessing
import os
import pickle
import select
import signal
import tempfile
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from support.children import in_child
from support.conjugate_chains import counts
from support.ledgers import forks
from support.recorded import prior_recorded_once, recorded_once

import torch_dpbayes as dpb
from torch_dpbayes.accounting.ledger import Ledger, open_blocks
from torch_dpbayes.mcmc import DPHMC, MCMC, ExponentialFamilyPenalty, exponential_family
from torch_dpbayes.mcmc.chains import _ParallelChains

DATA = torch.linspace(-1.0, 2.0, 40)
_recorded = recorded_once(exponential_family)
START = {"mean": torch.tensor([-3.0, 0.0, 3.0]), "scale": torch.tensor([1.0, 2.0, 3.0])}


def prior():
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    return mean, pyro.sample("scale", dist.LogNormal(0.0, 1.0))


def model(x):
    law = dist.Normal(*prior())
    with pyro.plate("data", len(x)):
        pyro.sample("x", law, obs=x)


def statistics(x):
    return torch.stack([x, x**2])


def natural(values):
    precision = values["scale"].mean() ** -2
    return torch.stack([values["mean"] * precision, -precision / 2])


def normalizer(values):
    return (values["mean"] / values["scale"].mean()) ** 2 / 2 + values["scale"].mean().log()


def make(kind, accountant, noise=50.0, **options):
    """Of the family, which is set up in no time, with what all kernels share."""
    if kind == "family":
        functions = {"sufficient_statistics": statistics, "natural_parameters": natural}
        settings = {"proposal_scale": 0.1, "max_statistic_norm": 5.0, "noise_multiplier": noise}
        settings |= {**functions, "log_normalizer": normalizer, "prior": prior, **options}
        return ExponentialFamilyPenalty(**settings, accountant=accountant)
    noises = {"ratio_noise_multiplier": noise, "grad_noise_multiplier": 1.2 * noise}
    bounds = {"log_ratio_slope": 5.0, "max_grad_norm": 5.0, "step_size": 0.02, "num_steps": 3}
    return DPHMC(model, **{**bounds, **noises, **options}, accountant=accountant)


def run(kernel, num_chains=3, context="fork", processors=8, **options):
    settings = {"num_samples": 8, "warmup_steps": 4, "disable_progbar": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        # Pyro runs chains side by side only if there are more cores than chains
        patch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: processors)
        runner = MCMC(kernel, num_chains=num_chains, mp_context=context, **settings)
    runner.run(DATA)
    return runner


def assert_draws_are_kept(runner, iterations=12, chains=3):
    """The kernel and Pyro's runner have the same draws, and no noise was drawn twice."""
    given = runner.get_samples(group_by_chain=True)
    own = runner.kernel.get_samples(group_by_chain=True)[-chains:]
    for name in ("mean", "scale"):
        torch.testing.assert_close(torch.stack([draws[name] for draws in own]), given[name])
    ratios = runner.diagnostics()["noisy log ratios"].values()
    drawn = [ratio for chain in ratios for ratio in chain if not math.isnan(ratio)]
    assert len(set(drawn)) == len(drawn) > 0.8 * iterations * chains


@pytest.fixture
def accountant(tmp_path):
    prior_recorded_once(prior)  # here, not in every process
    return dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")


@pytest.mark.filterwarnings("ignore:num_chains=3 is more than available_cpu:UserWarning")
def test_sequential_chains_are_charged_each_and_a_pickled_run_has_no_records(accountant):
    runner = run(make("family", accountant), processors=1, initial_params=START)
    assert_draws_are_kept(runner)
    assert counts(accountant) == {50.0: 36}
    assert DATA.numpy().tobytes() not in pickle.dumps(runner)


def test_parallel_chains_charge_one_file_and_draw_different_noise(accountant):
    kernel = make("family", accountant)
    pyro.set_rng_seed(1)  # Pyro seeds its workers from this; the noise must not follow
    for count in (24, 48):  # from the prior, on the same budget
        assert_draws_are_kept(run(kernel, 2), chains=2)
        assert counts(accountant) == {50.0: count}
    copied = pickle.loads(pickle.dumps(kernel)).get_samples(group_by_chain=True)
    assert torch.equal(copied[3]["mean"], kernel.get_samples(True)[3]["mean"])


@pytest.mark.slow
def test_spawned_chains_compute_gradients(accountant):
    kernel = make("HMC", accountant)
    assert_draws_are_kept(run(kernel, context="spawn", initial_params=START))
    assert counts(accountant) == {50.0: 12 * 3, 60.0: 3 * (12 * 3 + 1)}


def test_parallel_chains_start_where_they_are_told_to_and_show_progress(
    accountant, capsys, monkeypatch
):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # where Pyro shows none
        monkeypatch.delenv(name, raising=False)
    kernel = make("family", accountant, proposal_scale=1e-6)
    # of one who sets it himself: for all chains
    kernel.initial_params = {name: value[0] for name, value in START.items()}
    run(kernel, 2, num_samples=2, warmup_steps=0)
    run(kernel, num_samples=2, warmup_steps=0, initial_params=START, disable_progbar=False)
    assert "acc. rate" in capsys.readouterr().err
    for chain, draws in zip([0, 0, 0, 1, 2], kernel.get_samples(group_by_chain=True)):
        for name, value in (("mean", draws["mean"]), ("scale", draws["scale"].log())):
            close = {"atol": 1e-4, "rtol": 0}
            torch.testing.assert_close(value, START[name][chain].expand(2), **close)


def test_an_accountant_in_memory_refuses_parallel_chains():
    kernel = make("family", dpb.PrivacyAccountant())
    for context in ("fork", "spawn"):
        with pytest.raises((TypeError, RuntimeError)):
            run(kernel, 2, context)
    assert counts(kernel.accountant) == {} and kernel.get_samples() == {}


# -- how chains end --------------------------------------------------------------------------------


def half_a_draw(file, told):
    """Which nobody can read."""
    with open(file, "ab") as own:
        own.write(pickle.dumps(("draw", {"mean": DATA}))[:-20])


def a_fork(file, told):
    """That outlives the chain: until the test is over, or for long."""
    if os.fork() == 0:
        select.select([told], [], [], 40)
        os._exit(0)


@forks
@pytest.mark.parametrize("leaves", [half_a_draw, a_fork])
def test_a_killed_chain_ends_the_run_and_keeps_what_it_was_charged(
    accountant, leaves, tmp_path, monkeypatch
):
    told, tell = os.pipe()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def hook(kernel, params, stage, i):
        if multiprocessing.current_process().name == "1" and i == 5:
            leaves(*tmp_path.glob("*/1"), told)
            os.kill(os.getpid(), signal.SIGKILL)

    kernel, begun = make("family", accountant), time.monotonic()
    with pytest.raises(dpb.errors.StateError, match=r"chain 1 .* \(exit code -9\)"):
        run(kernel, 2, num_samples=10**6, warmup_steps=0, hook_fn=hook)
    assert time.monotonic() - begun < 30 and multiprocessing.active_children() == []
    os.write(tell, b"over")
    draws = kernel.get_samples(group_by_chain=True)
    assert max(len(chain["mean"]) for chain in draws) >= 5  # the other may hardly have begun
    # what was charged is kept; of the other chain what it had reserved is given back
    assert sum(len(chain["mean"]) for chain in draws) <= counts(accountant)[50.0]
    assert len(open_blocks(Ledger(accountant.path, {}).read())) <= 1


def test_a_draw_that_is_only_half_written_is_read_later(tmp_path):
    chains, path = object.__new__(_ParallelChains), tmp_path / "0"
    draw = pickle.dumps(("draw", {"mean": DATA}))
    with path.open("wb", buffering=0) as own, path.open("rb") as read:
        chains._files, chains._draws = [read], [[]]
        for part in (draw, draw[:-20], draw[-20:]):
            own.write(part)
            assert list(chains._messages()) == []
    assert [torch.equal(found["mean"], DATA) for found in chains._draws[0]] == [True, True]


def test_a_chain_that_exits_early_with_code_0_has_not_ended_well(accountant):
    """Its run failed with an error about the stacking of draws, or was cut short if all did so."""

    def hook(kernel, params, stage, i):
        if i == 5:
            raise SystemExit(0)

    kernel = make("family", accountant)
    with pytest.raises(dpb.errors.StateError, match=r"ended without .* \(exit code 0\)"):
        run(kernel, 2, hook_fn=hook)
    assert kernel.get_samples()["mean"].shape[0] >= 2


class TwoWords(Exception):
    """It is pickled, and cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(first + second)


def test_an_error_in_a_chain_is_raised_where_the_chains_were_started(accountant):
    lost = ConnectionError("the hook's own")
    for error, kind in (
        *((KeyError("secret"), KeyError), (TwoWords("a", "b"), RuntimeError)),
        (lost, ConnectionError),
    ):

        def hook(*_, error=error):
            raise error

        with pytest.raises(kind) as caught:
            run(make("family", accountant), 2, hook_fn=hook)
        assert any("in hook" in note for note in caught.value.__notes__)
    assert multiprocessing.active_children() == []


def test_ctrl_c_keeps_the_samples_and_says_what_they_cost(accountant):
    """Sent to the whole process group, as a terminal does."""

    def hook(kernel, params, stage, i):
        if multiprocessing.current_process().name == "1" and i == 20:  # after the warm-up
            os.killpg(0, signal.SIGINT)

    def work():
        os.setpgrp()
        kernel = make("family", accountant, noise=200.0)
        with pytest.raises(KeyboardInterrupt):
            run(kernel, 2, num_samples=10**6, warmup_steps=5, hook_fn=hook)
        return [len(chain["mean"]) for chain in kernel.get_samples(group_by_chain=True)]

    draws = in_child(work)
    assert 1 <= len(draws) <= 2 and max(draws) >= 15  # the other may not have begun
    assert 5 <= counts(accountant)[200.0] - sum(draws) <= 2 * 5 + 2
    assert 0 < accountant.get_epsilon() < 8


def test_parallel_chains_end_with_the_process_that_started_them(accountant, tmp_path, monkeypatch):
    """Which was killed, and could not ask them to; they return what they had reserved, and delete
    its folder.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def hook(kernel, params, stage, i):
        if i == 5:
            told.put(os.getpid())

    settings = {"hook_fn": hook, "num_samples": 10**6, "warmup_steps": 0}
    kernel = make("family", accountant, noise=1e4)  # the budget ends no chain
    process = context.Process(target=run, args=(kernel, 2), kwargs=settings)
    process.start()
    chains = [told.get(timeout=300) for _ in range(2)]
    process.kill()
    process.join()
    end = time.monotonic() + 30
    while any(map(is_running, chains)) and time.monotonic() < end:
        time.sleep(0.05)
    running = [pid for pid in chains if is_running(pid)]
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    assert not running and open_blocks(Ledger(accountant.path, {}).read()) == []
    assert counts(accountant)[1e4] >= 12
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def is_running(pid):
    """Not so a process that has ended, of which nobody has taken note."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- Pyro's ways of keeping draws ------------------------------------------------------------------


def test_only_what_was_asked_for_is_saved_under_its_own_name():
    names, kernel = ["scale", "mean"], make("family", dpb.PrivacyAccountant())
    # far apart, so that a mix-up shows
    start = {"mean": torch.tensor(-50.0), "scale": torch.tensor(0.0)}
    runner = run(kernel, 1, num_samples=6, initial_params=start, save_params=names)
    for name in names:
        torch.testing.assert_close(runner.get_samples()[name], kernel.get_samples()[name])
        assert (runner.get_samples()[name] < 0).all() == (name == "mean")
    runner = run(kernel, 1, num_samples=6, initial_params=start, save_params=["scale"])
    assert set(runner.get_samples()) == {"scale"}
