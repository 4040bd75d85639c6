"""What cannot run says so, with a code, whatever it would do to other records."""

import copy
import pickle
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import zoo
from attacks import Scaled
from helpers import assert_sum, gradients_of_records, mlp, private, sum_of
from opacus.layers import DPLSTM
from opacus.validators import ModuleValidator
from support import training
from support.refusals import refused
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset
from torchvision.ops import generalized_box_iou, generalized_box_iou_loss

import torch_dpbayes as dpb
from torch_dpbayes.errors import DPBayesError, ModelError
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.hooks import HooksGradientSource
from torch_dpbayes.per_sample.operations import Delivery

SCALE = nn.Parameter(torch.zeros(()))
X, Y = torch.randn(8, 6), torch.randint(3, (8,))
HOOKS = {"grad_sample_mode": "hooks", "assume_independent_records": True}
entropy = F.cross_entropy


def run(net=None, loop=None, data=(X, Y), **options):
    """One step; ``loop(net, *batch)`` gives the loss."""
    loop = loop or (lambda net, x, y: entropy(net(x), y))
    net, optimizer, loader = private(mlp() if net is None else net, *data, **options)
    for batch in loader:
        optimizer.zero_grad()
        loop(net, *batch).backward()
        optimizer.step()
    assert len(optimizer.accountant) == 1
    return optimizer


def given(loss):
    return partial(run, loss=loss, loop=lambda net, x, y: net.private_loss(x, y))


def ctc(out, y):
    log_probabilities = out[:, None, :2].expand(-1, 2, -1).log_softmax(2).transpose(0, 1)
    ones = torch.ones_like(y)
    return log_probabilities, ones[:, None], 2 * ones, ones


def ragged(out, x, y):
    return torch.sparse_coo_tensor(y[None], out[:, 0], (3,)).sum()


def weighted(out, y):
    return F.binary_cross_entropy_with_logits(out, y, weight=torch.arange(24.0).view(8, 3))


def of_places(out, x):
    """Which of its own places each is."""
    pairs = (x[:, :, None] * out[:, None, :1]).flatten(0, 1)
    return entropy(pairs.expand(-1, 6), torch.arange(6).repeat(len(x)))


def unlike(out, y):
    with warnings.catch_warnings(action="ignore"):  # torch's, which few see
        return F.mse_loss(out, y)


# loss(out, x, y)
LOSSES = {
    "a vector": ("loss-vector", lambda out, x, y: entropy(out, y, reduction="none")),
    "a constant": ("loss-constant", lambda out, x, y: y.float().mean()),
    "one column": ("loss-constant", lambda out, x, y: entropy(out[:, :1], 0 * y)),
    "a sum": ("loss-reduction", lambda out, x, y: entropy(out, y, reduction="sum")),
    "a mean's square": ("loss-reduced", lambda out, x, y: entropy(out, y) ** 2),
    "a mean's inverse": ("loss-reduced", lambda out, x, y: 1 / entropy(out, y)),
    "a mean's inverse by div": ("loss-reduced", lambda out, x, y: torch.div(2.0, entropy(out, y))),
    "a learned scale": ("loss-outside", lambda out, x, y: entropy(out * SCALE.exp(), y)),
    "a decision": ("loss-number", lambda out, x, y: entropy(out, y) * (2 if y.max() > 1 else 1)),
    "a copy": ("loss-number", lambda out, x, y: entropy(out, y) * copy.deepcopy(out).sum().sign()),
    "weights that torch hides": (
        "loss-divisor",
        lambda out, x, y: F.l1_loss(out, x[:, :3], weight=torch.ones(8, 3)),
    ),
    "a weight for each place": ("loss-rows", lambda out, x, y: weighted(out, x[:, :3])),
    "a label for each place": ("loss-rows", lambda out, x, y: of_places(out, x)),
    "two shapes": ("loss-mixes", lambda out, x, y: unlike(out[:, :1], x[:, 0])),
    "class weights": ("loss-divisor", lambda out, x, y: entropy(out, y, weight=torch.ones(3))),
    "lengths of CTC": ("loss-mixes", lambda out, x, y: F.ctc_loss(*ctc(out, y))),
    "noise": ("loss-rows", lambda out, x, y: entropy(out + torch.randn(len(x), 3), y)),
    "random numbers that mix": (
        "loss-mixes",
        lambda out, x, y: (F.gumbel_softmax(out, dim=0) * x[:, :3]).mean(),
    ),
    "distances to all": ("loss-mixes", lambda out, x, y: torch.cdist(out, X[:, :3]).mean()),
    "a Function": ("loss-mixes", lambda out, x, y: entropy(Scaled.apply(out), y)),
    "sparse values of a batch": ("loss-mixes", ragged),
}

