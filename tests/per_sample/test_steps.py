"""One backward pass for a step, and nothing that is neither clipped nor noisy."""

import contextlib
import copy
import io
import pickle
from functools import partial

import pytest
import torch
from helpers import (
    assert_sum,
    clipped_rows,
    delivered,
    entropy,
    gradients_of_records,
    mlp,
    private,
    sum_of,
)
from support import training
from support.refusals import refused
from support.steps import one, train
from torch import nn
from zoo import Of

import torch_dpbayes as dpb
from torch_dpbayes.errors import DPBayesError
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.derived import FixedTensors

MODES = pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])


def made(net=None, mode=None, **options):
    data = torch.randn(20, 6), torch.randint(3, (20,))
    return private(mlp() if net is None else net, *data, grad_sample_mode=mode, **options)


def assert_refused(work, codes, net, optimizer, loader):
    """``work`` raises, or the step after it, and nothing moved; then a clean step follows."""
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(DPBayesError) as error:
        for x, y in loader:
            work(net, x, y)
            optimizer.step()
    assert error.value.code in codes, error.value
    assert len(optimizer.accountant) == 0
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before))
    net.train()
    optimizer.zero_grad()
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 1


def set_by_hand(net, x, y):
    entropy(net, x, y).backward()
    net[0].bias.grad = torch.zeros(8)


@torch.no_grad()
def write(net):
    net[0].weight.add_(0.0)


def changed_weights(net, x, y):
    loss = entropy(net, x, y)
    write(net)
    loss.backward()


def changed_weights_later(net, x, y):
    entropy(net, x, y).backward()
    write(net)


def eval_mode(net, x, y):
    net.eval()
    entropy(net, x, y).backward()


def hook_on_a_parameter(net, x, y):
    loss = entropy(net, x, y)
    handle = net[0].weight.register_hook(lambda g: g)
    try:
        loss.backward()
    finally:
        handle.remove()


def another_parameter(net, x, y):
    kept = net[0].weight
    net[0].weight = nn.Parameter(2 * kept.detach())
    try:
        entropy(net, x, y).backward()
    finally:
        net[0].weight = kept


def two_passes(net, x, y):
    (entropy(net, x, y) + entropy(net, -x, y)).backward()


def gradients_of_gradients(net, x, y):
    entropy(net, x, y).backward(create_graph=True)


def without_versions(net, x, y):
    loss = entropy(net, x, y)
    with torch.inference_mode():
        loss.backward()


EITHER = ("bookkeeping", "vmap")
REFUSED = {
    "no backward": (entropy, ("step-unused",), EITHER),
    "set by hand": (set_by_hand, ("step-unclipped",), EITHER),
    "changed weights": (changed_weights, ("step-changed",), EITHER),
    "changed weights later": (changed_weights_later, ("step-changed",), EITHER),
    "two passes": (two_passes, ("step-passes", "loss-mixes"), EITHER),
    "eval mode": (eval_mode, ("step-eval", "loss-constant", "model-input"), EITHER),
    "gradients of gradients": (gradients_of_gradients, ("loss-backward",), EITHER),
    "in inference mode": (without_versions, ("loss-backward",), EITHER),
    # under vmap gradients are taken without autograd's graph
    "hook on a parameter": (hook_on_a_parameter, ("model-gradient-hook",), ("bookkeeping",)),
    "another parameter": (another_parameter, ("model-copied",), EITHER),
}


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, case in REFUSED.items() for mode in case[2]]
)
def test_a_step_that_is_not_of_one_pass_is_refused(name, mode):
    work, codes, _ = REFUSED[name]
    assert_refused(work, codes, *made(mode=mode))


