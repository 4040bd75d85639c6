"""Several chains, one after another, forked or spawned: one budget, different noise, and
their draws are kept. And Pyro's ways of keeping them.
"""

import copy
import gc
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.api import StreamingMCMC
from pyro.ops.streaming import CountMeanStats, StatsOfDict

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.ledger.file import Ledger
from torch_dpbayes.accounting.ledger.schema import open_blocks
from torch_dpbayes.mcmc import DPHMC, MCMC, DPPenalty, ExponentialFamilyPenalty

DATA = torch.linspace(-1.0, 2.0, 40)
START = {"mean": torch.tensor([0.1, 0.2, 0.3]), "scale": torch.tensor([0.0, 0.1, 0.2])}


def model(x):
    mean, scale = prior()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, scale), obs=x)


def prior():
    return pyro.sample("mean", dist.Normal(0.0, 1.0)), pyro.sample(
        "scale", dist.LogNormal(0.0, 1.0)
    )


def statistics(x):
    return torch.stack([x, x**2])


def natural(theta):
    return torch.stack([theta["mean"] / theta["scale"] ** 2, -0.5 / theta["scale"] ** 2])


def normalizer(theta):
    return theta["mean"] ** 2 / (2 * theta["scale"] ** 2) + theta["scale"].log()


def make(kind, accountant, noise=50.0, **options):
    if kind == "penalty":
        settings = {"proposal_scale": 0.1, "log_ratio_slope": 5.0, "noise_multiplier": noise}
        return DPPenalty(model, **{**settings, **options}, accountant=accountant)
    if kind == "family":
        functions = {
            "sufficient_statistics": statistics,
            "natural_parameters": natural,
            "log_normalizer": normalizer,
        }
        settings = {"proposal_scale": 0.1, "max_statistic_norm": 5.0, "noise_multiplier": noise}
        return ExponentialFamilyPenalty(
            prior, **functions, **settings, accountant=accountant, **options
        )
    bounds = {
        "log_ratio_slope": 5.0,
        "max_grad_norm": 5.0,
        "ratio_noise_multiplier": noise,
        "grad_noise_multiplier": 1.2 * noise,
    }
    return DPHMC(model, step_size=0.02, num_steps=3, **bounds, accountant=accountant, **options)


KINDS = ["penalty", "family", "HMC"]


def counts(accountant):
    return {charge.event.noise_multiplier: charge.count for charge in accountant.history}


def expected(kind, iterations, chains):
    return {
        50.0: iterations * chains,
        **({60.0: 3 * iterations * chains + chains} if kind == "HMC" else {}),
    }


def parallel(kernel, num_chains=3, context="fork", **options):
    settings = {"num_samples": 8, "warmup_steps": 4, "disable_progbar": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        # Pyro runs chains side by side only if there are more cores than chains
        patch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 8)
        return MCMC(kernel, num_chains=num_chains, mp_context=context, **settings)


def ratios(runner):
    return [
        value
        for chain in runner.diagnostics()["noisy log ratios"].values()
        for value in chain
        if not math.isnan(value)
    ]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:num_chains=3 is more than available_cpu:UserWarning")
def test_sequential_chains_are_charged_each(kind, monkeypatch):
    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 1)
    kernel = make(kind, dpb.PrivacyAccountant())
    runner = MCMC(
        kernel,
        num_samples=8,
        warmup_steps=4,
        num_chains=3,
        initial_params=START,
        disable_progbar=True,
    )
    runner.run(DATA)
    assert counts(kernel.accountant) == expected(kind, 12, 3)
    assert runner.get_samples(group_by_chain=True)["mean"].shape == (3, 8)
    own = kernel.get_samples(group_by_chain=True)
    for chain in range(3):
        torch.testing.assert_close(
            own[chain]["mean"], runner.get_samples(group_by_chain=True)["mean"][chain]
        )


