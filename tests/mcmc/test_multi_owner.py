"""Many owners: real process groups on loopback, one process for each owner."""

import copy
import importlib
import math
import os
import pickle
import signal
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer import MCMC
from support.ranks import Server
from support.recorded import record_once

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.density import clipped_ratio_sum
from torch_dpbayes.mcmc import DPHMC, DPPenalty, MultiOwnerHMC, MultiOwnerPenalty
from torch_dpbayes.mcmc import kernel as kernel_module
from torch_dpbayes.mcmc.multi_owner import SharedRandomness

DIMENSION = 3


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    """``owners(function, size, **arguments)``: what each returned, or None for one that died. They
    find the model recorded.
    """
    importlib.import_module("torch._dynamo")  # here, not in every process
    with pytest.MonkeyPatch.context() as patch:
        record_once(patch, kernel_module, for_any_count=True)
        for gradients in (False, True):
            options = {"data_plate": "data", "gradients": gradients, "count_is_public": False}
            kernel_module.RecordDensity(model, (records(0),), {}, **options)
        server = Server(__name__, tmp_path_factory.mktemp("owners"))
        yield server.run
        server.close()


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
SLOPE = 20.0


def make(kind, noise, accountant=None, the_model=model, alone=False, **options):
    """``noise``: of this owner, standard deviation of the log ratio for a step of one
    posterior standard deviation.
    """
    ratio = noise * PRECISION**0.5 / SLOPE
    scale, bound = PRECISION**-0.5, {"log_ratio_slope": SLOPE}
    options |= {"accountant": dpb.PrivacyAccountant() if accountant is None else accountant}
    of_one, of_many = {"penalty": (DPPenalty, MultiOwnerPenalty), "HMC": (DPHMC, MultiOwnerHMC)}[
        kind
    ]
    if kind == "penalty":
        settings = {"proposal_scale": scale, "noise_multiplier": ratio, **bound}
    else:
        settings = {"step_size": 0.6 * scale, "num_steps": 3, "max_grad_norm": SLOPE, **bound}
        settings |= {"ratio_noise_multiplier": ratio, "grad_noise_multiplier": ratio}
    return (of_one if alone else of_many)(the_model, **{**settings, **options})


def charged(accountant):
    return {round(charge.event.noise_multiplier, 9): charge.count for charge in accountant.history}


def how_it_ends(kernel, *data, num_samples=10):
    """The error's class and text, the number of draws, and the charges."""
    try:
        MCMC(kernel, num_samples, 0, disable_progbar=True).run(*data)
        ending = ("", "")
    except (Exception, KeyboardInterrupt) as error:
        ending = (type(error).__name__, str(error))
    draws = kernel.get_samples()
    return (*ending, len(draws["mean"]) if draws else 0, sum(charged(kernel.accountant).values()))


# -- sums over owners are sums over the pooled data ------------------------------------------------


class Silent:
    """No noise."""

    def standard_normal(self, size, dtype, device):
        return torch.zeros(size, dtype=dtype)


def public_values(rank, kind, counts, iterations=15):
    options = {} if kind == "penalty" else {"mass_matrix": torch.linspace(0.8, 1.2, DIMENSION)}
    is_alone = len(counts) == 1
    kernel = make(kind, 0.6 / len(counts) ** 0.5, alone=is_alone, **options)
    if is_alone:  # with the public numbers that several would share

        def share(stage):
            kernel._public = SharedRandomness(20261121, kernel._iteration, stage)

        kernel._share_public_numbers = share
    kernel.setup(5, POOLED.split(counts)[rank])
    kernel._noise = Silent()
    if not is_alone:
        kernel._owners._seed = [20261121]
    params, path = {"mean": torch.zeros(DIMENSION)}, []
    for _ in range(iterations):
        params = kernel.sample(params)
        path.append(params["mean"])
    found = kernel.diagnostics()
    return torch.stack(path).numpy(), found["noisy log ratios"], found["acceptance rate"]


