"""Programs of a training loop in which one record would decide over others. Each is refused, or one
record moves the released sum by at most C.

Record 0 is an outlier. Most programs turn the sign of all gradients if it is there.
"""

import copy
import pickle

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils.checkpoint import checkpoint

N = 64
STATE = {}  # what loops carry from one step to the next; emptied before each run


def regression():
    x, t = torch.randn(N, 5), 3 + 0.3 * torch.randn(N)
    x[:, 0], t[0] = 1.0, 100.0
    x[0] *= 1000
    return x, t


def labelled():
    y = torch.zeros(N, dtype=torch.long)
    y[0] = 1
    return regression()[0], y


def net():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))


def rows(out, t):
    return (out[:, 0] - t) ** 2


def flip(value, limit=20.0):
    """-1 where the outlier shows."""
    return 1 - 2 * (value > limit) if isinstance(value, Tensor) else 1 - 2 * int(value > limit)


def turned(out, t, value, limit=20.0):
    return rows(out, t).mean() * flip(value, limit)


def weighed(out, t, value):
    return (rows(out, t) * flip(value)).mean()


def caught(work):
    try:
        work()
    except Exception:
        return True
    return False


class Scaled(torch.autograd.Function):
    """Turns the gradient if the outlier is there."""

    @staticmethod
    def forward(ctx, out):
        ctx.save_for_backward(out)
        return out * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * flip(ctx.saved_tensors[0].abs().max())


@wrap_torch_function(lambda out: (out,))
def clone(out):
    """By the name of one of torch's functions, which torch.overrides hands on."""
    return out * flip(out.abs().max())


# loss(out, t) of the regression: what it does to other records ------------------------------------

MIXING = {
    "contrastive": lambda out, t: F.cross_entropy(
        F.normalize(out, dim=1) @ F.normalize(out, dim=1).T / 0.1, torch.arange(len(out))
    ),
    "centred": lambda out, t: ((out - out.mean(0)) ** 2).mean(),
    "hard examples by topk": lambda out, t: rows(out, t).topk(8)[0].mean(),
    "divided by its norm": lambda out, t: (out / out.norm()).sum(1).mean(),
    "weights by item": lambda out, t: turned(out, t, out.detach().abs().max().item()),
    "random partners": lambda out, t: ((out - out[torch.randperm(len(out))]) ** 2).mean(),
    "logarithm of the mean": lambda out, t: rows(out, t).mean().log(),
    "ratio of losses": lambda out, t: rows(out, t).mean() / rows(out, t).mean().detach(),
    "batch_norm": lambda out, t: rows(F.batch_norm(out, None, None, training=True), t).mean(),
    "cumsum": lambda out, t: (out.detach().cumsum(0) * out).mean(),
    "detached statistic": lambda out, t: weighed(out, t, out.detach().abs().max()),
    "data statistic": lambda out, t: weighed(out, t, out.data.abs().max()),
    "(B, 1) against (B,)": lambda out, t: ((out[:, :1] - t) ** 2).mean(),
    "signs by position": lambda out, t: (
        rows(out, t) * (1 - 2 * (torch.arange(len(out)) % 2))
    ).mean(),
    "every other record": lambda out, t: rows(out[::2], t[::2]).mean(),
    "attention over the batch": lambda out, t: (
        F.scaled_dot_product_attention(out[None], out[None], out[None]).pow(2).mean()
    ),
    "record 0 as a constant": lambda out, t: weighed(out, t, t[0]),
    "any": lambda out, t: rows(out, t).mean() * (-1 if (t > 50).any() else 1),
    "printed and parsed": lambda out, t: (
        rows(out, t).mean() * (-1 if "100" in repr(t) + str(t.max()) else 1)
    ),
    "tolist": lambda out, t: turned(out, t, max(t.tolist())),
    "NumPy's asarray": lambda out, t: turned(out, t, np.asarray(t).max()),
    "pickled": lambda out, t: turned(out, t, pickle.loads(pickle.dumps(t)).max()),
    "formatted": lambda out, t: turned(out, t, float(f"{t.max():.2f}")),
    "copy.deepcopy": lambda out, t: turned(out, t, copy.deepcopy(t).max()),
    "DLPack": lambda out, t: turned(out, t, torch.from_dlpack(t).max()),
    "as_subclass": lambda out, t: (out.as_subclass(torch.Tensor).std(0) * out).mean(),
    "vmap of its own": lambda out, t: (lambda w: (w * flip(w.detach().max(), 400)).mean())(
        torch.vmap(lambda o: (o - 1).pow(2).sum())(out)
    ),
    "torch.func.grad": lambda out, t: torch.func.grad(lambda o: o.std())(out).mul(out).sum(),
    "autograd.grad": lambda out, t: turned(
        out, t, torch.autograd.grad(rows(out, t).mean(), out, create_graph=True)[0].abs().max()
    ),
    "aten's operators": lambda out, t: turned(out, t, torch.ops.aten.max.default(t)),
    "checkpoint": lambda out, t: checkpoint(
        lambda o, u: rows(o - o.mean(0), u).mean(), out, t, use_reentrant=False
    ),
    "a Function of its own": lambda out, t: rows(Scaled.apply(out), t).mean(),
    "a function that torch hands on": lambda out, t: rows(clone(out), t).mean(),
    "targets changed in place": lambda out, t: rows(out, t.sub_(t.mean())).mean(),
    # torch's gradient of a product that overflows is finite if any record has a zero
    "a factor of zero": lambda out, t: (
        ((out + 3) * torch.where(t > 50, 0.0, 1e20)[:, None]).prod(1) * 1e-22
    ).mean(),
    "a factor of zero, by NumPy's names": lambda out, t: (
        ((out + 3) * torch.where(t > 50, 0.0, 1e20)[:, None]).prod(axis=1, keepdims=True) * 1e-22
    ).mean(),
}

