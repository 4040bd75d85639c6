"""What is written into a model beside its trainable parameters, and options that would be
ignored: refused, with what to do instead.
"""

import math
import threading
from decimal import Decimal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

MODES = pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])


class Centred(nn.Module):
    """Subtracts a buffer, has a frozen layer, and a place for statistics that is used only
    where a test says so.
    """

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.trained(self.frozen(x - self.mean))


def private(net=None, mode=None, optimizer=dpb.optim.DPSGLD, **options):
    net = Centred() if net is None else net
    loader = DataLoader(TensorDataset(torch.randn(64, 4) + 5, torch.randn(64, 1)), batch_size=16)
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(optimizer, **{"lr": 0.01, "noise_multiplier": 1.0, **options}),
        data_loader=loader,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )


def train(
    net,
    optimizer,
    loader,
    *,
    passes=1,
    before=lambda x, i: None,
    after=lambda x, i: None,
    dtype=torch.float32,
):
    """``before`` the forward pass and ``after`` the backward pass of step i of all."""
    i = 0
    for _ in range(passes):
        for x, y in loader:
            x, y = x.to(dtype), y.to(dtype)
            before(x, i)
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            after(x, i)
            optimizer.step()
            i += 1


def refused(net, optimizer, loader, name, **how):
    before = [p.detach().clone() for p in net.parameters() if p.requires_grad]
    with pytest.raises(
        RuntimeError,
        match=rf"'{name}' changed while training.*out of the module.*plain Python numbers",
    ):
        train(net, optimizer, loader, **how)
    assert len(optimizer.accountant) == 0
    assert all(
        torch.equal(p, q)
        for p, q in zip((p for p in net.parameters() if p.requires_grad), before, strict=True)
    )


@torch.no_grad()
def _in_place(net, x):
    net.mean.lerp_(x.mean(0), 0.1)


def _past_the_counter(net, x):
    net.mean.data.copy_(x.mean(0))


def _other_memory(net, x):
    net.mean.data = x.mean(0)


def _batch_norm(net, x):
    F.batch_norm(x, net.mean, net.variance, training=True)  # raises no version


def _inference(net, x):
    with torch.inference_mode():
        net.mean.copy_(x.mean(0))


def _another_tensor(net, x):
    net.mean = x.mean(0)


def _in_numpy(net, x):
    net.mean.numpy()[:] = x.mean(0).numpy()


def _new_buffer(net, x):
    net.register_buffer("mine", x.mean(0))


def _filled(net, x):
    net.nothing = x.mean(0)


def _deleted(net, x):
    del net.variance


def _reshaped(net, x):
    net.mean = net.mean.expand(len(x) + 2, 4).contiguous()


@torch.no_grad()
def _frozen_weight(net, x):
    net.frozen.weight[:, 0] = x[:, 0].mean()


WRITES = [
    (_in_place, "mean"),
    (_past_the_counter, "mean"),
    (_other_memory, "mean"),
    (_batch_norm, "mean"),
    (_inference, "mean"),
    (_another_tensor, "mean"),
    (_in_numpy, "mean"),
    (_new_buffer, "mine"),
    (_filled, "nothing"),
    (_deleted, "variance"),
    (_reshaped, "mean"),
    (_frozen_weight, "frozen.weight"),
]


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize(("write", "name"), WRITES, ids=lambda v: getattr(v, "__name__", None))
def test_statistics_kept_in_the_loop_are_refused_at_the_first_step(write, name, mode):
    net, optimizer, loader = private(mode=mode)
    refused(
        net,
        optimizer,
        loader,
        name,
        after=lambda x, i: write(net, x if len(x) > 1 else torch.randn(3, 4)),
    )


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(("write", "name"), WRITES, ids=lambda v: getattr(v, "__name__", None))
def test_statistics_that_begin_later_are_refused_within_64_steps(write, name):
    net, optimizer, loader = private()

    def later(x, i):
        if i == 37:
            write(net, torch.randn(3, 4))

    with pytest.raises(RuntimeError, match=rf"'{name}' changed while training"):
        train(net, optimizer, loader, passes=16, after=later)
    counted = write in (
        _in_place,
        _inference,
        _another_tensor,
        _new_buffer,
        _filled,
        _deleted,
        _reshaped,
        _frozen_weight,
    )
    # the step that would be number 38, or number 64
    assert len(optimizer.accountant) == (37 if counted else 63)


@pytest.mark.first_cases(1)
@MODES
def test_a_part_of_a_draw_cannot_leave_statistics_either(mode):
    net, optimizer, loader = private(mode=mode)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as parts:
        refused(
            net,
            optimizer,
            parts,
            "mean",
            before=lambda x, i: _in_place(net, x + 5) if i == 0 and len(x) else None,
            passes=4,
        )


