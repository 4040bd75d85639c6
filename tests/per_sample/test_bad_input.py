"""What cannot run says so in one sentence, with a code; and the line that it gives works."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import clipped_rows, gradients_of_records, mlp, private, sum_of
from opacus.layers import DPLSTM
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

import torch_dpbayes as dpb
from torch_dpbayes.errors import DPBayesError, LossError, ModelError, StepError
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.hooks import HooksGradientSource
from torch_dpbayes.per_sample.operations import Delivery

X, Y = torch.randn(8, 6), torch.randint(3, (8,))
entropy = F.cross_entropy


def run(net=None, loop=None, data=(X, Y), **options):
    """One step; ``loop(net, *batch)`` gives the loss."""
    loop = loop or (lambda net, x, y: F.cross_entropy(net(x), y))
    net, optimizer, loader = private(mlp() if net is None else net, *data, **options)
    for batch in loader:
        optimizer.zero_grad()
        loop(net, *batch).backward()
        optimizer.step()
    assert len(optimizer.accountant) == 1
    return net


def given(loss):
    return {"loss": loss, "loop": lambda net, x, y: net.private_loss(x, y)}


class Twice(nn.Module):
    """Both passes within the model: the advice for two passes in one loss."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x), self.net(-x)


class WithScale(nn.Module):
    """The advice for a learned scale."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.net(x), self.scale.expand(len(x))


def ctc(out, y):
    log_probabilities = out[:, None, :2].expand(-1, 2, -1).log_softmax(2).transpose(0, 1)
    ones = torch.ones_like(y)
    return log_probabilities, ones[:, None], 2 * ones, ones


SCALE, WEIGHT = nn.Parameter(torch.zeros(())), torch.tensor([1.0, 2.0, 3.0])

# name: class and code of the error, what is refused, what its advice says
LOSSES = {
    "a vector": (
        (LossError, "loss-vector"),
        {"loop": lambda net, x, y: entropy(net(x), y, reduction="none")},
        {"loop": lambda net, x, y: entropy(net(x), y, reduction="none").mean()},
    ),
    "a constant": (
        (LossError, "loss-constant"),
        {"loop": lambda net, x, y: y.float().mean()},
        {"loop": lambda net, x, y: entropy(net(x), y)},
    ),
    "a sum where a mean was said": (
        (LossError, "loss-reduction"),
        {"loop": lambda net, x, y: entropy(net(x), y, reduction="sum")},
        {"loop": lambda net, x, y: entropy(net(x), y, reduction="sum"), "loss_reduction": "sum"},
    ),
    "a mean of a mean's square": (
        (LossError, "loss-reduced"),
        {"loop": lambda net, x, y: entropy(net(x), y) ** 2},
        {"loop": lambda net, x, y: (entropy(net(x), y, reduction="none") ** 2).mean()},
    ),
    "a learned scale outside": (
        (LossError, "loss-outside"),
        {"loop": lambda net, x, y: entropy(net(x) * SCALE.exp(), y)},
        {
            "net": WithScale,
            "loop": lambda net, x, y: (lambda out, scale: entropy(out * scale.exp()[:, None], y))(
                *net(x)
            ),
        },
    ),
    "two passes": (
        (StepError, "step-passes"),
        {"loop": lambda net, x, y: entropy(net(x), y) + entropy(net(-x), y)},
        {"net": Twice, "loop": lambda net, x, y: sum(entropy(out, y) for out in net(x))},
    ),
    "a decision": (
        (LossError, "loss-number"),
        {"loop": lambda net, x, y: entropy(net(x), y) * (2 if y.max() > 1 else 1)},
        given(lambda out, y: entropy(out, y) * torch.where(y.amax() > 1, 2.0, 1.0)),
    ),
    "loss= with a loss of the loop": (
        (LossError, "loss-twice-given"),
        {"loss": entropy},
        given(entropy),
    ),
    "loss= that gives a vector": (
        (LossError, "loss-vector"),
        given(lambda out, y: out[0]),
        given(lambda out, y: out[0].sum()),
    ),
    "weights that torch hides": (
        (LossError, "loss-divisor"),
        {"loop": lambda net, x, y: F.l1_loss(net(x), x[:, :3], weight=torch.ones(8, 3))},
        {"loop": lambda net, x, y: (F.l1_loss(net(x), x[:, :3], reduction="none") * 2.0).mean()},
    ),
    "class weights": (
        (LossError, "loss-divisor"),
        {"loop": lambda net, x, y: entropy(net(x), y, weight=WEIGHT)},
        {"loop": lambda net, x, y: entropy(net(x), y, weight=WEIGHT, reduction="none").mean()},
    ),
    "lengths of CTC": (
        (LossError, "loss-divisor"),
        {"loop": lambda net, x, y: F.ctc_loss(*ctc(net(x), y))},
        {"loop": lambda net, x, y: F.ctc_loss(*ctc(net(x), y), reduction="none").mean()},
    ),
    "noise on the inputs": (
        (LossError, "loss-rows"),
        {"loop": lambda net, x, y: entropy(net(x + torch.randn(x.shape)), y)},
        {"loop": lambda net, x, y: entropy(net(x + torch.randn_like(x)), y)},
    ),
    "noise on the outputs": (
        (LossError, "loss-rows"),
        {"loop": lambda net, x, y: entropy(net(x) + torch.randn(len(x), 3), y)},
        {"loop": lambda net, x, y: (lambda o: entropy(o + torch.randn_like(o), y))(net(x))},
    ),
    "random numbers that mix": (
        (LossError, "loss-mixes"),
        {"loop": lambda net, x, y: (F.gumbel_softmax(net(x), dim=0) * x[:, :3]).mean()},
        given(lambda out, y: (F.gumbel_softmax(out, dim=-1) * y).mean()),
    ),
    "another tensor than the batch": (
        (LossError, "model-input"),
        {"loop": lambda net, x, y: entropy(net(X + 1), y)},
        {"loop": lambda net, x, y: entropy(net(x + 1), y)},
    ),
}


def with_net(settings):
    made = settings.get("net")
    return {**settings, "net": made()} if made is not None else settings


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_run_says_what_to_write(name):
    (kind, code), refused, advised = LOSSES[name]
    SCALE.grad = None
    with pytest.raises(kind) as error:
        run(**refused)
    assert error.value.code in code, error.value
    page = f"docs/troubleshooting.md#{error.value.code}"
    assert len(str(error.value)) < 600 and page in "".join(error.value.__notes__)
    assert SCALE.grad is None
    run(**with_net(advised))


@pytest.mark.parametrize("is_given", [False, True])
def test_a_loss_that_is_not_finite_counts_as_zero(is_given):
    def loss(out, y):
        return entropy(out, y) * torch.nan

    net = mlp()
    before = [p.detach().clone() for p in net.parameters()]
    run(net, **(given(loss) if is_given else {"loop": lambda net, x, y: loss(net(x), y)}))
    for p, q in zip(net.parameters(), before):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)


# -- models ----------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    more: dict


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        logits = self.net(x)
        return Output(logits, {"both": [(logits, logits.square())], "name": "fine"})


class Images(nn.Sequential):
    def forward(self, x):
        return super().forward(x.view(-1, 1, 2, 3))


def batch_norm():
    return Images(nn.Conv2d(1, 64, 1), nn.BatchNorm2d(64), nn.Flatten(1), nn.Linear(384, 3))


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))


def after_one_pass(net):
    net(torch.zeros(2, 6))
    return net


def head():
    return nn.Linear(6, 3)


class Of(nn.Module):
    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x):
        return self.function(self.net(x))


class Words(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Embedding(5, 2, **options), nn.Flatten(1), nn.Linear(12, 3))

    def forward(self, x):
        return super().forward(x.long().clamp(0, 4))


WHOLE = {"grad_sample_mode": "hooks", "assume_independent_records": True}


def with_unused():
    net = Nested()
    net.spare = nn.Linear(2, 2)
    return net


def unused_frozen(net):
    net.spare.requires_grad_(False)
    return net


def hooked():
    net = mlp()
    net[0].register_full_backward_hook(lambda *_: None)
    return net


def unhooked(net):
    net[0]._backward_hooks.clear()
    return net


MODELS = {
    "BatchNorm": ("model-layer", batch_norm, ModuleValidator.fix),
    "lazy": ("model-lazy", lazy, after_one_pass),
    "unused": ("model-unused", with_unused, unused_frozen),
    "backward hook": ("model-backward-hook", hooked, unhooked),
    "classes": ("model-output", lambda: Of(mlp(), lambda out: out.argmax(1)), lambda net: net.net),
    "TorchScript": ("model-layer", lambda: torch.jit.trace(mlp(), X), lambda net: mlp()),
    "spectral norm": ("model-map", lambda: nn.Sequential(spectral_norm(head())), lambda net: mlp()),
    "one pruned layer": (
        "model-map",
        lambda: prune.l1_unstructured(head(), "weight", 0.3),
        lambda net: nn.Sequential(net),
    ),
    "max_norm": ("model-map", lambda: Words(max_norm=1.0), lambda net: Words()),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")  # of torch 2.12
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_run_says_what_to_write(name):
    code, make, advice = MODELS[name]
    net = make()
    loop = (lambda net, x, y: entropy(net(x).logits, y)) if name == "unused" else None
    for options in ({}, WHOLE)[: 1 + (name == "BatchNorm")]:  # which hooks would not see
        with pytest.raises(ModelError) as error:
            private(net, X, Y, **options)
        assert error.value.code == code, error.value
    run(advice(net), loop)


def test_make_private_leaves_a_model_that_writes_its_parameters_as_it_was():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.gain = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.net.weight.data.mul_(0.5)
            with torch.no_grad():
                self.gain.add_(1.0)
            return self.net(x) * self.gain

    net = Writes()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ModelError):
        private(net, X, Y)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_batches_that_require_grad_are_refused():
    def collate(records):
        x, y = torch.utils.data.default_collate(records)
        return x.requires_grad_(), y

    data = torch.utils.data.TensorDataset(X, Y)
    for options in ({}, WHOLE):
        with pytest.raises(DPBayesError) as error:
            dpb.PrivacyEngine().make_private(
                module=mlp(),
                optimizer=lambda params, **given: dpb.optim.DPSGLD(params, 0.1, **given),
                data_loader=torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate),
                max_grad_norm=1.0,
                noise_multiplier=1.0,
                **{k: v for k, v in options.items() if k != "grad_sample_mode"},
            )
        assert error.value.code == "loader-collate"


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_outputs_of_dataclasses_and_dictionaries(mode):
    def loop(net, x, y):
        out = net(x)
        assert out.more["name"] == "fine"
        return entropy(out.logits, y) + 0.1 * out.more["both"][0][1].mean()

    run(Nested(), loop, grad_sample_mode=mode)


ARGUMENTS = {
    "another tensor": lambda x, old: (x, torch.randn(1, 6)),
    "numbers": lambda x, old: (x, [1, 2, 3, 4]),
    "texts": lambda x, old: ({"x": x, "texts": ["a", "b"]},),
    "an object": lambda x, old: (x, object()),
    "a tensor of an earlier batch": lambda x, old: (x, old),
    "a tensor of several records": lambda x, old: (x, x.mean()),
    "records in another dimension": lambda x, old: (x, x.T),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_a_row_for_every_record(name):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, other=None):
            return self.net(x["x"] if isinstance(x, dict) else x)

    source = BookkeepingGradientSource(net := Two())
    deliver = Delivery(4)
    old, x = (deliver(torch.randn(4, 6), 4) for _ in range(2))
    with pytest.raises(DPBayesError):
        net(*ARGUMENTS[name](x, old))
    source.discard(())
    x = deliver(torch.randn(4, 6), 4)
    net(x, 2 * x)


@pytest.mark.parametrize("make", [BookkeepingGradientSource, HooksGradientSource])
def test_an_input_that_would_be_trained_is_refused(make):
    """The user vouches for records, not for an encoder that gets unclipped gradients."""
    is_hooked = make is HooksGradientSource
    make(net := mlp(), **({} if is_hooked else {"assume_independent": True}))
    with pytest.raises(LossError) as error:
        net(nn.Linear(6, 6)(X))
    assert error.value.code == "loss-outside"


@pytest.mark.parametrize("kind", [BookkeepingGradientSource, VmapGradientSource])
def test_a_model_inside_a_transform_is_refused(kind):
    """Its numbers would pass for records."""
    kind(net := mlp(), assume_independent=True)
    for work in (
        lambda: torch.func.vmap(net)(X),
        lambda: torch.func.grad(lambda x: net(x).sum())(X),
    ):
        with pytest.raises(DPBayesError):
            work()


# -- what the user has to vouch for ----------------------------------------------------------------


def test_hooks_on_whole_batches_need_the_users_word():
    with pytest.raises(ModelError) as error:
        run(grad_sample_mode="hooks")
    assert error.value.code == "model-vouch"
    net, optimizer, loader = private(
        mlp(), X, Y, grad_sample_mode="hooks", assume_independent_records=True
    )
    for x, y in loader:
        assert type(x) is torch.Tensor
        entropy(net(x), y).backward()
        optimizer.step()
    assert "vouched for by the user" in optimizer.accountant.summary()


def test_a_bare_optimizer_needs_the_users_word():
    def made(**options):
        p = nn.Parameter(torch.zeros(3))
        optimizer = dpb.optim.DPSGLD(
            [p],
            0.1,
            **{"num_data": 10, "expected_batch_size": 10, "max_grad_norm": 1.0},
            noise_multiplier=1.0,
            **options,
        )
        p.grad_sample = torch.ones(10, 3)
        return optimizer

    optimizer = made()
    with pytest.raises(StepError) as error:
        optimizer.step()
    assert error.value.code == "step-vouch" and len(optimizer.accountant) == 0
    optimizer = made(assume_independent_records=True)
    optimizer.step()
    assert "vouched for by the user" in optimizer.accountant.summary()


@pytest.mark.parametrize("mode", [None, "vmap", "hooks"])
def test_a_vouched_run_is_that_of_records_alone(mode):
    net = mlp()
    loss = lambda net, x, y: entropy(net(x), y)  # noqa: E731
    expected = clipped_rows(gradients_of_records(net, loss, (X, Y)), 0.5)
    options = {"grad_sample_mode": mode, "assume_independent_records": True}
    net, optimizer, loader = private(net, X, Y, **options)
    for x, y in loader:
        loss(net, x, y).backward()
        found = sum_of(optimizer.release.source, net, 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_model_that_cannot_be_mapped_runs_where_it_is_vouched_for():
    net = nn.Sequential(mlp(), Of(nn.Identity(), lambda h: h / max(1.0, h.detach().norm().item())))
    with pytest.raises(ModelError):
        run(net)
    run(net, assume_independent_records=True)


def test_hooks_take_empty_batches():
    """An empty batch adds none, also where a layer fails on no records."""
    for net, x in ((mlp(), X[:0]), (nn.InstanceNorm1d(3, affine=True), torch.zeros(0, 3, 4))):
        source = HooksGradientSource(net)
        net(x).sum().backward()
        assert not sum_of(source, net, 0.5).any()


@pytest.mark.parametrize("is_twice", [False, True])
def test_hooks_give_padding_no_gradient(is_twice):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.out = nn.Embedding(5, 4, padding_idx=2), nn.Linear(12, 3)

        def forward(self, x):
            h = self.tokens(x)
            return self.out((h + self.tokens(x.flip(1)) if is_twice else h).flatten(1))

    x, y = torch.randint(5, (6, 3)), torch.randint(3, (6,))
    plain, net = Net(), Net()
    plain.load_state_dict(net.state_dict())
    source = HooksGradientSource(net)
    expected = clipped_rows(
        gradients_of_records(plain, lambda n, a, b: entropy(n(a), b), (x, y)), 0.5
    )
    entropy(net(x), y).backward()
    torch.testing.assert_close(sum_of(source, net, 0.5), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("code", ["loss-twice", "model-copied"])
def test_hooks_say_what_opacus_does_not(code):
    net = copy.deepcopy(HooksGradientSource(mlp())._module)
    if code == "loss-twice":
        HooksGradientSource(net := mlp())
    with pytest.raises(StepError) as error:
        loss = entropy(net(X), Y)
        loss.backward(retain_graph=True)
        loss.backward()
    assert error.value.code == code


def test_packed_sequences_are_refused_by_hooks():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = DPLSTM(6, 3, batch_first=True)

        def forward(self, x):
            lengths = torch.tensor([2, 4, 1])
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return self.lstm(packed)[1][0][-1]

    HooksGradientSource(net := Packed())
    with pytest.raises(StepError) as error:
        net(torch.randn(3, 4, 6)).mean().backward()
    assert error.value.code == "model-packed"


def test_errors_have_one_base_class_and_a_code_that_survives_pickling():
    for kind in (ModelError, LossError, StepError):
        error = pickle.loads(pickle.dumps(kind("what", code="loss-mixes")))
        assert type(error) is kind and isinstance(error, dpb.DPBayesError)
        assert error.code == "loss-mixes" and str(error) == "what"
    assert issubclass(ModelError, ValueError) and issubclass(StepError, RuntimeError)