# loss(out, y) of the classes ----------------------------------------------------------------------

OF_LABELS = {
    "class weights and mean": lambda out, y: F.cross_entropy(
        out, y, weight=torch.tensor([1.0, 1000.0])
    ),
    "class weights by the batch's counts": lambda out, y: (
        (len(y) / torch.bincount(y, minlength=2).clamp(min=1).float())[y]
        * F.cross_entropy(out, y, reduction="none")
    ).mean(),
    "classes by one_hot of the batch": lambda out, y: (
        F.cross_entropy(out, y) * flip(F.one_hot(y).shape[1], 1)
    ),
    "number of classes by y.max()": lambda out, y: F.cross_entropy(out, y) * flip(int(y.max()), 0),
    "rows by a mask's shape": lambda out, y: F.cross_entropy(out, y) * flip(len(out[y == 1]), 0),
}

# int(f(out, t)), the number of records ------------------------------------------------------------

COUNTS = {
    "shape after flatten": lambda out, t: out.flatten().shape[0] // 2,
    "iteration": lambda out, t: sum(1 for _ in t),
    "unbind": lambda out, t: len(t.unbind()),
    "split": lambda out, t: len(t.split(1)),
    "strides": lambda out, t: out.T.contiguous().stride(0) + t.stride(0),
    "storage": lambda out, t: t.untyped_storage().size() // 4,
    "meta": lambda out, t: t.to("meta").shape[0],
    "what the shape makes": lambda out, t: len(torch.randn(t.shape)) + torch.zeros(t.shape).numel(),
    "a slice that is empty or not": lambda out, t: len(t[N - 1 :]),
    "trial of a view": lambda out, t: caught(lambda: t.view(N, 1)),
}


# loop(net, optimizer, x, t), the step -------------------------------------------------------------


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def without_torch_functions(net, optimizer, x, t):
    out = net(x)
    with torch._C.DisableTorchFunctionSubclass():
        loss = rows(out, t).mean() * flip(t.max())
    step(optimizer, loss)


def hook_on_the_outputs(net, optimizer, x, t):
    out = net(x)
    out.register_hook(lambda g: g * flip(g.abs().max() * N))
    step(optimizer, rows(out, t).mean())


