"""The step that all optimizers share: what is clipped, what noise is added, what is charged,
and what is refused.
"""

import copy
import io
import math
import threading
from functools import partial

import pytest
import torch
from support import training
from support.refusals import refused
from support.steps import bare, fill, in_parts, one, train, zeros
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.release import ClippedSum, Layout

HOOKS = {"grad_sample_mode": "hooks", "assume_independent_records": True}
cross_entropy = nn.functional.cross_entropy


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(rows):
    return 3 * torch.randn(rows, 6), torch.randint(3, (rows,))


def private(net=None, batch_size=12, data=None, mode=None, engine=None, **options):
    given = {"optimizer": partial(dpb.optim.DPSGLD, **{"lr": 0.05, **options}), "engine": engine}
    data = TensorDataset(*(data or batch(60)))
    net = mlp() if net is None else net
    return training.private(net, data, batch_size, max_grad_norm=0.5, **given, **(mode or {}))


def test_a_step_of_another_thread_takes_no_noise_away(monkeypatch):
    net, optimizer, loader = private(noise_multiplier=1e9, prior_std=math.inf)
    one_batch, take, others = next(iter(loader)), optimizer.release.take, []

    def step_in_vain():  # it has no gradients
        with pytest.raises(RuntimeError):
            optimizer.step()

    def take_and_let_another_step(*arguments):
        done = take(*arguments)
        if not others:
            others.append(threading.Thread(target=step_in_vain))
            others[0].start()
            others[0].join(0.1)  # in vain where steps wait for each other
        return done

    monkeypatch.setattr(optimizer.release, "take", take_and_let_another_step)
    before = net[0].weight.detach().clone()
    one(net, optimizer, one_batch)
    others[0].join()
    assert float((net[0].weight.detach() - before).abs().max()) > 1e-4 * 0.05 * 0.5e9 / 12


# -- sums ------------------------------------------------------------------------------------------


def test_a_step_without_noise_has_no_guarantee():
    fill([p := zeros(2)])
    (optimizer := bare([p], temperature=0.0)).step()
    assert optimizer.accountant.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("broken", [math.nan, -math.inf, 1e30])  # whose square overflows
def test_a_record_that_is_not_finite_counts_as_zero_and_is_not_reported(broken):
    p = zeros(3, dtype=torch.float32)
    p.grad_sample = torch.tensor([[0.1, 0.0, 0.0], [broken, 1.0, 0.0], [0.0, 0.2, 0.0]])
    bare([p], temperature=0.0, prior_std=math.inf, lr=1.0).step()
    torch.testing.assert_close(p.detach(), -torch.tensor([0.1, 0.2, 0.0]) / 10)


def test_half_precision_is_clipped_and_noised_in_float32():
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    # its norm, 9487, squares beyond float16
    p.grad_sample = torch.full((1, 1000), 300.0, dtype=torch.float16)
    bare([p], temperature=0.0, prior_std=math.inf, lr=1.0, expected_batch_size=1).step()
    expected = torch.full((1000,), -1 / math.sqrt(1000))
    torch.testing.assert_close(p.detach().float(), expected, rtol=1e-2, atol=0)


def test_sums_are_wide_enough_for_their_records():
    for records, dtype, expected in (
        (8.0, torch.float32, torch.float32),
        (2.0**14, torch.float32, torch.float64),
        (8.0, torch.float64, torch.float64),
        (8.0, torch.float16, torch.float32),
    ):
        groups, query = [{"params": [zeros(5, dtype=dtype)]}], ClippedSum(1.0, records)
        assert Layout(groups, query, is_shared=False).buffer.dtype == expected


# -- one step on each draw, every record once ------------------------------------------------------


def test_two_physical_batches_make_one_logical_step():
    """Also after a draw that was left in the middle."""
    whole, split = mlp(), mlp()
    split.load_state_dict(whole.state_dict())
    data, sizes = batch(24), []
    # rate 1: every draw is the whole data set
    train(*private(whole, data=data, batch_size=24, temperature=0.0), steps=1)
    net, optimizer, loader = private(split, data=data, batch_size=24, temperature=0.0)
    with in_parts(loader, optimizer, 7) as parts:
        one(net, optimizer, next(iter(parts)))
    assert len(optimizer.accountant) == 0
    with in_parts(loader, optimizer, 7) as parts:
        for x, y in parts:
            one(net, optimizer, (x, y))
            sizes.append(len(x))
    assert sizes == [6, 6, 6, 6] and len(optimizer.accountant) == 1
    for p, q in zip(whole.parameters(), split.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    with refused("loader-memory-manager"):
        bare([zeros(2)]).signal_skip_step(True)


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: torch.cat([x, x[:1]]), lambda x: x])
def test_on_whole_batches_too_every_record_comes_once(change):
    """Opacus' hooks see neither records nor the loader."""
    net, optimizer, loader = private(batch_size=60, mode=HOOKS)
    x, y = next(iter(loader))
    is_as_it_is = len(change(x)) == len(x)
    if is_as_it_is:  # and then once more
        one(net, optimizer, (x, y))
    with refused("loader-no-batch" if is_as_it_is else "step-records"):
        one(net, optimizer, (change(x), change(y)))
    assert len(optimizer.accountant) == is_as_it_is