def in_a_fresh_process(function, *arguments):
    """Whose children can compute gradients, whatever was computed here and on whatever
    machine: see ``nested_backward``.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0


def forking(kind):
    return (
        in_a_fresh_process if kind == "HMC" else lambda function, *arguments: function(*arguments)
    )


def forked_chains(kind, path):
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=path)
    kernel = make(kind, accountant)
    pyro.set_rng_seed(1)  # Pyro seeds its workers from this; the noise must not follow
    runner = parallel(kernel, initial_params=START)
    runner.run(DATA)
    assert counts(accountant) == expected(kind, 12, 3)
    assert len(set(ratios(runner))) == len(ratios(runner)) > 30
    assert runner.get_samples()["scale"].shape == (24,) and runner.get_samples()["scale"].min() > 0
    own = kernel.get_samples(group_by_chain=True)
    for chain in range(3):
        torch.testing.assert_close(
            own[chain]["scale"], runner.get_samples(group_by_chain=True)["scale"][chain]
        )
    if kind == "HMC":
        return
    runner = parallel(kernel)  # another run, from the prior, on the same budget
    runner.run(DATA)
    assert counts(accountant) == expected(kind, 12, 6)
    assert len(kernel.get_samples(group_by_chain=True)) == 6
    torch.testing.assert_close(
        kernel.get_samples(group_by_chain=True)[4]["mean"],
        runner.get_samples(group_by_chain=True)["mean"][1],
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_forked_chains_charge_one_file_and_draw_different_noise(kind, tmp_path):
    forking(kind)(forked_chains, kind, tmp_path / "budget.db")


class Nested(torch.autograd.Function):
    """Calls for another backward pass in its own."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            nested_backward(ctx.depth - 1)
        return gradient, None


def nested_backward(depth):
    """torch refuses gradients in a fork if its engine had started threads before. It does so in the
    first backward pass where there is an accelerator, one thread for each device, and elsewhere
    when backward passes are nested more than 60 deep.
    """
    with torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        torch.autograd.grad(Nested.apply(x, depth), x)


def forked_after_a_backward_pass(depth, path):
    nested_backward(depth)
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=path)
    runner = parallel(make("HMC", accountant), 2)
    if depth > 60 or torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match='mp_context="spawn"'):
            runner.run(DATA)
        assert counts(accountant) == {}
    else:
        runner.run(DATA)
        assert counts(accountant) == expected("HMC", 12, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [0, 100])
def test_a_forked_chain_that_cannot_differentiate_says_what_to_do(depth, tmp_path):
    in_a_fresh_process(forked_after_a_backward_pass, depth, tmp_path / "budget.db")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        "penalty",
        pytest.param("family", marks=pytest.mark.slow),
        pytest.param("HMC", marks=pytest.mark.slow),
    ],
)
def test_spawned_chains_charge_one_file_and_draw_different_noise(kind, tmp_path):
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")
    kernel = make(kind, accountant)
    runner = parallel(kernel, 2, "spawn")
    runner.run(DATA)
    assert counts(accountant) == expected(kind, 12, 2)
    assert len(set(ratios(runner))) == len(ratios(runner)) > 20
    assert (
        runner.get_samples()["mean"].shape == (16,)
        and len(kernel.get_samples(group_by_chain=True)) == 2
    )


def killed_while_it_logs(path):
    def hold_the_lock(*_):
        if multiprocessing.current_process().name == "0":
            runner.sampler.log_queue._wlock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)

    kernel = make("penalty", dpb.PrivacyAccountant(8.0, 1e-5, path=path))
    runner = parallel(kernel, 2, hook_fn=hold_the_lock)
    threading.Timer(3.0, lambda: runner.sampler.result_queue.put((0, KeyError("enough")))).start()
    with pytest.raises(KeyError):
        runner.run(DATA)


@pytest.mark.thorough
def test_a_chain_that_was_killed_while_it_logged_does_not_keep_the_program_from_ending(tmp_path):
    in_a_fresh_process(killed_while_it_logs, tmp_path / "budget.db")


def wide(x):
    w = pyro.sample("w", dist.Normal(torch.zeros(40_000), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w.mean(), 1.0), obs=x)