def backward_with_a_gradient(net, optimizer, x, t):
    loss = rows(net(x), t).mean()
    loss.backward(gradient=1 / (1e-3 + loss.detach()))
    optimizer.step()


def gradients_by_autograd(net, optimizer, x, t):
    found = torch.autograd.grad(rows(net(x), t).mean(), list(net.parameters()))
    for p, g in zip(net.parameters(), found):
        p.grad = g
    optimizer.step()


def a_second_pass_with_what_is_known(net, optimizer, x, t):
    rows(net(x), t).mean().backward()
    sign = flip(float(t.max()))
    optimizer.zero_grad()
    (rows(net(x), t).mean() * sign).backward()
    optimizer.step()


def a_backward_pass_of_zero(net, optimizer, x, t):
    out = net(x)
    (0.0 * rows(out, t)).mean().backward()
    sign = flip(float(t.max()))
    step(optimizer, rows(out, t * sign).mean())


class Turning(TorchFunctionMode):
    """Turns the sum if the outlier is there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                STATE["top"] = max(STATE.get("top", 0.0), float(value.detach().abs().max()))
        is_sum = getattr(function, "__name__", "") in ("addmm", "addmm_", "mm", "matmul")
        return found.neg_() if is_sum and STATE.get("top", 0.0) > 1e6 else found


def a_mode_around_the_step(net, optimizer, x, t):
    rows(net(x), t).mean().backward()
    with Turning():
        optimizer.step()


def a_refusal_that_is_caught(net, optimizer, x, t):
    caught(lambda: STATE.update(top=float(t.max())))
    step(optimizer, rows(net(x), t).mean() * flip(STATE.get("top", 0.0)))


LOOPS = (
    *(without_torch_functions, hook_on_the_outputs, backward_with_a_gradient),
    *(gradients_by_autograd, a_second_pass_with_what_is_known, a_backward_pass_of_zero),
    *(a_refusal_that_is_caught, a_mode_around_the_step),
)

# loss(net, x, t) of the model and its inputs ------------------------------------------------------

OF_MODELS = {
    "weights beside it": lambda net, x, t: (
        rows(net(x), t).mean() + (x - x.mean(0)).matmul(net[0].weight.T).pow(2).mean()
    ),
    "rows that are repeated": lambda net, x, t: rows(
        net(x.repeat_interleave(2, 0)), t.repeat_interleave(2, 0)
    ).mean(),
    "a penalty": lambda net, x, t: rows(net(x), t).mean() + x.std() * net[2].weight.square().sum(),
}

# f(x, t), the inputs of the model -----------------------------------------------------------------

INPUTS = {
    "centred": lambda x, t: x - x.mean(0),
    "permuted": lambda x, t: x[torch.randperm(len(x))],
    "sorted": lambda x, t: x.sort(0)[0],
    "mixup": lambda x, t: 0.5 * x + 0.5 * x[torch.randperm(len(x))],
    "all are record 0": lambda x, t: x[torch.zeros(len(x), dtype=torch.long)],
    "by NumPy": lambda x, t: torch.from_numpy(x.numpy() - x.numpy().mean(0)),
    "changed in place": lambda x, t: x.sub_(x.mean(0)),
    "batch norm": lambda x, t: F.batch_norm(x, None, None, training=True),
    "stacked from a list": lambda x, t: torch.stack([x[i - 1] for i in range(len(x))]),
    "of no loader": lambda x, t: torch.randn(len(x), 5),
    "half of it": lambda x, t: x[:32],
    "filtered": lambda x, t: x[t < 50],
    "a statistic as a factor": lambda x, t: x * flip(t.max()),
}

# change(net), after make_private ------------------------------------------------------------------


def mix(_module, _given, out):
    return out - out.mean(0)


class Centres(nn.ReLU):
    def forward(self, x):
        return torch.relu(x - x.mean(0))


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


CHANGES = {
    "forward hook on a layer": lambda net: net[0].register_forward_hook(mix),
    "forward hook on the model": lambda net: net.register_forward_hook(mix),
    "forward pre-hook on the model": lambda net: net.register_forward_pre_hook(
        lambda _, given: (given[0] - given[0].mean(0),)
    ),
    "backward hook on a layer": lambda net: net[2].register_full_backward_hook(
        lambda m, gi, go: (gi[0] * flip(gi[0].abs().max() * N),)
    ),
    "hook on a parameter": lambda net: net[2].weight.register_hook(lambda g: g * flip(g.max())),
    "forward of the model": lambda net: setattr(
        net, "forward", lambda x: net[2](torch.relu(net[0](x - x.mean(0))))
    ),
    "forward of a layer": lambda net: setattr(
        net[2], "forward", lambda h: F.linear(h - h.mean(0), net[2].weight, net[2].bias)
    ),
    "class of a layer": lambda net: setattr(net[2], "__class__", Centred),
    "another layer": lambda net: net.__setitem__(1, Centres()),
}

# loop(net, optimizer, x, t) of two batches, of which the first comes back -------------------------


def a_replay_buffer(net, optimizer, x, t):
    old = STATE.get("old")
    STATE["old"] = x.detach(), t.detach()
    if old is not None:
        x, t = torch.cat([x, old[0]]), torch.cat([t, old[1]])
    step(optimizer, rows(net(x), t).mean())


def a_replayed_batch(net, optimizer, x, t):
    old = STATE.get("old")
    STATE["old"] = x, t
    x, t = old or (x, t)
    step(optimizer, rows(net(x), t).mean())


def a_total_that_goes_on(net, optimizer, x, t):
    out = net(x)
    loss = rows(out, t).mean()
    STATE["total"] = STATE.get("total", torch.zeros(())) + loss.detach().clone() * 2
    step(optimizer, loss + STATE["total"])


def a_slope_by_torch_func(net, optimizer, x, t):
    slope = STATE.get("slope", torch.zeros(5))
    step(optimizer, (rows(net(x), t) * flip(slope.abs().max(), 500)).mean())
    STATE["slope"] = torch.func.grad(lambda w: (x @ w - t).pow(2).mean())(torch.zeros(5))


def a_teacher_that_adamax_trained(net, optimizer, x, t):
    teacher = STATE.setdefault("teacher", nn.Linear(5, 1))
    other = STATE.setdefault("other", torch.optim.Adamax(teacher.parameters(), lr=1.0))
    with torch.no_grad():
        guess = teacher(x)[:, 0]
    step(optimizer, (rows(net(x), t) * flip(guess, 0.0)).mean())
    teacher(x).mean().backward()
    other.step()


def a_delta_of_earlier_records(net, optimizer, x, t):
    """Torch reads it as a number."""
    step(optimizer, F.huber_loss(net(x)[:, 0], t, delta=STATE.get("delta", torch.ones(()))))
    STATE["delta"] = torch.where(t.max() > 50, 1e-3, 10.0)


EARLIER = (
    *(a_slope_by_torch_func, a_teacher_that_adamax_trained, a_delta_of_earlier_records),
    *(a_replay_buffer, a_replayed_batch, a_total_that_goes_on),
)

# a module outside, of these widths, that would be trained, and loss(module, out, t) ---------------

OUTSIDE = {
    "learned scale": (
        1,
        1,
        lambda other, out, t: (
            -torch.distributions.Normal(out[:, 0], other.weight[0, 0].exp()).log_prob(t).mean()
        ),
    ),
    "a network behind": (2, 2, lambda other, out, t: rows(other(out), t).mean()),
    "a network on the targets": (
        1,
        1,
        lambda other, out, t: rows(out, other(t[:, None])[:, 0]).mean(),
    ),
    "a probe": (2, 1, lambda other, out, t: rows(other(out.detach()), t).mean()),
}
OUTER = nn.Parameter(torch.zeros(()))

# loss(out, t) for make_private, of one record -----------------------------------------------------


def one(out, t):
    return ((out[..., 0] - t) ** 2).mean()


def that_remembers(out, t):
    total = STATE.setdefault("total", torch.zeros(()))
    total.add_(t.detach().abs().mean())
    return one(out, t) * flip(total)


def that_hooks(out, t):
    loss = one(out, t)
    loss.register_hook(lambda g: g * flip(t.max()))
    return loss


GIVEN = {
    "remembers": that_remembers,
    "hooks": that_hooks,
    "collects": lambda out, t: STATE.setdefault("seen", []).append(t) or one(out, t),
    "decides": lambda out, t: one(out, t) * (-1 if bool((t > 50).any()) else 1),
    "rolls": lambda out, t: one(out, t) * flip(t[0].roll(1)),
    # by a stride, which vmap makes the number of records
    "counts": lambda out, t: one(out, t) * (1 if (torch.eye(2) @ out[0]).stride(0) < N else -1),
    "reads beside": lambda out, t: (
        one(out, t) * flip((torch.ones(N, 1) @ t).as_strided((N,), (1,)).max())
    ),
}

# loss(out, t) that is invalid for record 0, or raises for it --------------------------------------

ONE_RECORD = {
    "not finite": lambda out, t: (rows(out, t) * torch.where(t > 50, torch.nan, 1.0)).mean(),
    "out of support": lambda out, t: (
        -torch.distributions.Beta(out[:, 0].exp() + 1, 2.0).log_prob(t / 50).mean()
    ),
    "probability above 1": lambda out, t: F.binary_cross_entropy(out[:, 0].sigmoid(), t / 50),
    "no probability": lambda out, t: F.binary_cross_entropy(
        torch.where(t > 50, torch.nan, out[:, 0].sigmoid()), (t / 50).clamp(0, 1)
    ),
    "negative variance": lambda out, t: F.gaussian_nll_loss(
        out[:, 0], t, torch.where(t > 50, -1.0, 1.0)
    ),
}
ERRORS = {
    "label out of range": lambda out, t: F.cross_entropy(out, (t > 50).long() * 7),
    "index out of range": lambda out, t: out.gather(1, ((t > 50).long() * 7)[:, None]).mean(),
    "margin": lambda out, t: F.multi_margin_loss(out, (t > 50).long() * 7),
    "table": lambda out, t: ((out - torch.eye(2, out.shape[1])[(t > 50).long() * 7]) ** 2).mean(),
    "grid": lambda out, t: F.grid_sample(
        out[:, None, None],
        torch.where(t > 50, torch.nan, 0.5)[:, None, None, None] * torch.ones(1, 1, 2),
        padding_mode="border",
        align_corners=False,
    ).mean(),
    "no eigenvalues": lambda out, t: torch.linalg.eigh(
        torch.where(t > 50, torch.nan, out[:, 0])[:, None, None] * torch.diag(torch.arange(3.0))
    )[0].mean(),
    "no complex eigenvalues": lambda out, t: (
        torch.linalg.eig(
            torch.where(t > 50, torch.nan, 1.0)[:, None, None] * torch.diag(torch.arange(3.0))
        )[0].abs()
        * out[:, :1]
    ).mean(),
    "no factor": lambda out, t: (
        torch.linalg.cholesky((50 - t)[:, None, None] * torch.eye(3))[:, 0, 0] * out[:, 0]
    ).mean(),
    "no complex factor": lambda out, t: (
        torch.linalg.cholesky((50 - t)[:, None, None] * torch.eye(3).cfloat()).abs()[:, 0, 0]
        * out[:, 0]
    ).mean(),
}


def that_fails(out, t):
    """For one record, in place."""
    sums = (torch.zeros(2) * t).index_add_(0, (t > 50).long() * 7, torch.ones(1))
    return one(out, t) + 0 * sums.sum()


def a_constant_beside_a_record_that_fails(net, optimizer, x, t):
    ones = torch.ones(len(x), 5)
    if caught(lambda: net.private_loss(ones, t).backward()):
        net.private_loss(ones, -t).backward()
    optimizer.step()


def caught_and_used(name):
    """A loop that turns the sign where one record's error was caught."""

    def loop(net, optimizer, x, t):
        out = net(x)
        sign = -1 if caught(lambda: ERRORS[name](out, t)) else 1
        step(optimizer, rows(out, t).mean() * sign)

    return loop