# what the errors say to write, loss(out, x, y)
ADVICE = {
    "a vector": lambda out, x, y: entropy(out, y, reduction="none").mean(0),
    "a constant": lambda out, x, y: out.square().mean(),
    "one column": lambda out, x, y: F.binary_cross_entropy_with_logits(out[:, 0], y.clamp(max=1.0)),
    "a sum": lambda out, x, y: entropy(out, y, reduction="none").mean(),
    "a mean's square": lambda out, x, y: (entropy(out, y, reduction="none") ** 2).mean(),
    "weights that torch hides": lambda out, x, y: (
        F.l1_loss(out, x[:, :3], reduction="none") * torch.ones(3)
    ).mean(),
    "a weight for each place": lambda out, x, y: F.binary_cross_entropy_with_logits(
        out, x[:, :3], weight=torch.zeros_like(out) + 0.5
    ),
    "two shapes": lambda out, x, y: F.mse_loss(out[:, :1].squeeze(-1), x[:, 0]),
    "class weights": lambda out, x, y: entropy(
        out, y, weight=torch.ones(3), reduction="none"
    ).mean(),
    "noise": lambda out, x, y: entropy(out + torch.randn_like(out), y),
}


# -- models ----------------------------------------------------------------------------------------


class Words(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Embedding(5, 2, **options), nn.Flatten(1), nn.Linear(12, 3))

    def forward(self, x):
        return super().forward(x.long().clamp(0, 4))


def batch_norm():
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))


def changed(net, change):
    """The model after ``change`` of it."""
    change(net)
    return net


def with_spare(is_trained=True):
    spare = nn.Linear(2, 2).requires_grad_(is_trained)
    return zoo.Of(lambda net, x: net.layer(x), layer=mlp(), spare=spare)


def hooked(net):
    net[0].register_full_backward_hook(lambda *_: None)


def counting():
    def function(net, x):
        net.count.add_(1)
        return net.layer(x)

    net = zoo.Of(function, layer=mlp())
    net.register_buffer("count", torch.zeros(()))
    return net


def with_records(records):
    net = zoo.Of(lambda net, x: net.layer(x) + (x @ net.all.T).mean(1, True), layer=mlp())
    net.register_buffer("all", records)
    return net


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))


def with_traced_function():
    swish = torch.jit.trace(lambda h: h * h.sigmoid(), X)
    return zoo.Of(lambda net, x: net.layer(swish(x)), layer=mlp())


def head():
    return nn.Linear(6, 3)


def with_start(function):
    net = zoo.Of(function, layer=mlp())
    net.register_buffer("start", torch.zeros(3))
    return net


def with_graph(graph):
    net = zoo.Of(lambda net, x: net.layer(x @ net.graph), layer=mlp())
    net.register_buffer("graph", graph)
    return net


def keeping(net, x):
    net.__dict__["kept"] = net.layer(x)
    return net.kept


def conditional(net, x):
    return torch.cond(x.sum() > 0, lambda h: h + 1, lambda h: h - 1, (net.layer(x),))


def chosen(net, x):
    return net.layer(x) + torch.where(x.sum(1) > 0, 1.0, -1.0)[:, None]


def with_scale(net, x):
    return net.layer(x), net.scale.expand(len(x))


def classes(net, x):
    return net.layer(x).argmax(1)