def test_a_step_after_a_backward_pass_that_failed_is_refused():
    """The layers behind the function that failed have recorded their gradients."""

    def function(net, x):
        h = net.first(x).sigmoid()
        upper = torch.where(x[:, 0] > 50, -1.0, 1.0) * (1 + h[:, 0])
        matrix = torch.stack([h[:, 1] * 0, upper, h[:, 1] * 0 + 1, 0.1 * h[:, 1]], 1)
        vectors = torch.linalg.eig(matrix.unflatten(1, (2, 2)))[1]
        return net.last(100 * vectors.real.sum(-1))  # complex ones have no such gradient

    x = torch.randn(20, 6)
    x[0, 0] = 100.0
    net = Of(function, first=nn.Linear(6, 2), last=nn.Linear(2, 3))
    net, optimizer, loader = private(net, x, torch.randint(3, (20,)))
    with refused("step-records"):
        for x, _ in loader:
            with pytest.raises(RuntimeError, match="eigenvectors"):
                net(x).sum(1).mean().backward()
            optimizer.step()
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize(
    ("is_evaluating", "mode"), [(False, "hooks"), *((e, m) for e in (False, True) for m in EITHER)]
)
def test_an_ordinary_optimizer_finds_no_gradient(is_evaluating, mode):
    """Nor in eval mode, where the loop is refused, also on records that no loader delivered."""
    net, _, loader = made(mode=mode, assume_independent_records=mode == "hooks")
    net.train(not is_evaluating)
    batches = [*loader, *[(torch.randn(4, 6), torch.randint(3, (4,)))] * is_evaluating]
    for x, y in batches:
        with pytest.raises(DPBayesError) if is_evaluating else contextlib.nullcontext():
            entropy(net, x, y).backward()
    assert all(p.grad is None for p in net.parameters())


def test_a_parameter_that_is_unfrozen_later_gets_no_gradient_either():
    source = BookkeepingGradientSource(
        net := nn.Sequential(mlp().requires_grad_(False), nn.Linear(3, 3))
    )
    assert not net[0][0].weight.requires_grad
    net.requires_grad_(True).eval()
    net[1].requires_grad_(False)
    with refused("step-unclipped"):
        entropy(net, torch.randn(4, 6), torch.randint(3, (4,))).backward()
    assert net[0][0].weight.grad is None
    source.remove()


def test_what_is_done_to_whole_batches_that_are_vouched_for_is_refused():
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    source = BookkeepingGradientSource(net := mlp(), assume_independent=True)
    earlier = entropy(net, x, y)
    source.discard(())
    entropy(net, x, y)
    with refused("loss-twice"):
        earlier.backward()
    source.discard(())
    loss = entropy(net, x, y)
    with refused("loss-backward"):
        loss.backward(create_graph=True)
    source.discard(())
    entropy(net, x, y).backward()
    x += 1
    with refused("step-changed"):
        source.norms(list(net.named_parameters()))
    net = Of(lambda net, x: x + net.shift, shift=nn.Parameter(torch.zeros(1, 6)))
    source = VmapGradientSource(net, assume_independent=True, loss_reduction="sum")
    net(x).backward(gradient=(given := torch.ones(4, 6)))  # what the parameter gets, too
    given *= 2
    with refused("step-changed"):
        source.norms(list(net.named_parameters()))


@pytest.mark.parametrize("make", [BookkeepingGradientSource, VmapGradientSource])
def test_what_a_loss_leaves_out_has_gradient_zero(make):
    def loss(net, x, y):
        return entropy(lambda x: net(x)[0], x, y)

    heads = {
        "first": nn.Linear(6, 3),
        "second": nn.Linear(6, 3),
        "scale": nn.Parameter(torch.ones(3)),
    }
    net = Of(lambda net, x: (net.first(x), net.second(x) * net.scale), **heads)
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    gradients, source = gradients_of_records(net, loss, (x, y)), make(net)
    loss(net, *delivered(x, y)).backward()
    assert_sum(source, net, gradients)
    loss(net, *delivered(x, y)).backward()
    scaled = sum_of(source, net, 0.3, scale=torch.ones(gradients.shape[1]))
    torch.testing.assert_close(scaled, clipped_rows(gradients, 0.3))


