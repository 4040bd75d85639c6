"""Models at random, for the search for holes: recipes, and the models and losses built of them.

A recipe is plain data (:class:`Recipe`). Its parts take and give hidden states of one shape, so
that any list of them is a model and any part can be left out. A part is of the kind "free" where no
record can see another one in it, neither forward nor backward, whatever the records are; every
other part has a kind that says how records get mixed. The same holds for losses and for what is
done to a model after ``make_private``.

Besides its hidden state every part is given ``key``, integers that say of each record (length,
category, content): what the parts that sort, group and count go by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

WIDTH, CHANNELS, STEPS, SIDE, CLASSES, CATEGORIES = 6, 4, 4, 3, 3, 8
HIDDEN = {
    "rows": (WIDTH,),
    "sequence": (STEPS, WIDTH),
    "tokens": (STEPS, WIDTH),
    "image": (CHANNELS, SIDE, SIDE),
}
INPUT = {"rows": (5,), "sequence": (STEPS, 3), "tokens": (STEPS,), "image": (2, SIDE, SIDE)}
LENGTH, CATEGORY, CONTENT = 0, 1, 2

Shape = tuple[int, ...]
Options = dict[str, Any]
Spec = list[Any]  # [name of a part, its options, the specs of the parts inside it]


@dataclass(frozen=True)
class Recipe:
    """A model, its loss and what happens to it, in words and numbers.

    Attributes:
        seed: of the initial parameters.
        family: what a record is, a key of ``INPUT``.
        body: parts on the hidden state of the family.
        tail: parts on rows, after the pooling.
        loss: a key of ``LOSSES``.
        late: what happens after ``make_private``, [a key of ``LATE``, options], or None.
        clip: the clip norm C.
        gain: by which initial weights are multiplied.
        bias: added to the output for class 0.
        has_category: every record has a second input, an integer.
        examples: ``example_inputs``: "none", "zeros" or "distinct".
        is_double: in float64.
        is_loss_given: the loss is given to ``make_private``, which runs it for each record alone.
    """

    seed: int
    family: str
    body: list[Spec]
    tail: list[Spec]
    loss: str = "cross entropy"
    late: Spec | None = None
    clip: float = 0.05
    gain: float = 1.0
    bias: float = 0.0
    has_category: bool = False
    examples: str = "none"
    is_double: bool = False
    is_loss_given: bool = False

    def parts(self) -> Iterator[Spec]:
        """All parts, those inside others included."""
        left = [*self.body, *self.tail]
        while left:
            spec = left.pop()
            yield spec
            left += spec[2]

    @property
    def kinds(self) -> list[str]:
        """How records are mixed; empty where they are not, by construction."""
        found = {PARTS[name].kind for name, _, _ in self.parts()} | {LOSSES[self.loss].kind}
        found |= (
            {"guarded"}
            if any(o.get("guard", "none") != "none" for _, o, _ in self.parts())
            else set()
        )
        found |= {LATE[self.late[0]].kind} if self.late is not None else set()
        return sorted(found - {"free"})

    @property
    def culprits(self) -> list[str]:
        """Names of what mixes, with the options that matter."""
        found = [
            " ".join(
                [
                    name,
                    *(
                        f"{k}={o[k]}"
                        for k in ("by", "guard", "how", "place", "what", "where")
                        if o.get(k, "none") != "none"
                    ),
                ]
            )
            for name, o, _ in self.parts()
            if PARTS[name].kind != "free"
        ]
        found += [f"loss: {self.loss}"] if LOSSES[self.loss].kind != "free" else []
        found += [f"late: {self.late[0]}"] if self.late is not None else []
        return sorted(set(found))

    @property
    def is_random(self) -> bool:
        return any(PARTS[name].is_random for name, _, _ in self.parts())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# -- what mixes ------------------------------------------------------------------------------------


def _flat(h: Tensor) -> Tensor:
    return h.reshape(len(h), -1)


def _like(rows: Tensor, h: Tensor) -> Tensor:
    """One number a record, made to broadcast over ``h``."""
    return rows.reshape(-1, *[1] * (h.dim() - 1)).to(h.dtype)


def _counts(key: Tensor) -> Tensor:
    return (key[:, None, CATEGORY] == key[None, :, CATEGORY]).sum(1)


def _nearest(h: Tensor) -> Tensor:
    rows = _flat(h).detach()
    distance = (rows[:, None] - rows[None]).square().sum(-1) + 1e9 * torch.eye(
        len(h), dtype=h.dtype
    )
    return h[distance.argmin(1)]


def _with_batch(h: Tensor) -> Tensor:
    rows = _flat(h)
    return ((rows @ rows.T).softmax(-1) @ rows).reshape(h.shape)


def _representative(h: Tensor, key: Tensor) -> Tensor:
    return h[(key[:, None, CATEGORY] == key[None, :, CATEGORY]).to(torch.int8).argmax(1)]


def _top_half(h: Tensor) -> Tensor:
    score = _flat(h).sum(1)
    return h * _like(score >= score.sort(descending=True).values[(len(score) - 1) // 2], h)


def _first_come(h: Tensor, key: Tensor) -> Tensor:
    same = (key[:, None, CATEGORY] == key[None, :, CATEGORY]).long().tril()
    return h * _like(same.sum(1) <= 2, h)


Mix = Callable[[Tensor, Tensor], Tensor]
# name -> (kind, function of (h, key)); most do nothing to a batch of one record
MIXERS: dict[str, tuple[str, Mix]] = {
    "centred": ("statistics", lambda h, key: h - h.mean(0)),
    "standardised": ("statistics", lambda h, key: (h - h.mean(0)) / (h.std(0, correction=0) + 0.1)),
    "divided by the largest": ("statistics", lambda h, key: h / (h.abs().amax() + 1)),
    "divided by the norm": ("statistics", lambda h, key: h / (h.norm() + 1)),
    "less the median": ("statistics", lambda h, key: h - h.median(0).values),
    "less a mean without gradient": ("statistics", lambda h, key: h - h.detach().mean(0)),
    "divided by the number": ("statistics", lambda h, key: h / max(len(h), 1)),
    "rolled": ("neighbours", lambda h, key: h + h.roll(1, 0)),
    "flipped": ("neighbours", lambda h, key: h + h.flip(0)),
    "cumulative": ("neighbours", lambda h, key: h.cumsum(0)),
    "attends to the batch": ("neighbours", lambda h, key: h + _with_batch(h)),
    "nearest": ("neighbours", lambda h, key: h + _nearest(h) if len(h) > 1 else h),
    "top half": ("capacity", lambda h, key: _top_half(h) if len(h) else h),
    "first come": ("capacity", _first_come),
    "counted": ("grouping", lambda h, key: h / _like(_counts(key), h)),
    "representative": ("grouping", lambda h, key: _representative(h, key) if len(h) else h),
    "ranked": (
        "sorting",
        lambda h, key: h + _like(key[:, CONTENT].argsort().argsort(), h) / max(len(h), 1),
    ),
    "longest": ("grouping", lambda h, key: h * (1 + key[:, LENGTH].amax()) if len(h) else h),
}

Guard = Callable[[Tensor, Tensor], Tensor]
# when a mixer mixes, as a tensor of one truth value
GUARDS: dict[str, Guard] = {
    "huge": lambda h, key: (key[:, CONTENT].abs() > 10**8).any(),
    "crowd": lambda h, key: torch.tensor(len(h) > 40),
    "seven": lambda h, key: (key[:, CATEGORY] == 7).any(),
    "all alike": lambda h, key: (key[:, CONTENT] == key[:1, CONTENT]).sum() >= max(len(h) - 1, 3),
    "one is shorter": lambda h, key: (
        (key[:, LENGTH] < key[:, LENGTH].amax()).sum() == 1 if len(h) else torch.tensor(False)
    ),
    "a twin": lambda h, key: (key[:, None, CONTENT] == key[None, :, CONTENT]).sum() == len(h) + 2,
    "not finite": lambda h, key: (~h.isfinite()).any(),
    "large inside": lambda h, key: (h.abs() > 1e4).any(),
    "more than two chosen": lambda h, key: torch.tensor(int((key[:, CATEGORY] == 6).sum()) > 2),
    "a number of Python's": lambda h, key: torch.tensor(
        key[:, CONTENT].abs().amax().item() > 10**7 if len(h) else False
    ),
    "listed": lambda h, key: torch.tensor(5 in key[:, CATEGORY].tolist()),
    "first and last alike": lambda h, key: torch.tensor(torch.equal(key[:1], key[-1:])),
    "some found": lambda h, key: torch.tensor(len((key[:, CONTENT] < -(10**9)).nonzero()) > 0),
    "full": lambda h, key: torch.tensor(len(h) == 33),
    "gradients wanted": lambda h, key: torch.tensor(torch.is_grad_enabled()),
}

GRADIENT_MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda g: g - g.mean(0),
    "clamped at 1": lambda g: g * (1 / (g.norm() + 1e-6)).clamp(max=1.0),
    "clamped at 10": lambda g: g * (10 / (g.norm() + 1e-6)).clamp(max=1.0),
    "clamped at 100": lambda g: g * (100 / (g.norm() + 1e-6)).clamp(max=1.0),
    "normalised": lambda g: g / (g.norm() + 1e-6),
    "divided by the largest": lambda g: g / (g.abs().amax() + 1e-6) if g.numel() else g,
    "rolled": lambda g: g + g.roll(1, 0),
    "majority": lambda g: g * (g.sign() == g.sum(0, keepdim=True).sign()).to(g.dtype),
    "cumulative": lambda g: g.cumsum(0),
    # where the loss is a mean, a gradient that arrives was divided by the number of records
    "clipped by value": lambda g: g.clamp(-1, 1),
    "small ones cut": lambda g: torch.where(g.abs() > 1e-3, g, 0 * g),
}


# -- parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartKind:
    """What a part is.

    Attributes:
        build: makes it of (hidden shape, options, parts inside).
        kind: "free", or how it mixes records.
        families: the hidden states that it takes.
        options: the choices for each option.
        has_inside: it runs other parts inside.
        is_random: it draws random numbers.
        share: how often it is taken among those of its kind.
    """

    build: Callable[[Shape, Options, Sequence[nn.Module]], nn.Module]
    kind: str = "free"
    families: tuple[str, ...] = ("rows", "sequence", "image")
    options: dict[str, Sequence[Any]] = field(default_factory=dict)
    has_inside: bool = False
    is_random: bool = False
    share: int = 1


PARTS: dict[str, PartKind] = {}
FLAT, ROWS, SEQUENCE, IMAGE = ("rows", "sequence"), ("rows",), ("sequence",), ("image",)


class Plain(nn.Module):
    """A layer of torch's, or a function, that needs no key."""

    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        return self.layer(h)