# what is refused, and what is written in its place
MODELS = {
    "BatchNorm": ("model-layer", batch_norm, lambda: ModuleValidator.fix(batch_norm())),
    "eval mode": ("model-eval", lambda: mlp().eval(), mlp),
    "lazy": ("model-lazy", lazy, lambda: changed(lazy(), lambda net: net(torch.zeros(2, 6)))),
    "a counter": ("model-buffer", counting, mlp),
    "all records": (
        "data-private",
        lambda: with_records(X),
        lambda: with_records(torch.ones(8, 6)),
    ),
    "all records, from outside": (
        "model-map",
        lambda: zoo.Of(lambda net, x: net.layer(x) + (x @ X.T).mean(1, True), layer=mlp()),
        mlp,
    ),
    "unused": ("model-unused", with_spare, lambda: with_spare(False)),
    "backward hook": ("model-backward-hook", lambda: changed(mlp(), hooked), mlp),
    "classes": ("model-output", lambda: zoo.Of(classes, layer=mlp()), mlp),
    "TorchScript": ("model-layer", lambda: torch.jit.trace(mlp(), X), mlp),
    "a sparse buffer": (
        "model-layer",
        lambda: with_graph(torch.eye(6).to_sparse()),
        lambda: with_graph(torch.eye(6)),
    ),
    "spectral norm": ("model-map", lambda: nn.Sequential(spectral_norm(head())), mlp),
    "one pruned layer": (
        "model-map",
        lambda: prune.l1_unstructured(head(), "weight", 0.3),
        lambda: nn.Sequential(prune.l1_unstructured(head(), "weight", 0.3)),
    ),
    "max_norm": ("model-map", lambda: Words(max_norm=1.0), Words),
    "kept": ("model-kept", lambda: zoo.Of(keeping, layer=mlp()), mlp),
    "a state that all share": (
        "model-map",
        lambda: with_start(lambda net, x: net.start.clone()[None].add_(net.layer(x))),
        lambda: with_start(lambda net, x: net.start + net.layer(x)),
    ),
    "a function in TorchScript": ("model-kept", with_traced_function, mlp),
    "torch.cond": (
        "model-map",
        lambda: zoo.Of(conditional, layer=mlp()),
        lambda: zoo.Of(chosen, layer=mlp()),
    ),
}


def boxes(net, x, y):
    return generalized_box_iou_loss(net(x)[:, [0, 0, 1, 2]], x[:, :4], reduction="mean")


def of_loss(code, loss):
    return code, partial(run, loop=lambda net, x, y: loss(net(x), x, y))