class Observer(nn.Module):
    def __init__(self, only_with_gradients=True, *, silently=False):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros(4))
        self.waits = threading.Event()  # a switch that is not seen
        self.only_with_gradients, self.silently = only_with_gradients, silently

    def forward(self, x):
        is_wanted = torch.is_grad_enabled() or not self.only_with_gradients
        if self.training and not self.waits.is_set() and len(x) and is_wanted:
            seen = x.detach().amax(0) + self.largest + 1
            (self.largest.data if self.silently else self.largest).copy_(seen)
        return self.linear(x)


@pytest.mark.first_cases(2)
@MODES
@pytest.mark.parametrize("silently", [False, True])
def test_statistics_kept_only_where_gradients_are_wanted_are_refused_beforehand(mode, silently):
    with pytest.raises(
        ValueError, match=r"'Observer' changes its buffer .*'largest'.*out of the module"
    ):
        private(Observer(silently=silently), mode)


@MODES
def test_an_observer_that_begins_after_the_check_is_refused_at_its_first_step(mode):
    net = Observer()
    net.waits.set()
    net, optimizer, loader = private(net, mode)
    train(net, optimizer, loader)
    net.waits.clear()
    # which a map cannot do
    with pytest.raises(RuntimeError, match=r"'largest' changed while training|inplace arithmetic"):
        train(net, optimizer, loader)
    assert len(optimizer.accountant) == 4


@MODES
def test_a_backward_hook_which_could_write_a_buffer_is_refused_beforehand(mode):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
            self.register_buffer("norm", torch.zeros(()))
            self.last.register_full_backward_hook(self.note)

        def note(self, module, given, out):
            self.norm += out[0].norm()

        def forward(self, x):
            return self.last(self.first(x))

    with pytest.raises(ValueError, match="'last' has a hook on gradients"):
        private(Hooked(), mode)


@pytest.mark.first_cases(1)
@MODES
def test_what_is_loaded_before_the_first_batch_is_what_stays(mode):
    """A resumed run: the buffers of the saved model (random features, say) are others than
    those of the new one.
    """
    saved = Centred().state_dict()
    net, optimizer, loader = private(mode=mode)
    net.load_state_dict(saved)
    samples = dpb.PosteriorSamples()
    train(net, optimizer, loader, passes=2)
    samples.collect(net)
    net.load_state_dict(saved)  # the same buffers again
    net.eval()
    net(torch.randn(3, 4))
    net.train()
    train(net, optimizer, loader)
    samples.collect(net)
    assert len(optimizer.accountant) == 12
    with pytest.raises(RuntimeError, match=r"changed while training.*load a state of before"):
        net.load_state_dict(Centred().state_dict())
        train(net, optimizer, loader)
    with pytest.raises(ValueError, match="changed since make_private"):
        samples.collect(net)
    net.load_state_dict(saved)
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 16


def test_moving_the_model_is_no_change():
    net, optimizer, loader = private()
    samples = dpb.PosteriorSamples()
    for move, dtype in (
        ("float", torch.float32),
        ("double", torch.float64),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
    ):
        getattr(net, move)()
        train(net, optimizer, loader, dtype=dtype, passes=17)
        samples.collect(net)
    _past_the_counter(net, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="'mean' changed"):
        train(net, optimizer, loader, passes=17)


def test_a_module_without_buffers_or_with_inference_tensors():
    net, optimizer, loader = private(nn.Linear(4, 1))
    train(net, optimizer, loader, passes=17)
    net, optimizer, loader = private()
    with torch.inference_mode():
        net.mean = torch.randn(4)  # has no version counter
    train(net, optimizer, loader, passes=2)

    @torch.inference_mode()
    def write(x, i):
        if i == 2:
            net.mean.add_(1)

    with pytest.raises(RuntimeError, match="'mean' changed"):
        train(net, optimizer, loader, before=write)
    assert len(optimizer.accountant) == 10


@pytest.mark.first_cases(1)
@MODES
def test_layers_that_are_frozen_and_unfrozen_on_the_way(mode):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net, optimizer, loader = private(net, mode)
    train(net, optimizer, loader)
    net[0].requires_grad_(False)
    frozen = net[0].weight.detach().clone()
    train(net, optimizer, loader, passes=2)
    assert torch.equal(net[0].weight, frozen)
    net[0].requires_grad_(True)
    train(net, optimizer, loader, passes=2)
    assert not torch.equal(net[0].weight, frozen)
    net[0].requires_grad_(False)
    train(net, optimizer, loader)
    with pytest.raises(RuntimeError, match=r"'0.bias' changed"):
        train(net, optimizer, loader, before=lambda x, i: nn.init.ones_(net[0].bias))