@pytest.mark.thorough
def test_draws_that_are_larger_than_a_pipe_arrive(tmp_path):
    """A pipe holds 64 kB: a chain that waits for its draw to be taken must not be waited for."""
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")
    kernel = DPPenalty(
        wide,
        proposal_scale=1e-3,
        log_ratio_slope=1.0,
        noise_multiplier=50.0,
        accountant=accountant,
    )

    def too_long(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        parallel(kernel, 2, num_samples=3, warmup_steps=1).run(DATA)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert kernel.get_samples()["w"].shape == (6, 40_000)
    assert counts(accountant) == {50.0: 8}


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_an_accountant_in_memory_refuses_parallel_chains(context):
    kernel = make("penalty", dpb.PrivacyAccountant())
    with pytest.raises((TypeError, RuntimeError), match=r"path=|another process"):
        parallel(kernel, 2, context).run(DATA)
    assert counts(kernel.accountant) == {} and kernel.get_samples() == {}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_runs_out_in_parallel_keeps_the_samples(kind, tmp_path):
    forking(kind)(too_many_forked_chains, kind, tmp_path / "budget.db")


def too_many_forked_chains(kind, path):
    accountant = dpb.PrivacyAccountant(2.0, 1e-5, path=path)
    kernel = make(kind, accountant, noise=20.0)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        # the budget may end before a late chain has warmed up
        parallel(kernel, num_samples=100_000, warmup_steps=0).run(DATA)
    for child in multiprocessing.active_children():  # which Pyro has ended, but does not wait for
        child.join(20)
    draws, charged = len(kernel.get_samples()["mean"]), counts(accountant)
    assert charged.keys() == ({20.0, 24.0} if kind == "HMC" else {20.0}), (
        f"reserved, and not given back: {charged}"
    )
    assert 20 < draws <= charged[20.0] <= draws + 3, (
        f"{draws} draws, but {charged}: nothing else but what was under way in three chains"
    )
    if kind == "HMC":
        assert 3 * draws + 1 <= charged[24.0] <= 3 * (draws + 3) + 3
    assert 1.8 < accountant.get_epsilon() <= 2.0


INTERRUPTED = """
import json, multiprocessing, os, signal, sys
# a test run in the background hands it down ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
import torch_dpbayes as dpb
import test_chain_processes as t

def started(kernel, params, stage, i):
    if stage.startswith("Sample") and i == 20:
        os.write(1, b"started\\n")  # at once: chains share the pipe

if __name__ == "__main__":
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path={path!r})
    kernel = t.make("penalty", accountant, noise=200.0)
    runner = t.parallel(
        kernel, {chains}, {context!r}, num_samples=10**6, warmup_steps=5, hook_fn=started
    )
    try:
        runner.run(t.DATA)
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.join()
        draws = [len(chain["mean"]) for chain in kernel.get_samples(group_by_chain=True)]
        charged, epsilon = t.counts(accountant)[200.0], accountant.get_epsilon()
        print(json.dumps({{"draws": draws, "charged": charged, "epsilon": epsilon}}), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "chains, context", [(1, "fork"), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_ctrl_c_keeps_the_samples_and_says_what_they_cost(chains, context, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        INTERRUPTED.format(
            tests=os.path.dirname(__file__),
            path=str(tmp_path / "budget.db"),
            chains=chains,
            context=context,
        )
    )
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    }
    with subprocess.Popen(
        [sys.executable, str(script)], start_new_session=True, **pipes
    ) as process:
        for _ in range(chains):
            assert process.stdout.readline() == "started\n"
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        try:
            out, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    told = json.loads(out.splitlines()[-1])
    assert len(told["draws"]) == chains and min(told["draws"]) > 20
    assert 0 <= told["charged"] - sum(told["draws"]) - 5 * chains <= chains
    assert 0 < told["epsilon"] < 8


@pytest.fixture
def accountant(tmp_path):
    return dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")


def wait_for_ever():
    threading.Event().wait()


def test_a_killed_chain_keeps_what_it_was_charged(accountant, tmp_path):
    """And what it had reserved: nobody is left to return it."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def charge():
        for _ in range(3):
            accountant.compose(events.GaussianDpEvent(200.0))
        ready.set()
        wait_for_ever()

    process = context.Process(target=charge)
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    assert counts(accountant)[200.0] >= 3


def test_parallel_chains_end_with_the_process_that_started_them(accountant):
    """Which was killed, and could not ask them to; they return what they had reserved."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def slow_hook(kernel, params, stage, i):
        told.put(os.getpid())
        wait_for_ever()

    process = context.Process(
        target=lambda: parallel(make("penalty", accountant), 2, hook_fn=slow_hook).run(DATA)
    )
    process.start()
    workers = [told.get(timeout=300) for _ in range(2)]
    process.kill()
    process.join()
    assert_end(workers)
    assert open_blocks(Ledger(accountant.path, {}).read()) == [] and counts(accountant) == {50.0: 2}


def test_several_starts_for_one_chain_are_refused():
    """Pyro sets the starts of all parallel chains on one kernel, one after another."""
    kernel = make("penalty", dpb.PrivacyAccountant())
    for row in (0, 1):
        kernel.initial_params = {name: value[row] for name, value in START.items()}
    with pytest.raises(RuntimeError, match=r"mcmc\.MCMC"):
        kernel.setup(0, DATA)


def test_other_kernels_are_refused():
    with pytest.raises(TypeError, match="private kernels"):
        MCMC(pyro.infer.NUTS(model), num_samples=3)


def test_a_worker_that_is_still_being_set_up_ends_with_its_parent(accountant, monkeypatch):
    told = multiprocessing.get_context("fork").Queue()

    def slow(*_):
        told.put(os.getpid())
        wait_for_ever()

    monkeypatch.setattr(DPPenalty, "_prepare", slow)  # as a large model is checked for long
    process = multiprocessing.get_context("fork").Process(
        target=lambda: parallel(make("penalty", accountant), 2).run(DATA)
    )
    process.start()
    workers = [told.get(timeout=300) for _ in range(2)]
    process.kill()
    process.join()
    assert_end(workers)


def assert_end(pids):
    end = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    running = [pid for pid in pids if is_running(pid)]
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    assert not running


def is_running(pid):
    """Not so a process that has ended, of which nobody has taken note."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FAR = {"mean": torch.tensor([-3.0, 0.0, 3.0]), "scale": torch.tensor([1.0, 2.0, 3.0])}


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_parallel_chains_start_where_they_are_told_to(context, accountant):
    kernel = make("penalty", accountant, proposal_scale=1e-6)
    for starts in (FAR, {name: -value[:2] for name, value in FAR.items()}):
        number = len(starts["mean"])
        parallel(kernel, number, context, num_samples=2, warmup_steps=0, initial_params=starts).run(
            DATA
        )
        for chain, draws in enumerate(kernel.get_samples(group_by_chain=True)[-number:]):
            torch.testing.assert_close(
                draws["mean"], starts["mean"][chain].expand(2), atol=1e-4, rtol=0
            )
            torch.testing.assert_close(
                draws["scale"].log(), starts["scale"][chain].expand(2), atol=1e-4, rtol=0
            )
    # of one who sets it himself: for all chains
    kernel.initial_params = {"mean": torch.tensor(7.0), "scale": torch.tensor(0.5)}
    parallel(kernel, 2, context, num_samples=2, warmup_steps=0).run(DATA)
    torch.testing.assert_close(
        torch.stack([draws["mean"] for draws in kernel.get_samples(group_by_chain=True)[-2:]]),
        torch.full((2, 2), 7.0),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))]
)
def test_a_copy_keeps_the_draws_of_all_chains_when_the_original_is_gone(copied, tmp_path):
    kernel = make("penalty", dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db"))
    parallel(kernel, 2).run(DATA)
    draws = kernel.get_samples(group_by_chain=True)
    again = copied(kernel)
    del kernel
    gc.collect()
    kept = again.get_samples(group_by_chain=True)
    assert len(kept) == 2
    for chain in range(2):
        assert torch.equal(kept[chain]["mean"], draws[chain]["mean"])
    parallel(again, 2).run(DATA)
    assert len(again.get_samples(group_by_chain=True)) == 4 and counts(
        again.accountant
    ) == expected("penalty", 12, 4)


# -- Pyro's ways of keeping draws ------------------------------------------------------------------


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_see_every_iteration(kind):
    seen = []
    kernel = make(kind, dpb.PrivacyAccountant())

    def note(given, params, stage, i):
        seen.append((given is kernel, stage, i))

    MCMC(kernel, num_samples=5, warmup_steps=3, disable_progbar=True, hook_fn=note).run(DATA)
    assert seen == [(True, "Warmup", i) for i in range(3)] + [(True, "Sample", i) for i in range(5)]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "kind, names", [("penalty", ["scale"]), ("family", ["scale", "mean"]), ("HMC", ("mean",))]
)
def test_only_what_was_asked_for_is_saved_under_its_own_name(kind, names):
    kernel = make(kind, dpb.PrivacyAccountant())
    # far apart, so that a mix-up shows
    start = {"mean": torch.tensor(-50.0), "scale": torch.tensor(0.0)}
    runner = MCMC(
        kernel,
        num_samples=6,
        warmup_steps=1,
        initial_params=start,
        save_params=names,
        disable_progbar=True,
    )
    runner.run(DATA)
    assert set(runner.get_samples()) == set(kernel.get_samples()) == set(names)
    for name in names:
        torch.testing.assert_close(runner.get_samples()[name], kernel.get_samples()[name])
        assert (runner.get_samples()[name] < 0).all() == (name == "mean")


