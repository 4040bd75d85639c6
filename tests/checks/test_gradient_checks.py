"""Records that are mixed by the order of rows, in the backward pass or by random numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import DropBlock2d, StochasticDepth

import torch_dpbayes as dpb

pytestmark = pytest.mark.usefixtures("whole_batches")

MODES = pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])


def make_private(net, x, mode=None, **options):
    data = DataLoader(TensorDataset(*x, torch.zeros(len(x[0]))), batch_size=4)
    dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=data,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        **options,
    )


# -- rows in another order -------------------------------------------------------------------------


class Reordered(nn.Module):
    """Runs its first layer on rows in the order of a key, and puts them back."""

    def __init__(self, key, width=6):
        super().__init__()
        self.key, self.first, self.last = key, nn.Linear(width, 8), nn.Linear(8, 2)

    def forward(self, x, *others):
        order = self.key(x, *others).argsort(stable=True)
        h = torch.tanh(self.first(x[order]))[order.argsort()]
        return self.last(h.mean(1) if h.dim() == 3 else h)


def length(x):
    return -(x.abs().sum(-1) > 0).sum(1)


KEYS = {
    "length": (length, (7, 6)),
    "length of the first channel": (lambda x: (x[:, :, 0] != 0).sum(1), (7, 6)),
    "sum": (lambda x: x.sum(1), (6,)),
    "norm": (lambda x: x.norm(dim=1), (6,)),
    "norm, rounded": (lambda x: x.norm(dim=1).round(), (6,)),
    "argmax": (lambda x: x.argmax(1), (6,)),
    "first feature": (lambda x: x[:, 0], (6,)),
    "first feature, an integer": (lambda x: x[:, 0].long(), (6,)),
    "sign": (lambda x: x[:, 0] > 0, (6,)),
    "a code in a number": (lambda x: x[:, 0] == 1, (6,)),
    "two equal codes": (lambda x: (x[:, 0] == 1) & (x[:, 1] == 1), (6,)),
    "number of zeros": (lambda x: (x == 0).sum(1), (6,)),
    "large": (lambda x: x.abs().amax(1) > 100, (6,)),
    "missing": (lambda x: x.isnan().any(1), (6,)),
    "in an interval": (lambda x: (x[:, 2] > 0) & (x[:, 2] < 0.1), (6,)),
    "as the first record": (lambda x: x[:, 0] == x[:1, 0], (6,)),
    "same sum as the first": (lambda x: (x.sum(1) - x[:1].sum(1)).abs() < 1e-4, (6,)),
    "same norm as the first": (lambda x: (x.norm(dim=1) - x[:1].norm(dim=1)).abs() < 1e-4, (6,)),
    "position": (lambda x: -torch.arange(len(x)), (6,)),
}


@pytest.mark.first_cases(18)
@pytest.mark.parametrize("name", KEYS)
def test_rows_in_another_order_are_refused(name):
    key, shape = KEYS[name]
    with pytest.raises(ValueError, match=r"module 'first' sees rows in another order|depend on"):
        make_private(Reordered(key), [torch.zeros(20, *shape)])


@MODES
def test_a_category_beside_the_features(mode):
    data = [torch.zeros(20, 6), torch.zeros(20, dtype=torch.long)]
    key = lambda x, category: category  # noqa: E731
    with pytest.raises(ValueError, match="module 'first' sees rows in another order"):
        make_private(Reordered(key), data, mode)
    examples = torch.randn(2, 6), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="module 'first' sees rows in another order"):
        make_private(Reordered(key), data, mode, example_inputs=examples)
    examples = torch.ones(2, 6), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="two equal records"):
        make_private(Reordered(key), data, mode, example_inputs=examples)


class Experts(nn.Module):
    """Trainable experts, each on the records that choose it."""

    def __init__(self, choose):
        super().__init__()
        self.gate, self.last = nn.Linear(6, 2), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.choose = choose

    def forward(self, x):
        score, y = self.gate(x), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            for rows in self.choose(score, k):
                y = y.index_put((rows,), expert(x[rows]))
        return self.last(y + score.sum(1, keepdim=True))


def by_choice(score, k):
    return [(score.argmax(1) == k).nonzero().flatten()]


def by_choice_if_any(score, k):
    return [rows for rows in by_choice(score, k) if len(rows)]


def top_half(score, k):
    return [score[:, k].topk((len(score) + 1) // 2).indices]


def all_by_score(score, k):
    return [score[:, k].argsort()]


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("choose", [by_choice, by_choice_if_any, top_half, all_by_score])
def test_experts_that_see_some_of_the_rows_are_refused(choose, mode):
    with pytest.raises(ValueError, match=r"'experts\.|'last|depend on"):
        make_private(Experts(choose), [torch.zeros(20, 6)], mode)


# -- the backward pass -----------------------------------------------------------------------------


class Backward(nn.Module):
    """``change`` is done to what passes between two layers."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(6, 8), nn.Linear(8, 2), change

    def forward(self, x):
        return self.b(self.change(torch.tanh(self.a(x))))


def changing(gradient):
    """The identity with another backward pass."""

    class Changing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h.clone()

        @staticmethod
        def backward(ctx, g):
            return gradient(g, *ctx.saved_tensors)

    return Changing.apply


def clipped_together(g, h):
    return g * (10 / (g.norm() + 1e-6)).clamp(max=1.0)


def on_node(hook):
    def change(h):
        h = h.clone()
        if h.grad_fn is not None:
            h.grad_fn.register_hook(hook)
        return h

    return change