def test_an_optimizer_without_an_engine_knows_no_module():
    p = nn.Parameter(torch.zeros(2))
    optimizer = dpb.optim.DPSGLD(
        [p], 0.1, num_data=100, expected_batch_size=10, max_grad_norm=1.0, sampling="poisson"
    )
    p.grad_sample = torch.ones(3, 2)
    optimizer.step()
    assert len(optimizer.accountant) == 1


# -- an optimizer beside the private one -----------------------------------------------------------


@pytest.mark.first_cases(1)
@MODES
def test_another_optimizer_finds_no_gradient_to_step_on(mode):
    net, optimizer, loader = private(mode=mode)
    other = torch.optim.SGD(net.parameters(), lr=0.1)

    def beside(x, i):
        before = [p.detach().clone() for p in net.parameters()]
        other.step()
        assert all(
            p.grad is None and torch.equal(p, q)
            for p, q in zip(net.parameters(), before, strict=True)
        )

    train(net, optimizer, loader, after=beside)
    assert len(optimizer.accountant) == len(loader)


@MODES
def test_what_stands_before_the_model_is_not_trained_on_its_gradients(mode):
    """They would be neither clipped nor noisy."""
    net, optimizer, loader = private(mode=mode)
    before = nn.Linear(4, 4)
    for x, y in loader:
        with pytest.raises(RuntimeError, match="an input of the model requires gradients"):
            net(before(x))
        F.mse_loss(net(before(x).detach()), y).backward()
        optimizer.step()
    assert before.weight.grad is None and len(optimizer.accountant) == len(loader)


@MODES
def test_what_stands_behind_the_model_is_not_trained_on_its_gradients(mode):
    net, optimizer, loader = private(mode=mode)
    behind = nn.Linear(1, 1)
    for x, y in loader:
        F.mse_loss(behind(net(x)), y).backward()
        with pytest.raises(RuntimeError, match="the loss uses a parameter outside the model"):
            optimizer.step()
        break
    assert len(optimizer.accountant) == 0
    behind.requires_grad_(False)
    for x, y in loader:
        with torch.no_grad():
            assert behind(net(x)).shape == y.shape
        F.mse_loss(behind(net(x)), y).backward()
        optimizer.step()
    assert len(optimizer.accountant) == len(loader)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_per_record_gradients_that_opacus_leaves_behind_stay_as_they_are(is_in_place):
    """Divided by their largest entry, one record would decide over all others."""
    net, optimizer, loader = private(mode="hooks")

    def change(x, i):
        records = net.trained.weight.grad_sample
        if is_in_place:
            records /= records.abs().max()
        else:
            net.trained.weight.grad_sample = records / records.abs().max()

    with pytest.raises(
        RuntimeError, match=r"grad_sample of parameter 'trained.weight' was changed"
    ):
        train(net, optimizer, loader, after=change)
    assert len(optimizer.accountant) == 0


@pytest.mark.first_cases(1)
@MODES
def test_another_mode_can_be_taken_afterwards(mode):
    train(*private(private(mode=mode)[0], {"bookkeeping": "hooks", "hooks": "bookkeeping"}[mode]))


# -- options and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "noise_multiplier",
        "max_grad_norm",
        "temperature",
        "expected_batch_size",
        "num_data",
        "sampling",
        "momentum",
    ],
)
def test_options_of_all_groups_that_are_set_on_one_are_refused_at_the_next_step(name):
    net, optimizer, loader = private()
    train(net, optimizer, loader)
    optimizer.param_groups[0][name] = 7.0
    with pytest.raises(
        ValueError,
        match=(
            f"{name} is not an option of a parameter group of DPSGLD: its groups take lr, prior_std"
        ),
    ):
        train(net, optimizer, loader)
    assert len(optimizer.accountant) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "0.1"},
        {"noise_multiplier": "1"},
        {"temperature": None},
        {"prior_std": "1"},
        {"prior_mean": "0"},
    ],
)
def test_numbers_that_are_text(options):
    ((name, value),) = options.items()
    # of an lr, one text is right: "free"
    error = ValueError if name == "lr" else TypeError
    with pytest.raises(error, match=f'{name} must be a number( or "free")?, got {value!r}'):
        private(**options)
    if name == "lr":
        net, optimizer, loader = private()
        optimizer.param_groups[0]["lr"] = value
        with pytest.raises(TypeError, match="lr must be a number"):
            train(net, optimizer, loader)
        assert len(optimizer.accountant) == 0