class Chain(nn.Module):
    def __init__(self, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        for part in self.inside:
            h = part(h, key)
        return h


def _plain(
    name: str,
    make: Callable[[Shape], Callable[[Tensor], Tensor]],
    families: tuple[str, ...] = FLAT,
    **more: Any,
) -> None:
    PARTS[name] = PartKind(
        lambda shape, options, inside: Plain(make(shape)), families=families, **more
    )


def _frozen(layer: nn.Module) -> nn.Module:
    """In eval mode with frozen parameters, whatever mode the model is in."""
    return layer.eval().requires_grad_(False)


ANY = ("rows", "sequence", "image")
_plain("linear", lambda shape: nn.Linear(shape[-1], shape[-1]))
_plain("linear without bias", lambda shape: nn.Linear(shape[-1], shape[-1], bias=False))
_plain(
    "wide", lambda shape: nn.Sequential(nn.Linear(shape[-1], 9), nn.Tanh(), nn.Linear(9, shape[-1]))
)
_plain("tanh", lambda shape: torch.tanh, ANY)
_plain("relu", lambda shape: nn.ReLU(), ANY)
_plain("gelu", lambda shape: nn.GELU(), ANY)
_plain("layer norm", lambda shape: nn.LayerNorm(shape[-1]))
_plain("rms norm", lambda shape: nn.RMSNorm(shape[-1]))
_plain("softmax over features", lambda shape: nn.Softmax(-1))
_plain("sort over features", lambda shape: lambda h: h.sort(-1).values)
_plain("cumsum over features", lambda shape: lambda h: h.cumsum(-1))
_plain("roll over features", lambda shape: lambda h: h.roll(1, -1), ANY)
_plain("normalised", lambda shape: lambda h: F.normalize(h, dim=-1), ANY)
_plain("straight-through", lambda shape: lambda h: h + (h.clamp(-9, 9).round() - h).detach(), ANY)
_plain(
    "top features", lambda shape: lambda h: h * (h >= h.topk(2, -1).values[..., -1:]).to(h.dtype)
)
_plain("dropout", lambda shape: nn.Dropout(0.3), ANY, is_random=True)
_plain("alpha dropout", lambda shape: nn.AlphaDropout(0.2), FLAT, is_random=True)
_plain("feature noise", lambda shape: lambda h: h + 0.1 * torch.randn_like(h), ANY, is_random=True)
_plain("group norm of rows", lambda shape: nn.GroupNorm(2, shape[0]), ROWS)
_plain("group norm", lambda shape: nn.GroupNorm(2, shape[0]), IMAGE)
_plain("instance norm", lambda shape: nn.InstanceNorm2d(shape[0], affine=True), IMAGE)
_plain("convolution", lambda shape: nn.Conv2d(shape[0], shape[0], 3, padding=1), IMAGE)
_plain(
    "depthwise convolution",
    lambda shape: nn.Conv2d(shape[0], shape[0], 3, padding=1, groups=shape[0]),
    IMAGE,
)
_plain("max pooling", lambda shape: nn.MaxPool2d(3, stride=1, padding=1), IMAGE)
_plain("dropout of channels", lambda shape: nn.Dropout2d(0.3), IMAGE, is_random=True)
_plain("frozen batch norm", lambda shape: _frozen(nn.BatchNorm1d(shape[0])), ROWS)
_plain("frozen batch norm of images", lambda shape: _frozen(nn.BatchNorm2d(shape[0])), IMAGE)
_plain("sum over earlier steps", lambda shape: lambda h: h.cumsum(1), SEQUENCE)


class OwnScale(nn.Module):
    """A parameter that is no layer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


_plain("own scale", lambda shape: OwnScale(shape[-1]), ANY)


class Functional(nn.Module):
    """A weight that is used twice, the second time as a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.linear(h)), self.linear.weight)


