"""Whatever a loop does with a batch, it is refused, or one record moves the sum by at most C."""

import attacks
import pytest
import torch
import torch.nn.functional as F
from attacks import STATE, N, flip, labelled, regression, rows, step
from helpers import delivered, private, sum_of, vector
from torch import nn

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


def assert_harmless(loop, data=regression, mode=None, **options):
    """With record 0 or without it; full batches, which are those of every record."""
    x, t = data()
    whole, rest = (
        released(loop, (x[k:], t[k:]), mode, expected=len(x) - k, **options) for k in (0, 1)
    )
    if isinstance(whole, Exception) or isinstance(rest, Exception):
        assert type(whole) is type(rest), (whole, rest)
        return whole
    assert float((whole - rest).norm()) < 1.02
    return None


def of_loss(loss):
    return lambda net, optimizer, x, t: step(optimizer, loss(net(x), t))


BOTH = pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])


@BOTH
def test_an_honest_loop_runs(mode):
    assert assert_harmless(of_loss(lambda out, t: rows(out, t).mean()), mode=mode) is None


@pytest.mark.parametrize("name", attacks.MIXING)
def test_a_loss_that_mixes_records(name):
    error = assert_harmless(of_loss(attacks.MIXING[name]))
    assert error is None or isinstance(error, DPBayesError), repr(error)


@pytest.mark.parametrize("name", attacks.OF_LABELS)
def test_a_loss_that_mixes_labels(name):
    assert_harmless(of_loss(attacks.OF_LABELS[name]), labelled)


@pytest.mark.parametrize("loop", attacks.LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_that_mixes_records(loop):
    assert_harmless(loop)


@pytest.mark.parametrize("name", attacks.INPUTS)
def test_inputs_that_mix_records(name):
    assert_harmless(
        lambda net, optimizer, x, t: step(
            optimizer, rows(net(attacks.INPUTS[name](x, t)), t).mean()
        )
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "bookkeeping") for name in attacks.CHANGES), (next(iter(attacks.CHANGES)), "vmap")],
)
def test_a_model_that_is_changed_later(name, mode):
    assert_harmless(
        of_loss(lambda out, t: rows(out, t).mean()), mode=mode, change=attacks.CHANGES[name]
    )


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


def a_sign_of_the_batch_before(net, optimizer, x, t):
    sign = STATE.get("sign", torch.ones(()))
    step(optimizer, rows(net(x), t).mean() * sign)
    STATE["sign"] = flip(t.max())


def an_average_of_the_outputs(net, optimizer, x, t):
    out = net(x)
    step(optimizer, rows(out - STATE.get("centre", torch.zeros(2)), t).mean())
    STATE["centre"] = 10 * out.detach().mean(0)


@pytest.mark.parametrize(
    "loop",
    [a_replay_buffer, a_replayed_batch, a_sign_of_the_batch_before, an_average_of_the_outputs],
    ids=lambda loop: loop.__name__,
)
def test_an_earlier_batch_that_comes_back(loop):
    error = assert_harmless(loop, passes=2)
    assert isinstance(error, DPBayesError), repr(error)


def into_rows(c, out):
    for row, value in zip(c, out.detach(), strict=False):
        row.copy_(value)