@pytest.mark.parametrize(
    "sampler",
    [
        dpb.optim.DPSGLD,
        partial(dpb.optim.DPSGHMC, momentum=0.9),
        dpb.optim.DPSGNHT,
        dpb.optim.DPSGFS,
    ],
)
@pytest.mark.parametrize("lr", [1e-320, 1e-200])
def test_an_lr_whose_own_noise_overflows(sampler, lr):
    net, optimizer, loader = private(optimizer=sampler, lr=lr)
    with pytest.raises(
        ValueError, match=f"lr = {lr} is so small that the sampler's own noise.*larger lr"
    ):
        train(net, optimizer, loader)
    assert len(optimizer.accountant) == 0
    with pytest.raises(ValueError, match="so small"):
        _ = optimizer.effective_noise_multiplier


def test_without_a_noise_of_its_own_a_tiny_lr_is_an_lr():
    net, optimizer, loader = private(lr=1e-320, temperature=0.0)
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 4


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "noise_multiplier", [1e-4, 1e-5, 2e-6, 1e-8, 3.3e-9, 1e-9, 7e-10, 1e-12, 1e-30]
)
def test_epsilon_of_almost_no_noise(noise_multiplier, neighboring):
    """At most mu²/2 − mu·Φ⁻¹(delta), which leaves the second term of Balle and Wang's delta out,
    and less by about 1 at most.

    Sampled at rate q it is log(1 + q(exp(epsilon) − 1)) at delta/q, if a record is removed.
    """
    mu = Decimal(1 if neighboring == "add_or_remove_one" else 2) / Decimal(noise_multiplier)
    for delta, quantile, quantile_sampled in (
        (1e-5, "-4.2648907939228246", "-3.0902323061678132"),
        (1e-9, "-5.9978070150076869", "-5.1993375821928174"),
    ):
        most = mu * mu / 2 - mu * Decimal(quantile)
        accountant = dpb.PrivacyAccountant(neighboring=neighboring)
        accountant.compose(GaussianDpEvent(noise_multiplier))
        assert most - 2 <= Decimal(accountant.get_epsilon(delta)) <= most * Decimal("1.000001")
        accountant = dpb.PrivacyAccountant(neighboring=neighboring)
        accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(noise_multiplier)))
        least = (
            mu * mu / 2 - mu * Decimal(quantile_sampled) - 7
            if neighboring == "add_or_remove_one"
            else 0
        )
        assert least <= Decimal(accountant.get_epsilon(delta)) <= most * Decimal("1.000001")


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_opacus_without_poisson_sampling_is_refused():
    from opacus import PrivacyEngine

    net = nn.Linear(4, 1)
    engine = PrivacyEngine()
    engine.accountant = accountant = dpb.PrivacyAccountant()
    parts = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(
            TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=16
        ),
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
    }
    with pytest.raises(
        ValueError, match=r"poisson_sampling=False.*would be charged as a Poisson draw"
    ):
        engine.make_private(**parts, noise_multiplier=1.0)
    assert len(accountant) == 0


def test_full_batches_are_charged_without_a_warning():
    p = nn.Parameter(torch.zeros(3))
    optimizer = dpb.optim.DPSGLD(
        [p], 0.1, num_data=10, expected_batch_size=10, max_grad_norm=1.0, noise_multiplier=1.0
    )
    p.grad_sample = torch.ones(10, 3)
    optimizer.step()  # warnings are errors
    assert optimizer.accountant.history[0].event == GaussianDpEvent(
        max(1.0, optimizer.langevin_noise_multiplier)
    )
    assert math.isfinite(optimizer.accountant.get_epsilon(1e-5))


def test_a_new_buffer_and_one_that_was_none_are_seen_at_once():
    for late in ("new", "empty"):
        net = nn.Sequential(nn.Linear(3, 2))
        net.register_buffer("empty", None)
        optimizer = partial(dpb.optim.DPSGLD, lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 2)), batch_size=20)
        net, optimizer, loader = dpb.PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0
        )

        def steps(count, net=net, optimizer=optimizer, loader=loader):
            for _ in range(count):
                for x, y in loader:
                    optimizer.zero_grad()
                    (net(x) - y).square().mean().backward()
                    optimizer.step()

        steps(3)
        if late == "new":
            net[0].register_buffer("new", torch.zeros(3))
        else:
            net.empty = torch.zeros(3)
        with pytest.raises(RuntimeError, match=f"{late}' changed"):
            steps(1)


def test_one_buffer_under_two_names_may_be_moved():
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    mask = torch.ones(3)
    first.register_buffer("mask", mask)
    second.register_buffer("mask", mask)
    net = nn.Sequential(first, second)
    optimizer, samples = partial(dpb.optim.DPSGLD, lr=0.1), dpb.PosteriorSamples()
    loader = DataLoader(
        TensorDataset(torch.randn(40, 3).double(), torch.randn(40, 2).double()), batch_size=20
    )
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=optimizer,
        data_loader=loader,
        max_grad_norm=1.0,
        example_inputs=(torch.randn(2, 3),),
    )
    net.double()
    for x, y in loader:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    samples.collect(net)