REFUSED = {
    **{name: of_loss(*case) for name, case in LOSSES.items()},
    **{name: (code, lambda make=make: run(make())) for name, (code, make, _) in MODELS.items()},
    "loss= with a loss of the loop": ("loss-twice-given", partial(run, loss=entropy)),
    "loss= that gives a vector": ("loss-vector", given(lambda out, y: out[0])),
    "loss= of the output alone": ("argument-type", given(lambda out: out.sum())),
    "private_loss without loss=": ("argument", given(None)),
    "torchvision's loss of boxes": ("loss-mixes", partial(run, loop=boxes)),
    "BatchNorm, which hooks would not see": ("model-layer", lambda: run(batch_norm(), **HOOKS)),
    "hooks on whole batches": ("model-vouch", partial(run, grad_sample_mode="hooks")),
    # what made them would be trained without noise
    "batches that require grad": (
        "loader-collate",
        lambda: run(data=(X.clone().requires_grad_(), Y), assume_independent_records=True),
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")  # of torch 2.12
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run(name):
    code, work = REFUSED[name]
    with refused(code) as caught:
        work()
    assert len(str(caught.value).split()) <= 35  # also of what is put together
    assert SCALE.grad is None
    if name in MODELS:
        run(MODELS[name][2]())
    if name in ADVICE:
        run(loop=lambda net, x, y: ADVICE[name](net(x), x, y))


def test_what_errors_say_to_write_besides():
    """A parameter of the module; a loss of boxes; a saved state."""

    def made():
        return zoo.Of(with_scale, layer=mlp(), scale=nn.Parameter(torch.zeros(())))

    def loop(net, x, y):
        out, scale = net(x)
        return entropy(out * scale.exp()[:, None], y)

    optimizer = run(made(), loop)
    given(lambda out, y: 1 - generalized_box_iou(out[:, [0, 0, 1, 2]], out[:, [0, 1, 2, 2]]))()
    with refused("copied"):
        pickle.dumps(optimizer)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    private(made(), X, Y)[1].load_state_dict(state)


class Stored(Dataset):
    def __init__(self):
        self.x, self.y, self.mean = torch.randn(8, 6), torch.randint(3, (8,)), torch.zeros(6)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.x[i] - self.mean, self.y[i]


def test_what_a_data_set_keeps_for_each_record_is_private_its_constants_are_not():
    data = Stored()
    net, _, loader = training.private(mlp(), data, 8, noise_multiplier=1.0)
    for x, y in loader:
        entropy(net(x + data.mean), y).backward()
        with refused("data-private"):
            training.private(with_records(data.x), data, 8, noise_multiplier=1.0)


def test_a_device_may_be_named_inside_a_model():
    def function(net, x):
        return net.layer(x) + torch.zeros(3, device=torch.device("cpu"))

    run(zoo.Of(function, layer=mlp()))


def test_a_part_that_only_an_optional_argument_uses():
    """No batch shows this argument."""

    def made():
        part = {"first": nn.Linear(6, 3), "last": nn.Linear(3, 3)}
        return zoo.Of(
            lambda net, x, *more: net.last(net.first(x)) if more else net.first(x), **part
        )

    run(made(), lambda net, x, y: entropy(net(x, True), y))
    with refused("model-unused"):
        private(made(), X, Y, example_inputs=(X[:2],))


def differentiated(net, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.layer(x).square().sum(), x, create_graph=True)[0][:, :3]


def test_what_a_model_should_do_instead():
    with pytest.raises(ModelError, match=r"use torch\.func\.grad"):
        run(zoo.Of(differentiated, layer=mlp()))
    with pytest.raises(ModelError, match="Without make_private it fails, too"):
        run(nn.Linear(5, 3))


def test_make_private_leaves_a_model_that_writes_its_parameters_as_it_was():
    def function(net, x):
        net.layer.weight.data.mul_(0.5)
        with torch.no_grad():
            net.gain.add_(1.0)
        return net.layer(x) * net.gain

    net = zoo.Of(function, layer=head(), gain=nn.Parameter(torch.ones(3)))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ModelError):
        private(net, X, Y)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


# -- arguments and results of the model ------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    more: dict


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_outputs_of_dataclasses_and_dictionaries(mode):
    def function(net, x):
        logits = net.layer(x)
        whole = {"label": logits.argmax(-1), "mask": logits > 0}  # not floating-point numbers
        return Output(logits, {"both": [(logits, logits.square())], "name": "fine", **whole})

    def loop(net, x, y):
        out = net(x)
        assert out.more["name"] == "fine"
        squares = out.more["both"][0][1] * out.more["mask"]
        return entropy(out.logits, y) + 0.1 * squares.mean()

    run(zoo.Of(function, layer=mlp()), loop, grad_sample_mode=mode)


class WithMean(dict):
    """A mapping that keeps what was made of all records beside its items."""

    def __init__(self, items=(), **more):
        super().__init__(items, **more)
        self.mean = self["x"]


ARGUMENTS = {
    "another tensor": lambda x, old: (x, torch.randn(1, 6)),
    "numbers": lambda x, old: (x, [1, 2, 3, 4]),
    "texts": lambda x, old: ({"x": x, "texts": ["a", "b"]},),
    "an object": lambda x, old: (x, object()),
    "an attribute of a mapping": lambda x, old: (WithMean(x=x),),
    "a tensor of an earlier batch": lambda x, old: (x, old),
    "a tensor of several records": lambda x, old: (x, x.mean()),
    "records in another dimension": lambda x, old: (x, x.T),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_a_row_for_every_record(name):
    def of_two(net, x, other=None):
        return net.net(x["x"] if isinstance(x, dict) else x)

    source = BookkeepingGradientSource(net := zoo.Of(of_two, net=mlp()))
    deliver = Delivery(4)
    old, x = (deliver(torch.randn(4, 6), 4) for _ in range(2))
    with pytest.raises(DPBayesError):
        net(*ARGUMENTS[name](x, old))
    source.discard(())
    x = deliver(torch.randn(4, 6), 4)
    net(x, 2 * x)


def test_an_argument_without_rows_is_not_the_models_fault():
    net = zoo.Of(lambda net, x, mask: net.layer(x @ mask), layer=mlp())
    with refused("model-input"):
        run(net, lambda net, x, y: entropy(net(x, torch.eye(6)), y))


@pytest.mark.parametrize("make", [BookkeepingGradientSource, HooksGradientSource])
def test_an_input_that_would_be_trained_is_refused(make):
    """The user vouches for records, not for an encoder that gets unclipped gradients."""
    make(net := mlp(), **({} if make is HooksGradientSource else {"assume_independent": True}))
    with refused("loss-outside"):
        net(nn.Linear(6, 6)(X))


# -- what the user has to vouch for ----------------------------------------------------------------


def test_a_bare_optimizer_needs_the_users_word():
    def made(**options):
        p = nn.Parameter(torch.zeros(3))
        given = {"num_data": 10, "expected_batch_size": 10, "max_grad_norm": 1.0, **options}
        optimizer = dpb.optim.DPSGLD([p], 0.1, noise_multiplier=1.0, **given)
        p.grad_sample = torch.ones(10, 3)
        return optimizer

    optimizer = made()
    with refused("step-vouch"):
        optimizer.step()
    assert len(optimizer.accountant) == 0
    optimizer = made(assume_independent_records=True)
    optimizer.step()
    assert "as the user vouches" in optimizer.accountant.summary()


@pytest.mark.parametrize("mode", [None, "hooks"])
def test_a_model_that_cannot_be_mapped_runs_where_it_is_vouched_for(mode):
    def function(net, x):
        h = net.layer(x)
        return h / max(1.0, h.detach().norm().item())

    net = zoo.Of(function, layer=mlp())
    with pytest.raises(ModelError):
        run(copy.deepcopy(net))
    optimizer = run(net, grad_sample_mode=mode, assume_independent_records=True)
    assert "as the user vouches" in optimizer.accountant.summary()


class WithLoss(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.layer, self.reads = mlp(), reads

    def forward(self, x, labels=None):
        out = self.layer(x)
        if labels is None:
            return out
        assert not self.reads or labels.max() < 3
        return entropy(out, labels)


def test_a_loss_in_the_model():
    """If it reads the labels, they are given to loss=, or the user vouches."""
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]

    def step(reads, loss_of=lambda net, batch: net(**batch), **options):
        given = {"noise_multiplier": 1.0, **options}
        net, optimizer, loader = training.private(WithLoss(reads), data, 8, **given)
        for batch in loader:
            loss_of(net, batch).backward()
            optimizer.step()

    with refused("model-map"):
        step(True)
    step(True, lambda net, b: net.private_loss(b["x"], b["labels"]), loss=entropy)
    for reads in (True, False):
        step(reads, assume_independent_records=True)


def test_hooks_take_empty_batches():
    """An empty batch adds none, also where a layer fails on no records."""
    for net, x in ((mlp(), X[:0]), (nn.InstanceNorm1d(3, affine=True), torch.zeros(0, 3, 4))):
        source = HooksGradientSource(net)
        net(x).sum().backward()
        assert not sum_of(source, net, 0.5).any()


@pytest.mark.parametrize("is_twice", [False, True])
def test_hooks_give_padding_no_gradient(is_twice):
    def function(net, x):
        h = net.tokens(x)
        return net.out((h + net.tokens(x.flip(1)) if is_twice else h).flatten(1))

    layers = {"tokens": nn.Embedding(5, 4, padding_idx=2), "out": nn.Linear(12, 3)}
    net, x, y = zoo.Of(function, **layers), torch.randint(5, (6, 3)), torch.randint(3, (6,))
    rows = gradients_of_records(net, lambda n, a, b: entropy(n(a), b), (x, y))
    source = HooksGradientSource(net)
    entropy(net(x), y).backward()
    assert_sum(source, net, rows, 0.5, atol=1e-6)


def backward_twice(net):
    loss = entropy(net(X), Y)
    loss.backward(retain_graph=True)
    loss.backward()


def packed(net, x):
    lengths, options = torch.tensor([2, 4, 1]), {"batch_first": True, "enforce_sorted": False}
    return net.lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, **options))[1][0][-1]


