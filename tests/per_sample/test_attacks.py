"""Whatever a loop does with a batch, it is refused, or one record moves the sum by at most C."""

from types import MappingProxyType
from typing import Any, NamedTuple

import attacks
import pytest
import torch
import torch.nn.functional as F
from attacks import STATE, N, labelled, regression, rows, step
from helpers import delivered, private, sum_of, vector
from torch import nn
from zoo import Of

from torch_dpbayes.errors import DPBayesError
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource

pytestmark = [
    # torch's words on what the attacks do
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CLIP = 0.05


def released(loop, data, mode=None, *, expected, passes=1, change=None, **options):
    """The sum that the last step released over C, or the error that refused it."""
    STATE.clear()
    torch.manual_seed(1)
    net = attacks.net()
    try:
        net, optimizer, loader = private(
            net, *data, clip=CLIP, batch_size=expected, grad_sample_mode=mode, **options
        )
        if change is not None:
            change(net)
        torch.manual_seed(0)
        for k in range(passes):
            optimizer.param_groups[0]["lr"] = 1.0 if k + 1 == passes else 1e-9
            start = vector(net)
            for x, t in loader:
                loop(net, optimizer, x, t)
    except Exception as error:
        return error
    return (start - vector(net)) * expected / CLIP


def assert_harmless(loop, data=regression, *, may_stop=False, **options):
    """With record 0 or without it; full batches, which are those of every record."""
    x, t = data()
    whole, rest = (released(loop, (x[k:], t[k:]), expected=len(x) - k, **options) for k in (0, 1))
    if may_stop and isinstance(whole, DPBayesError):
        return whole
    if isinstance(whole, Exception) or isinstance(rest, Exception):
        assert type(whole) is type(rest), (whole, rest)
        return whole
    assert float((whole - rest).norm()) < 1.02
    return None


def of_loss(loss):
    return lambda net, optimizer, x, t: step(optimizer, loss(net(x), t))


def of_inputs(change):
    return of_loss_of(lambda net, x, t: rows(net(change(x, t)), t).mean())


def of_loss_of(loss):
    return lambda net, optimizer, x, t: step(optimizer, loss(net, x, t))


def given(net, optimizer, x, t):
    step(optimizer, net.private_loss(x, t))


def mean(out, t):
    return rows(out, t).mean()


class Attack(NamedTuple):
    """A loop, the records of which the first is an outlier, and options of :func:`released`."""

    loop: Any
    data: Any = regression
    options: Any = MappingProxyType({})
    is_refused: bool = False


def beside(inputs, outputs, loss):
    def loop(net, optimizer, x, t):
        other = nn.Linear(inputs, outputs)
        STATE["p"] = other.weight
        step(optimizer, loss(other, net(x), t))

    return loop


def given_an_outer_scale(net, optimizer, x, t):
    STATE["p"] = attacks.OUTER
    given(net, optimizer, x, t)


OUTSIDE = {"loss": lambda out, t: attacks.one(out, t) * attacks.OUTER.exp()}
VMAP = {"mode": "vmap"}
ATTACKS = {
    **{f"loss, {name}": Attack(of_loss(loss)) for name, loss in attacks.MIXING.items()},
    **{f"labels, {k}": Attack(of_loss(v), labelled) for k, v in attacks.OF_LABELS.items()},
    **{f"loop, {loop.__name__}": Attack(loop) for loop in attacks.LOOPS},
    **{f"model, {name}": Attack(of_loss_of(loss)) for name, loss in attacks.OF_MODELS.items()},
    **{f"inputs, {name}": Attack(of_inputs(change)) for name, change in attacks.INPUTS.items()},
    **{
        f"changed, {name}": Attack(of_loss(mean), options={"change": change})
        for name, change in attacks.CHANGES.items()
    },
    "changed, vmap": Attack(
        of_loss(mean), options={"change": next(iter(attacks.CHANGES.values())), **VMAP}
    ),
    **{
        f"earlier, {loop.__name__}": Attack(loop, options={"passes": 2}, is_refused=True)
        for loop in attacks.EARLIER
    },
    **{f"loss=, {name}": Attack(given, options={"loss": f}) for name, f in attacks.GIVEN.items()},
    **{
        f"loss=, {name}, vmap": Attack(given, options={"loss": attacks.GIVEN[name], **VMAP})
        for name in ("decides", "hooks")
    },
    **{f"one record, {k}": Attack(of_loss(v)) for k, v in attacks.ONE_RECORD.items()},
    **{
        f"caught, {name}": Attack(attacks.caught_and_used(name), options={"may_stop": True})
        for name in attacks.ERRORS
    },
    "caught, loss=": Attack(
        attacks.a_constant_beside_a_record_that_fails,
        options={"may_stop": True, "loss": attacks.that_fails},
    ),
    **{
        f"outside, {name}": Attack(beside(*case), is_refused=True)
        for name, case in attacks.OUTSIDE.items()
    },
    "outside, loss=": Attack(given_an_outer_scale, options=OUTSIDE, is_refused=True),
}


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_an_honest_loop_runs(mode):
    assert assert_harmless(of_loss(mean), mode=mode) is None


@pytest.mark.parametrize("name", ATTACKS)
def test_one_record_moves_the_sum_by_no_more_than_the_clip_norm(name):
    """Or the loop is refused; what it would have trained beside the model got no gradient."""
    attack = ATTACKS[name]
    error = assert_harmless(attack.loop, attack.data, **attack.options)
    if attack.is_refused or (name.startswith("loss, ") and error is not None):
        assert isinstance(error, DPBayesError), repr(error)
    if name.startswith("outside, "):
        assert error.code == "loss-outside" and STATE["p"].grad is None


def of_scale(out, t, scale):
    return ((out[:, 0] - t) ** 2).mean() * scale.exp()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_learned_scale_in_torchscript_gets_no_gradient(is_given):
    scale, scripted = nn.Parameter(torch.zeros(())), torch.jit.script(of_scale)
    options = {"loss": lambda out, t: scripted(out, t, scale)} if is_given else {}

    def loop(net, optimizer, x, t):
        loss = net.private_loss(x, t) if is_given else scripted(net(x), t, scale)
        step(optimizer, loss)

    released(loop, regression(), expected=N, **options)
    assert scale.grad is None


# -- how many records there are --------------------------------------------------------------------


@pytest.mark.parametrize("name", attacks.COUNTS)
def test_the_number_of_records_turns_no_sign(name):
    """Two batches of the same expected size, one of which has a record more."""
    count = attacks.COUNTS[name]

    def sums(n):
        torch.manual_seed(1)
        net = attacks.net()
        source = BookkeepingGradientSource(net)
        torch.manual_seed(3)
        x, t = (v[:n] for v in regression())
        batch_x, batch_t = delivered(x, t, shown=N)
        try:
            out = net(batch_x)
            sign = (-1) ** int(count(out, batch_t))
            (rows(out, batch_t).mean() * sign).backward()
        except Exception as error:
            return error
        return sum_of(source, net, CLIP) / CLIP

    whole, rest = sums(N), sums(N - 1)
    if isinstance(whole, Exception):
        assert type(whole) is type(rest), (whole, rest)
    else:
        assert float((whole - rest).norm()) < 1.02


# -- from one batch to the next --------------------------------------------------------------------


def into_rows(c, out):
    for row, value in zip(c, out.detach(), strict=False):
        row.copy_(value)


# what a loop writes into a tensor that it keeps
WRITTEN = {
    "view": lambda c, out: c[0].copy_(out.mean(0)),
    "rows": into_rows,
    "index": lambda c, out: c[out.argmax(1)[0]].lerp_(out.mean(0), 0.5),
    "one index": lambda c, out: c.__setitem__(out.argmax(1)[0] * 0, 3.0),
    "running statistics": lambda c, out: F.instance_norm(out.T[None], c[0], torch.ones(2)),
    "data": lambda c, out: c.data.mul_(0.9).add_(out.mean(0)),
    "detach": lambda c, out: c.detach().add_(out.mean(0)),
    "new data": lambda c, out: setattr(c, "data", c.data * 0.9 + out.mean(0)),
    "foreach": lambda c, out: torch._foreach_add_([c], [out.mean(0)]),
    "out=": lambda c, out: torch.max(out, 0, out=(c[0], torch.zeros(2, dtype=torch.long))),
    "copied": lambda c, out: c.copy_(torch.zeros(3, 2).add_(out.mean(0))),
    "storage": lambda c, out: c.set_(out[:3].untyped_storage(), 0, (3, 2)),
}
# what it computes for the next batch
COMPUTED = {
    "subclass": lambda c, out: out[:3].as_subclass(torch.Tensor),
    "vmap": lambda c, out: torch.vmap(torch.mean, in_dims=1)(out),
    "jvp": lambda c, out: torch.func.jvp(lambda v: v.mean(0), (out,), (out,))[0],
    "grad": lambda c, out: torch.func.grad(lambda v: (v.mean(0) ** 2).sum())(out).sum(0),
    "traced": lambda c, out: torch.jit.trace(lambda v: v.mean(0), torch.zeros(3, 2))(out),
    "new_tensor": lambda c, out: c.new_tensor(out.mean(0)),
    "Tensor": lambda c, out: torch.Tensor(out.mean(0)),
}
CARRIED = {**WRITTEN, **COMPUTED}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("loss", name) for name in CARRIED),
        *(("computed", name) for name in ("view", "foreach", "vmap")),
        *(("model", name) for name in ("rows", "data", "new data", "jvp")),
        *(("loss=", name) for name in ("index", "detach", "storage", "grad", "Tensor")),
    ],
)
def test_what_was_made_of_an_earlier_batch_comes_back(place, name, monkeypatch):
    kept = {"value": torch.zeros(3, 2)}
    module = Of(lambda net, x: net.net(x) - net.kept.reshape(-1, 2)[:1], net=attacks.net())
    module.kept = kept["value"]
    if place == "model":
        monkeypatch.setattr(attacks, "net", lambda: module)

    def loop(net, optimizer, x, t):
        centre = kept["value"].reshape(-1, 2)
        if place == "loss=":
            loss, out = net.private_loss(x, t), None
        else:
            out = net(x)
            centre = F.normalize(centre) if place == "computed" else centre
            loss = ((out - (0 if place == "model" else centre[:1])) ** 2).mean()
        step(optimizer, loss)
        with torch.no_grad():
            made = CARRIED[name](kept["value"], net.eval()(x) if out is None else out.detach())
        net.train()
        if name in COMPUTED:
            kept["value"] = made
        module.kept = kept["value"]

    options = {}
    if place == "loss=":
        options["loss"] = lambda out, t: ((out - kept["value"].reshape(-1, 2)[:1]) ** 2).mean()
    error = released(loop, regression(), expected=N, passes=2, **options)
    assert isinstance(error, DPBayesError), repr(error)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", ["view", "data", "new data", "foreach"])
