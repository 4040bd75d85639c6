"""Trains a Bayesian neural network with differential privacy and reports how good and how calibrated its predictions are.

    python examples/private_bnn.py                                   # scikit-learn's digits, under a minute
    python examples/private_bnn.py --dataset mnist --plot mnist.png  # downloads MNIST and Fashion-MNIST
    python examples/private_bnn.py --task regression                 # scikit-learn's diabetes
    python examples/private_bnn.py --epsilon inf                     # the same without noise: what privacy costs

DP-SGLD draws one Gaussian a step, which is both the privacy noise and the noise of the sampler. The iterates of the second half of the run are the
posterior samples, free post-processing of what was paid for. Inputs are scaled by public constants, never by statistics of the records. What is
printed is computed on the test records, whose disclosure is accepted here; no loss or accuracy on the training records is ever shown.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_dpbayes as dpb

# Defaults of each problem. Temperature 1 is the Bayesian posterior and needs more noise than these budgets ask for; the temperatures here are
# just below the one whose own noise would be the noise that epsilon needs.
SETTINGS: dict[str, dict[str, float]] = {
    "digits": dict(epsilon=5.0, epochs=60, lr=2.0, temperature=0.01, batch_size=512, max_grad_norm=0.5),
    "mnist": dict(epsilon=3.0, epochs=40, lr=4.0, temperature=0.01, batch_size=2048, max_grad_norm=0.1),
    "fashion-mnist": dict(epsilon=3.0, epochs=40, lr=4.0, temperature=0.01, batch_size=2048, max_grad_norm=0.1),
    "diabetes": dict(epsilon=5.0, epochs=100, lr=0.2, temperature=0.1, batch_size=128, max_grad_norm=1.0),
}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
MEAN_AND_STD = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}  # published with the data sets
MAX_SAMPLES = 100


@dataclass(frozen=True)
class Problem:
    """Records to learn from, records to test on, and what the network and its likelihood are."""

    name: str
    likelihood: str
    train: TensorDataset
    test_x: Tensor
    test_y: Tensor
    network: nn.Module
    loss: nn.Module  # mean over the batch of −log p(record), up to a constant
    outside_name: str = ""
    outside_x: Tensor | None = None


def digits(seed: int) -> Problem:
    from sklearn.datasets import load_digits, load_sample_images

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16  # pixels are 0..16
    y = torch.tensor(labels)
    train, test = split(len(x), seed)
    photographs = np.concatenate([photo[:424, :640].mean(2).reshape(53, 8, 80, 8).swapaxes(1, 2).reshape(-1, 8, 8) for photo in load_sample_images().images])
    patches = torch.tensor(photographs, dtype=torch.float32)[:, None] / 255
    network = nn.Sequential(
        nn.Flatten(1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )
    return Problem(
        "digits", "categorical", TensorDataset(x[train], y[train]), x[test], y[test], network, nn.CrossEntropyLoss(),
        "patches of photographs", patches,
    )


def mnist_like(name: str, data_root: Path | None) -> Problem:
    train_x, train_y = torchvision_images(name, data_root, train=True)
    test_x, test_y = torchvision_images(name, data_root, train=False)
    outside_x, _ = torchvision_images(OTHER[name], data_root, train=False)
    mean, std = MEAN_AND_STD[name]
    network = nn.Sequential(  # the network of Tramèr and Boneh (2021), with the tanh of Papernot et al. (2021)
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(1), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip
    return Problem(
        name, "categorical", TensorDataset((train_x - mean) / std, train_y), (test_x - mean) / std, test_y, network, nn.CrossEntropyLoss(),
        OTHER[name], (outside_x - mean) / std,
    )


def torchvision_images(name: str, data_root: Path | None, *, train: bool) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import MNIST, FashionMNIST

    data_set = {"mnist": MNIST, "fashion-mnist": FashionMNIST}[name]
    if data_root is None:
        loaded = data_set(Path.home() / ".cache" / "torch_dpbayes", train=train, download=True)
    else:
        try:
            loaded = data_set(data_root, train=train)
        except RuntimeError:
            raise ValueError(f"--data-root {data_root} has no {data_set.__name__}/raw in torchvision's layout; without --data-root it is downloaded") from None
    return loaded.data[:, None].float() / 255, loaded.targets


def split(num_records: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four fifths to learn from, one fifth to test on."""
    order = torch.randperm(num_records, generator=torch.Generator().manual_seed(seed))
    num_test = num_records // 5
    return order[num_test:], order[:num_test]


PROBLEMS: dict[str, Callable] = {}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--dataset", default="digits")
    p.add_argument("--data-root", type=Path)
    for n in ("epsilon", "lr", "temperature", "max-grad-norm"):
        p.add_argument("--" + n, type=float)
    p.add_argument("--delta", type=float, default=1e-5)
    p.add_argument("--prior-std", type=float, default=1.0)
    for n in ("epochs", "batch-size"):
        p.add_argument("--" + n, type=int)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    for k, v in SETTINGS[a.dataset].items():
        if getattr(a, k) is None:
            setattr(a, k, v)
    torch.manual_seed(a.seed)
    logging.basicConfig(format="%(message)s")
    pr = digits(a.seed) if a.dataset == "digits" else mnist_like(a.dataset, a.data_root)
    engine = dpb.PrivacyEngine()
    kw = dict(module=pr.network, optimizer=partial(dpb.optim.DPSGLD, lr=a.lr, temperature=a.temperature, prior_std=a.prior_std),
              data_loader=DataLoader(pr.train, batch_size=a.batch_size), max_grad_norm=a.max_grad_norm)
    plan = engine.plan(**kw, target_epsilon=a.epsilon, target_delta=a.delta, epochs=a.epochs)
    net, opt, loader = engine.make_private_with_epsilon(**kw, target_epsilon=a.epsilon, target_delta=a.delta, epochs=a.epochs)
    S = dpb.PosteriorSamples(burn_in=plan.steps // 2, thin=max(1, plan.steps // 2 // MAX_SAMPLES))
    m = dpb.metrics
    t = time.time()
    for epoch in range(a.epochs):
        for x, y in loader:
            opt.zero_grad(); pr.loss(net(x), y).backward(); opt.step()
            S.collect(net)
        if a.dataset != "digits" and epoch % 5 == 4 or epoch == a.epochs - 1:
            net.eval()
            with torch.no_grad():
                last = net(pr.test_x).softmax(1)
            net.train()
            print(epoch, f"{time.time()-t:.0f}s", "last", m.accuracy(last, pr.test_y), m.negative_log_likelihood(last, pr.test_y), m.expected_calibration_error(last, pr.test_y), flush=True)
    t1 = time.time()
    av = S.predict(net, pr.test_x)
    print("avg", len(S), m.accuracy(av, pr.test_y), m.negative_log_likelihood(av, pr.test_y), m.expected_calibration_error(av, pr.test_y))
    ent = lambda q: torch.special.entr(q).sum(1)
    print("auroc", m.area_under_roc(ent(av), S.predictive_entropy(net, pr.outside_x)), "mi", m.area_under_roc(S.mutual_information(net,pr.test_x), S.mutual_information(net, pr.outside_x)), "last", m.area_under_roc(ent(last), ent(net(pr.outside_x).softmax(1).detach())))
    print("eps", engine.accountant.get_epsilon(a.delta), "predict", time.time() - t1, "param norm", sum(p.pow(2).sum() for p in net.parameters()).sqrt().item(), "acc T", opt.effective_temperature)


if __name__ == "__main__":
    main()