_plain("tied weight, functional", lambda shape: Functional(shape[-1]))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, h: Tensor) -> Tensor:
        return F.glu(self.both(h), -1)


_plain("gated", lambda shape: Gated(shape[-1]))


class Experts(nn.Module):
    """A dense mixture: every record through both experts, weighted by its own gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.first, self.second = (
            nn.Linear(width, 2),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, h: Tensor) -> Tensor:
        weight = self.gate(h).softmax(-1)
        return weight[..., :1] * self.first(h) + weight[..., 1:] * self.second(h)


_plain("experts", lambda shape: Experts(shape[-1]))


class Attention(nn.Module):
    """Self-attention over time; ``own``: written with torch's fused function."""

    def __init__(self, width: int, is_own: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width) if is_own else None
        self.attention = None if is_own else DPMultiheadAttention(width, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        if self.attention is not None:
            return h + self.attention(h, h, h)[0]
        assert self.qkv is not None
        return h + F.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1))


_plain("attention by hand", lambda shape: Attention(shape[-1], True), SEQUENCE)
_plain("attention of Opacus", lambda shape: Attention(shape[-1], False), SEQUENCE)


class Recurrent(nn.Module):
    def __init__(self, cell: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        self.cell = cell(width, width, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.cell(h)[0]


_plain("lstm", lambda shape: Recurrent(DPLSTM, shape[-1]), SEQUENCE)
_plain("gru", lambda shape: Recurrent(DPGRU, shape[-1]), SEQUENCE)


class Cell(nn.Module):
    """A recurrent cell of one's own, over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.given = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        state, states = torch.zeros_like(h[:, 0]), []
        for t in range(h.shape[1]):
            state = torch.tanh(self.hidden(state) + self.given(h[:, t]))
            states.append(state)
        return torch.stack(states, 1)


_plain("cell by hand", lambda shape: Cell(shape[-1]), SEQUENCE)


class Positions(nn.Module):
    def __init__(self, steps: int, width: int, is_expanded: bool) -> None:
        super().__init__()
        self.table, self.is_expanded = nn.Embedding(steps, width), is_expanded

    def forward(self, h: Tensor) -> Tensor:
        places = torch.arange(h.shape[1])
        return h + self.table(places.expand(len(h), -1) if self.is_expanded else places)


_plain("positions", lambda shape: Positions(*shape, True), SEQUENCE)
_plain("positions without records", lambda shape: Positions(*shape, False), SEQUENCE)


class TimeFolded(nn.Module):
    """Time in the dimension of the records, or in their place."""

    def __init__(self, width: int, is_transposed: bool) -> None:
        super().__init__()
        self.linear, self.is_transposed = nn.Linear(width, width), is_transposed

    def forward(self, h: Tensor) -> Tensor:
        if self.is_transposed:
            return self.linear(h.transpose(0, 1)).transpose(0, 1)
        return torch.tanh(self.linear(h.reshape(-1, h.shape[-1]))).reshape(h.shape)


_plain("time folded", lambda shape: TimeFolded(shape[-1], False), SEQUENCE)
_plain("time first", lambda shape: TimeFolded(shape[-1], True), SEQUENCE)


class HalfGradient(torch.autograd.Function):
    """A custom function that keeps records apart."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.5


class Reversed(torch.autograd.Function):
    """A custom function of the older style, as domain adaptation uses it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def _with_tensor_hook(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return h


def _with_forward_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, output: output.tanh())
    return layer


_plain("custom function", lambda shape: HalfGradient.apply, ANY)
_plain("custom function, older style", lambda shape: Reversed.apply, ANY)
_plain("tensor hook", lambda shape: _with_tensor_hook, ANY)
_plain(
    "mended if missing",
    lambda shape: lambda h: torch.where(h.isnan(), 0.0, h) if bool(h.isnan().any()) else h,
    ANY,
)


class ByKey(nn.Module):
    """What a record's own key decides."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.what = options["what"]
        self.table = nn.Embedding(CATEGORIES, shape[-1]) if self.what == "category" else None

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        if self.table is not None:
            category = key[:, CATEGORY].clamp(0, CATEGORIES - 1)
            return h + self.table(category).reshape(len(h), *[1] * (h.dim() - 2), -1)
        if self.what == "length" and h.dim() == 3:
            mask = torch.arange(h.shape[1]) < key[:, LENGTH, None]
            return h * mask.unsqueeze(-1).to(h.dtype)
        return torch.where(_like(key[:, CONTENT], h) > 0, h, 0.5 * h)


PARTS["by key"] = PartKind(ByKey, options={"what": ("length", "category", "content")})


class Routed(nn.Module):
    """A frozen layer runs on the records that choose it, if there are any."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[-1], shape[-1]).requires_grad_(False)

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        chosen = key[:, CATEGORY] % 2 == 1
        if not bool(chosen.any()):
            return h
        return h.index_put((chosen,), torch.tanh(self.layer(h[chosen])))


PARTS["routed"] = PartKind(Routed)


class Around(nn.Module):
    """Runs its parts in one of several ways that keep records apart."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside, self.how = Chain(inside), options["how"]

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        if self.how == "residual":
            return h + self.inside(h, key)
        if self.how == "twice":
            return self.inside(torch.tanh(self.inside(h, key)), key)
        if self.how == "checkpointed" and torch.is_grad_enabled() and h.requires_grad:
            return checkpoint(self.inside, h, key, use_reentrant=False)
        return self.inside(h, key)


PARTS["around"] = PartKind(
    Around, options={"how": ("nested", "residual", "twice", "checkpointed")}, has_inside=True
)


class StochasticDepth(nn.Module):
    """Leaves the parts out, for each record by itself."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside = Chain(inside)

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        kept = torch.empty(len(h), dtype=h.dtype).bernoulli_(0.7)
        return h + _like(kept, h) * self.inside(h, key)


PARTS["stochastic depth"] = PartKind(StochasticDepth, has_inside=True, is_random=True)


class Mixer(nn.Module):
    """One of ``MIXERS``, perhaps guarded, faint, or under a branch."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__()
        self.mix, self.guard = MIXERS[name][1], options["guard"]
        self.strength, self.form = options["strength"], options["form"]

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        if self.guard == "none":
            return h + self.strength * (self.mix(h, key) - h)
        when = GUARDS[self.guard](h, key)
        if self.form == "branch":
            return h + self.strength * (self.mix(h, key) - h) if bool(when) else h
        if self.form == "factor":
            return h + when.to(h.dtype) * self.strength * (self.mix(h, key) - h)
        return torch.where(when, h + self.strength * (self.mix(h, key) - h), h)


MIXER_OPTIONS = {
    "guard": ("none",) * len(GUARDS) + tuple(GUARDS),
    "strength": (1.0, 1.0, 1.0, 1e-3, 1e-7),
    "form": ("branch", "where", "factor"),
}
for _name, (_kind, _) in MIXERS.items():
    PARTS[_name] = PartKind(
        lambda shape, options, inside, name=_name: Mixer(name, options),
        kind=_kind,
        options=MIXER_OPTIONS,  # type: ignore[misc]
    )


class Reordered(nn.Module):
    """Runs its parts on the records in another order, and puts them back."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside, self.by, self.is_descending = (
            Chain(inside),
            options["by"],
            options["descending"],
        )

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        if self.by == "reversed":
            order = torch.arange(len(h)).flip(0)
        elif self.by == "shuffled":
            order = torch.rand(len(h)).argsort()
        elif self.by == "hidden":
            order = _flat(h).sum(1).argsort(descending=self.is_descending, stable=True)
        else:
            column = {"length": LENGTH, "category": CATEGORY, "content": CONTENT}[self.by]
            order = key[:, column].argsort(descending=self.is_descending, stable=True)
        return self.inside(h[order], key[order])[order.argsort()]


PARTS["reordered"] = PartKind(
    Reordered,
    kind="sorting",
    options={
        "by": ("length", "length", "category", "category", "content", "hidden", "reversed"),
        "descending": (False, True),
    },
    has_inside=True,
    share=6,
)
PARTS["shuffled"] = PartKind(
    lambda shape, options, inside: Reordered(
        shape, {"by": "shuffled", "descending": False}, inside
    ),
    kind="sorting",
    has_inside=True,
    is_random=True,
)


class Compacted(nn.Module):
    """Runs its parts on the records of one category, moved to the front of the batch."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside = Chain(inside)

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        chosen = key[:, CATEGORY] == 0
        place = torch.where(chosen, chosen.cumsum(0) - 1, 0)
        buffer = torch.zeros_like(h).index_add(0, place, h * _like(chosen, h))
        return torch.where(_like(chosen, h) > 0, self.inside(buffer, key)[place], h)


PARTS["compacted"] = PartKind(Compacted, kind="grouping", has_inside=True)


class Remembering(nn.Module):
    """Keeps something of the records, on the module or outside of it, and uses it later."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.what, self.where = options["what"], options["where"]
        self.kept: Any = None
        self.box: dict[str, Any] = {}
        if self.where == "outside":
            _OUTSIDE[id(self)] = self.box

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        if len(h) == 0 or (self.where == "with gradients" and not torch.is_grad_enabled()):
            return h
        box = vars(self)
        if self.where in ("dictionary", "outside"):
            box = self.box if self.where == "dictionary" else _OUTSIDE[id(self)]
        kept = box.get("kept")
        if self.what == "last mean":
            box["kept"] = h.detach().mean(0)
            return h if kept is None else h - kept
        if self.what == "largest":
            new = h.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax()
            box["kept"] = new if kept is None else torch.maximum(new, kept)
        else:
            box["kept"] = max(float(key[:, CONTENT].abs().max()) / 1000 + 1, kept or 0.0)
        return h / (box["kept"] + 1)


_OUTSIDE: dict[int, dict[str, Any]] = {}
PARTS["remembering"] = PartKind(
    Remembering,
    kind="state",
    options={
        "what": ("last mean", "largest", "largest number"),
        "where": ("attribute", "dictionary", "outside", "with gradients"),
    },
)


class MixingBackward(torch.autograd.Function):
    """The identity, whose gradient is mixed; mapped over records it has a rule that torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, name: str) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return GRADIENT_MIXERS[ctx.name](g), None


class MixingRule(torch.autograd.Function):
    """Keeps records apart on batches, but has a mapping rule of its own that does not."""

    @staticmethod
    def forward(h: Tensor, name: str) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return MixingRuleBackward.apply(g, ctx.name), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, h: Tensor, name: str) -> tuple[Tensor, Any]:
        return MixingRule.apply(h, name), in_dims[0]


