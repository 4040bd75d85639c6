"""What all four samplers share: charges, reports, groups, schedules, resumption, split
batches, dtypes, bad input.
"""

import copy
import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from scipy import stats
from support.steps import bare, fill, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    RecordwiseBatchGaussianDpEvent,
    UnspecifiedBatchGaussianDpEvent,
)
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT

SAMPLERS = {
    "sgld": DPSGLD,
    "sghmc": partial(DPSGHMC, momentum=0.7),
    "matched": partial(DPSGHMC, momentum="matched", noise_multiplier=1.0, temperature=1.0),
    "sgnht": DPSGNHT,
    "sgfs-full": partial(DPSGFS, fisher="full"),
    "sgfs-diagonal": partial(DPSGFS, fisher="diagonal"),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())


def built(make, shapes=((3,), (2, 2)), dtype=torch.float64, device="cpu", **options):
    parameters = [
        nn.Parameter(0.1 * torch.randn(shape, dtype=dtype).to(device)) for shape in shapes
    ]
    options = {"num_data": 40, "max_grad_norm": 0.5, "temperature": 1.0, "lr": 0.01, **options}
    return bare(parameters, make, **options), parameters


def private_model(make, *, batch=8, records=64, accountant=None, seed=None, noise_multiplier=1.0):
    def net():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    data = TensorDataset(torch.randn(records, 4), torch.randint(3, (records,)))
    loader = DataLoader(
        data,
        batch_size=batch,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    if seed is not None:
        make = partial(make, generator=torch.Generator().manual_seed(seed + 1))
    engine = dpb.PrivacyEngine(accountant)
    return engine.make_private(
        module=net(),
        optimizer=partial(make, lr=0.05),
        data_loader=loader,
        max_grad_norm=1.0,
        noise_multiplier=noise_multiplier,
    )


# -- the charge and the noise ----------------------------------------------------------------------


@pytest.mark.chance(2e-6)
@pytest.mark.parametrize(
    ("name", "batches", "neighboring"),
    [
        *((name, "poisson", "add_or_remove_one") for name in SAMPLERS),
        *(
            (name, batches, neighboring)
            for name in ("sgld", "sgfs-diagonal")
            for batches, neighboring in (
                ("poisson", "replace_one"),
                ("full", "add_or_remove_one"),
                ("full", "replace_one"),
                ("recordwise", "add_or_remove_one"),
                ("unspecified", "replace_one"),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:steps are charged at sensitivity 2C:UserWarning")
def test_the_charge_is_the_noise_that_was_added(name, batches, neighboring):
    """Measured: the standard deviation of S, and of M where there is one, against the event
    in the accountant.
    """
    size, clip, z = 60, 0.5, 1.5
    options = (
        {"expected_batch_size": 40}
        if batches == "full"
        else {"sampling": None if batches == "unspecified" else batches}
    )
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    optimizer, (p,) = built(
        SAMPLERS[name],
        shapes=((size,),),
        noise_multiplier=z,
        lr=0.2,
        accountant=accountant,
        **options,
    )
    wanted = optimizer.effective_noise_multiplier
    batch = optimizer.expected_batch_size
    noise = {"gradient": [], "moment": []}
    update = optimizer._update

    def recording(parts):
        noise["gradient"].append(optimizer._layout.gradient.clone() * batch / clip)
        noise["moment"].append(optimizer._layout.extra.clone() * batch / clip**2)
        update(parts)

    optimizer._update = recording
    optimizer.param_groups[0]["prior_std"] = math.inf
    for _ in range(150):
        fill([p], records=40 if batches == "full" else 10, value=0.0)
        optimizer.step()
    gradient, moment = torch.cat(noise["gradient"]), torch.cat(noise["moment"])
    tolerance = 5 / math.sqrt(2 * len(gradient))
    measured = float(gradient.square().mean().sqrt())
    assert measured == pytest.approx(wanted, rel=tolerance)
    assert stats.kstest(gradient.numpy() / wanted, "norm").pvalue > 1e-7
    ((event, count, _, _),) = accountant.history
    assert count == 150
    inverse_square = measured**-2
    if len(moment):
        share = (measured / float(moment.square().mean().sqrt())) ** 2
        assert share == pytest.approx(0.5, rel=3 * tolerance)
        # C and C² together under add or remove; 2C and at most √2·C², never both at once, for a
        # swap
        swap = (neighboring == "replace_one" and batches == "full") or batches in (
            "unspecified",
            "recordwise",
        )
        inverse_square *= 1.0 if swap else 1 + share
    charged = event.event if batches == "poisson" else event
    expected = {
        "poisson": PoissonSampledDpEvent,
        "full": GaussianDpEvent,
        "recordwise": RecordwiseBatchGaussianDpEvent,
        "unspecified": UnspecifiedBatchGaussianDpEvent,
    }[batches]
    assert type(event) is expected
    assert charged.noise_multiplier**-2 == pytest.approx(inverse_square, rel=4 * tolerance)


@pytest.mark.parametrize(
    ("share", "fisher", "is_scaled"),
    [(2.0, "full", False), (0.2, "full", True), (0.2, "diagonal", True)],
)
def test_the_charge_of_fisher_scoring_with_groups_and_a_scale(share, fisher, is_scaled):
    """One record moves (S, M) by C and C² in units of F; the noise, measured in those units,
    is what the event says: smallest z of the groups.
    """
    size, clip, records, steps = 40, 0.5, 40, 150
    units = torch.rand(size, dtype=torch.float64) + 0.1 if is_scaled else torch.ones(size).double()
    parameters = [nn.Parameter(torch.zeros(size // 2, dtype=torch.float64)) for _ in range(2)]
    optimizer = DPSGFS(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.2, 0.05))],
        1.0,
        assume_independent_records=True,
        num_data=records,
        expected_batch_size=10,
        max_grad_norm=clip,
        sampling="poisson",
        prior_std=math.inf,
        fisher=fisher,
        fisher_share=share,
        sensitivity_scale=units if is_scaled else None,
    )
    moved, noise = [], {"gradient": [], "moment": []}
    add_noise = optimizer.release.query.add_noise

    def recording(layout, smallest, stream):
        moved.append((float(layout.gradient.norm()), float(layout.extra.norm())))
        layout.buffer.zero_()
        add_noise(layout, smallest, stream)
        noise["gradient"].append(layout.gradient / units * 10 / clip)
        noise["moment"].append(layout.extra * 10 / clip**2)

    optimizer.release.query.add_noise = recording
    for _ in range(steps):
        fill(parameters, records=1, value=1e3)
        optimizer.step()
    for norms in moved:
        assert norms[0] == pytest.approx(clip, rel=1e-9)
        assert (
            norms[1] <= clip**2 * (1 + 1e-9)
            if fisher == "diagonal"
            else norms[1] == pytest.approx(clip**2, rel=1e-9)
        )
    first, second = torch.stack(noise["gradient"]).split(size // 2, dim=1)
    assert float((second.square().mean() / first.square().mean()).sqrt()) == pytest.approx(
        2.0, rel=10 / math.sqrt(2 * first.numel())
    )
    moment = torch.cat(noise["moment"])
    inverse_square = 1 / float(first.square().mean()) + 1 / float(moment.square().mean())
    ((event, count, _, _),) = optimizer.accountant.history
    assert count == steps
    assert event.event.noise_multiplier**-2 == pytest.approx(
        inverse_square, rel=10 / math.sqrt(2 * first.numel())
    )


def test_joint_sensitivity_of_gradient_and_fisher():
    """sup ‖a−b‖² + ϕ‖aaᵀ−bbᵀ‖² over the unit ball is what the events assume, on a grid of
    lengths and angles.
    """
    angle, size = torch.linspace(0, math.pi, 500).double(), torch.linspace(0, 1, 11).double()
    angle, long, short = torch.cartesian_prod(angle, size, size).T
    inner, squares = long * short * angle.cos(), long**2 + short**2
    for share in (0.1, 0.5, 0.8, 3.0):
        bound = 4.0 if share <= 0.5 else 2 + 2 * share + 1 / (2 * share)
        found = squares - 2 * inner + share * (long**4 + short**4 - 2 * inner**2)
        assert 0.999 * bound < float(found.max()) <= bound + 1e-9
        z = 1.7
        optimizer, _ = built(
            DPSGFS,
            fisher_share=share,
            expected_batch_size=40,
            accountant=dpb.PrivacyAccountant(neighboring="replace_one"),
        )
        event = optimizer.release.event(z, None)
        assert event.noise_multiplier == pytest.approx(2 * z / math.sqrt(bound))
        optimizer, _ = built(DPSGFS, fisher_share=share, expected_batch_size=40)
        event = optimizer.release.event(z, None)
        assert event.noise_multiplier == pytest.approx(z / math.sqrt(1 + share))


@every_sampler
def test_a_refused_charge_leaves_everything_as_it_was(make):
    """Parameters, state and history; no noise was drawn, and no sum without noise is left."""
    accountant, generator = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5), torch.Generator()
    generator.manual_seed(int(torch.randint(2**40, ())))
    options = {"accountant": accountant, "generator": generator, "noise_multiplier": 2.0}
    optimizer, parameters = built(make, lr=0.5, **options)
    steps, refusals = 0, 0
    while refusals < 2:  # the error is the same twice
        fill(parameters)
        before = copy.deepcopy(
            [[*map(torch.Tensor.detach, parameters)], [*optimizer.state.values()]]
        )
        place = generator.get_state()
        try:
            optimizer.step()
            steps += 1
        except dpb.PrivacyBudgetExceeded:
            refusals += 1
            now = [[*map(torch.Tensor.detach, parameters)], [*optimizer.state.values()]]
            torch.testing.assert_close(now, before, rtol=0, atol=0)
            assert torch.equal(generator.get_state(), place)
            assert not optimizer._layout.buffer.any()
        assert len(accountant) == steps < 10_000
    assert steps > 0


@every_sampler
def test_where_every_lr_is_0_nothing_is_released(make):
    optimizer, parameters = built(make)
    optimizer.param_groups[0]["lr"] = 0.0
    if optimizer.noise_multiplier == 0:
        fill(parameters)
        optimizer.step()
        assert not optimizer._layout.extra.any() and len(optimizer.accountant) == 0


# -- against torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [None, 0.8])
def test_temperature_zero_is_torch_sgd_step_for_step(momentum, double):
    """Sums are over B, whatever batch came; weight decay λ is the prior of std 1/√(Nλ)."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    twin, records, batch, decay = copy.deepcopy(net), 40, 16, 0.05
    ours = (DPSGLD if momentum is None else partial(DPSGHMC, momentum=momentum))(
        net.parameters(),
        0.3,
        assume_independent_records=True,
        num_data=records,
        expected_batch_size=batch,
        max_grad_norm=1e6,
        temperature=0.0,
        prior_std=1 / math.sqrt(records * decay),
        sampling="poisson",
    )
    hooked = GradSampleModule(net)
    theirs = torch.optim.SGD(twin.parameters(), 0.3, momentum or 0.0, weight_decay=decay)
    # torch's velocity is in units of the gradient, ours in those of the parameters
    scheduled = (ours, theirs) if momentum is None else ()
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in scheduled]
    for step in range(12):
        x, y = torch.randn(10 + step, 5), torch.randint(3, (10 + step,))
        for model, optimizer in ((hooked, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss if model is hooked else loss * len(x) / batch).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


# -- as torch optimizers ---------------------------------------------------------------------------


GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@every_sampler
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_devices(make, dtype, device):
    optimizer, parameters = built(make, dtype=dtype, device=device)
    for _ in range(3):
        fill(parameters)
        for p in parameters:
            p.grad_sample = p.grad_sample.to(device)
        optimizer.step()
    assert all(p.dtype is dtype and p.device.type == device for p in parameters)
    assert all(bool(torch.isfinite(p).all()) for p in parameters)


@every_sampler
def test_resume_is_bit_for_bit_with_generators(make):
    """The state after three epochs in one go, and after one, save, load and two: equal,
    velocities, friction and Fisher estimate included.
    """
    net, optimizer, loader = private_model(make, seed=int(torch.randint(2**40, ())))
    train(net, optimizer, loader)
    weights, file = copy.deepcopy(net.state_dict()), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    train(net, optimizer, loader, epochs=2)
    expected = [p.detach().clone() for p in net.parameters()]

    other, resumed, new_loader = private_model(make, seed=int(torch.randint(2**40, ())))
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    from torch_dpbayes import noise

    noise._used_positions.clear()  # as in a new process
    new_loader.dataset.tensors = loader.dataset.tensors
    train(other, resumed, new_loader, epochs=2)
    for p, q in zip(other.parameters(), expected):
        assert torch.equal(p, q)
    assert len(resumed.accountant) == len(optimizer.accountant)


def test_state_of_half_precision_parameters_is_resumed_exactly():
    optimizer, parameters = built(DPSGHMC, dtype=torch.bfloat16)
    for _ in range(3):
        fill(parameters)
        optimizer.step()
    other, twins = built(DPSGHMC, dtype=torch.bfloat16)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, twin in zip(parameters, twins):
        assert optimizer.state[p]["velocity"].dtype is torch.float32
        assert torch.equal(other.state[twin]["velocity"], optimizer.state[p]["velocity"])


@every_sampler
def test_a_copy_shares_the_accountant_and_not_the_state(make):
    optimizer, parameters = built(make)
    fill(parameters)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.accountant is optimizer.accountant
    copies = [p for group in twin.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    fill(copies)
    twin.step()
    assert len(optimizer.accountant) == 2
    assert all(torch.equal(p, old) for p, old in zip(parameters, before))
    for p in parameters:
        for name, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                assert all(
                    value.data_ptr() != twin.state[q][name].data_ptr()
                    for q in copies
                    if name in twin.state[q]
                )


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SAMPLERS["matched"], DPSGNHT])
def test_too_much_friction_names_the_lr_that_works(make):
    optimizer, parameters = built(make, noise_multiplier=50.0, lr=1.0)
    fill(parameters)
    with pytest.raises(ValueError, match="Use lr <= ") as error:
        optimizer.step()
    assert len(optimizer.accountant) == 0
    works = float(str(error.value).split("Use lr <= ")[1].split(",")[0])
    optimizer.param_groups[0]["lr"] = 1.001 * works  # printed to four digits
    fill(parameters)
    with pytest.raises(ValueError, match="Use lr <= "):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.999 * works
    fill(parameters)
    optimizer.step()
    assert len(optimizer.accountant) == 1


def test_a_full_fisher_that_does_not_fit_is_refused_before_it_is_allocated():
    with pytest.raises(ValueError, match='"diagonal"'):
        built(DPSGFS, shapes=((3_000_000,),), dtype=torch.float32)
    built(DPSGFS, shapes=((3_000_000,),), dtype=torch.float32, fisher="diagonal")


@pytest.mark.parametrize("make", [DPSGLD, partial(DPSGHMC, momentum=0.5), DPSGNHT])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_step_that_overflows_is_undone_and_stays_charged(make, dtype):
    """A prior far too narrow for the lr: the iterates grow without bound until the dtype ends."""
    optimizer, parameters = built(make, lr=1e-3, prior_std=1e-4, dtype=dtype)
    with pytest.raises(FloatingPointError, match="smaller lr"):
        for _ in range(300):
            states = [
                {name: v.clone() for name, v in optimizer.state[p].items()} for p in parameters
            ]
            groups = [dict(group) for group in optimizer.param_groups]
            before = [p.detach().clone() for p in parameters], states, len(optimizer.accountant)
            fill(parameters)
            optimizer.step()
    assert len(optimizer.accountant) == before[2] + 1
    assert [dict(group) for group in optimizer.param_groups] == groups
    for p, old, state in zip(parameters, before[0], before[1]):
        assert torch.isfinite(p).all()
        assert torch.equal(p, old)
        assert optimizer.state[p].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(optimizer.state[p][name], value)


@every_sampler
def test_what_is_trained_may_change_between_steps(make):
    optimizer, parameters = built(make, dtype=torch.float32)
    for step in range(4):
        parameters[0].requires_grad_(step % 2 == 0)
        before = parameters[0].detach().clone()
        fill(parameters)
        optimizer.step()
        assert torch.equal(parameters[0], before) == (step % 2 == 1)
    for p in parameters:
        p.data = p.data.double()
    new = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [new]})
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.02}
    z = optimizer.effective_noise_multiplier
    fill([*parameters, new])
    optimizer.step()
    assert new.all()
    share = math.sqrt(1 + getattr(optimizer, "fisher_share", 0.0))
    assert optimizer.accountant.history[-1].event.event.noise_multiplier * share == pytest.approx(z)


def test_the_fisher_estimate_survives_another_scale_and_a_resume():
    """Î in the units of the parameters is the same before and after; M in units of F is what
    it is without.
    """
    scale = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    def in_parameter_units(optimizer):
        f = optimizer.sensitivity_scale
        f = torch.ones(3, dtype=torch.float64) if f is None else f
        (p,) = optimizer.param_groups[0]["params"]
        return f[:, None] * optimizer.state[p]["fisher"] * f

    gradients = torch.randn(10, 3, dtype=torch.float64)
    options = {"max_grad_norm": 100.0, "fisher_share": 1e14, "noise_multiplier": 1e-3, "lr": 1e9}
    for given in (None, scale):
        optimizer, (p,) = built(DPSGFS, ((3,),), sensitivity_scale=given, **options)
        p.grad_sample = gradients.clone()
        optimizer.step()
        before = in_parameter_units(optimizer)
        start = (
            1e4 / 2 * (torch.eye(3, dtype=torch.float64) if given is None else scale.diag() ** 2)
        )
        moment = gradients.T @ gradients / 10 / 2
        torch.testing.assert_close(before - start, moment, rtol=1e-3, atol=0.05)
        optimizer.sensitivity_scale = 2 * scale
        torch.testing.assert_close(in_parameter_units(optimizer), before)
        other, _ = built(DPSGFS, ((3,),), **options)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        torch.testing.assert_close(in_parameter_units(other), before)


@pytest.mark.parametrize("make", [DPSGFS, dpb.optim.DPSGLD])
def test_what_is_charged_and_clipped_is_a_plain_number_that_nobody_changes(make):
    clip = torch.tensor(1.0)
    optimizer = make(
        [nn.Parameter(torch.zeros(3))],
        0.1,
        assume_independent_records=True,
        num_data=100_000,
        expected_batch_size=np.float16(10.3),
        max_grad_norm=clip,
        noise_multiplier=1.0,
        sampling="poisson",
    )
    query = optimizer.release.query
    assert type(query.max_grad_norm) is type(query.expected_batch_size) is float
    assert type(optimizer.event(1.0).sampling_probability) is float
    assert optimizer.event(1.0).sampling_probability == float(np.float16(10.3)) / 100_000
    clip.fill_(1e-6)
    assert query.max_grad_norm == optimizer.max_grad_norm == 1.0