def of_packed():
    HooksGradientSource(net := zoo.Of(packed, lstm=DPLSTM(6, 3, batch_first=True)))
    net(torch.randn(3, 4, 6)).mean().backward()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x, shift):
        return self.gain * x + shift


def of_two_inputs():
    return zoo.Of(lambda net, x: net.scale(net.layer(x), shift=1.0), scale=Scale(), layer=mlp())


@pytest.mark.parametrize(
    ("code", "work"),
    [
        ("loss-twice", lambda: backward_twice(HooksGradientSource(mlp())._module)),
        ("model-copied", lambda: backward_twice(copy.deepcopy(HooksGradientSource(mlp())._module))),
        ("model-packed", of_packed),
        ("model-no-sampler", lambda: backward_twice(HooksGradientSource(of_two_inputs())._module)),
    ],
)
def test_hooks_say_what_opacus_does_not(code, work):
    with refused(code):
        work()


def test_hooks_say_what_autograd_does_not():
    """The error of autograd stays, and says besides what to write."""

    def function(net, x):
        h = net.layer(x)
        h /= 2
        return h

    HooksGradientSource(net := zoo.Of(function, layer=mlp()))
    with pytest.raises(RuntimeError) as caught:
        net(X)
    assert "x = x / 2" in caught.value.__notes__[0]