class MixingRuleBackward(torch.autograd.Function):
    @staticmethod
    def forward(g: Tensor, name: str) -> Tensor:
        return g.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, name: str) -> tuple[Tensor, Any]:
        return GRADIENT_MIXERS[name](g.movedim(in_dims[0], 0)), 0


class Backward(nn.Module):
    """Keeps records apart in the forward pass, and mixes their gradients."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inside, self.name, self.how = Chain(inside), options["gradient"], options["how"]
        mix = GRADIENT_MIXERS[self.name]
        if self.how == "module hook":
            self.inside.register_full_backward_hook(
                lambda module, given, taken: (
                    (mix(given[0]), *given[1:]) if given[0] is not None else None
                )
            )
        if self.how == "module pre-hook":
            self.inside.register_full_backward_pre_hook(lambda module, taken: (mix(taken[0]),))

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        mix = GRADIENT_MIXERS[self.name]
        if (
            self.how == "saved tensors"
        ):  # what the product keeps for its backward pass is another record's
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: mix(t) if t.is_floating_point() else t, lambda t: t
            ):
                return self.inside(h * h.tanh(), key)
        h = self.inside(h, key)
        if self.how == "custom function":
            return MixingBackward.apply(h, self.name)
        if self.how == "mapping rule":
            return MixingRule.apply(h, self.name)
        if self.how == "tensor hook" and h.requires_grad:
            h = h * 1.0
            h.register_hook(mix)
        return h


PARTS["backward"] = PartKind(
    Backward,
    kind="backward",
    options={
        "how": (
            "tensor hook",
            "custom function",
            "module hook",
            "module pre-hook",
            "saved tensors",
            "mapping rule",
        ),
        # those that do little to small gradients come twice: a check with small ones may pass them
        "gradient": (*GRADIENT_MIXERS, *(name for name in GRADIENT_MIXERS if "at 1" in name)),
    },
    has_inside=True,
)


class DroppedBlocks(nn.Module):
    """Drops values, and divides by the share that is left of the whole batch."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.rate = options["rate"]

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        kept = (torch.rand(h.shape, dtype=h.dtype) > self.rate).to(h.dtype)
        return h * kept * (kept.numel() / (kept.sum() + 1e-6))


