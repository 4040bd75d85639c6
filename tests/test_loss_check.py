"""Is the gradient of each record's output that of its own loss? Right losses are accepted and compared, wrong ones refused with the line to write."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal, StudentT, kl_divergence

from torch_dpbayes.clipping.loss_check import LossWatch


def watched(loss: Callable[..., Any], *made: Tensor, reduction: str = "mean", watch: LossWatch | None = None) -> str:
    """One backward pass from ``loss`` to the outputs of a model, then what step() does; the state."""
    watch = LossWatch(reduction) if watch is None else watch
    outputs = tuple(t.clone().requires_grad_() * 1 for t in made)
    given = watch.outputs(outputs, len(made[0]))
    value = loss(*given)
    if value is not None:
        value.backward()
    watch.require_each_alone()
    return watch.state


N, K, T = 7, 5, 3
logits = partial(torch.randn, N, K)
sequence = partial(torch.randn, N, T, K)


def classes(*shape: int) -> Tensor:
    return torch.randint(K, shape or (N,))


def of_classes(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], tuple[Any, ...]]:
    def make():
        y = classes()
        return (lambda out: loss(out, y)), logits()

    return make


def of_numbers(loss: Callable[[Tensor, Tensor], Tensor], *, between_0_and_1: bool = False) -> Callable[[], tuple[Any, ...]]:
    def make():
        y = torch.rand(N, K) if between_0_and_1 else torch.randn(N, K)
        return (lambda out: loss(out, y)), logits()

    return make


def of_sequences(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], tuple[Any, ...]]:
    def make():
        y = classes(N, T)
        return (lambda out: loss(out, y)), sequence()

    return make


def helper(out, y, strength=0.3):
    return (1 - strength) * F.cross_entropy(out, y) + strength * smooth_part(out)


def smooth_part(out):
    return -F.log_softmax(out, -1).mean(-1).mean()


def in_place(out, y):
    loss = F.cross_entropy(out, y, reduction="none")
    loss *= 2
    loss += out.square().sum(1)
    loss = loss.mean()
    loss += 3.0
    loss *= 0.5
    return loss


def into_new(out, y):
    store = torch.zeros(len(out))
    store.add_(F.cross_entropy(out, y, reduction="none"))
    return store.mean()


def with_metrics(out, y):
    with torch.no_grad():
        accuracy = (out.argmax(1) == y).float().mean()
        assert 0 <= float(accuracy) <= 1
    print(f"{out.detach().mean():.3f} {accuracy:.3f}")
    return F.cross_entropy(out, y)


def focal(out, y):
    own = F.log_softmax(out, 1).gather(1, y[:, None]).squeeze(1)
    return -(((1 - own.detach().exp()) ** 2) * own).mean()


def masked_per_record(out, y):
    mask = (y > 1).float()
    losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def backward_of_all(out, y):
    torch.autograd.backward(F.cross_entropy(out, y))


def backward_of_each(out, y):
    losses = F.cross_entropy(out, y, reduction="none")
    losses.backward(torch.full((len(y),), 1 / len(y)))


def several(out, y):
    losses = [F.cross_entropy(out, y), out.square().mean(), (out.logsumexp(1) ** 2).sum() / len(out)]
    return sum(losses)


RIGHT = {
    "cross entropy": of_classes(F.cross_entropy),
    "module": of_classes(nn.CrossEntropyLoss()),
    "smoothing": of_classes(partial(F.cross_entropy, label_smoothing=0.1)),
    "probabilities": of_numbers(lambda out, y: F.cross_entropy(out, y.softmax(1), weight=torch.arange(1.0, K + 1))),
    "weights of each": of_classes(lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1.0, K + 1), reduction="none").mean()),
    "weights by class": of_classes(lambda out, y: (F.cross_entropy(out, y, reduction="none") * torch.arange(1.0, K + 1)[y]).mean()),
    "equal weights": of_classes(lambda out, y: F.cross_entropy(out, y, weight=torch.full((K,), 3.0))),
    "ignoring none": of_classes(lambda out, y: F.cross_entropy(out, y, ignore_index=K + 1)),
    "ignoring each": of_classes(lambda out, y: F.cross_entropy(out, y, ignore_index=2, reduction="none").mean()),
    "sum over n": of_classes(lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y)),
    "sum times 1/n": of_classes(lambda out, y: (1 / len(y)) * F.cross_entropy(out, y, reduction="sum")),
    "sum over tensor n": of_classes(lambda out, y: F.cross_entropy(out, y, reduction="sum") / torch.tensor(len(y))),
    "nll": of_classes(lambda out, y: F.nll_loss(F.log_softmax(out, 1), y)),
    "mse": of_numbers(F.mse_loss),
    "mse by hand": of_numbers(lambda out, y: ((out - y) ** 2).sum() / out.numel()),
    "mse by rows": of_numbers(lambda out, y: (out - y).pow(2).sum(-1).mean(0)),
    "smooth l1": of_numbers(F.smooth_l1_loss),
    "gaussian": of_numbers(lambda out, y: F.gaussian_nll_loss(out, y, torch.full((N, K), 0.5))),
    "kl": of_numbers(lambda out, y: F.kl_div(out.log_softmax(1), y.softmax(1), reduction="batchmean")),
    "bce": of_numbers(F.binary_cross_entropy_with_logits, between_0_and_1=True),
    "bce pos_weight": of_numbers(lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=torch.arange(1.0, K + 1)), between_0_and_1=True),
    "bce weight": of_numbers(lambda out, y: F.binary_cross_entropy_with_logits(out, y, weight=torch.rand(N, 1)), between_0_and_1=True),
    "bce of probabilities": of_numbers(lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), between_0_and_1=True),
    "cosine": of_numbers(lambda out, y: 1 - F.cosine_similarity(out, y).mean()),
    "normalized": of_numbers(lambda out, y: (F.normalize(out) * y).sum(1).mean()),
    "logits adjusted": of_classes(lambda out, y: F.cross_entropy(out + torch.randn(K), y)),
    "hinge": of_classes(F.multi_margin_loss),
    "triplet": of_numbers(lambda out, y: F.triplet_margin_loss(out, y, y.flip(1))),
    "flattened": of_sequences(lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())),
    "view -1": of_sequences(lambda out, y: F.cross_entropy(out.view(-1, K), y.view(-1))),
    "view n T": of_sequences(lambda out, y: F.cross_entropy(out.view(N * T, K), y.view(N * T))),
    "view back": of_sequences(lambda out, y: F.cross_entropy(out.view(N * T, K), y.flatten(), reduction="none").view(N, T).sum(1).mean()),
    "transposed": of_sequences(lambda out, y: F.cross_entropy(out.transpose(1, 2), y)),
    "permuted": of_sequences(lambda out, y: F.cross_entropy(out.permute(0, 2, 1), y)),
    "time first": of_sequences(lambda out, y: F.cross_entropy(out.transpose(0, 1).reshape(T * N, K), y.T.flatten())),
    "time by time": of_sequences(lambda out, y: sum(F.cross_entropy(out[:, t], y[:, t]) for t in range(T))),
    "shifted": of_sequences(lambda out, y: F.cross_entropy(out[:, :-1].contiguous().view(-1, K), y[:, 1:].reshape(-1))),
    "masked": of_sequences(masked_per_record),
    "helpers": of_classes(helper),
    "in place": of_classes(in_place),
    "into new": of_classes(into_new),
    "metrics": of_classes(with_metrics),
    "focal": of_classes(focal),
    "half": of_classes(lambda out, y: 0.5 * F.cross_entropy(out, y)),
    "twice": of_classes(lambda out, y: 2 * F.cross_entropy(out, y)),
    "plus constant": of_classes(lambda out, y: F.cross_entropy(out, y) + torch.tensor(4.0) + 1),
    "times a tensor": of_classes(lambda out, y: F.cross_entropy(out, y) * torch.tensor(3.0)),
    "sum of losses": of_classes(several),
    "stacked": of_classes(lambda out, y: torch.stack([F.cross_entropy(out, y), out.square().mean()]).sum()),
    "indexed": of_classes(lambda out, y: -F.log_softmax(out, 1)[torch.arange(len(y)), y].mean()),
    "indexed by range": of_classes(lambda out, y: -F.log_softmax(out, 1)[range(len(y)), y].mean()),
    "in another order": of_classes(lambda out, y: F.cross_entropy(out[(p := torch.randperm(N))], y[p])),
    "some rows": of_classes(lambda out, y: F.cross_entropy(out[y > 1], y[y > 1], reduction="sum") / N),
    "one hot": of_classes(lambda out, y: -(F.one_hot(y, K) * out.log_softmax(1)).sum(1).mean()),
    "sorted losses": of_classes(lambda out, y: F.cross_entropy(out, y, reduction="none").sort().values.mean()),
    "diagonal": of_numbers(lambda out, y: (out @ y.T).diagonal().mean()),
    "twice the rows": of_classes(lambda out, y: F.cross_entropy(torch.cat([out, -out]), y.repeat(2))),
    "shift by the maximum": of_classes(lambda out, y: F.cross_entropy(out - out.detach().max(1, keepdim=True).values, y)),
    "double": of_classes(lambda out, y: F.cross_entropy(out.double(), y)),
    "float": of_classes(lambda out, y: F.cross_entropy(out.float(), y)),
    "chosen": of_numbers(lambda out, y: torch.where(y > 0, out**2, out.abs()).mean()),
    "einsum": of_numbers(lambda out, y: torch.einsum("nk,nk->n", out, y).square().mean()),
    "normal": of_numbers(lambda out, y: -Normal(out, 1).log_prob(y).mean()),
    "normal by rows": of_numbers(lambda out, y: -Normal(out, torch.tensor(0.3)).log_prob(y).sum(-1).mean()),
    "student": of_numbers(lambda out, y: -StudentT(3.0, out, 1.0).log_prob(y).mean()),
    "categorical": of_classes(lambda out, y: -Categorical(logits=out).log_prob(y).mean()),
    "bernoulli": of_numbers(lambda out, y: -Bernoulli(logits=out).log_prob(y.round()).mean(), between_0_and_1=True),
    "multivariate": of_numbers(lambda out, y: -MultivariateNormal(out, torch.eye(K)).log_prob(y).mean()),
    "divergence": of_numbers(lambda out, y: kl_divergence(Normal(out, 1.0), Normal(0.0, 1.0)).sum(1).mean()),
    "autograd.backward": of_classes(backward_of_all),
    "backward with gradient": of_classes(backward_of_each),
    "mean of means": of_sequences(lambda out, y: out.mean(2).mean(1).mean()),
    "norms": of_numbers(lambda out, y: (out - y).norm(dim=1).mean()),
    "ctc": lambda: (
        lambda out: F.ctc_loss(
            out.transpose(0, 1).log_softmax(2), torch.ones(N, 1, dtype=torch.long), torch.full((N,), T), torch.ones(N, dtype=torch.long), reduction="none"
        ).mean(),
        sequence(),
    ),
    "two outputs": lambda: (lambda mean, spread: -Normal(mean, spread.exp()).log_prob(torch.ones(N, K)).mean(), logits(), logits()),
    "one of two outputs": lambda: (lambda a, b: a.square().mean(), logits(), logits()),
    "numbers for vae": lambda: (lambda mean, log_var: (-0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)).mean(), logits(), logits()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_compared_and_pass(name):
    loss, *made = RIGHT[name]()
    assert watched(loss, *made) == "compared"


WEIGHT = torch.arange(1.0, K + 1)


def two_classes(*shape: int) -> Tensor:
    """At least one record of each kind."""
    y = torch.randint(2, shape or (N,))
    y[0], y[1] = 0, 1
    return y


def of_two(loss: Callable[[Tensor, Tensor], Any]) -> Callable[[], tuple[Any, ...]]:
    def make():
        y = two_classes()
        return (lambda out: loss(out, y)), logits()

    return make


def of_two_by_time(loss: Callable[[Tensor, Tensor], Any]) -> Callable[[], tuple[Any, ...]]:
    def make():
        y = two_classes(N, T)
        return (lambda out: loss(out, y)), sequence()

    return make


def hooked(loss: Callable[[Tensor], Tensor], where: str) -> Callable[[Tensor, Tensor], Tensor]:
    def run(out, y):
        middle = out.tanh()
        losses = F.cross_entropy(middle, y, reduction="none")
        end = losses.mean()
        {"output": out, "middle": middle, "losses": losses, "end": end}[where].register_hook(loss)
        return end

    return run


def masked_mean(out, y):
    mask = (y > 0).float()
    return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()


def masked_mean_over_time(out, y):
    mask = (y > 0).float()
    return (F.cross_entropy(out.transpose(1, 2), y, reduction="none") * mask).sum() / mask.sum()


def contrastive(out, y):
    return F.cross_entropy(out @ out.T, torch.arange(N))


def standardised(out, y):
    losses = F.cross_entropy(out, y, reduction="none")
    return ((losses - losses.mean()) / losses.std()).square().mean()


WEIGHTS = (r"weight=.*divides by the weights", 'F.cross_entropy(out, y, weight=weight, reduction="none").mean()')
IGNORED = ("not ignore_index", 'reduction="none").mean()')
COUNT = ("count or sum over the whole batch", "(losses * mask).sum(1) / mask.sum(1)).mean()")
CONSTANT = ("divides by 13", "losses.mean()")
SUM = ("is a sum over records", "losses.mean()")
MIXES = ("mixes records", "losses.mean()")
HOOK = ("changed on its way", "register_hook")

WRONG = {
    "weight": (of_two(partial(F.cross_entropy, weight=WEIGHT)), WEIGHTS),
    "weight of a module": (of_two(nn.CrossEntropyLoss(weight=WEIGHT)), WEIGHTS),
    "weight of nll": (of_two(lambda out, y: F.nll_loss(out.log_softmax(1), y, WEIGHT)), ("nll_loss", "F.nll_loss(out, y")),
    "weight over time": (of_two_by_time(lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=WEIGHT)), WEIGHTS),
    "ignore_index": (of_two(partial(F.cross_entropy, ignore_index=0)), IGNORED),
    "ignore_index over time": (of_two_by_time(lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=0)), IGNORED),
    "-100": (of_two(lambda out, y: F.cross_entropy(out, torch.where(y > 0, y, -100))), IGNORED),
    "masked mean": (of_two(masked_mean), COUNT),
    "masked mean over time": (of_two_by_time(masked_mean_over_time), COUNT),
    "mean of some": (of_two(lambda out, y: F.cross_entropy(out[y > 0], y[y > 0])), MIXES),
    "constant": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="sum") / 13), CONSTANT),
    "times a constant": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="sum") * (1 / 13)), SUM),
    "sum": (of_two(partial(F.cross_entropy, reduction="sum")), SUM),
    "n minus 1": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="sum") / (len(y) - 1)), ("divides by 6", "losses.mean()")),
    "centred": (of_two(lambda out, y: F.cross_entropy(out - out.mean(0), y)), (r"mixes records \(mean\)", "losses.mean()")),
    "centred unseen": (of_two(lambda out, y: F.cross_entropy(out - out.detach().mean(0), y)), MIXES),
    "divided by the largest": (of_two(lambda out, y: F.cross_entropy(out / out.detach().abs().max(), y)), MIXES),
    "divided by itself": (of_two(lambda out, y: (loss := F.cross_entropy(out, y)) / loss.detach()), MIXES),
    "softmax over records": (of_two(lambda out, y: F.nll_loss(out.log_softmax(0), y)), (r"mixes records \(log_softmax\)", "")),
    "square of the mean": (of_two(lambda out, y: F.cross_entropy(out, y) ** 2), MIXES),
    "log of the mean": (of_two(lambda out, y: F.cross_entropy(out, y).log()), MIXES),
    "the next record": (of_two(lambda out, y: F.mse_loss(out, out.roll(1, 0).detach())), (r"mixes records \(roll\)", "")),
    "hardest": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="none").topk(3).values.mean()), (r"mixes records \(topk\)", "")),
    "hardest by sorting": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="none").sort().values[-3:].mean()), MIXES),
    "largest": (of_two(lambda out, y: F.cross_entropy(out, y, reduction="none").max()), MIXES),
    "contrastive": (of_two(contrastive), MIXES),
    "standardised": (of_two(standardised), MIXES),
    "batch norm": (of_two(lambda out, y: F.cross_entropy(F.batch_norm(out, None, None, training=True), y)), (r"mixes records \(batch_norm\)", "")),
    "covariance": (of_two(lambda out, y: F.cross_entropy(out, y) + (out.T @ out / N).square().sum()), MIXES),
    "hook on the output": (of_two(hooked(lambda g: g * 2, "output")), HOOK),
    "hook that centres": (of_two(hooked(lambda g: g - g.mean(0), "output")), HOOK),
    "hook in the middle": (of_two(hooked(lambda g: g.flip(0), "middle")), HOOK),
    "hook on the losses": (of_two(hooked(lambda g: g * torch.arange(N), "losses")), HOOK),
    "hook on the loss": (of_two(hooked(lambda g: g * 3, "end")), HOOK),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_refused_with_the_line_to_write(name):
    make, (says, line) = WRONG[name]
    loss, *made = make()
    with pytest.raises(RuntimeError, match=says) as error:
        watched(loss, *made)
    assert line in str(error.value)
    assert len(re.findall(r"\S+", str(error.value))) <= 35