def saved_by_another_rule(h):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t - t.mean(0)):
        return torch.tanh(h)


MIXING = {
    "centred": changing(lambda g, h: g - g.mean(0)),
    "clipped together": changing(clipped_together),
    "clipped together far away": changing(lambda g, h: g * (3e4 / (g.norm() + 1e-6)).clamp(max=1)),
    "scaled up together": changing(lambda g, h: g * (1e-5 / (g.norm() + 1e-12)).clamp(min=1)),
    "normalised": changing(lambda g, h: g / (g.norm() + 1e-12)),
    "standardised": changing(lambda g, h: g / (g.std(0, correction=0) + 1e-3)),
    "the record before": changing(lambda g, h: g.roll(1, 0)),
    "running sum": changing(lambda g, h: g.cumsum(0)),
    "divided by their number": changing(lambda g, h: g / max(len(g), 1)),
    "times the mean of what came": changing(lambda g, h: g * h.mean(0)),
    "none if one is large": changing(lambda g, h: g * (g.abs().amax() < 1e3) if len(g) else g),
    "sorted by size": changing(lambda g, h: g[g.norm(dim=1).argsort()]),
    "largest only": changing(lambda g, h: g * (g == g.amax(0)) if len(g) else g),
    "in a window of sizes": changing(lambda g, h: g / len(g) if 30 < g.norm() < 300 else g),
    "hook on a node": on_node(lambda given, out: (given[0] - given[0].mean(0),)),
    "hook on a node, clipped": on_node(lambda given, out: (clipped_together(given[0], None),)),
    "saved tensors": saved_by_another_rule,
}
ALONE = {
    "as it is": changing(lambda g, h: g),
    "reversed": changing(lambda g, h: -g),
    "each clipped": changing(
        lambda g, h: g * (1 / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
    ),
    "each normalised": changing(lambda g, h: F.normalize(g)),
    "bounded": changing(lambda g, h: g.clamp(-1, 1)),
    "straight through": changing(lambda g, h: g * (h.abs() <= 1)),
}


@pytest.mark.first_cases(2)
@MODES
@pytest.mark.parametrize("name", MIXING)
def test_mixing_in_the_backward_pass_is_refused(name, mode):
    message = "mix records in the backward pass|not the gradients of the records"
    with pytest.raises(ValueError, match=message):
        make_private(Backward(MIXING[name]), [torch.zeros(20, 6)], mode)


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("name", ALONE)
def test_changes_of_each_records_gradient_pass(name, mode):
    make_private(Backward(ALONE[name]), [torch.zeros(20, 6)], mode, loss_reduction="sum")


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("name", ["each clipped", "each normalised"])
def test_what_is_not_linear_does_not_see_the_divisor_of_a_mean_loss(name, mode):
    """A gradient divided by n, clipped and multiplied by n would not be that of a batch of
    another size.
    """
    make_private(Backward(ALONE[name]), [torch.zeros(20, 6)], mode)


def hooked_tensor(h):
    if h.requires_grad:
        h.register_hook(lambda g: clipped_together(g, h))
    return h


@MODES
def test_hooks_on_gradients_are_refused_outright(mode):
    with pytest.raises(
        ValueError, match=r"'Backward' has a hook on gradients \(Tensor.register_hook\)"
    ):
        make_private(Backward(hooked_tensor), [torch.zeros(20, 6)], mode)
    for kind in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        net = Backward(torch.relu)
        getattr(net.b, kind)(lambda *_: None)
        with pytest.raises(ValueError, match=rf"module 'b' has a hook on gradients \({kind}\)"):
            make_private(net, [torch.zeros(20, 6)], mode)


# -- random numbers --------------------------------------------------------------------------------


class Image(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 2)
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.b(self.layers(self.a(x)).flatten(1))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if len(x) else x


def shared_share(h):
    mask = torch.empty_like(h).bernoulli_(0.7)
    return h * mask / mask.mean().clamp(min=0.1)


def random_weights(h):
    weights = torch.rand(len(h), 1, 1, 1)
    return h * weights / weights.sum()


def half_of_them(h):
    chosen = torch.rand(len(h)).argsort().argsort() < (len(h) + 1) // 2
    return h * chosen[:, None, None, None]


SHARED = {
    "DropBlock": lambda: DropBlock2d(0.3, 3),
    "a mask by its mean": lambda: Apply(shared_share),
    "random weights that sum to 1": lambda: Apply(random_weights),
    "a random half": lambda: Apply(half_of_them),
}
OWN = {
    "stochastic depth by row": lambda: StochasticDepth(0.3, "row"),
    "stochastic depth by batch, a coin that knows no record": lambda: StochasticDepth(0.3, "batch"),
    "channels": lambda: nn.Dropout2d(0.3),
    "alpha": lambda: nn.AlphaDropout(0.3),
    "uniform noise": lambda: Apply(lambda h: h + torch.rand_like(h)),
    "uniform weights": lambda: Apply(lambda h: h * torch.rand(len(h), 1, 1, 1)),
}


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("name", SHARED)
def test_random_layers_that_share_a_normaliser_are_refused(name, mode):
    with pytest.raises(ValueError, match=r"depend on (another record|the number of records)"):
        make_private(Image(SHARED[name]()), [torch.zeros(20, 2, 4, 4)], mode)


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("name", OWN)
def test_random_layers_by_record_pass(name, mode):
    make_private(Image(OWN[name]()), [torch.zeros(20, 2, 4, 4)], mode)