@pytest.mark.parametrize(("kind", "counts"), [("penalty", [25, 15]), ("HMC", [0, 40])])
def test_two_owners_make_the_chain_of_one_kernel_on_the_pooled_data(owners, kind, counts):
    """With public numbers fixed and no noise drawn: proposals, ratios and decisions, which count
    the noise of both.
    """
    one, other = owners(public_values, 2, kind=kind, counts=counts)
    pooled = public_values(0, kind, [40])
    assert one[1] == other[1] and np.array_equal(one[0], other[0])
    np.testing.assert_allclose(one[0], pooled[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[1], pooled[1], rtol=1e-4, atol=1e-4)
    assert one[2] == pooled[2] > 0


# -- what leaves a rank ----------------------------------------------------------------------------

OTHER_COLLECTIVES = """all_gather_into_tensor all_gather_object broadcast broadcast_object_list
gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter send isend all_to_all
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
    all_reduce, gather = torch.distributed.all_reduce, torch.distributed.all_gather

    def noted_sum(message, **options):
        sums.append(message.tolist())
        return all_reduce(message, **options)

    def noted_numbers(found, message, **options):
        numbers.append(message.tolist())
        return gather(found, message, **options)

    def forbidden(*arguments, **options):
        raise AssertionError("another way of communicating")

    torch.distributed.all_reduce = noted_sum
    torch.distributed.all_gather = noted_numbers
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


NOISES = (1.0, 1.5)


def hospital(rank, folder):
    """One of two, which differ in budget, relation, method and noise, and one of which has no
    records: what it sends, the noise it drew, the exact sums that this hid, draws and charges.
    """
    accountant = [
        dpb.PrivacyAccountant(method="rdp"),
        dpb.PrivacyAccountant(6000.0, 1e-6, neighboring="replace_one", path=folder / "budget.db"),
    ][rank]
    kernel, sums = make("HMC", NOISES[rank], accountant, target_accept_prob=0.5), []
    x = records(rank, (25, 0))
    if rank == 0:
        x[1] = math.nan
    kernel.setup(2, x)
    (numbers, sent), kernel._noise = tap(), Tapped(kernel._noise)
    gradient_sum = kernel._density.clipped_gradient_sum

    def noted(theta, bound):
        sums.append(gradient_sum(theta, bound))
        return sums[-1]

    def noted_ratio(current, proposed, bound):
        sums.append((clipped_ratio_sum(current, proposed, bound), bound))
        return sums[-1][0]

    kernel._density.clipped_gradient_sum = noted
    kernel_module.clipped_ratio_sum = noted_ratio
    params = {"mean": torch.zeros(DIMENSION)}
    for _ in range(5):
        params = kernel.sample(params)
    return (
        numbers,
        sent,
        [noise.tolist() for noise in kernel._noise.drawn],
        [s.tolist() if isinstance(s, torch.Tensor) else s for s in sums],
        kernel.get_samples()["mean"].numpy(),
        charged(accountant),
    )


def test_what_leaves_an_owner_is_its_noisy_sums_which_it_pays_for(owners, tmp_path):
    """And all get the same draws."""
    results = owners(hospital, 2, folder=tmp_path)
    every = [n for _, _, drawn, *_ in results for draw in drawn for n in draw]
    assert len(set(every)) == len(every)
    for rank, (numbers, sent, drawn, sums, draws, charges) in enumerate(results):
        ratio = NOISES[rank] * PRECISION**0.5 / SLOPE
        assert charges == {round(ratio, 9): 5 + 5 * 3 + 1}
        assert draws.shape == (3, DIMENSION) and np.array_equal(draws, results[0][4])
        assert np.isfinite(draws).all()
        assert numbers == results[0][0]  # nothing of its own
        hidden = iter(zip(sums, drawn, strict=True))  # every draw of noise hides one sum
        for what, message in by_kind(sent):
            if what == "point":  # the first rank tells where the chain is
                assert rank == 0 or not any(message)
                continue
            exact, noise = next(hidden)
            if what == "ratio":
                expected = exact[0] + ratio * exact[1] * noise[0]
                assert message[0] == pytest.approx(expected, rel=1e-12)
                # the first rank sends the public part of the test
                assert not any(message[2:] if rank == 0 else message[1:])
            else:
                expected = [e + ratio * SLOPE * n for e, n in zip(exact, noise)]
                assert message == pytest.approx([*expected, 0], rel=1e-12)
        assert next(hidden, None) is None


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


def test_what_is_sent_at_set_up_does_not_depend_on_the_records_nor_on_their_number(owners):
    _, (none, one, seven, forty) = owners(tapped_set_ups, 2)
    assert len(none[0]) > 5 and none == one == seven == forty


# -- how runs end ----------------------------------------------------------------------------------


def a_budget_ends(rank):
    """And another run: between the question whether an iteration can be paid and the charge another
    job spends what was left.
    """
    endings = []
    for _ in range(2):
        accountant = dpb.PrivacyAccountant(*((3.0, 1e-5) if rank == 1 else (30.0, 1e-5)))
        fitting = accountant.remaining(GaussianDpEvent(12.0 * PRECISION**0.5 / SLOPE))
        if endings:
            accountant.remaining = lambda event: 10
        kernel = make("penalty", 12.0, accountant)
        endings.append(how_it_ends(kernel, records(rank, (9, 9, 9)), num_samples=10_000))
    return endings, fitting


def test_the_tightest_budget_stops_all_in_the_same_iteration(owners):
    results = owners(a_budget_ends, 3)
    fitting = results[1][1]
    for rank, (((name, text, draws, charges), after_all), _) in enumerate(results):
        assert name == after_all[0] == "PrivacyBudgetExceeded"
        assert rank == 1 or ("rank 1" in text and "rank 1" in after_all[1])
        assert draws == charges == fitting > 5
        # the others had charged, and keep that
        assert after_all[2:] == (fitting, fitting + (rank != 1))


def interrupt(what, when, kernel):
    """Do ``what`` in the middle of iteration number ``when``, between charge and message."""
    original, calls = kernel._metropolis, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == when:
            what()
        return original(*arguments)

    kernel._metropolis = interrupted


def out_of_memory():
    raise torch.OutOfMemoryError("a made-up one, with 123 records")


MISHAPS = {  # of owner 1, with the error that it sees
    "Ctrl-C": (partial(signal.raise_signal, signal.SIGINT), "KeyboardInterrupt"),
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


@pytest.mark.parametrize(
    "how", [pytest.param(m, marks=pytest.mark.slow if m == "stalls" else ()) for m in MISHAPS]
)
def test_what_happens_to_one_owner_reaches_the_others_at_once(owners, how):
    results, own_error = owners(mishap_of_one, 3, how=how), MISHAPS[how][1]
    assert (results[1] is None) == (how == "dies")
    for rank in (0, 2):
        (name, text, *counts), shorter, seconds = results[rank]
        assert name == "OwnerError" and counts == [3, 4] and seconds < 40
        assert "123" not in text and "get_samples" in text
        if own_error:
            assert shorter[0] == "OwnerError" and shorter[2:] == (4, 4)
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
    "proposal_scale": {},
    "start": {},
    "prior": {"the_model": partial(model, prior_std=1.001 * PRIOR_STD)},
    "likelihood": {"the_model": partial(scaled, factor=1.001)},
    "kernel": {"kind": "HMC"},
    "model": {"the_model": local},
}


def different(rank):
    endings = {}
    for name, of_owner_1 in DIFFERENCES.items():
        settings, own = dict(of_owner_1) if rank else {}, torch.full((DIMENSION,), 0.1 + rank)
        if name == "proposal_scale":
            settings["proposal_scale"] = own
        kernel = make(settings.pop("kind", "penalty"), 1.0, **settings)
        if name == "start":
            kernel.initial_params = {"mean": own}
        endings[name] = how_it_ends(kernel, records(rank), num_samples=2)
    return endings


def test_owners_that_differ_find_out_before_a_charge(owners):
    for rank, result in enumerate(owners(different, 2)):
        for name, (error, _, *nothing) in result.items():
            assert nothing == [0, 0], name
            assert error == ("UnfitModel" if rank and name == "model" else "OwnerError"), name


UNREADABLE = ("[" * 900, f'["", {{}}, 0, {10**400}, ""]')


def unreadable(text, gather, own, size):
    return gather(len(text).to_bytes(8, "little") + text.encode(), size)


def refusals(rank, folder):
    for kind, options in (
        ("penalty", {"noise_multiplier": 0.0}),
        ("HMC", {"grad_noise_multiplier": 0.0}),
        ("penalty", {"proposal": object()}),
    ):
        with pytest.raises(dpb.errors.ArgumentError):
            make(kind, 1.0, **options)
    kernel = make("penalty", 1.0, dpb.PrivacyAccountant(path=folder / f"copied-{rank}.db"))
    with pytest.raises(dpb.errors.OwnerError):
        kernel.sample({"mean": torch.zeros(DIMENSION)})
    for copied in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        with pytest.raises(dpb.errors.OwnerError):
            copied.setup(0, records(rank))
    for text in UNREADABLE:
        strange = make("penalty", 1.0)
        if rank == 1:
            gather = strange._owners._ranks._gather
            strange._owners._ranks._gather = partial(unreadable, text, gather)
        with pytest.raises(dpb.errors.OwnerError):
            strange.setup(0, records(rank))


def test_what_is_refused_of_an_owner(owners, tmp_path):
    """No noise of its own, copies of a kernel, and messages that nobody can read."""
    owners(refusals, 2, folder=tmp_path)
    with pytest.raises(dpb.errors.OwnerError):  # there is no group
        make("penalty", 1.0)
