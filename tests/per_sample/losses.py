"""Usual losses in the plain form ``loss(net(x), *targets).backward()``: each runs as it is."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Dirichlet,
    Gamma,
    Laplace,
    MixtureSameFamily,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions.transforms import AffineTransform, SigmoidTransform

N, K, T, V = 8, 4, 5, 7  # records, classes, positions, words
Maker = Callable[[], Any]


class Usual(NamedTuple):
    """A loss of a training loop: ``loss(net, *batch)``."""

    loss: Callable[..., Tensor]
    model: Maker
    data: Maker
    loss_reduction: str
    draws: bool  # random numbers of its own, so that two runs differ


USUAL: dict[str, Usual] = {}


def usual(
    name: str,
    loss: Callable[..., Any],
    width: int = K,
    data: Maker | None = None,
    *,
    model: Maker | None = None,
    loss_reduction: str = "mean",
    draws: bool = False,
) -> None:
    """Enter ``loss(out, *targets)``, or ``loss(net, *batch)``."""
    of_loop = loss
    if next(iter(inspect.signature(loss).parameters)) != "net":

        def of_loop(net: nn.Module, x: Tensor, *targets: Tensor) -> Tensor:
            return loss(net(x), *targets)

    USUAL[name] = Usual(of_loop, model or net_of(width), data or LABELS, loss_reduction, draws)


def inputs(*shape: int) -> Tensor:
    return torch.randn(N, *(shape or (6,)))


def classes(k: int = K, *shape: int) -> Tensor:
    return torch.randint(0, k, (N, *shape))


def reals(*shape: int) -> Tensor:
    return torch.randn(N, *shape)


def units(*shape: int) -> Tensor:
    """Numbers between .1 and .9."""
    return 0.1 + 0.8 * torch.rand(N, *shape)


def bits(*shape: int) -> Tensor:
    return units(*shape).round()


def bytes_of_pixels() -> Tensor:
    return torch.randint(0, 256, (N, 6)).to(torch.uint8)


def net_of(k: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, k))


class Images(nn.Module):
    """(B, 2, 6, 6) to (B, k, 6, 6)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Words(nn.Module):
    """(B, T) to (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(V, 6), nn.Linear(6, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.e(x)).cumsum(1))


class Two(nn.Module):
    """Two heads."""

    def __init__(self, a: int = K, b: int = 1) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, a), nn.Linear(8, b)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)


class Named(Two):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return dict(zip(("classes", "value"), super().forward(x), strict=True))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + 0 * log_var), mean, log_var


LABELS: Maker = lambda: (inputs(), classes())  # noqa: E731
REALS: Maker = lambda: (inputs(), reals())  # noqa: E731
REALS_K: Maker = lambda: (inputs(), reals(K))  # noqa: E731
BITS: Maker = lambda: (inputs(), bits())  # noqa: E731
BITS_K: Maker = lambda: (inputs(), bits(K))  # noqa: E731
UNITS: Maker = lambda: (inputs(), units())  # noqa: E731
COUNTS: Maker = lambda: (inputs(), classes(6).float())  # noqa: E731
MAPS: Maker = lambda: (inputs(2, 6, 6), classes(K, 6, 6))  # noqa: E731
TEXT: Maker = lambda: (classes(V, T), classes(V, T))  # noqa: E731
MASKED: Maker = lambda: (  # noqa: E731
    classes(V, T),
    classes(V, T),
    (torch.arange(T) <= classes(T)[:, None]).float(),
)
BOTH: Maker = lambda: (inputs(), classes(), reals())  # noqa: E731


def in_a_loop(out, y, t):
    loss = 0.0
    for k in range(K):
        loss = loss + F.mse_loss(out[0][:, k], (y == k).float())
    loss += 0.1 * F.mse_loss(out[1][:, 0], t)
    return loss / (K + 1)


def by_name(out, y, t):
    losses = {
        "class": F.cross_entropy(out["classes"], y),
        "value": F.mse_loss(out["value"][:, 0], t),
    }
    weights = {"class": 1.0, "value": 0.2}
    return sum(weights[k] * v for k, v in losses.items())


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.ce = nn.CrossEntropyLoss(reduction="none")

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (self.weight[y] * self.ce(out, y)).mean()


FROZEN = nn.Linear(6, K).requires_grad_(False).eval()


# classes ------------------------------------------------------------------------------------------

usual("cross entropy", lambda out, y: F.cross_entropy(out, y))
usual(
    "cross entropy, sum over len", lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y)
)
usual(
    "cross entropy, sum",
    lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    loss_reduction="sum",
)
usual(
    "cross entropy, none then mean", lambda out, y: F.cross_entropy(out, y, reduction="none").mean()
)
usual("label smoothing", lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1))
usual(
    "label smoothing by hand",
    lambda out, y: (
        0.9 * F.nll_loss(out.log_softmax(1), y) - 0.1 * out.log_softmax(1).mean(1).mean()
    ),
)
usual(
    "soft targets",
    lambda out, y: F.cross_entropy(out, y),
    data=lambda: (inputs(), reals(K).softmax(1)),
)
usual("nll of log_softmax", lambda out, y: F.nll_loss(F.log_softmax(out, dim=1), y))
usual(
    "log-probability by arange", lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean()
)
usual("log-probability by range", lambda out, y: -out.log_softmax(1)[range(len(y)), y].mean())
usual(
    "log-probability by gather",
    lambda out, y: -out.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1).mean(),
)
usual(
    "log-probability by take_along_dim",
    lambda out, y: -torch.take_along_dim(out.log_softmax(1), y[:, None], dim=1).mean(),
)
usual("Brier score", lambda out, y: ((out.softmax(-1) - F.one_hot(y, K)) ** 2).sum(-1).mean())
usual("multi margin", lambda out, y: F.multi_margin_loss(out, y))
usual(
    "focal",
    lambda out, y: (lambda ce: ((1 - torch.exp(-ce)) ** 2 * ce).mean())(
        F.cross_entropy(out, y, reduction="none")
    ),
)
usual(
    "class weights by indexing",
    lambda out, y: (
        torch.tensor([1.0, 2.0, 3.0, 4.0])[y] * F.cross_entropy(out, y, reduction="none")
    ).mean(),
)
usual(
    "class weights and sum",
    lambda out, y: (
        F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="sum") / len(y)
    ),
)
usual(
    "logit adjustment by public shares",
    lambda out, y: F.cross_entropy(out + torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), y),
)
usual(
    "generalised cross entropy",
    lambda out, y: ((1 - out.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean(),
)
usual(
    "labels squeezed",
    lambda out, y: F.cross_entropy(out, y.squeeze(1)),
    data=lambda: (inputs(), classes()[:, None]),
)
usual(
    "labels by argmax of one-hot",
    lambda out, y: F.cross_entropy(out, y.argmax(1)),
    data=lambda: (inputs(), F.one_hot(classes(), K)),
)
usual("labels moved by to()", lambda out, y: F.cross_entropy(out.to("cpu"), y.to(out.device)))
usual(
    "ordinal by cumulative links",
    lambda out, y: F.binary_cross_entropy_with_logits(
        out[:, : K - 1], (y[:, None] > torch.arange(K - 1)).float()
    ),
)
usual(
    "two targets",
    lambda out, y, t: F.cross_entropy(out[:, :3], y) + F.mse_loss(out[:, 3], t),
    data=lambda: (inputs(), classes(3), reals()),
)
usual(
    "bce, squeeze(1)", lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y), 1, BITS
)
usual("bce, flatten", lambda out, y: F.binary_cross_entropy_with_logits(out.flatten(), y), 1, BITS)
usual("bce, y.unsqueeze(1)", lambda out, y: nn.BCEWithLogitsLoss()(out, y.unsqueeze(1)), 1, BITS)
usual("bce, y.view_as", lambda out, y: nn.BCEWithLogitsLoss()(out, y.view_as(out)), 1, BITS)
usual(
    "bce of a sigmoid", lambda out, y: F.binary_cross_entropy(torch.sigmoid(out)[:, 0], y), 1, BITS
)
usual(
    "bce, pos_weight",
    lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y, pos_weight=torch.tensor(3.0)),
    1,
    BITS,
)
usual("bce, many labels", lambda out, y: F.binary_cross_entropy_with_logits(out, y), K, BITS_K)
usual(
    "bce, weights per class",
    lambda out, y: F.binary_cross_entropy_with_logits(
        out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])
    ),
    K,
    BITS_K,
)
usual("multilabel soft margin", lambda out, y: F.multilabel_soft_margin_loss(out, y), K, BITS_K)
usual("hinge embedding", lambda out, y: F.hinge_embedding_loss(out[:, 0], 2 * y - 1), 1, BITS)
usual(
    "asymmetric many labels",
    lambda out, y: (
        -(y * F.logsigmoid(out) + (1 - y) * torch.sigmoid(out) ** 2 * F.logsigmoid(-out))
        .sum(1)
        .mean()
    ),
    K,
    BITS_K,
)

# real targets -------------------------------------------------------------------------------------

usual("mse", lambda out, t: F.mse_loss(out, t), K, REALS_K)
usual("mse by hand", lambda out, t: ((out - t) ** 2).mean(), K, REALS_K)
usual("l1", lambda out, t: F.l1_loss(out, t), K, REALS_K)
usual("smooth l1", lambda out, t: F.smooth_l1_loss(out, t, beta=0.5), K, REALS_K)
usual("huber", lambda out, t: F.huber_loss(out, t, delta=0.3), K, REALS_K)
usual("euclidean distance", lambda out, t: torch.linalg.norm(out - t, dim=1).mean(), K, REALS_K)
usual("cosine similarity", lambda out, t: (1 - F.cosine_similarity(out, t)).mean(), K, REALS_K)
usual(
    "cosine embedding, y of targets",
    lambda out, t: F.cosine_embedding_loss(out, t, torch.ones_like(t[:, 0])),
    K,
    REALS_K,
)
usual(
    "gaussian nll",
    lambda out, t: F.gaussian_nll_loss(out[:, 0], t, F.softplus(out[:, 1])),
    2,
    REALS,
)
usual(
    "heteroscedastic",
    lambda out, t: (lambda m, s: (0.5 * ((t[:, None] - m) ** 2 / s.exp() + s)).mean())(
        *out.chunk(2, dim=1)
    ),
    2,
    REALS,
)
usual(
    "quantile, three",
    lambda out, t: (
        torch.stack(
            [
                torch.maximum(q * (t - out[:, j]), (q - 1) * (t - out[:, j]))
                for j, q in enumerate((0.1, 0.5, 0.9))
            ]
        )
        .sum(0)
        .mean()
    ),
    3,
    REALS,
)
usual(
    "expectile",
    lambda out, t: (torch.where(t > out[:, 0], 0.8, 0.2) * (t - out[:, 0]) ** 2).mean(),
    1,
    REALS,
)
usual("poisson nll", lambda out, y: F.poisson_nll_loss(out[:, 0], y), 1, COUNTS)
usual(
    "kl, batchmean",
    lambda out, t: F.kl_div(out.log_softmax(1), t.softmax(1), reduction="batchmean"),
    K,
    REALS_K,
)
usual(
    "masked where",
    lambda out, t: torch.where(t > 0, (out - t) ** 2, torch.zeros(())).sum(1).mean(),
    K,
    REALS_K,
)
usual(
    "missing targets by nan",
    lambda out, t: torch.where(t.isnan(), 0.0, (out - t.nan_to_num()) ** 2).sum(1).mean(),
    K,
    lambda: (inputs(), torch.where(reals(K) > 1, float("nan"), reals(K))),
)

# distributions ------------------------------------------------------------------------------------

usual("Normal", lambda out, t: -Normal(out[:, 0], out[:, 1].exp()).log_prob(t).mean(), 2, REALS)
usual("Normal, fixed scale", lambda out, t: -Normal(out[:, 0], 0.5).log_prob(t).mean(), 1, REALS)
usual("Laplace", lambda out, t: -Laplace(out[:, 0], out[:, 1].exp()).log_prob(t).mean(), 2, REALS)
usual(
    "StudentT",
    lambda out, t: -StudentT(4.0, out[:, 0], out[:, 1].exp()).log_prob(t).mean(),
    2,
    REALS,
)
usual("Categorical", lambda out, y: -Categorical(logits=out).log_prob(y).mean())
usual(
    "Categorical with entropy",
    lambda out, y: (lambda d: (-d.log_prob(y) - 0.01 * d.entropy()).mean())(
        Categorical(logits=out)
    ),
)
usual("Bernoulli", lambda out, y: -Bernoulli(logits=out[:, 0]).log_prob(y).mean(), 1, BITS)
usual("Poisson", lambda out, y: -Poisson(out[:, 0].exp()).log_prob(y).mean(), 1, COUNTS)
usual(
    "NegativeBinomial",
    lambda out, y: -NegativeBinomial(out[:, 0].exp(), logits=out[:, 1]).log_prob(y).mean(),
    2,
    COUNTS,
)
usual("Binomial", lambda out, y: -Binomial(6, logits=out[:, 0]).log_prob(y).mean(), 1, COUNTS)
usual("Beta", lambda out, t: -Beta(out[:, 0].exp(), out[:, 1].exp()).log_prob(t).mean(), 2, UNITS)
usual("Gamma", lambda out, t: -Gamma(out[:, 0].exp(), out[:, 1].exp()).log_prob(t).mean(), 2, UNITS)
usual(
    "Dirichlet",
    lambda out, t: -Dirichlet(out.exp() + 0.1).log_prob(t.softmax(1)).mean(),
    K,
    REALS_K,
)
usual(
    "MultivariateNormal by scale_tril",
    lambda out, t: (
        -MultivariateNormal(out[:, :2], scale_tril=torch.diag_embed(out[:, 2:].exp()))
        .log_prob(t)
        .mean()
    ),
    4,
    lambda: (inputs(), reals(2)),
)
usual(
    "mixture of Normals",
    lambda out, t: (
        -MixtureSameFamily(Categorical(logits=out[:, :3]), Normal(out[:, 3:6], out[:, 6:].exp()))
        .log_prob(t)
        .mean()
    ),
    9,
    REALS,
)
usual(
    "TransformedDistribution",
    lambda out, t: (
        -TransformedDistribution(
            Normal(out[:, 0], 1.0), [SigmoidTransform(), AffineTransform(0.0, 1.0)]
        )
        .log_prob(t)
        .mean()
    ),
    1,
    UNITS,
)
usual(
    "kl_divergence to a prior",
    lambda out, t: (
        -Normal(out[:, 0], 1.0).log_prob(t)
        + 0.1 * kl_divergence(Normal(out[:, 1], out[:, 2].exp()), Normal(0.0, 1.0))
    ).mean(),
    3,
    REALS,
)

# images, texts, series ----------------------------------------------------------------------------

usual("segmentation", lambda out, y: F.cross_entropy(out, y), data=MAPS, model=lambda: Images(K))
usual(
    "dice per record",
    lambda out, y: (
        lambda p, g: (
            1 - (2 * (p * g).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + g.sum((1, 2, 3)) + 1)
        ).mean()
    )(out.sigmoid(), y),
    data=lambda: (inputs(2, 6, 6), bits(1, 6, 6)),
    model=lambda: Images(1),
)
usual(
    "reconstruction",
    lambda net, x: F.mse_loss(net(x), x),
    data=lambda: (inputs(2, 6, 6),),
    model=lambda: Images(2),
)
usual(
    "spectral loss",
    lambda out, x: (torch.fft.rfft2(out) - torch.fft.rfft2(x)).abs().mean(),
    data=lambda: (inputs(2, 6, 6), reals(2, 6, 6)),
    model=lambda: Images(2),
)
usual(
    "language model, view",
    lambda out, y: F.cross_entropy(out.view(-1, V), y.view(-1)),
    data=TEXT,
    model=Words,
)
usual(
    "language model, transposed",
    lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    data=TEXT,
    model=Words,
)
usual(
    "language model, flatten(0, 1)",
    lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    data=TEXT,
    model=Words,
)
usual(
    "language model, shifted, contiguous",
    lambda net, x, y: (
        lambda logits: F.cross_entropy(
            logits[..., :-1, :].contiguous().view(-1, V), x[..., 1:].contiguous().view(-1)
        )
    )(net(x)),
    data=TEXT,
    model=Words,
)
usual(
    "mask of tokens, mean per record",
    lambda out, y, m: (
        (F.cross_entropy(out.transpose(1, 2), y, reduction="none") * m).sum(1)
        / m.sum(1).clamp(min=1)
    ).mean(),
    data=MASKED,
    model=Words,
)
usual(
    "mask of tokens from the input",
    lambda net, x, y: (F.cross_entropy(net(x).mT, y, reduction="none") * (x != 0)).sum(1).mean(),
    data=TEXT,
    model=Words,
)
usual(
    "last token's class",
    lambda out, y, m: F.cross_entropy(out[torch.arange(len(out)), m.sum(1).long() - 1], y[:, 0]),
    data=MASKED,
    model=Words,
)
usual(
    "ctc, lengths of the batch",
    lambda out, y, n, k: F.ctc_loss(
        out.log_softmax(2).permute(1, 0, 2), y, n, k, reduction="none", zero_infinity=True
    ).mean(),
    data=lambda: (classes(V, T), classes(V - 1, 2) + 1, torch.full((N,), T), classes(2) + 1),
    model=Words,
)
usual(
    "prototypes, cross entropy of distances",
    lambda out, y: F.cross_entropy(-(out[:, None, :] - torch.eye(K)[None]).pow(2).sum(-1), y),
)
usual(
    "triplet within a record",
    lambda out, y: F.triplet_margin_loss(out[:, :4], out[:, 4:8], out[:, 8:]),
    12,
)
usual(
    "contrast within a record",
    lambda out, y: F.cross_entropy(
        torch.einsum("bd,bkd->bk", out[:, :3], out[:, 3:].view(-1, 3, 3)), torch.zeros_like(y)
    ),
    12,
)
usual(
    "ranking within a record",
    lambda out, t: F.relu(
        1 - (out[:, :, None] - out[:, None, :]) * (t[:, :, None] - t[:, None, :]).sign()
    ).mean(),
    K,
    REALS_K,
)

# several heads, models of two parts ---------------------------------------------------------------

usual(
    "two heads",
    lambda out, y, t: F.cross_entropy(out[0], y) + 0.5 * F.mse_loss(out[1][:, 0], t),
    data=BOTH,
    model=Two,
)
usual(
    "two heads, dictionary",
    lambda out, y, t: F.cross_entropy(out["classes"], y) + F.huber_loss(out["value"].squeeze(1), t),
    data=BOTH,
    model=Named,
)
usual(
    "stack of losses",
    lambda out, y, t: torch.stack([F.cross_entropy(out[0], y), F.mse_loss(out[1][:, 0], t)]).sum(),
    data=BOTH,
    model=Two,
)
usual("losses added in a loop", in_a_loop, data=BOTH, model=Two)
usual("dictionary of losses", by_name, data=BOTH, model=Named)
usual("a criterion of ours", lambda out, y: Criterion()(out, y))
usual(
    "elbo",
    lambda net, x: (
        lambda r, m, v: ((r - x).pow(2).sum(1) - 0.5 * (1 + v - m.pow(2) - v.exp()).sum(1)).mean()
    )(*net(x)),
    data=lambda: (inputs(),),
    model=VAE,
)
usual(
    "elbo, sums",
    lambda net, x: (
        lambda r, m, v: (
            F.mse_loss(r, x, reduction="sum") - 0.5 * torch.sum(1 + v - m.pow(2) - v.exp())
        )
    )(*net(x)),
    data=lambda: (inputs(),),
    model=VAE,
    loss_reduction="sum",
)
usual(
    "elbo by distributions",
    lambda net, x: (
        lambda r, m, v: (
            -Normal(r, 1.0).log_prob(x).sum(-1)
            + kl_divergence(
                Normal(m, (0.5 * v).exp()), Normal(torch.zeros_like(m), torch.ones_like(v))
            ).sum(-1)
        ).mean()
    )(*net(x)),
    data=lambda: (inputs(),),
    model=VAE,
)
usual("distillation, teacher without grad", lambda net, x, y: F.mse_loss(net(x), FROZEN(x)))
usual(
    "straight-through",
    lambda out, y: (
        lambda p: F.mse_loss(
            p + (F.one_hot(p.argmax(1), K).float() - p).detach(), F.one_hot(y, K).float()
        )
    )(out.softmax(1)),
)
usual(
    "vector quantisation",
    lambda out, y: (
        lambda q: F.mse_loss(out, q.detach()) + F.cross_entropy(out + (q - out).detach(), y)
    )(torch.eye(K)[out.detach().argmax(1)]),
)
usual(
    "preference, Bradley and Terry",
    lambda net, pair: (lambda s: -F.logsigmoid(s[:, 0] - s[:, 1]).mean())(net(pair).squeeze(-1)),
    1,
    lambda: (inputs(2, 6),),
)

# inputs -------------------------------------------------------------------------------------------

usual(
    "x.view(len(x), -1)",
    lambda net, x, y: F.cross_entropy(net(x.view(len(x), -1)), y),
    data=lambda: (inputs(2, 3), classes()),
)
usual(
    "x.float() / 255",
    lambda net, x, y: F.cross_entropy(net(x.float() / 255), y),
    data=lambda: (bytes_of_pixels(), classes()),
)
usual(
    "normalised by constants",
    lambda net, x, y: F.cross_entropy(net((x - torch.arange(6.0)) / torch.full((6,), 2.0)), y),
)
usual(
    "x.to(device, dtype)",
    lambda net, x, y: F.cross_entropy(
        net(x.to("cpu", torch.float32, non_blocking=True)), y.to("cpu")
    ),
)
usual(
    "features appended",
    lambda net, x, y: F.cross_entropy(net(torch.cat([x[:, :3], x[:, :3] ** 2], dim=1)), y),
)
usual(
    "ones appended",
    lambda net, x, y: F.cross_entropy(net(torch.cat([x[:, :5], torch.ones(len(x), 1)], dim=1)), y),
)
usual(
    "ones_like appended",
    lambda net, x, y: F.cross_entropy(
        net(torch.cat([x[:, :5], torch.ones_like(x[:, :1])], dim=1)), y
    ),
)
usual(
    "noise added",
    lambda net, x, y: F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), y),
    draws=True,
)
usual("input dropout", lambda net, x, y: F.cross_entropy(net(F.dropout(x, 0.2)), y), draws=True)
usual(
    "standardised per record",
    lambda net, x, y: F.cross_entropy(
        net((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)), y
    ),
)
usual(
    "rsample of a distribution",
    lambda out, t: F.mse_loss(Normal(out[:, 0], out[:, 1].exp()).rsample(), t),
    2,
    REALS,
    draws=True,
)

# numbers ------------------------------------------------------------------------------------------

usual("accumulation: loss / 4", lambda out, y: F.cross_entropy(out, y) / 4)
usual("negative of a log-likelihood", lambda out, y: -1 * (-F.cross_entropy(out, y)))
usual("mean of a mean", lambda out, y: F.cross_entropy(out, y).mean())