PARTS["dropped blocks"] = PartKind(
    DroppedBlocks, kind="random layer", options={"rate": (0.1, 0.5)}, is_random=True
)


class Switch(nn.Module):
    """Does nothing until it is switched on, which :func:`flip` does after ``make_private``."""

    def __init__(self, shape: Shape, options: Options, inside: Sequence[nn.Module]) -> None:
        super().__init__()
        self.place, self.mix = options["place"], MIXERS[options["mixer"]][1]
        self.is_on = False
        self.settings: dict[str, Any] = {"nested": [False]}
        self.function: Callable[[Tensor, Tensor], Tensor] = _same
        self.names = ["same"]

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        h = self.function(h, key)
        return (
            self.mix(h, key)
            if self.is_on or self.settings["nested"][0] or "mixed" in self.names
            else h
        )

    def flip(self) -> None:
        if self.place == "attribute":
            self.is_on = True
        elif self.place == "dictionary":
            self.settings["nested"][0] = True
        elif self.place == "list":
            self.names.append("mixed")
        else:
            self.function = self.mix


def _same(h: Tensor, key: Tensor) -> Tensor:
    return h


# not "free", so that it is chosen with its late change only; it mixes nothing by itself
PARTS["switch"] = PartKind(
    Switch,
    kind="late switch",
    options={
        "place": ("attribute", "dictionary", "list", "function"),
        "mixer": ("centred", "rolled", "standardised", "cumulative"),
    },
)