def test_what_the_model_has_not_cannot_be_saved():
    kernel = make("penalty", dpb.PrivacyAccountant())
    with pytest.raises(ValueError, match="save_params names"):
        MCMC(kernel, num_samples=6, save_params=["mean", "slope"], disable_progbar=True).run(DATA)
    assert counts(kernel.accountant) == {}
    with pytest.raises(TypeError, match="list of names"):
        MCMC(kernel, num_samples=6, save_params="mean", disable_progbar=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_streaming_statistics_are_those_of_the_draws(kind):
    kernel = make(kind, dpb.PrivacyAccountant())
    streaming = StreamingMCMC(
        kernel,
        num_samples=20,
        warmup_steps=5,
        statistics=StatsOfDict(default=CountMeanStats),
        disable_progbar=True,
    )
    streaming.run(DATA)
    found = streaming.get_statistics(group_by_chain=False)
    torch.testing.assert_close(found["mean"]["mean"], kernel.get_samples()["mean"].mean())
    assert counts(kernel.accountant) == expected(kind, 25, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:num_chains=2 is more than available_cpu:UserWarning")
@pytest.mark.slow
def test_arviz_takes_the_draws(kind, monkeypatch, capsys):
    import arviz  # which takes seconds

    monkeypatch.setattr("pyro.infer.mcmc.api.mp.cpu_count", lambda: 1)
    kernel = make(kind, dpb.PrivacyAccountant(), noise=0.2)  # so little that every chain moves
    runner = MCMC(kernel, num_samples=30, warmup_steps=5, num_chains=2, disable_progbar=True)
    runner.run(DATA)
    samples = {
        name: value.numpy() for name, value in runner.get_samples(group_by_chain=True).items()
    }
    table = arviz.summary(
        arviz.from_dict(posterior=samples)
        if arviz.__version__ < "1"
        else arviz.from_dict({"posterior": samples})
    )
    assert {"mean", "scale"} == set(table.index)
    if arviz.__version__ < "1" and kind != "family":  # whose model has no data to copy
        found = arviz.from_pyro(runner, log_likelihood=False)
        assert (
            found.posterior["scale"].shape == (2, 30) and not found.sample_stats["diverging"].any()
        )
    runner.summary()
    assert "scale" in capsys.readouterr().out
    found = runner.diagnostics()
    assert set(found["acceptance rate"]) == {"chain 0", "chain 1"} and all(
        0 <= rate <= 1 for rate in found["acceptance rate"].values()
    )


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_progress_bar_shows_what_was_charged_for(kind, capsys, monkeypatch):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # where Pyro shows none
        monkeypatch.delenv(name, raising=False)
    kernel = make(kind, dpb.PrivacyAccountant(8.0, 1e-5))
    MCMC(kernel, num_samples=6, warmup_steps=2).run(DATA)
    shown = capsys.readouterr().err
    assert "acc. rate" in shown and "epsilon" in shown
    assert {"step size", "acc. rate", "epsilon"} == set(kernel.logging())
