"""What all samplers share: refused charges, dtypes, copies, resumption, and steps that fail."""

import copy
import io
import math
from functools import partial

import pytest
import torch
from support.steps import bare, fill, train
from support.training import private
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT

MATCHED = partial(DPSGHMC, momentum="matched", noise_multiplier=1.0, temperature=1.0)
SAMPLERS = {
    "sgld": DPSGLD,
    "sghmc": partial(DPSGHMC, momentum=0.7),
    "matched": MATCHED,
    "sgnht": DPSGNHT,
    "sgfs-full": partial(DPSGFS, fisher="full"),
    "sgfs-diagonal": partial(DPSGFS, fisher="diagonal"),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
assert {getattr(make, "func", make) for make in SAMPLERS.values()} == {
    getattr(dpb.optim, name) for name in dpb.optim.__all__ if name.startswith("DP")
}, "add the new sampler"
same = partial(torch.testing.assert_close, rtol=0, atol=0)


def built(make, shapes=((3,), (2, 2)), dtype=torch.float64, device="cpu", **options):
    parameters = [
        nn.Parameter(0.1 * torch.randn(shape, dtype=dtype).to(device)) for shape in shapes
    ]
    options = {"num_data": 40, "max_grad_norm": 0.5, "temperature": 1.0, "lr": 0.01, **options}
    return bare(parameters, make, **options), parameters


def everything(optimizer):
    """Copies of all that a step changes."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy([parameters, [*optimizer.state.values()], options])


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
        accountant = dpb.PrivacyAccountant(neighboring="replace_one")
        options = {"fisher_share": share, "expected_batch_size": 40, "accountant": accountant}
        event = built(DPSGFS, **options)[0].release.event(1.7, None)
        assert event.noise_multiplier == pytest.approx(2 * 1.7 / math.sqrt(bound))


@every_sampler
def test_a_refused_charge_leaves_everything_as_it_was(make):
    """Parameters, state and history; no noise was drawn, and no sum without noise is left."""
    accountant, generator = dpb.PrivacyAccountant(epsilon=3.0, delta=1e-5), torch.Generator()
    generator.seed()
    options = {"accountant": accountant, "generator": generator, "noise_multiplier": 2.0}
    optimizer, parameters = built(make, lr=20.0, expected_batch_size=20, **options)
    steps, refusals = 0, 0
    while refusals < 2:  # the error is the same twice
        fill(parameters)
        before, place = everything(optimizer), generator.get_state()
        try:
            optimizer.step()
            steps += 1
        except dpb.PrivacyBudgetExceeded:
            refusals += 1
            same(everything(optimizer), before)
            assert torch.equal(generator.get_state(), place)
            assert not optimizer._layout.buffer.any()
        assert len(accountant) == steps < 100
    assert steps > 0


# -- as torch optimizers ---------------------------------------------------------------------------

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@every_sampler
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_devices_and_what_is_trained(make, dtype, device):
    """Parameters are frozen and thawed between steps; the state is resumed in its own dtype, and a
    copy shares the accountant only.
    """
    optimizer, parameters = built(make, dtype=dtype, device=device)

    def one_step(optimizer, parameters):
        fill(parameters)
        for p in parameters:
            p.grad_sample = p.grad_sample.to(device)
        optimizer.step()

    for step in range(4):
        parameters[0].requires_grad_(step != 2)
        before = parameters[0].detach().clone()
        one_step(optimizer, parameters)
        assert torch.equal(parameters[0], before) or step != 2
    for p in parameters:
        assert p.dtype is dtype and p.device.type == device and torch.isfinite(p).all()
    other, twins = built(make, dtype=dtype, device=device)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, twin in zip(parameters, twins):
        same(dict(other.state[twin]), dict(optimizer.state[p]))
    copied, before = copy.deepcopy(optimizer), everything(optimizer)
    one_step(copied, [p for group in copied.param_groups for p in group["params"]])
    assert copied.accountant is optimizer.accountant and len(optimizer.accountant) == 5
    same(everything(optimizer), before)


@every_sampler
def test_a_parameter_of_another_dtype_and_a_group_that_is_added(make):
    optimizer, parameters = built(make, dtype=torch.float32)
    fill(parameters)
    optimizer.step()
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


def seeded(make, data):
    """A private model, every random number of which comes from generators."""
    first, second = (torch.Generator().manual_seed(int(torch.randint(2**40, ()))) for _ in "ab")
    options = {"optimizer": partial(make, lr=0.05, generator=second), "noise_multiplier": 1.0}
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return private(net, data, 8, loader={"generator": first}, **options)


@every_sampler
def test_resume_is_bit_for_bit_with_generators(make):
    """Two passes in one go, and one, save, load and another: equal in all."""
    data, file = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,))), io.BytesIO()
    net, optimizer, loader = seeded(make, data)
    train(net, optimizer, loader)
    weights = copy.deepcopy(net.state_dict())
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    train(net, optimizer, loader)
    other, resumed, new_loader = seeded(make, data)
    other.load_state_dict(weights)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    noise._used_positions.clear()  # as in a new process
    train(other, resumed, new_loader)
    same(other.state_dict(), net.state_dict())
    assert len(resumed.accountant) == len(optimizer.accountant)


@pytest.mark.parametrize("other", [{}, {"max_grad_norm": 0.6}, {"noise_multiplier": 9.0}])
def test_a_resume_with_another_clip_norm_or_noise_is_said(other, caplog):
    options = {"temperature": None, "noise_multiplier": 8.0}
    (saved, _), (resumed, _) = built(DPSGLD, **options), built(DPSGLD, **{**options, **other})
    caplog.clear()
    resumed.load_state_dict(saved.state_dict())
    assert ("the saved run had 0.5 and 8" in caplog.text) == bool(other)


@pytest.mark.parametrize("scale", [None, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)])
def test_the_fisher_estimate_survives_a_resume(scale):
    """Î in the units of the parameters is the same before and after, whatever F is given."""
    optimizer, parameters = built(DPSGFS, ((3,),), sensitivity_scale=scale)
    fill(parameters)
    optimizer.step()
    other, twins = built(DPSGFS, ((3,),))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = []
    for of, (p,) in ((optimizer, parameters), (other, twins)):
        f = torch.ones(3).double() if of.sensitivity_scale is None else of.sensitivity_scale
        found.append(f[:, None] * of.state[p]["fisher"] * f)
    torch.testing.assert_close(*found)


# -- steps that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MATCHED, DPSGNHT])
def test_too_much_friction_names_the_lr_that_works(make):
    optimizer, parameters = built(make, noise_multiplier=50.0, lr=1.0)
    fill(parameters)
    with pytest.raises(ValueError, match="Use lr <= ") as error:
        optimizer.step()
    works = float(str(error.value).split("Use lr <= ")[1].split(",")[0])
    for factor in (1.001, 0.999):  # printed to four digits
        assert len(optimizer.accountant) == 0
        optimizer.param_groups[0]["lr"] = factor * works
        fill(parameters)
        if factor > 1:
            with pytest.raises(ValueError, match="Use lr <= "):
                optimizer.step()
    optimizer.step()
    assert len(optimizer.accountant) == 1
    if make is DPSGNHT:  # its thermostat starts where it matches the noise
        assert optimizer.friction == pytest.approx(0.999, abs=0.1)


def test_a_full_fisher_that_does_not_fit_is_refused_before_it_is_allocated():
    with pytest.raises(ValueError, match='"diagonal"'):
        built(DPSGFS, shapes=((3_000_000,),), dtype=torch.float32)
    built(DPSGFS, shapes=((3_000_000,),), dtype=torch.float32, fisher="diagonal")


@pytest.mark.parametrize("make", [DPSGLD, partial(DPSGHMC, momentum=0.5), DPSGNHT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("prior_std", [1e-4, 1e-20])  # the first step, which adds options, too
def test_a_step_that_overflows_is_undone_and_stays_charged(make, dtype, prior_std):
    """A prior far too narrow for the lr: the iterates grow without bound until the dtype ends."""
    optimizer, parameters = built(make, lr=1e-2, prior_std=prior_std, dtype=dtype)
    group = optimizer.param_groups[0]
    with pytest.raises(FloatingPointError):
        for _ in range(300):
            before, charged = everything(optimizer), len(optimizer.accountant)
            fill(parameters)
            optimizer.step()
    assert len(optimizer.accountant) == charged + 1
    same(everything(optimizer), before)
    assert optimizer.param_groups[0] is group  # the caller may lower its lr
    assert all(torch.isfinite(p).all() for p in parameters)