# what a loop writes into a tensor that it keeps
WRITTEN = {
    "view": lambda c, out: c[0].copy_(out.mean(0)),
    "view of a view": lambda c, out: c.view(-1)[:2].mul_(0.9).add_(0.1 * out.mean(0)),
    "rows": into_rows,
    "index": lambda c, out: c[out.argmax(1)[0]].lerp_(out.mean(0), 0.5),
    "transposed": lambda c, out: c.T.copy_(out[:3].T),
    "data": lambda c, out: c.data.mul_(0.9).add_(out.mean(0)),
    "detach": lambda c, out: c.detach().add_(out.mean(0)),
    "new data": lambda c, out: setattr(c, "data", c.data * 0.9 + out.mean(0)),
    "foreach": lambda c, out: torch._foreach_add_([c], [out.mean(0)]),
    "out=": lambda c, out: torch.max(out, 0, out=(c[0], torch.zeros(2, dtype=torch.long))),
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


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.kept = attacks.net(), torch.zeros(3, 2)

    def forward(self, x):
        return self.net(x) - self.kept.reshape(-1, 2)[:1]


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
    module = Kept()
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

    def loop(net, optimizer, x, t):
        out = net(x)
        step(optimizer, rows(out, t).mean())
        STATE["step"] = STATE.get("step", 0) + 1
        if STATE["step"] == 2:
            STATE["before"] = net.extra.detach().clone()
            with torch.no_grad():
                CARRIED[name](net.extra, out.detach())

    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = attacks.net()
            self.extra = nn.Parameter(torch.zeros(3, 2), not is_frozen)

        def forward(self, x):
            return self.net(x) - self.extra[:1]

    STATE.clear()
    net, optimizer, loader = private(Extra(), *regression(), clip=CLIP)
    with pytest.raises(DPBayesError) as error:
        for _ in range(4):
            for x, t in loader:
                loop(net, optimizer, x, t)
    assert STATE["step"] == 2 and len(optimizer.accountant) == 2
    assert error.value.code in ("model-written", "model-buffer", "model-map")
    if name in ("view", "foreach"):  # refused before it is written, also after the last step
        assert torch.equal(net.extra, STATE["before"])


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


# -- what is learned beside the model --------------------------------------------------------------


def learned_scale(net, optimizer, x, t):
    scale = STATE["p"] = nn.Parameter(torch.zeros(()))
    step(optimizer, -torch.distributions.Normal(net(x)[:, 0], scale.exp()).log_prob(t).mean())


def a_network_behind(net, optimizer, x, t):
    other = nn.Linear(2, 2)
    STATE["p"] = other.weight
    step(optimizer, rows(other(net(x)), t).mean())


def a_network_on_the_targets(net, optimizer, x, t):
    other = nn.Linear(1, 1)
    STATE["p"] = other.weight
    step(optimizer, rows(net(x), other(t[:, None])[:, 0]).mean())


def a_probe(net, optimizer, x, t):
    other = nn.Linear(2, 1)
    STATE["p"] = other.weight
    out = net(x)
    ((other(out.detach())[:, 0] - t) ** 2).mean().backward()
    step(optimizer, rows(out, t).mean())


@pytest.mark.parametrize(
    "loop",
    [learned_scale, a_network_behind, a_network_on_the_targets, a_probe],
    ids=lambda loop: loop.__name__,
)
def test_what_is_learned_outside_is_refused_and_gets_no_gradient(loop):
    error = released(loop, regression(), expected=N)
    assert isinstance(error, DPBayesError) and error.code == "loss-outside", repr(error)
    assert STATE["p"].grad is None


def test_a_learned_scale_in_a_given_loss_is_refused():
    scale = nn.Parameter(torch.zeros(()))
    error = released(
        lambda net, optimizer, x, t: step(optimizer, net.private_loss(x, t)),
        regression(),
        expected=N,
        loss=lambda out, t: ((out[..., 0] - t) ** 2).mean() * scale.exp(),
    )
    assert isinstance(error, DPBayesError) and error.code == "loss-outside", repr(error)
    assert scale.grad is None


def of_scale(out: torch.Tensor, t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
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


# -- loss= that remembers or reads -----------------------------------------------------------------


def that_remembers(out, t):
    total = STATE.setdefault("total", torch.zeros(()))
    total.add_(t.detach().abs().mean())
    return ((out[..., 0] - t) ** 2).mean() * flip(total)


def that_decides(out, t):
    return ((out[..., 0] - t) ** 2).mean() * (-1 if bool((t > 50).any()) else 1)


def that_collects(out, t):
    STATE.setdefault("seen", []).append(t)
    return ((out[..., 0] - t) ** 2).mean()


def that_hooks(out, t):
    loss = ((out[..., 0] - t) ** 2).mean()
    loss.register_hook(lambda g: g * flip(t.max()))
    return loss


@pytest.mark.parametrize(
    ("loss", "mode"),
    [
        (that_remembers, "bookkeeping"),
        (that_decides, "vmap"),
        (that_collects, "bookkeeping"),
        (that_hooks, "bookkeeping"),
        (that_hooks, "vmap"),
    ],
)
def test_a_given_loss_that_looks_at_other_records(loss, mode):
    assert_harmless(
        lambda net, optimizer, x, t: step(optimizer, net.private_loss(x, t)), mode=mode, loss=loss
    )


# -- a record that would stop everybody's step -----------------------------------------------------

ONE_RECORD = {
    "not finite": lambda out, t: (rows(out, t) * torch.where(t > 50, torch.nan, 1.0)).mean(),
    "out of support": lambda out, t: (
        -torch.distributions.Beta(out[:, 0].exp() + 1, 2.0).log_prob(t / 50).mean()
    ),
    "negative variance": lambda out, t: F.gaussian_nll_loss(
        out[:, 0], t, torch.where(t > 50, -1.0, 1.0)
    ),
}


@pytest.mark.parametrize("name", ONE_RECORD)
def test_an_invalid_record_stops_nobody_elses_step(name):
    assert_harmless(of_loss(ONE_RECORD[name]))


OF_CLASSES = {
    "mean": lambda out, t: F.cross_entropy(out, t),
    "smoothed": lambda out, t: F.cross_entropy(out, t, label_smoothing=0.1),
    "none": lambda out, t: F.cross_entropy(out, t, reduction="none").mean(),
    "nll": lambda out, t: F.nll_loss(out.log_softmax(-1), t),
    "one-hot": lambda out, t: (F.one_hot(t, 2) * out).mean(),
}


@pytest.mark.parametrize(
    ("mode", "is_given"), [("bookkeeping", False), ("bookkeeping", True), ("vmap", True)]
)
@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_class_that_does_not_exist_counts_as_zero(name, is_given, mode):
    x, y = regression()[0], labelled()[1].long() % 2
    y[0] = 7
    loss = OF_CLASSES[name]
    if is_given:
        found = [
            released(
                lambda net, optimizer, x, t: step(optimizer, net.private_loss(x, t)),
                (x[k:], y[k:]),
                mode,
                expected=N - k,
                loss=loss,
            )
            for k in (0, 1)
        ]
    else:
        found = [released(of_loss(loss), (x[k:], y[k:]), mode, expected=N - k) for k in (0, 1)]
    # rounding: parameters are float32, and a difference of two is taken N / CLIP = 1,280 times
    assert float((found[0] - found[1]).norm()) < 0.01


ERRORS = {
    "label out of range": lambda out, t: F.cross_entropy(out, (t > 50).long() * 7),
    "index out of range": lambda out, t: out.gather(1, ((t > 50).long() * 7)[:, None]).mean(),
    "probability above 1": lambda out, t: F.binary_cross_entropy(out[:, 0].sigmoid(), t / 50),
    "no factor": lambda out, t: torch.linalg.cholesky((50 - t)[:, None, None] * torch.eye(2)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_one_record_causes_cannot_be_caught_and_used(name):
    def loop(net, optimizer, x, t):
        out, sign = net(x), 1
        try:
            ERRORS[name](out, t)
        except DPBayesError:
            sign = -1
        step(optimizer, rows(out, t).mean() * sign)

    x, t = regression()
    whole, rest = (released(loop, (x[k:], t[k:]), expected=N - k) for k in (0, 1))
    if not isinstance(whole, DPBayesError):
        assert float((whole - rest).norm()) < 1.02