@MODES
def test_evaluation_in_between_records_nothing(mode):
    net, optimizer, loader = made(mode=mode)
    for x, y in loader:
        loss = entropy(net, x, y)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                net(torch.randn(3, 6))
        net.eval()
        net(torch.randn(3, 6))
        net.train()
        loss.backward()
        optimizer.step()


@MODES
def test_copies_and_files_carry_nothing_and_need_make_private(mode):
    net, optimizer, loader = made(mode=mode)
    for x, y in loader:
        loss = entropy(net, x, y)
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
            z = torch.randn(3, 6)
            with torch.no_grad():
                torch.testing.assert_close(other(z), net(z))
            with pytest.raises(DPBayesError):
                other(*delivered(z))
            train(*made(other, mode))
        loss.backward()
        optimizer.step()
    assert len(optimizer.accountant) == 1


def test_a_file_does_not_tell_whether_the_batch_was_empty():
    net = mlp()
    BookkeepingGradientSource(net)
    entropy(net, *delivered(torch.zeros(0, 6), torch.zeros(0).long(), shown=4)).backward()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        source = BookkeepingGradientSource.attached_to(other)
        assert (source.batch, source.spare) == (None, 0)


@pytest.mark.parametrize("make", [BookkeepingGradientSource, VmapGradientSource])
def test_everything_is_taken_off_again(make):
    net = mlp()
    before = [{k: str(v) for k, v in vars(module).items()} for module in net.modules()]
    source = make(net)
    assert "forward" in net.__dict__
    source.remove()
    assert [{k: str(v) for k, v in vars(module).items()} for module in net.modules()] == before
    net(torch.randn(2, 6)).sum().backward()
    assert net[0].weight.grad is not None


def test_layers_are_frozen_and_unfrozen():
    net, optimizer, loader = made()
    train(net, optimizer, loader)
    frozen = net[0].weight.detach().clone()
    for is_frozen in (True, False):
        net[0].requires_grad_(not is_frozen)
        train(net, optimizer, loader)
        assert torch.equal(net[0].weight, frozen) == is_frozen
    loss = entropy(net, *next(iter(loader)))
    frozen = net[0].requires_grad_(False).weight.clone()
    loss.backward()
    optimizer.step()
    assert torch.equal(net[0].weight, frozen)
    other = mlp()
    other[0].requires_grad_(False)
    net, optimizer, loader = made(other)
    net[0].requires_grad_(True)
    with refused("model-copied"):
        train(net, optimizer, loader)


@pytest.mark.parametrize(("backend", "is_before"), [("eager", True), ("aot_eager", False)])
def test_a_compiled_model_runs(backend, is_before):
    torch._dynamo.reset()
    net, x, y = mlp(), torch.randn(5, 6), torch.randint(3, (5,))
    gradients = gradients_of_records(net, entropy, (x, y))
    compiled = torch.compile(net, backend=backend)
    if is_before:
        compiled(x)
    compiled_or_not, optimizer, loader = private(compiled if is_before else net, x, y)
    for a, b in loader:
        entropy(compiled_or_not if is_before else compiled, a, b).backward()
        assert_sum(optimizer.release.source, net, gradients, atol=1e-6)


def test_a_compiled_training_step_runs():
    torch._dynamo.reset()
    net, optimizer, loader = made()
    before = [p.detach().clone() for p in net.parameters()]

    @torch.compile(backend="eager")
    def step(x, y):
        entropy(net, x, y).backward()
        optimizer.step()

    for x, y in loader:
        step(x, y)
    assert len(optimizer.accountant) == 1
    assert not any(torch.equal(p, b) for p, b in zip(net.parameters(), before))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_backward_pass_runs():
    torch._dynamo.reset()
    net, x, y = mlp(), torch.randn(5, 6), torch.randint(3, (5,))
    gradients, source = gradients_of_records(net, entropy, (x, y)), VmapGradientSource(net)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        entropy(net, *delivered(x, y)).backward()
    assert_sum(source, net, gradients, atol=1e-6)


