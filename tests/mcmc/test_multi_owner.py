"""Many owners: real process groups on the loopback interface, one process for each owner."""

import copy
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer import MCMC
from scipy.stats import chi2, kstest

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.density import clipped_ratio_sum
from torch_dpbayes.mcmc import (
    MultiOwnerHMC,
    MultiOwnerPenalty,
)
from torch_dpbayes.mcmc import kernel as kernel_module

CHANCE = 2e-4  # of one look at a law
DIMENSION = 3


# -- processes -------------------------------------------------------------------------------------


class Failed(Exception):
    """What a process raised: the name of its class, and the message."""


def serve(function, rank, size, place, timeout, pipe, arguments):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        pipe.send((True, function(rank, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # what tears the group down waits for ranks that are gone


@pytest.fixture(scope="module")
def processes():
    """Forked from one that has imported everything and computed nothing."""
    multiprocessing.set_forkserver_preload(
        ["torch_dpbayes.mcmc", "torch._dynamo", "scipy.stats", "pytest"]
    )
    return multiprocessing.get_context("forkserver")


@pytest.fixture
def owners(processes, tmp_path_factory):
    """Run ``function(rank, *arguments)`` on ``size`` ranks: what each returns, or None for
    one that died.
    """

    def run(size, function, *arguments, timeout=30):
        place = tmp_path_factory.mktemp("group") / "store"
        started = []
        for rank in range(size):
            mine, theirs = processes.Pipe()
            process = processes.Process(
                target=serve, args=(function, rank, size, place, timeout, theirs, arguments)
            )
            process.start()
            theirs.close()
            started.append((process, mine))
        results = []
        try:
            for _, pipe in started:
                try:
                    right, result = pipe.recv() if pipe.poll(100) else (False, "still running")
                except EOFError:
                    right, result = True, None
                if not right:
                    raise Failed(result)
                results.append(result)
        finally:
            for process, _ in started:
                process.kill()
                process.join()
        return results

    return run


# -- models, and the truth about them --------------------------------------------------------------


PRIOR_STD = 0.25  # so that a prior counted twice, or not at all, shows


def model(x, prior_std=PRIOR_STD):
    mean = pyro.sample("mean", dist.Normal(0.0, prior_std).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def records(rank, counts=(25, 15)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(counts[rank], DIMENSION, generator=generator) + 0.5


POOLED = torch.cat([records(0), records(1)])
PRECISION = PRIOR_STD**-2 + len(POOLED)
MEAN = POOLED.sum(0) / PRECISION
SLOPE = 20.0


def make(kind, noise, accountant=None, the_model=model, **options):
    """``noise``: of this owner, standard deviation of the log ratio for a step of one
    posterior standard deviation.
    """
    ratio = noise * PRECISION**0.5 / SLOPE
    scale, bound = PRECISION**-0.5, {"log_ratio_slope": SLOPE}
    options |= {"accountant": dpb.PrivacyAccountant() if accountant is None else accountant}
    if kind == "penalty":
        settings = {"proposal_scale": scale, "noise_multiplier": ratio, **bound}
        return MultiOwnerPenalty(the_model, **{**settings, **options})
    settings = {"step_size": 0.6 * scale, "num_steps": 3, "max_grad_norm": SLOPE, **bound}
    settings |= {"ratio_noise_multiplier": ratio, "grad_noise_multiplier": ratio}
    return MultiOwnerHMC(the_model, **{**settings, **options})


def runner(kernel, num_samples=10, warmup_steps=0, **options):
    return MCMC(
        kernel, num_samples=num_samples, warmup_steps=warmup_steps, disable_progbar=True, **options
    )


def charged(accountant):
    return {round(charge.event.noise_multiplier, 9): charge.count for charge in accountant.history}


def how_it_ends(kernel, *data, num_samples=10, **options):
    """The error's class and text, the number of draws, and the charges."""
    try:
        runner(kernel, num_samples, **options).run(*data)
        ending = ("", "")
    except (Exception, KeyboardInterrupt) as error:
        ending = (type(error).__name__, str(error))
    draws = kernel.get_samples()
    return (*ending, len(draws["mean"]) if draws else 0, sum(charged(kernel.accountant).values()))


def law(rank, kind, seed, starts, iterations, noises):
    """Chains of a few iterations, each from an exact draw of the posterior: their ends."""
    kernel = make(kind, noises[rank])
    kernel.setup(0, records(rank))
    generator = torch.Generator().manual_seed(seed)
    ends = []
    for _ in range(starts):
        params = {"mean": MEAN + torch.randn(DIMENSION, generator=generator) / PRECISION**0.5}
        for _ in range(iterations):
            params = kernel.sample(params)
        ends.append(params["mean"])
    return torch.stack(ends).numpy()


@pytest.mark.slow
@pytest.mark.chance(CHANCE)
@pytest.mark.parametrize(
    "kind, starts, iterations, noises",
    [("penalty", 200, 8, (0.2, 1.5)), ("HMC", 150, 4, (0.2, 0.6))],
)
def test_the_chain_samples_the_pooled_posterior(owners, kind, starts, iterations, noises):
    one, other = owners(2, law, kind, torch.seed(), starts, iterations, noises)
    assert np.array_equal(one, other)
    z = (one - MEAN.numpy()) * PRECISION**0.5
    assert kstest(chi2.cdf((z**2).sum(1), DIMENSION), "uniform").pvalue > CHANCE / 2
    assert kstest(z.sum(1) / DIMENSION**0.5, "norm").pvalue > CHANCE / 2


# -- sums over owners are sums over the pooled data ------------------------------------------------


class Silent:
    """No noise."""

    def standard_normal(self, size, dtype, device):
        return torch.zeros(size, dtype=dtype)


def public_values(rank, kind, counts, iterations):
    options = {} if kind == "penalty" else {"mass_matrix": torch.linspace(0.8, 1.2, DIMENSION)}
    kernel = make(kind, 0.6 / len(counts) ** 0.5, **options)
    kernel.setup(5, POOLED.split(counts)[rank])
    kernel._owners._seed, kernel._noise = [20261121], Silent()
    params, path = {"mean": torch.zeros(DIMENSION)}, []
    for _ in range(iterations):
        params = kernel.sample(params)
        path.append(params["mean"])
    return (
        torch.stack(path).numpy(),
        kernel.diagnostics()["noisy log ratios"],
        kernel.diagnostics()["acceptance rate"],
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "counts"), [("penalty", [25, 15]), ("HMC", [25, 15]), ("HMC", [0, 40])]
)
def test_with_randomness_fixed_one_owner_and_two_compute_the_same(owners, kind, counts):
    """Proposals, decisions and ratios, warm-up included."""
    (pooled,), (one, other) = (
        owners(1, public_values, kind, [40], 25),
        owners(2, public_values, kind, counts, 25),
    )
    assert one[1] == other[1] and np.array_equal(one[0], other[0])
    np.testing.assert_allclose(one[0], pooled[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[1], pooled[1], rtol=1e-4, atol=1e-4)
    assert one[2] == pooled[2] > 0


# -- what leaves a rank ----------------------------------------------------------------------------

OTHER_COLLECTIVES = """all_gather all_gather_object broadcast broadcast_object_list gather
gather_object reduce reduce_scatter reduce_scatter_tensor scatter send isend all_to_all
batch_isend_irecv barrier monitored_barrier""".split()


class Tapped:
    """The noise of a kernel, written down."""

    def __init__(self, noise):
        self._noise, self.drawn = noise, []

    def standard_normal(self, size, dtype, device):
        self.drawn.append(self._noise.standard_normal(size, dtype=dtype, device=device))
        return self.drawn[-1].clone()


def tap():
    """What this rank sends from here on, by the two ways that are left open: the numbers that say
    where it is, and sums.
    """
    numbers, sums = [], []
    all_reduce, gather = torch.distributed.all_reduce, torch.distributed.all_gather_into_tensor

    def noted_sum(message, **options):
        sums.append(message.tolist())
        return all_reduce(message, **options)

    def noted_numbers(found, message, **options):
        numbers.append(message.tolist())
        return gather(found, message, **options)

    def forbidden(*arguments, **options):
        raise AssertionError("another way of communicating")

    torch.distributed.all_reduce = noted_sum
    torch.distributed.all_gather_into_tensor = noted_numbers
    for name in OTHER_COLLECTIVES:
        setattr(torch.distributed, name, forbidden)
    return numbers, sums


def by_kind(sums):
    """The sums of iterations: where the chain is, then gradients, then the ratio."""
    begins = True
    for message in sums:
        if len(message) == DIMENSION + 1:
            yield "gradient", message
        else:
            yield ("point" if begins else "ratio"), message
            begins = not begins


def tapped_run(rank, kind, iterations):
    """All messages of this rank, the noise it drew, and the exact sums that they hid."""
    kernel, sums = make(kind, 1.0), []
    kernel.setup(0, records(rank, (25, 15, 4)))
    (numbers, sent), kernel._noise = tap(), Tapped(kernel._noise)
    density = kernel._density
    gradient_sum = density.clipped_gradient_sum

    def noted(theta, bound):
        sums.append(gradient_sum(theta, bound))
        return sums[-1]

    density.clipped_gradient_sum = noted

    def noted_ratio(current, proposed, bound):
        sums.append((clipped_ratio_sum(current, proposed, bound), bound))
        return sums[-1][0]

    kernel_module.clipped_ratio_sum = noted_ratio
    params = {"mean": torch.zeros(DIMENSION)}
    for _ in range(iterations):
        params = kernel.sample(params)
    return (
        numbers,
        sent,
        [noise.tolist() for noise in kernel._noise.drawn],
        [s.tolist() if isinstance(s, torch.Tensor) else s for s in sums],
    )


def tapped_set_ups(rank):
    """The messages of set-ups with other records, with the entropy that others see fixed."""
    os.urandom = bytes
    (numbers, sums), found = tap(), []
    for count in (0, 1, 7, 40):
        kernel = make("penalty", 1.0)
        kernel.setup(0, records(rank, (25, count)) + count)
        found.append((list(numbers), len(sums)))
        kernel.cleanup()
        numbers.clear()
        sums.clear()
    return found


@pytest.mark.parametrize("kind", ["penalty", "HMC"])
def test_what_leaves_an_owner_is_its_noisy_sums_and_nothing_else_of_its_records(owners, kind):
    results = owners(3, tapped_run, kind, 6)
    std = PRECISION**0.5 / SLOPE
    for rank, (numbers, sent, drawn, sums) in enumerate(results):
        assert numbers == results[0][0]  # nothing of its own
        hidden = iter(zip(sums, drawn, strict=True))  # every draw of noise hides one sum
        for what, message in by_kind(sent):
            if what == "point":  # the first rank tells where the chain is
                assert rank == 0 or not any(message)
                continue
            exact, noise = next(hidden)
            if what == "ratio":
                assert message[0] == pytest.approx(exact[0] + std * exact[1] * noise[0], rel=1e-12)
                # the first rank sends the public part of the test
                assert not any(message[2:] if rank == 0 else message[1:])
            else:
                assert message[:DIMENSION] == pytest.approx(
                    [e + std * SLOPE * n for e, n in zip(exact, noise)], rel=1e-12
                )
                assert message[DIMENSION] == 0
        assert next(hidden, None) is None
        assert len({n for draw in drawn for n in draw}) == sum(map(len, drawn))
    assert len({n for _, _, drawn, _ in results for draw in drawn for n in draw}) == 3 * sum(
        map(len, results[0][2])
    )


@pytest.mark.thorough
def test_what_is_sent_at_set_up_does_not_depend_on_the_records_nor_on_their_number(owners):
    _, (none, one, seven, forty) = owners(2, tapped_set_ups)
    assert len(none[0]) > 5 and none == one == seven == forty


# -- runs ------------------------------------------------------------------------------------------


def three_hospitals(rank, kind, folder):
    accountant = [
        dpb.PrivacyAccountant(5000.0, 1e-5),
        dpb.PrivacyAccountant(6000.0, 1e-6, neighboring="replace_one", path=folder / "budget.db"),
        dpb.PrivacyAccountant(method="rdp"),
    ][rank]
    kernel = make(
        kind,
        [1.0, 1.5, 3.0][rank],
        accountant,
        target_accept_prob=0.5,
    )
    x = records(rank, (25, 0, 4))
    if rank == 2:
        x[1] = math.nan
    run = runner(kernel, 8, 5)
    run.run(x)
    again = runner(kernel, 4)
    again.run(x)
    return (
        run.get_samples()["mean"].numpy(),
        kernel.get_samples()["mean"].numpy(),
        charged(accountant),
    )


@pytest.mark.parametrize("kind", ["penalty", "HMC"])
def test_all_owners_get_the_same_draws_and_each_pays_for_its_own_noise(owners, kind, tmp_path):
    """One of them has no records, another one that is no number; budgets, relations, methods
    and noise differ.
    """
    results = owners(3, three_hospitals, kind, tmp_path)
    for noise, (draws, kept, charges) in zip((1.0, 1.5, 3.0), results):
        assert draws.shape == (8, DIMENSION) and kept.shape == (12, DIMENSION)
        assert (
            np.array_equal(kept, results[0][1])
            and np.array_equal(kept[:8], draws)
            and np.isfinite(kept).all()
        )
        assert charges == {
            round(noise * PRECISION**0.5 / SLOPE, 9): 17 if kind == "penalty" else 17 + 17 * 3 + 2
        }


def in_folder(rank, folder, function):
    os.chdir(folder)
    return function(rank)


# -- how runs end ----------------------------------------------------------------------------------


def a_budget_ends(rank, kind):
    accountant = dpb.PrivacyAccountant(*((3.0, 1e-5) if rank == 1 else (30.0, 1e-5)))
    kernel = make(kind, 20.0, accountant)
    fitting = accountant.remaining(GaussianDpEvent(20.0 * PRECISION**0.5 / SLOPE))
    ending = how_it_ends(kernel, records(rank, (9, 9, 9)), num_samples=10_000)
    other = make("penalty", 20.0)  # the group is still of use
    runner(other, 3).run(records(rank, (9, 9, 9)))
    return ending, fitting, charged(other.accountant)


@pytest.mark.parametrize("kind", ["penalty", "HMC"])
def test_the_tightest_budget_stops_all_in_the_same_iteration(owners, kind):
    results = owners(3, a_budget_ends, kind)
    for name, text, draws, charges in (ending for ending, *_ in results):
        assert name == "PrivacyBudgetExceeded" and "budget of" in text
        assert (
            charges == results[1][0][3]
            and draws == (charges if kind == "penalty" else (charges - 1) // 4) > 2
        )
    assert all("rank 1" in results[rank][0][1] for rank in (0, 2))
    tightest, fitting = results[1][0], results[1][1]
    assert tightest[3] == fitting if kind == "penalty" else fitting - 4 < tightest[3] <= fitting
    assert all(sum(after.values()) == 3 for *_, after in results)


def refused_after_all(rank):
    """Between the question whether an iteration can be paid and the charge another job spends
    what was left.
    """
    accountant = dpb.PrivacyAccountant(*((3.0, 1e-5) if rank == 1 else ()))
    accountant.remaining = lambda event: 10
    return how_it_ends(make("penalty", 20.0, accountant), records(rank), num_samples=10_000)


def test_a_charge_that_is_refused_after_all_stops_all(owners):
    (name, text, draws, charges), (own_name, _, own_draws, own_charges) = owners(
        2, refused_after_all
    )
    assert name == own_name == "PrivacyBudgetExceeded" and "rank 1" in text
    assert "stays charged" in text and "Nothing of it was" not in text
    # the other had charged, and keeps that
    assert draws == own_draws == own_charges == charges - 1 > 5


def interrupt(what, when, kernel):
    """Do ``what`` in the middle of iteration number ``when``, between charge and message."""
    original, calls = kernel._metropolis, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == when:
            what()
        return original(*arguments)

    kernel._metropolis = interrupted


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def out_of_memory():
    raise torch.OutOfMemoryError("a made-up one, with 123 records")


MISHAPS = {  # of owner 1, with the error that it sees
    "Ctrl-C": (ctrl_c, "KeyboardInterrupt"),
    "memory": (out_of_memory, "OutOfMemoryError"),
    "stalls": (partial(time.sleep, 15), None),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGKILL), None),
}


def mishap_of_one(rank, how):
    """In the middle of an iteration; one that stalls does so for longer than the timeout."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=10 if how == "stalls" else 30))
    kernel = make("penalty", 1.0, process_group=group)
    if rank == 1:
        interrupt(MISHAPS[how][0], 4, kernel)
    begin = time.monotonic()
    ending = how_it_ends(kernel, records(rank, (9, 9, 9)))
    shorter = None
    if MISHAPS[how][1]:  # the group stays usable; this run is shorter for owner 1
        own = {"num_samples": 4 if rank == 1 else 6}
        shorter = how_it_ends(make("penalty", 1.0), records(rank, (9, 9, 9)), **own)
    return ending, shorter, time.monotonic() - begin


@pytest.mark.thorough
@pytest.mark.parametrize("how", MISHAPS)
def test_what_happens_to_one_owner_reaches_the_others_at_once(owners, how):
    results, own_error = owners(3, mishap_of_one, how), MISHAPS[how][1]
    assert (results[1] is None) == (how == "dies")
    for rank in (0, 2):
        (name, text, *counts), shorter, seconds = results[rank]
        assert name == "OwnerError" and counts == [3, 4] and seconds < 40
        assert ("rank 1 failed" if own_error else "cannot be reached") in text
        assert "get_samples" in text and "123" not in text
        if own_error:
            assert shorter[0] == "OwnerError" and "rank 1 is in the end of a chain" in shorter[1]
            assert shorter[2:] == (4, 4)
    if own_error:
        (name, _, *counts), shorter, _ = results[1]
        assert name == own_error and counts == [3, 4] and shorter == ("", "", 4, 4)


# -- set-up ----------------------------------------------------------------------------------------


def scaled(x, factor=1.0):
    return model(x * factor)


def local(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])


DIFFERENCES = {  # of owner 1
    "slope": {"log_ratio_slope": 7.0},
    "scale": {"proposal_scale": torch.full((DIMENSION,), 0.2), "target_accept_prob": None},
    "prior": {"the_model": partial(model, prior_std=1.001 * PRIOR_STD)},
    "likelihood": {"the_model": partial(scaled, factor=1.001)},
}


def different(rank):
    def end(kind="penalty", data=records, start=None, warmup_steps=0, **options):
        start = None if start is None else {"mean": torch.full((DIMENSION,), start)}
        kernel = make(kind, 1.0, **options)
        return how_it_ends(kernel, data(rank), initial_params=start, warmup_steps=warmup_steps)

    endings = {}
    for name, options in DIFFERENCES.items():
        steps = rank * (name == "slope")
        endings[name] = end(warmup_steps=steps, **(options if rank == 1 else {}))
    endings["kernel"] = end(["penalty", "HMC"][rank])
    endings["columns"] = end(data=lambda rank: records(rank)[:, : 3 - rank])
    endings["dtype"] = end(data=lambda rank: records(rank) if rank else records(rank).double())
    endings["start"] = end(start=0.1 * rank)
    endings["no start"] = end(start=0.0 if rank else None)
    endings["unfit"] = end(the_model=local if rank else model)
    endings["nothing"] = end(start=0.0)
    return endings


SAYS = {
    "slope": "rank 1 and rank 0 differ in log_ratio_slope (7.0, on rank 0 20.0)",
    "scale": "differ in proposal_scale ('tensor",
    "prior": "rank 1 has another density",
    "likelihood": "rank 1 has another density",
    "kernel": "differ in kernel ('DPHMC', on rank 0 'DPPenalty')",
    "columns": "differ in latents",
    "dtype": "differ in data",
    "start": "differ in initial_params ('tensor",
    "no start": "differ in initial_params ('tensor",
}


def test_owners_that_differ_find_out_at_set_up(owners):
    for rank, result in enumerate(owners(2, different)):
        for name, text in SAYS.items():
            assert result[name][0] == "OwnerError" and text in result[name][1], result[name]
            assert result[name][2:] == (0, 0)
        name, text, *nothing = result["unfit"]
        assert name == ("UnfitModel" if rank else "OwnerError") and nothing == [0, 0]
        assert ("lies in the data plate" if rank else "rank 1 failed") in text
        assert result["nothing"] == ("", "", 10, 10)


UNREADABLE = ("{", "[" * 900, '["", [[1, 2]], 0, 0, ""]', f'["", {{}}, 0, {10**400}, ""]')


def unreadable(text, gather, own, size):
    return gather(len(text).to_bytes(8, "little") + text.encode(), size)


def refusals(rank):
    with pytest.raises(ValueError, match="noise of its own"):
        make("penalty", 0.0)
    with pytest.raises(ValueError, match="noise of its own"):
        make("HMC", 1.0, grad_noise_multiplier=0.0)
    with pytest.raises(ValueError, match="unknown to the others"):
        make("penalty", 1.0, proposal=object())
    kernel = make("penalty", 1.0, dpb.PrivacyAccountant(path=f"copied-{rank}.db"))
    with pytest.raises(RuntimeError, match="in a run together"):
        kernel.sample({"mean": torch.zeros(DIMENSION)})
    for copied in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        with pytest.raises(RuntimeError, match="copied into another process"):
            copied.setup(0, records(rank))
    for text in UNREADABLE:
        strange = make("penalty", 1.0)
        if rank == 1:
            gather = strange._owners._ranks._gather
            strange._owners._ranks._gather = partial(unreadable, text, gather)
        with pytest.raises(RuntimeError, match="another rank sent settings that cannot be read"):
            strange.setup(0, records(rank))
    return json.dumps(sorted(kernel._owners._settings))


def test_what_the_constructors_and_copies_refuse(owners, tmp_path):
    owners(2, in_folder, tmp_path, refusals)
    with pytest.raises(RuntimeError, match="init_process_group"):
        make("penalty", 1.0)


# -- the example -----------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--records", "3000", "--iterations", "12", "--quiet"]


def spent(out):
    line = r"^(\w+) +epsilon = ([\d.]+) at delta = 1e-06, .*mean of the first weight (\S+)$"
    found = re.findall(line, out, re.MULTILINE)
    return {name: float(epsilon) for name, epsilon, _ in found}, {mean for *_, mean in found}


def torchrun(size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", port]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 0])
def test_the_example_as_people_call_it(size, tmp_path):
    example = [str(ROOT / "examples" / "multi_owner.py"), *SHORT, "--epsilon", "1", "2", "3"]
    command = [sys.executable, *(torchrun(size) if size else []), *example]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    epsilons, means = spent(ran.stdout)
    assert sorted(epsilons) == ["Aachen", "Bern", "Cork"] and len(means) == 1
    for name, budget in (("Aachen", 1), ("Bern", 2), ("Cork", 3)):
        assert 0.99 * budget < epsilons[name] <= budget
    assert "8 samples" in ran.stdout and "no privacy" in ran.stdout