def test_values_of_a_batch_in_a_parameter_or_buffer(name, is_frozen):
    """At the next step, whichever it is."""
    extra = nn.Parameter(torch.zeros(3, 2), not is_frozen)
    net = Of(lambda net, x: net.net(x) - net.extra[:1], net=attacks.net(), extra=extra)
    net, optimizer, loader = private(net, *regression(), clip=CLIP)
    with pytest.raises(DPBayesError) as error:
        for number in range(4):
            for x, t in loader:
                out = net(x)
                step(optimizer, rows(out, t).mean())
                if number == 1:
                    before = net.extra.detach().clone()
                    with torch.no_grad():
                        CARRIED[name](net.extra, out.detach())
    assert len(optimizer.accountant) == 2
    assert error.value.code in ("model-written", "model-buffer", "model-map")
    if name in ("view", "foreach"):  # refused before it is written, also after the last step
        assert torch.equal(net.extra, before)


def test_public_values_may_be_written_into_parameters():
    net, optimizer, loader = private(attacks.net(), *regression(), clip=CLIP)
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(3):
        for x, t in loader:
            step(optimizer, rows(net(x), t).mean())
            with torch.no_grad():
                net[0].weight.clamp_(-1, 1)
        net.load_state_dict(saved)
    assert len(optimizer.accountant) == 3