# -- buffers and frozen parameters -----------------------------------------------------------------


@torch.inference_mode()
def by_inference(net, x):
    net.mean.copy_(x.mean(0))


@torch.no_grad()
def frozen_weight(net, x):
    net.weight[:, 0] = x[:, 0].mean()


# the change, the name it has in the error, and whether version counters tell
WRITES = {
    "in place": (lambda net, x: net.mean.lerp_(x.mean(0), 0.1), "mean", True),
    "past the counter": (lambda net, x: net.mean.data.copy_(x.mean(0)), "mean", False),
    "inference": (by_inference, "mean", True),
    "of inference": (by_inference, "mean", True),
    "new": (lambda net, x: net.register_buffer("mine", x.mean(0)), "mine", True),
    "deleted": (lambda net, x: delattr(net, "mean"), "mean", True),
    "frozen weight": (frozen_weight, "weight", True),
}


def found_changed(fixed):
    """The name in the error of a look."""
    try:
        fixed.require_unchanged()
    except DPBayesError as error:
        return str(error).split("'")[1]


@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("name", WRITES)
def test_writes_into_fixed_tensors_are_seen(name, start):
    """At once where a version counter or an identity tells; within 64 steps where values do."""
    write, tensor, is_counted = WRITES[name]
    net = nn.Linear(4, 4).requires_grad_(False)
    with torch.inference_mode(name == "of inference"):  # whose versions torch does not count
        net.register_buffer("mean", torch.randn(4))
    net.register_buffer("nothing", None)
    fixed = FixedTensors(net)
    fixed.begin()
    for look in range(start):
        assert found_changed(fixed) is None, look
    write(net, torch.randn(3, 4))
    looks = next(k for k in range(65) if found_changed(fixed) == tensor)
    assert looks == 0 or (not is_counted and start + looks < 64)


def momentum(data, target, optimizer, x):
    for state in optimizer.state.values():
        state["velocity"].fill_(x.max())


# keep(data, target, optimizer, x)
KEPT = {
    "by the data set": (lambda d, t, o, x: setattr(d, "mean", x.mean(0)), "loss-mixes"),
    "in the data set": (lambda d, t, o, x: d.x.sub_(x.mean(0)), "loss-mixes"),
    "lr": (lambda d, t, o, x: o.param_groups[0].update(lr=x.abs().max()), "model-written"),
    "momentum": (momentum, "model-written"),
    "log_prior": (lambda d, t, o, x: t.copy_(x.mean()), "model-written"),
}


class Adjusted(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y, self.mean = torch.randn(20, 6), torch.randint(3, (20,)), torch.zeros(6)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.x[index] - self.mean, self.y[index]


@pytest.mark.parametrize("at", ["x", "y"])
def test_records_in_the_prior_are_refused(at):
    data = Adjusted()

    def log_prior(named):
        return -sum((p - getattr(data, at)[0].sum()).square().sum() for p in named.values())

    factory = partial(dpb.optim.DPSGLD, lr=0.1, log_prior=log_prior)
    net, optimizer, loader = training.private(
        mlp(), data, 10, optimizer=factory, noise_multiplier=1.0
    )
    with refused("model-written"):
        one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize("name", KEPT)
def test_values_of_a_batch_that_others_keep_are_refused(name):
    (keep, code), data, target = KEPT[name], Adjusted(), torch.zeros(())

    def log_prior(named):
        return -sum(((p - target) ** 2).sum() for p in named.values())

    factory = partial(dpb.optim.DPSGHMC, lr=0.1, temperature=0.0, log_prior=log_prior)
    made = training.private(mlp(), data, 10, optimizer=factory, noise_multiplier=1.0)
    net, optimizer, loader = made
    with refused(code):
        for x, y in loader:
            one(net, optimizer, (x, y))
            keep(data, target, optimizer, x)
    assert len(optimizer.accountant) == 1
