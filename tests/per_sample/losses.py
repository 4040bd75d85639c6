"""Usual losses in the plain form ``loss(net(x), *targets).backward()``: each runs as it is."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from zoo import Of, of

N, K, T, V = 8, 4, 5, 7  # records, classes, positions, words


class Usual(NamedTuple):
    """A loss of a training loop: ``loss(net, *batch)``."""

    loss: Callable
    model: Callable
    data: Callable
    loss_reduction: str
    draws: bool  # random numbers of its own, so that two runs differ
    is_plain: bool  # a loss of torch's on the outputs
    of_output: Any  # of one output and one target, or None


USUAL = {}


def add(name, loss, width=K, data=None, *, model=None, loss_reduction="mean", draws=False):
    """Enter ``loss(out, *targets)``, or ``loss(net, *batch)``."""
    first, *rest = inspect.signature(loss).parameters
    is_of_output = first != "net"
    USUAL[name] = Usual(
        (lambda net, x, *targets: loss(net(x), *targets)) if is_of_output else loss,
        model or net_of(width),
        data or LABELS,
        loss_reduction,
        draws,
        is_plain=model is None and is_of_output,
        of_output=loss if is_of_output and len(rest) == 1 else None,
    )


def inputs(*shape):
    return torch.randn(N, *(shape or (6,)))


def classes(k=K, *shape):
    return torch.randint(0, k, (N, *shape))


def reals(*shape):
    return torch.randn(N, *shape)


def units(*shape):
    """Numbers between .1 and .9."""
    return 0.1 + 0.8 * torch.rand(N, *shape)


def bits(*shape):
    return units(*shape).round()


def net_of(k):
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, k))


# (B, 2, 6, 6) to (B, K, 6, 6); (B, T) to (B, T, V); two heads, of a pair and of a dictionary
IMAGES = of(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, K, 1))


def words():
    layers = {"table": nn.Embedding(V, 6), "last": nn.Linear(6, V)}
    return Of(lambda net, x: net.last(net.table(x).tanh().cumsum(1)), **layers)


def two_heads(result=lambda a, b: (a, b)):
    def function(net, x):
        h = torch.tanh(net.body(x))
        return result(net.a(h), net.b(h))

    return Of(function, body=nn.Linear(6, 8), a=nn.Linear(8, K), b=nn.Linear(8, 1))


def vae():
    def function(net, x):
        mean, log_var = net.encoder(x).chunk(2, 1)
        return net.decoder(mean + 0 * log_var), mean, log_var

    return Of(function, encoder=nn.Linear(6, 4), decoder=nn.Linear(2, 6))


LABELS = lambda: (inputs(), classes())  # noqa: E731
REALS = lambda: (inputs(), reals())  # noqa: E731
REALS_K = lambda: (inputs(), reals(K))  # noqa: E731
BITS = lambda: (inputs(), bits())  # noqa: E731
MAPS = lambda: (inputs(2, 6, 6), classes(K, 6, 6))  # noqa: E731
TEXT = lambda: (classes(V, T), classes(V, T))  # noqa: E731
MASKED = lambda: (  # noqa: E731
    classes(V, T),
    classes(V, T),
    (torch.arange(T) <= classes(T)[:, None]).float(),
)
GRID = lambda: (inputs(2, 3), classes())  # noqa: E731
PIXELS = lambda: (torch.randint(0, 256, (N, 6)).to(torch.uint8), classes())  # noqa: E731
BOTH = lambda: (inputs(), classes(), reals())  # noqa: E731


bce, ce, mse = F.binary_cross_entropy_with_logits, F.cross_entropy, F.mse_loss
nll = F.gaussian_nll_loss


def rows(out, y):
    return ce(out, y, reduction="none")


def in_a_loop(out, y, t):
    loss = 0.0
    for k in range(K):
        loss = loss + mse(out[0][:, k], (y == k).float())
    loss += 0.1 * mse(out[1][:, 0], t)
    return loss / (K + 1)


WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])
FROZEN = nn.Linear(6, K).requires_grad_(False).eval()


# classes ------------------------------------------------------------------------------------------

add("cross entropy", lambda out, y: ce(out, y))
add("cross entropy, sum over len", lambda out, y: ce(out, y, reduction="sum") / len(y))
add("cross entropy, sum", lambda out, y: ce(out, y, reduction="sum"), loss_reduction="sum")
add("cross entropy, none then mean", lambda out, y: rows(out, y).mean())
add("cross entropy, number first", lambda out, y: torch.mul(2.0, ce(out, y)))
add("cross entropy, added to zeros", lambda out, y: torch.zeros(()) + ce(out, y))
add("cross entropy, class weights", lambda out, y: (WEIGHT[y] * rows(out, y)).mean())
add(
    "a disabled scaler", lambda out, y: torch.amp.GradScaler("cpu", enabled=False).scale(ce(out, y))
)
add("log-probability by arange", lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean())
add("by names", lambda out, y: F.nll_loss(torch.log_softmax(input=out, dim=1), target=y))
add("Brier score", lambda out, y: ((out.softmax(-1) - F.one_hot(y, K)) ** 2).sum(-1).mean())
add("bce, pos_weight", lambda out, y: bce(out[:, 0], y, pos_weight=torch.tensor(3.0)), 1, BITS)

# real targets -------------------------------------------------------------------------------------

add("mse", lambda out, t: mse(out, t), K, REALS_K)
add("mse, sum over numel", lambda out, t: mse(out, t, reduction="sum") / t.numel(), K, REALS_K)
add("gaussian nll", lambda out, t: nll(out[:, 0], t, F.softplus(out[:, 1])), 2, REALS)
add("gaussian nll, one variance", lambda out, t: nll(out, t, 0.7), K, REALS_K)
add(
    "gaussian nll, a variance for each record",
    lambda out, t: nll(out, t, out[:, 0].detach().square() + 0.1),
    K,
    REALS_K,
)

# distributions ------------------------------------------------------------------------------------

add("Normal", lambda out, t: -Normal(out[:, 0], out[:, 1].exp()).log_prob(t).mean(), 2, REALS)
add("Categorical", lambda out, y: -Categorical(logits=out).log_prob(y).mean())
# images, texts, series ----------------------------------------------------------------------------

add("segmentation", lambda out, y: ce(out, y), data=MAPS, model=IMAGES)
add(
    "language model, two terms",
    lambda out, y: ce(out.view(-1, V), y.view(-1)) + 1e-3 * out.logsumexp(-1).pow(2).mean(),
    data=TEXT,
    model=words,
)
add(
    "language model, kl of all words",
    lambda out, y: F.kl_div(
        out.flatten(0, 1).log_softmax(-1), F.one_hot(y.flatten(), V) * 1.0, reduction="batchmean"
    ),
    data=TEXT,
    model=words,
)
add(
    "mask of tokens, mean per record",
    lambda out, y, m: (
        (ce(out.transpose(1, 2), y, reduction="none") * m).sum(1) / m.sum(1).clamp(min=1)
    ).mean(),
    data=MASKED,
    model=words,
)
add(
    "last token's class",
    lambda out, y, m: ce(out[torch.arange(len(out)), m.sum(1).long() - 1], y[:, 0]),
    data=MASKED,
    model=words,
)

# several heads, models of two parts ---------------------------------------------------------------

add(
    "two heads, dictionary",
    lambda out, y, t: ce(out["classes"], y) + F.huber_loss(out["value"].squeeze(1), t),
    data=BOTH,
    model=lambda: two_heads(lambda a, b: {"classes": a, "value": b}),
)
add("losses added in a loop", in_a_loop, data=BOTH, model=two_heads)
add(
    "elbo",
    lambda net, x: (
        lambda r, m, v: ((r - x).pow(2).sum(1) - 0.5 * (1 + v - m.pow(2) - v.exp()).sum(1)).mean()
    )(*net(x)),
    data=lambda: (inputs(),),
    model=vae,
)
add("distillation, teacher without grad", lambda net, x, y: mse(net(x), FROZEN(x)))
add(
    "vector quantisation",
    lambda out, y: (lambda q: mse(out, q.detach()) + ce(out + (q - out).detach(), y))(
        torch.eye(K)[out.detach().argmax(1)]
    ),
)
add(
    "preference, Bradley and Terry",
    lambda net, pair: (lambda s: -F.logsigmoid(s[:, 0] - s[:, 1]).mean())(net(pair).squeeze(-1)),
    1,
    lambda: (inputs(2, 6),),
)

# inputs -------------------------------------------------------------------------------------------

add("x.view(len(x), -1)", lambda net, x, y: ce(net(x.view(len(x), -1)), y), data=GRID)
add(
    "channels last",
    lambda net, x, y: ce(net(x.to("cpu", memory_format=torch.channels_last)), y),
    data=MAPS,
    model=IMAGES,
)
add("x.float() / 255", lambda net, x, y: ce(net(x.float() / 255), y), data=PIXELS)
add(
    "ones appended",
    lambda net, x, y: ce(net(torch.cat([x[:, :5], torch.ones(len(x), 1)], dim=1)), y),
)
add("strides", lambda net, x, y: ce(net(x if x.stride(-1) == 1 else x.contiguous()), y))
add("noise added", lambda net, x, y: ce(net(x + 0.1 * torch.randn_like(x)), y), draws=True)

# losses of the model's own, and some of one record alone ------------------------------------------


def with_loss():
    """Computes its own loss, as models of transformers do."""

    def function(net, x, labels):
        out = net.layer(x)
        return {"loss": ce(out, labels), "logits": out}

    return Of(function, layer=net_of(K)())


def penalised():
    def function(net, x):
        out = net.layer(x)
        return out, 0.1 * out.square().sum()

    return Of(function, layer=net_of(K)())


add("all of it in the model", lambda net, x, y: net(x, y)["loss"], model=with_loss)
add(
    "a part of it in the model",
    lambda net, x, y: (lambda out, more: ce(out, y) + 0.5 * more)(*net(x)),
    model=penalised,
)