# -- labels that are no class ----------------------------------------------------------------------

OF_CLASSES = {
    "mean": lambda out, t: F.cross_entropy(out, t),
    "none": lambda out, t: F.cross_entropy(out, t, reduction="none").mean(),
    "nll": lambda out, t: F.nll_loss(out.log_softmax(-1), t),
    "one-hot": lambda out, t: (F.one_hot(t, 2) * out).mean(),
    "ctc": lambda out, t: F.ctc_loss(
        out.log_softmax(-1).unsqueeze(0).repeat(3, 1, 1),
        t[:, None],
        torch.full_like(t, 3),
        t * 0 + 1,
    ),
}


@pytest.mark.parametrize(
    ("mode", "is_given"), [("bookkeeping", False), ("bookkeeping", True), ("vmap", True)]
)
@pytest.mark.parametrize("name", [*OF_CLASSES, *attacks.ERRORS])
def test_a_record_on_which_the_loss_fails_counts_as_zero(name, is_given, mode):
    x, y = regression()[0], labelled()[1] % 2
    y[0] = 7
    if name in attacks.ERRORS:
        x, y = regression()
    loss = {**OF_CLASSES, **attacks.ERRORS}[name]
    loop, options = of_loss(loss), {"mode": mode}
    if is_given or name == "ctc":  # the loop's own is in test_followed
        loop, options = given, {"mode": mode, "loss": loss}
    whole, rest = (released(loop, (x[k:], y[k:]), expected=N - k, **options) for k in (0, 1))
    # rounding: parameters are float32, and a difference of two is taken N / CLIP = 1,280 times
    assert float((whole - rest).norm()) < 0.01