def test_gradients_of_an_earlier_draw_do_not_pass_for_the_next():
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = private(batch_size=60, engine=engine)  # rate 1: draws of one size
    x, y = next(iter(loader))
    cross_entropy(net(x), y).backward()
    next(iter(loader))
    with pytest.raises(dpb.DPBayesError):
        optimizer.step()
    # nor do those of a model that was made private again
    net, _, again = private(net, engine=engine)
    batches, _ = iter(loader), next(iter(again))
    x, y = next(batches)
    cross_entropy(net(x), y).backward()
    with refused("step-removed"):
        optimizer.step()
    assert len(engine.accountant) == 0


# -- noise is never drawn twice --------------------------------------------------------------------


def noise_of(optimizer, p):
    before = p.detach().clone()
    p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype)
    optimizer.step()
    return p.detach() - before


def test_copies_and_resumes_never_repeat_noise():
    p = zeros(50)
    seeded = torch.Generator().manual_seed(torch.seed())
    original = bare([p], prior_std=math.inf, generator=seeded)
    start = seeded.get_state()
    seen = [noise_of(original, p)]
    duplicate, place = copy.deepcopy(original), seeded.get_state()
    seen += [noise_of(duplicate, duplicate.param_groups[0]["params"][0])]
    assert torch.equal(seeded.get_state(), place)  # a copy draws from a stream of its own
    seen += [noise_of(original, p)]
    plain, resumed = (bare([p], prior_std=math.inf) for _ in range(2))
    seen += [noise_of(plain, p)]
    resumed.load_state_dict(plain.state_dict())
    seen += [noise_of(resumed, p), noise_of(plain, p)]
    assert len({tuple(noise.tolist()) for noise in seen}) == 6
    # a generator that was set back is refused before the charge
    seeded.set_state(start)
    before, charged = p.detach().clone(), len(original.accountant)
    with pytest.raises(ValueError, match="already drawn"):
        noise_of(original, p)
    assert torch.equal(p.detach(), before) and len(original.accountant) == charged


OTHERS = [{"lr": 0.3}, {"noise_multiplier": 9.0}, {"max_grad_norm": 2.0}]


@pytest.mark.parametrize("other", [{}, *OTHERS, {"start": 1.0}, {"gradient": 1e-9}])
def test_a_resumed_run_that_departs_from_the_first_gets_other_noise(monkeypatch, other):
    """Equal noise under another lr, start or batch would be solved for the clipped sum."""
    generator, noise = torch.Generator(), []
    generator.seed()
    state = generator.get_state()
    for options in ({}, other):
        monkeypatch.setattr("torch_dpbayes.noise._used_positions", set())  # as in another process
        generator.set_state(state)
        options = {"max_grad_norm": 1.0, "start": 0.0, "gradient": 0.0} | options
        start, gradient = options.pop("start"), options.pop("gradient")
        p = nn.Parameter(torch.full((20,), start, dtype=torch.float64))
        optimizer = bare([p], prior_std=math.inf, generator=generator, **options)
        fill([p], records=3, value=gradient)
        optimizer.step()
        noise.append((p.detach() - start) / (p.detach() - start).std())
    assert torch.allclose(*noise, atol=1e-5) == (not other)


# -- charges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_full_batches_are_recognised_and_their_length_is_checked(neighboring):
    p = zeros(3, dtype=torch.float32)
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    optimizer = bare([p], num_data=10, sampling=None, accountant=accountant)
    for rows in (10, 9, 11):  # neighbouring data sets must not be told apart by an error
        fill([p], records=rows)
        optimizer.step()
    assert [type(c.event) for c in accountant.history] == [events.GaussianDpEvent]
    fill([p], records=5)
    with refused("sampling-unknown"):
        optimizer.step()
    assert len(accountant) == 3


def test_unknown_batches_are_charged_without_amplification_with_one_warning():
    p = zeros(3, dtype=torch.float32)
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    optimizer = bare([p], sampling=None, accountant=accountant)
    fill([p])
    with pytest.warns(UserWarning, match=r"no batch has a record twice.*make_private") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    fill([p])
    optimizer.step()  # a second warning would be an error
    (charge,) = accountant.history
    assert charge.count == 2 and isinstance(charge.event, events.UnspecifiedBatchGaussianDpEvent)


# -- torch's contract ------------------------------------------------------------------------------


