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
    pytest.mark.first_cases(1000),
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


@BOTH
@pytest.mark.parametrize("name", attacks.CHANGES)
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


@BOTH
@pytest.mark.parametrize(
    "loss",
    [that_remembers, that_decides, that_collects, that_hooks],
    ids=lambda loss: loss.__name__,
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


def test_hooks_on_saved_tensors_are_refused_with_a_code():
    error = released(attacks.saved_tensors_around_the_model, regression(), expected=N)
    assert isinstance(error, DPBayesError), repr(error)
