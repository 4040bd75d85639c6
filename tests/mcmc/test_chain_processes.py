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
from pyro.infer import MCMC
from pyro.infer.mcmc.api import StreamingMCMC
from pyro.ops.streaming import CountMeanStats, StatsOfDict

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.ledger.file import Ledger
from torch_dpbayes.accounting.ledger.schema import open_blocks
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty, chain_processes

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
    process.join(200)
    process.kill()
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "context, words", [("fork", "by other transforms than"), ("spawn", "in spawned processes")]
)
def test_transforms_are_looked_at_in_parallel_chains_too(context, words, tmp_path):
    accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")
    kernel = make("penalty", accountant)
    with pytest.raises(ValueError, match=rf"MCMC\(transforms=.*{words}"):
        parallel(kernel, 2, context, transforms={}).run(DATA)
    assert counts(accountant) == {} and kernel.get_samples() == {}


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


def charging(accountant, releases):
    chain_processes.give_back_when_terminated(accountant)
    event = events.ComposedDpEvent(
        [
            events.GaussianDpEvent(200.0),
            events.SelfComposedDpEvent(events.GaussianDpEvent(240.0), 3),
        ]
    )
    with releases.open("ab", buffering=0) as file:
        while True:
            accountant.compose(event)
            file.write(b".")


BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "signals", [BOTH, BOTH[::-1], BOTH[1:]], ids=["Ctrl-C first", "SIGTERM first", "SIGTERM alone"]
)
@pytest.mark.parametrize("apart", [0.0, 0.003], ids=["at once", "one after the other"])
def test_a_worker_that_is_stopped_anywhere_gives_back_what_it_had_reserved(
    signals, apart, tmp_path
):
    """At once: both reach it before it runs on."""
    for k in range(5):
        path, releases = tmp_path / f"{k}.db", tmp_path / f"{k}"
        accountant = dpb.PrivacyAccountant(8.0, 1e-5, path=path)
        process = multiprocessing.get_context("fork").Process(
            target=charging, args=(accountant, releases)
        )
        process.start()
        while not releases.exists() or releases.stat().st_size < 40 * (k + 1):
            assert process.is_alive()
            time.sleep(0.002)
        if not apart:
            os.kill(process.pid, signal.SIGSTOP)
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(apart)
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
        assert open_blocks(Ledger(path, {}).read()) == []
        released, charged = releases.stat().st_size, counts(accountant)
        assert (
            released <= charged[200.0] <= released + 1
            and 3 * released <= charged[240.0] <= 3 * released + 3
        )


def started(target, *arguments):
    """A forked process that has charged something, like a worker of Pyro's, and goes on with
    ``target(*arguments)``.
    """
    accountant, arguments = arguments[0], arguments[1:]
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def run():
        chain_processes.give_back_when_terminated(accountant)
        accountant.compose(events.GaussianDpEvent(200.0))
        ready.set()
        target(*arguments)

    process = context.Process(target=run)
    process.start()
    assert ready.wait(60)
    return process


def assert_gave_back(process, accountant):
    process.join(20)
    ended = process.exitcode
    process.kill()
    assert ended == 128 + signal.SIGTERM
    assert open_blocks(Ledger(accountant.path, {}).read()) == [] and counts(accountant) == {
        200.0: 1
    }


@pytest.fixture
def accountant(tmp_path):
    return dpb.PrivacyAccountant(8.0, 1e-5, path=tmp_path / "budget.db")


def wait_for_ever():
    threading.Event().wait()


def test_a_worker_that_waits_for_pyro_hears_a_signal_that_did_not_wake_it(accountant):
    """Another thread receives it, which leaves the main thread asleep as one does that came
    just before it fell asleep.
    """

    def wait():
        threading.Timer(
            0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        ).start()
        wait_for_ever()

    assert_gave_back(started(wait, accountant), accountant)


def test_a_worker_ends_whoever_has_the_lock_that_it_waits_for(accountant):
    """As of a parent that was killed in the middle of waking it."""
    event = multiprocessing.get_context("fork").Event()
    process = started(event.wait, accountant)
    time.sleep(0.5)
    event._cond.acquire()
    process.terminate()
    assert_gave_back(process, accountant)


def test_a_worker_ends_though_it_takes_every_exception_for_another(accountant):
    def deaf():
        while True:
            try:
                wait_for_ever()
            except BaseException:
                pass

    process = started(deaf, accountant)
    process.terminate()
    assert_gave_back(process, accountant)


def test_a_worker_does_not_take_over_how_its_program_hears_signals(accountant):
    """A flag that the program sets on SIGTERM, or its event loop's pipe, would leave the
    worker deaf.
    """
    heard, (reader, writer) = threading.Event(), os.pipe()
    os.set_blocking(writer, False)
    handlers = {number: signal.signal(number, lambda *_: heard.set()) for number in BOTH}
    wakeup = signal.set_wakeup_fd(writer)
    try:
        process = started(wait_for_ever, accountant)
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    process.terminate()
    assert_gave_back(process, accountant)
    os.close(writer)
    assert os.read(reader, 1) == b"" and not heard.is_set()