def test_gradients_do_not_survive_a_closure_that_fails():
    net, optimizer, loader = private(mode=HOOKS)
    x, y = next(iter(loader))

    def closure():
        cross_entropy(net(x), y).backward()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in net.parameters())


def test_a_state_holds_options_and_no_noise_and_needs_its_charges():
    optimizer, behind = bare([p := zeros(2)], prior_std=0.5), bare([q := zeros(2)])
    for sampler, parameter in ((optimizer, p), (optimizer, p), (behind, q)):
        fill([parameter])
        sampler.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert "noise" not in state["private_step"]  # no generator= was passed
    fresh = bare([zeros(2)], lr=0.5)
    fresh.load_state_dict(state)
    assert [fresh.param_groups[0][name] for name in ("lr", "prior_std")] == [0.1, 0.5]
    assert fresh.accountant.history == optimizer.accountant.history
    with pytest.raises(ValueError, match="does not contain the charges"):
        behind.load_state_dict(state)
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(optimizer, io.BytesIO())


def hmc(momentum, size=2):
    options = {"noise_multiplier": 1.0, "temperature": 1.0, "momentum": momentum}
    return bare([zeros(size)], dpb.optim.DPSGHMC, **options)


def test_the_state_of_another_and_a_damaged_one_are_refused():
    fresh, charged = hmc(0.9), hmc(0.9)
    charged.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    saved = charged.state_dict()
    for state in (
        hmc(0.9, size=3).state_dict(),
        hmc("matched").state_dict(),
        bare([zeros(2)]).state_dict(),
        torch.optim.SGD([zeros(2)], 0.1).state_dict(),
        {**saved, "private_step": {"algorithm": "DPSGHMC"}},
        {**saved, "private_step": {"shapes": [[[2]]]}},
        {**saved, "private_step": {**saved["private_step"], "clip_norm_and_noise": ("no", 1.0)}},
    ):
        with refused("checkpoint"):
            fresh.load_state_dict(state)
        assert len(fresh.accountant) == 0 and not any(fresh.state.values())
    seeded = torch.Generator().manual_seed(2**40)
    for lost in ("param_groups", "state", "noise", "sensitivity_scale"):
        state = (of := bare([zeros(2)], dpb.optim.DPSGFS, generator=seeded)).state_dict()
        place = state if lost in state else state["private_step"]
        place[lost] = torch.zeros(3, dtype=torch.uint8)
        with refused("argument" if lost == "sensitivity_scale" else "checkpoint"):
            of.load_state_dict(state)


# -- bad input: nothing moves, nothing is charged --------------------------------------------------

ROWS = torch.zeros(3, 2)
REFUSED = [  # the code, and what else than two zeros with gradients of three records there is
    ("step-unused", {"second": None}),
    ("step-disagree", {"second": torch.zeros(4, 2)}),
    ("step-grad-sample", {"first": [ROWS] * 2}),
    *(("diverged", {"value": value}) for value in (math.nan, math.inf)),
    *(("argument", {"later": {"lr": lr}}) for lr in (math.nan, -0.1, 1e39)),
    ("argument", {"later": {"prior_std": 0.0}}),
    ("argument", {"later": {"prior_mean": math.inf}}),
    ("argument", {"log_prior": lambda q: q["first"]}),
    ("argument", {"log_prior": lambda q: (q["first"] / 0.0).sum()}),
    ("sampling-unknown", {"sampling": None}),
    # overflows, which is released
    ("diverged", {"lr": 1e5, "log_prior": lambda q: -1e36 * q["first"].sum()}),
]


@pytest.mark.parametrize(("code", "given"), REFUSED)
def test_what_is_refused_charges_and_moves_nothing(code, given):
    given = {"first": ROWS, "second": ROWS, "value": 0.0, "later": {}} | given
    first, second, value, later = (given.pop(k) for k in ("first", "second", "value", "later"))
    parameters = [zeros(2, dtype=torch.float32) for _ in range(2)]
    optimizer = bare([*zip(("first", "second"), parameters)], **given)
    optimizer.param_groups[0].update(later)
    with torch.no_grad():
        parameters[1][1] = value
    for p, gradient in zip(parameters, (first, second)):
        p.grad_sample = gradient
    with refused(code):
        optimizer.step()
    assert len(optimizer.accountant) == ("lr" in given)
    assert not parameters[0].any()
    assert parameters[1].tolist() == pytest.approx([0.0, value], nan_ok=True)


def test_gradient_scalers_are_refused():
    net, optimizer, loader = private()
    x, y = next(iter(loader))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(dpb.DPBayesError, match="GradScaler"):
        scaler.scale(cross_entropy(net(x), y))
    with refused("grad-scaler"):
        scaler.step(optimizer)
    assert len(optimizer.accountant) == 0
    train(net, optimizer, loader, 1)  # without the scaler all is well again
    assert len(optimizer.accountant) == 1
