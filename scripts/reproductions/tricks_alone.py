"""What each trick of private training does alone, to a small convolutional network on Fashion-MNIST
at one ε.

    python tricks_alone.py --data-root ROOT [--repeats 3] [--choose]

ROOT is a folder in torchvision's layout. The records are the first 6,000 training images, averaged
over squares of 2 x 2 pixels, to keep this to minutes of one core; the test images are all 10,000.
ε = 3, δ = 1e-5, add or remove one record.

The base is DP-SGD: batches of 250 for 10 passes, clip norm 1, constant lr, and the last iterate
predicts. Every other row changes one thing, at the same ε and number of passes, by what
docs/how_to/raise_accuracy.md says. The lr is the base's: ``--choose`` runs the base alone over a
grid of them, on the last 10,000 training images. Averages are taken of the base's own runs. Four
views are flips and shifts by one pixel, drawn anew in each pass, but for the first, which is the
image itself. Batches of 2000 have a row at the base's lr, and one at the root of 8 and at 8 times
that, as two rules have it, and one with as many steps as the base. The clip norm follows the
median of the gradients' norms through the first five passes: a share of z = 10 is released after
each and charged; "from 10" starts at a clip norm ten times as large, whose row without adaptation
stands beside it. lr is divided by the clip norm, which leaves the noise of a step as it is.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from reproduction import Row, finish, grouped, mean_and_error, parser_of, positive
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import metrics
from torch_dpbayes.accounting.calibration import noise_multiplier_for
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

EPSILON, DELTA, RECORDS = 3.0, 1e-5, 6_000
PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530  # published
LR, LRS = 4.0, (1.0, 2.0, 4.0, 8.0)
BASE = {"batch_size": 250, "epochs": 10, "lr": LR, "clip": 1.0}
DECAY, BLOCKS, SHARE_NOISE, AIM = 0.99, 5, 10.0, 0.5
TRICKS: dict[str, dict[str, Any]] = {
    "base": {},
    "four views": {"views": 4},
    "batches of 2000": {"batch_size": 2000},
    "batches of 2000, lr x 2.8": {"batch_size": 2000, "lr": 2.8 * LR},
    "batches of 2000, lr x 8": {"batch_size": 2000, "lr": 8 * LR},
    "batches of 2000, 80 passes": {"batch_size": 2000, "epochs": 80},
    "standardised weights": {"standardised": True},
    "warm-up": {"schedule": "warm-up"},
    "warm-up and cosine": {"schedule": "cosine"},
    "adaptive clip norm": {"adaptive": True},
    "clip norm 10": {"clip": 10.0},
    "adaptive clip norm, from 10": {"clip": 10.0, "adaptive": True},
}
OF_BASE = ("EMA", "tail average of weights", "posterior average")
MEASURES = ("accuracy", "NLL", "ECE")


class Views(nn.Module):
    """A network on several views of each record, ``[n, views, ...]`` to ``[n, views, classes]``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return scores


class DrawnViews(Dataset[tuple[Tensor, Tensor]]):
    """The image, and copies of it that are flipped and shifted by up to a pixel, at random."""

    def __init__(self, x: Tensor, y: Tensor, views: int) -> None:
        self.x, self.y, self.views = F.pad(x, (1, 1, 1, 1), mode="replicate"), y, views

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        padded = self.x[index]
        side = padded.shape[-1] - 2
        found = [padded[:, 1:-1, 1:-1]]
        for top, left, flip in torch.randint(0, 6, (self.views - 1, 3)).tolist():
            view = padded[:, top % 3 : top % 3 + side, left % 3 : left % 3 + side]
            found.append(view.flip(2) if flip % 2 else view)
        return torch.stack(found), self.y[index]


class StandardisedConv2d(nn.Conv2d):
    """A convolution by its weights less their mean, in units of their spread."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (spread + 1e-5), self.bias)


def network(convolution: type[nn.Conv2d]) -> nn.Module:
    """For images of 14 x 14."""
    return nn.Sequential(
        convolution(1, 8, 5, stride=2, padding=2),
        nn.GroupNorm(4, 8),
        nn.Tanh(),
        convolution(8, 16, 3),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@cache
def load(root: str, validate: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training records, and those to judge by."""
    from torchvision import datasets

    def of(train: bool) -> tuple[Tensor, Tensor]:
        data = datasets.FashionMNIST(root, train=train, download=False)
        small = F.avg_pool2d(data.data[:, None].float() / 255, 2)
        return (small - PIXEL_MEAN) / PIXEL_STD, data.targets

    x, y = of(train=True)
    judged = (x[-10_000:], y[-10_000:]) if validate else of(train=False)
    return (x[:RECORDS], y[:RECORDS]), judged