@pytest.mark.thorough
def test_what_a_chain_starts_may_be_ended_without_it(accountant):
    """As the workers of a pool are."""

    def start_and_end_others(told):
        child = os.fork()
        if not child:
            wait_for_ever()
        os.kill(child, signal.SIGTERM)
        told.put(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            told.put(pool.map(abs, [-1, 2]))
        time.sleep(2.5)
        told.put("went on")
        wait_for_ever()

    told = multiprocessing.get_context("fork").Queue()
    process = started(start_and_end_others, accountant, told)
    assert [told.get(timeout=300) for _ in range(3)] == [-signal.SIGTERM, [1, 2], "went on"]
    process.terminate()
    assert_gave_back(process, accountant)


def test_workers_end_with_their_parent(accountant):
    """Which was killed, and could not tell them."""

    def parent(told):
        for process in [started(wait_for_ever, accountant) for _ in range(3)]:
            told.put(process.pid)
        wait_for_ever()

    told = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=parent, args=(told,))
    process.start()
    workers = [told.get(timeout=300) for _ in range(3)]
    process.kill()
    process.join()
    end = time.monotonic() + 30
    while open_blocks(Ledger(accountant.path, {}).read()) and time.monotonic() < end:
        time.sleep(0.1)
    assert open_blocks(Ledger(accountant.path, {}).read()) == [] and counts(accountant) == {
        200.0: 3
    }
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


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


def test_a_worker_whose_parent_ended_before_it_looked_ends_too(accountant):
    """Though a process that the parent forked later keeps open what would have told it."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def late():
        told.put(("worker", os.getpid()))
        while os.getppid() == multiprocessing.parent_process().pid:
            time.sleep(0.01)
        chain_processes.give_back_when_terminated(accountant)
        wait_for_ever()

    def parent():
        for target in (late, wait_for_ever):
            process = context.Process(target=target)
            process.start()
        told.put(("other", process.pid))
        wait_for_ever()

    process = context.Process(target=parent)
    process.start()
    started = dict(told.get(timeout=300) for _ in range(2))
    process.kill()
    process.join()
    try:
        assert_end([started["worker"]])
    finally:
        os.kill(started["other"], signal.SIGKILL)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_ctrl_c_is_heard_in_the_middle_of_a_fork(moment):
    """Python drops what is raised there: the program would run on, and start its chains."""

    def program(told):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        times = iter([1])
        os.register_at_fork(
            **{moment: lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in times]}
        )
        chain_processes.keep_interrupts.cache_clear()
        chain_processes.keep_interrupts()  # as a kernel does, for its chains
        try:
            chain = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.0,))
            chain.start()
            time.sleep(10)
            told.put("nothing")
        except KeyboardInterrupt:
            chain.join()
            told.put(
                (chain.exitcode, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            )

    told = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=program, args=(told,))
    process.start()
    assert told.get(timeout=300) == (0, True)
    process.join()


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


def sequential_chain(path, told):
    handlers, (_, writer) = [signal.getsignal(number) for number in BOTH], os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    kernel = make("penalty", dpb.PrivacyAccountant(8.0, 1e-5, path=path))
    MCMC(kernel, num_samples=3, warmup_steps=1, disable_progbar=True).run(DATA)
    assert [signal.getsignal(number) for number in BOTH] == handlers and signal.set_wakeup_fd(
        -1
    ) == writer
    told.put(kernel._spool.folder)


@pytest.mark.thorough
def test_a_process_of_the_users_is_left_as_it_was(tmp_path):
    """Its signals are its own, and the file for draws goes when it ends."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    process = context.Process(target=sequential_chain, args=(tmp_path / "budget.db", told))
    process.start()
    folder = told.get(timeout=300)
    process.join(60)
    assert process.exitcode == 0 and not os.path.exists(folder)


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


EARLIER = {name: -value for name, value in FAR.items()}


@pytest.mark.parametrize("first", [0, 1], ids=["all rows", "rows of a larger tensor"])
@pytest.mark.parametrize("earlier", [EARLIER, {name: value[:1] for name, value in EARLIER.items()}])
def test_whose_start_it_is_is_told_by_the_rows_of_one_tensor(first, earlier, monkeypatch):
    """Pyro sets the starts of all parallel chains on one kernel, one after another."""
    kernel = make("penalty", dpb.PrivacyAccountant())
    for starts in (earlier, {name: value[first:] for name, value in FAR.items()}):
        for row in zip(*starts.values()):
            kernel.initial_params = dict(zip(starts, row))
    for chain, expected in enumerate(FAR["mean"][first:]):
        monkeypatch.setattr("torch_dpbayes.mcmc.kernel.chain_number", lambda chain=chain: chain)
        assert kernel.initial_params["mean"] == expected
    kernel.initial_params = {"mean": torch.tensor(7.0), "scale": torch.tensor(0.5)}
    assert kernel.initial_params["mean"] == 7.0


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