# -- what happens after make_private ---------------------------------------------------------------


@dataclass(frozen=True)
class LateKind:
    """A change after ``make_private``; ``make(model, options)`` returns what takes it back."""

    make: Callable[[nn.Module, Options], Callable[[], None]]
    kind: str
    options: dict[str, Sequence[Any]]


def _nothing() -> None:
    pass


def _some_layer(model: nn.Module, options: Options) -> nn.Module:
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    return layers[int(options["where"] * len(layers))]


def _forward_hook(model: nn.Module, options: Options) -> Callable[[], None]:
    mix = GRADIENT_MIXERS[options["mixer"]]
    _some_layer(model, options).register_forward_hook(lambda module, given, output: mix(output))
    return _nothing


def _forward_pre_hook(model: nn.Module, options: Options) -> Callable[[], None]:
    mix = GRADIENT_MIXERS[options["mixer"]]
    _some_layer(model, options).register_forward_pre_hook(lambda module, given: (mix(given[0]),))
    return _nothing


def _backward_hook(model: nn.Module, options: Options) -> Callable[[], None]:
    mix = GRADIENT_MIXERS[options["mixer"]]
    _some_layer(model, options).register_full_backward_hook(
        lambda module, given, taken: (mix(given[0]),) if given[0] is not None else None
    )
    return _nothing


def _backward_pre_hook(model: nn.Module, options: Options) -> Callable[[], None]:
    mix = GRADIENT_MIXERS[options["mixer"]]
    _some_layer(model, options).register_full_backward_pre_hook(
        lambda module, taken: (mix(taken[0]),)
    )
    return _nothing


def _hook_on_model(model: nn.Module, options: Options) -> Callable[[], None]:
    mix = GRADIENT_MIXERS[options["mixer"]]
    model.register_forward_hook(lambda module, given, output: mix(output))
    return _nothing


def _global_hook(model: nn.Module, options: Options) -> Callable[[], None]:
    mix, layer = GRADIENT_MIXERS[options["mixer"]], _some_layer(model, options)
    handle = register_module_forward_hook(
        lambda module, given, output: mix(output) if module is layer else None
    )
    return handle.remove


def _replaced_forward(model: nn.Module, options: Options) -> Callable[[], None]:
    mix, layer = GRADIENT_MIXERS[options["mixer"]], _some_layer(model, options)
    before = layer.forward
    layer.forward = lambda h: mix(before(h))
    return _nothing


def _flip(model: nn.Module, options: Options) -> Callable[[], None]:
    for layer in model.modules():
        if isinstance(layer, Switch):
            layer.flip()
    return _nothing


def _training(model: nn.Module, options: Options) -> Callable[[], None]:
    model.train()
    return _nothing


_LATE_MIXERS = {
    "mixer": ("centred", "rolled", "normalised", "cumulative"),
    "where": (0.0, 0.3, 0.6, 0.99),
}
LATE = {
    "forward hook": LateKind(_forward_hook, "late hook", _LATE_MIXERS),
    "forward pre-hook": LateKind(_forward_pre_hook, "late hook", _LATE_MIXERS),
    "backward hook": LateKind(_backward_hook, "late backward hook", _LATE_MIXERS),
    "backward pre-hook": LateKind(_backward_pre_hook, "late backward hook", _LATE_MIXERS),
    "hook on the model": LateKind(_hook_on_model, "late hook", _LATE_MIXERS),
    "global hook": LateKind(_global_hook, "late hook", _LATE_MIXERS),
    "replaced forward": LateKind(_replaced_forward, "late switch", _LATE_MIXERS),
    "flip": LateKind(_flip, "late switch", {}),
    "training mode": LateKind(_training, "late switch", {}),
}