def scheduler(name: str, optimizer: Any, steps: int) -> Any:
    """Fixed in advance: a tenth of the steps up from a tenth of lr, then flat or down a cosine."""
    up = LinearLR(optimizer, 0.1, total_iters=steps // 10)
    if name == "warm-up":
        return up
    down = CosineAnnealingLR(optimizer, steps - steps // 10)
    return SequentialLR(optimizer, [up, down], [steps // 10])


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """The mean over records, and over their views where there are any."""
    if output.dim() == 3:
        return F.cross_entropy(output.flatten(0, 1), y.repeat_interleave(output.shape[1]))
    return F.cross_entropy(output, y)


def run(
    root: str,
    trick: str,
    repeat: int,
    batch_size: int,
    epochs: int,
    lr: float,
    clip: float,
    views: int = 1,
    standardised: bool = False,
    schedule: str = "",
    adaptive: bool = False,
    validate: bool = False,
) -> dict[str, Any]:
    """One training run, and the measures of its predictors."""
    (x, y), (x_test, y_test) = load(root, validate)
    begun = time.process_time()
    net = network(StandardisedConv2d if standardised else nn.Conv2d)
    records: Dataset[Any] = TensorDataset(x, y)
    if views > 1:
        net, records = Views(net), DrawnViews(x, y, views)
    rate, per_pass = batch_size / len(y), len(y) // batch_size
    steps, shares = epochs * per_pass, BLOCKS if adaptive else 0
    noise = noise_multiplier_for(
        lambda z: PoissonSampledDpEvent(rate, GaussianDpEvent(z)),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        steps=steps,
        history=[(PoissonSampledDpEvent(rate, GaussianDpEvent(SHARE_NOISE)), shares)] * adaptive,
    )
    accountant = dpb.PrivacyAccountant(EPSILON, DELTA)
    loader: Any = DataLoader(records, batch_size=batch_size)

    def private(net: nn.Module, loader: Any, clip: float) -> Any:
        return dpb.PrivacyEngine(accountant).make_private(
            module=net,
            optimizer=partial(
                dpb.optim.DPSGHMC, lr=lr / clip, momentum=0.0, temperature=0.0, prior_std=10.0
            ),
            data_loader=loader,
            max_grad_norm=clip,
            noise_multiplier=noise,
        )

    net, optimizer, loader = private(net, loader, clip)
    moving = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    tail = AveragedModel(net)
    samples = dpb.PosteriorSamples(steps // 2, max(1, steps // 40), 20)
    steps_of_lr = scheduler(schedule, optimizer, steps) if schedule else None
    for epoch in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_of(net(inputs), labels).backward()
            optimizer.step()
            moving.update_parameters(net)
            if epoch >= epochs // 2:
                tail.update_parameters(net)
            samples.collect(net)
            if steps_of_lr is not None:
                steps_of_lr.step()
        if epoch < shares:
            longer = dpb.private_clipped_fraction(
                net, optimizer, loader, noise_multiplier=SHARE_NOISE
            )
            clip *= math.exp(longer - AIM)
            net, optimizer, loader = private(net, loader, clip)
    seconds = time.process_time() - begun
    x_test = x_test[:, None] if views > 1 else x_test

    def probabilities(model: nn.Module) -> Tensor:
        with torch.no_grad():
            scores = torch.cat([model(part) for part in x_test.split(2000)])
        return (scores[:, 0] if views > 1 else scores).softmax(-1)

    predicted = {trick: probabilities(copy.deepcopy(net).eval())}
    if trick == "base":
        averages: Sequence[Callable[[], Tensor]] = (
            lambda: probabilities(moving.eval()),
            lambda: probabilities(tail.eval()),
            lambda: torch.cat([samples.predict(net, part) for part in x_test.split(2000)]),
        )
        predicted |= {n: average() for n, average in zip(OF_BASE, averages, strict=True)}
    return {
        "rows": [
            {
                "trick": name,
                "accuracy": metrics.accuracy(p, y_test),
                "NLL": metrics.negative_log_likelihood(p, y_test),
                "ECE": metrics.expected_calibration_error(p, y_test),
                "clip norm": clip,
                "noise": noise,
                "epsilon": accountant.get_epsilon(DELTA),
                "seconds": seconds,
            }
            for name, p in predicted.items()
        ]
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over repeats with their standard errors."""
    lines = []
    for (trick, lr), some in grouped(rows, "trick", "lr").items():
        line: Row = {"trick": trick, "lr": lr, "runs": len(some)}
        for measure in MEASURES:
            line[measure], line[f"{measure} se"] = mean_and_error([row[measure] for row in some])
        for measure in ("clip norm", "noise", "epsilon", "seconds"):
            line[measure] = mean_and_error([row[measure] for row in some])[0]
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "tricks_alone")
    parser.add_argument("--data-root", required=True, help="folder with FashionMNIST/raw")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--choose", action="store_true", help="the base over a grid of lr")
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    tricks = list(TRICKS.items())[:: 6 if options.quick else 1]
    if options.choose:
        tricks = [("base", {"lr": lr, "validate": True}) for lr in LRS]
    jobs = [
        {"trick": trick, "repeat": repeat, **BASE, **changed}
        for repeat in range(options.repeats)
        for trick, changed in tricks
    ]
    make = partial(run, options.data_root)
    finish(options, make, jobs, tables=lambda rows: {"": summary(rows)})


if __name__ == "__main__":
    main()