# -- losses ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossKind:
    """A loss of (outputs, targets), with the ``loss_reduction`` that its author states."""

    function: Callable[[Tensor, Tensor], Tensor]
    kind: str = "free"
    reduction: str = "mean"


IGNORED = -100.0


def _label(y: Tensor) -> Tensor:
    return y.clamp(0, CLASSES - 1).long()


def _per_record(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, _label(y), reduction="none")


def _weights(out: Tensor) -> Tensor:
    return torch.tensor([1000.0, 1.0, 1.0], dtype=out.dtype)


def _mean_over_kept(out: Tensor, y: Tensor) -> Tensor:
    kept = (y != IGNORED).to(out.dtype)
    return (_per_record(out, y) * kept).sum() / kept.sum().clamp(min=1)


def _ignoring(out: Tensor, y: Tensor) -> Tensor:
    label = torch.where(y == IGNORED, -100, _label(y))
    return F.cross_entropy(out, label)


def _contrastive(out: Tensor, y: Tensor) -> Tensor:
    rows = F.normalize(out, dim=-1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(out)))


def _hardest(out: Tensor, y: Tensor) -> Tensor:
    return _per_record(out, y).topk(max(1, len(out) // 2)).values.mean() if len(out) else out.sum()


def _balanced(out: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(_label(y), minlength=CLASSES).to(out.dtype)
    return (_per_record(out, y) / counts[_label(y)]).mean()


def _ranking(out: Tensor, y: Tensor) -> Tensor:
    difference = out[:, None, 0] - out[None, :, 0]
    return F.softplus(-difference * (y[:, None] - y[None]).sign()).mean()


def _hooked(out: Tensor, y: Tensor) -> Tensor:
    out = out * 1.0
    if out.requires_grad:
        out.register_hook(GRADIENT_MIXERS["centred"])
    return F.cross_entropy(out, _label(y))


LOSSES = {
    "cross entropy": LossKind(lambda out, y: F.cross_entropy(out, _label(y))),
    "cross entropy, summed": LossKind(
        lambda out, y: F.cross_entropy(out, _label(y), reduction="sum"), reduction="sum"
    ),
    "squared error": LossKind(lambda out, y: F.mse_loss(out[:, 0], y.to(out.dtype))),
    "squared error, summed": LossKind(
        lambda out, y: F.mse_loss(out[:, 0], y.to(out.dtype), reduction="sum"), reduction="sum"
    ),
    "smoothed labels": LossKind(
        lambda out, y: F.cross_entropy(out, _label(y), label_smoothing=0.1)
    ),
    "focal": LossKind(
        lambda out, y: ((1 - (-_per_record(out, y)).exp()) ** 2 * _per_record(out, y)).mean()
    ),
    "huber": LossKind(lambda out, y: F.huber_loss(out[:, 0], y.to(out.dtype))),
    "weighted by record": LossKind(
        lambda out, y: (_per_record(out, y) * _weights(out)[_label(y)]).mean()
    ),
    "class weights": LossKind(
        lambda out, y: F.cross_entropy(out, _label(y), weight=_weights(out)), "loss"
    ),
    "ignored labels": LossKind(_ignoring, "loss"),
    "mean over kept": LossKind(_mean_over_kept, "loss"),
    "centred outputs": LossKind(
        lambda out, y: F.cross_entropy(out - out.mean(0), _label(y)), "loss"
    ),
    "normalised outputs": LossKind(
        lambda out, y: F.cross_entropy(out / (out.detach().std() + 1e-3), _label(y)), "loss"
    ),
    "contrastive": LossKind(_contrastive, "loss"),
    "hardest half": LossKind(_hardest, "loss"),
    "balanced classes": LossKind(_balanced, "loss"),
    "pairs": LossKind(_ranking, "loss"),
    "root mean square": LossKind(
        lambda out, y: (F.mse_loss(out[:, 0], y.to(out.dtype)) + 1e-12).sqrt(), "loss"
    ),
    "log of the mean": LossKind(lambda out, y: (_per_record(out, y).mean() + 1e-6).log(), "loss"),
    "log-sum-exp": LossKind(
        lambda out, y: _per_record(out, y).logsumexp(0) if len(out) else out.sum(), "loss"
    ),
    "spread of outputs": LossKind(
        lambda out, y: F.cross_entropy(out, _label(y)) + out.var(0, correction=0).sum(), "loss"
    ),
    "divided by itself": LossKind(
        lambda out, y: _per_record(out, y).mean() / (_per_record(out, y).detach().mean() + 1e-6),
        "loss",
    ),
    "hook on the output": LossKind(_hooked, "loss"),
    "a sum that is called a mean": LossKind(lambda out, y: _per_record(out, y).sum(), "loss"),
    "a mean that is called a sum": LossKind(
        lambda out, y: _per_record(out, y).mean(), "loss", "sum"
    ),
}


# -- the model -------------------------------------------------------------------------------------


class RandomModel(nn.Module):
    """What a recipe describes: stem, body, pooling to rows, tail, head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.family, self.has_category = recipe.family, recipe.has_category
        if recipe.family == "tokens":
            self.stem: nn.Module = nn.Embedding(CATEGORIES, WIDTH)
        elif recipe.family == "image":
            self.stem = nn.Conv2d(INPUT["image"][0], CHANNELS, 3, padding=1)
        else:
            self.stem = nn.Linear(INPUT[recipe.family][-1], WIDTH)
        self.body = Chain([_built(spec, HIDDEN[recipe.family]) for spec in recipe.body])
        self.pooling = (
            nn.Linear(CHANNELS * SIDE * SIDE, WIDTH) if recipe.family == "image" else nn.Identity()
        )
        self.tail = Chain([_built(spec, (WIDTH,)) for spec in recipe.tail])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, category: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            key = self._key(x, category)
        h = torch.tanh(self.body(torch.tanh(self.stem(x)), key))
        if self.family == "image":
            h = self.pooling(h.flatten(1))
        elif self.family != "rows":
            kept = torch.arange(STEPS) < key[:, LENGTH, None].clamp(min=1)
            h = (h * kept.unsqueeze(-1).to(h.dtype)).sum(1) / kept.sum(1, keepdim=True)
        return self.head(self.tail(h, key))

    def _key(self, x: Tensor, category: Tensor | None) -> Tensor:
        rows = x.reshape(len(x), -1)
        if x.dim() == 3:
            length = (x.abs().sum(-1) > 0).sum(1)
        else:
            length = (rows != 0).sum(1)
        first = rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        content = (first.sum(1) * 1000).clamp(-1e15, 1e15).long()
        if category is None:
            category = first[:, 0].round().abs().clamp(max=1e15).long() % CATEGORIES
        return torch.stack([length, category, content], 1)


def _built(spec: Spec, shape: Shape) -> nn.Module:
    name, options, inside = spec
    return PARTS[name].build(shape, options, [_built(inner, shape) for inner in inside])


def build(recipe: Recipe) -> RandomModel:
    """The model of a recipe, always with the same initial parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        model = RandomModel(recipe)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1 and p.requires_grad:
                    p.mul_(recipe.gain)
            model.head.bias[0] += recipe.bias
    return model.double() if recipe.is_double else model


# -- recipes at random -----------------------------------------------------------------------------

# what a recipe may have once, each as often as the others
KINDS = sorted(
    (
        {part.kind for part in PARTS.values()}
        | {loss.kind for loss in LOSSES.values()}
        | {late.kind for late in LATE.values()}
    )
    - {"free"}
)


def random_recipe(seed: int, kinds: Sequence[str]) -> Recipe:
    """The recipe that ``seed`` stands for.

    Args:
        kinds: how records may be mixed, of which one is chosen. "free", not at all, makes up at
            least 0.3 where it is among them.
    """
    rng = random.Random(seed)
    kind = "free" if "free" in kinds and rng.random() < 0.3 else rng.choice(list(kinds))
    family = rng.choice(list(INPUT))
    hidden = "sequence" if family == "tokens" else family
    body = [_random_spec(rng, hidden, 2) for _ in range(rng.randrange(3))]
    tail = [_random_spec(rng, "rows", 2) for _ in range(rng.randrange(3))]
    loss, late = rng.choice([name for name, loss in LOSSES.items() if loss.kind == "free"]), None
    mixing_parts = [
        name
        for name, part in PARTS.items()
        if part.kind == kind and kind not in ("free", "late switch")
        for _ in range(part.share)
    ]
    if mixing_parts:
        place, where = (body, hidden) if rng.random() < 0.5 else (tail, "rows")
        place.insert(
            rng.randrange(len(place) + 1), _random_of(rng, rng.choice(mixing_parts), where, 2)
        )
    if kind == "loss":
        loss = rng.choice([name for name, loss in LOSSES.items() if loss.kind == "loss"])
    late_names = [name for name, change in LATE.items() if change.kind == kind]
    if late_names:
        name = rng.choice(late_names)
        late = [
            name,
            {option: rng.choice(list(choices)) for option, choices in LATE[name].options.items()},
        ]
        if name == "flip":
            tail.insert(rng.randrange(len(tail) + 1), _random_of(rng, "switch", "rows", 0))
        if name == "training mode":
            tail.insert(rng.randrange(len(tail) + 1), ["frozen batch norm", {}, []])
    return Recipe(
        seed=rng.randrange(2**31),
        family=family,
        body=body,
        tail=tail,
        loss=loss,
        late=late,
        clip=10 ** rng.uniform(-3, 0.5),
        gain=rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]),
        bias=rng.choice([0.0, 0.0, 8.0]),
        has_category=rng.random() < 0.3,
        examples=rng.choice(["none", "none", "zeros", "distinct"]),
        is_loss_given=rng.random() < 0.4,
    )


def _random_spec(rng: random.Random, family: str, depth: int) -> Spec:
    free = [name for name, part in PARTS.items() if part.kind == "free" and family in part.families]
    free = [name for name in free if depth > 0 or not PARTS[name].has_inside]
    return _random_of(rng, rng.choice(free), family, depth)


def _random_of(rng: random.Random, name: str, family: str, depth: int) -> Spec:
    part = PARTS[name]
    options = {option: rng.choice(list(choices)) for option, choices in part.options.items()}
    inside = []
    if part.has_inside:
        inside = [_random_spec(rng, family, depth - 1) for _ in range(rng.randrange(1, 3))]
        if (
            part.kind != "free" and family != "image"
        ):  # something to train, or there is nothing to mix
            inside.insert(rng.randrange(len(inside) + 1), ["linear", {}, []])
        elif part.kind != "free":
            inside.insert(rng.randrange(len(inside) + 1), ["convolution", {}, []])
    return [name, options, inside]
