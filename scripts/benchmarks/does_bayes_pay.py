#!/usr/bin/env python3
"""Does Bayes pay? The posterior average at the defaults beside DP-SGD, at the same ε, on eight data
sets.

    python scripts/benchmarks/does_bayes_pay.py table --data-root ROOT [--seeds 5] [--stored]
    python scripts/benchmarks/does_bayes_pay.py temperature | rates | plane

ROOT has the folders ``adult`` and ``abalone`` with UCI's files and ``mnist`` in torchvision's
layout. Finished runs are lines of ``--results`` and are not made again; seeds are the outer loop.
δ = 1e-5, add or remove one record, Poisson batches. Inputs are scaled by published constants.

``table`` has these rows, all runs of this library's engine:

* DP-SGD as Opacus' tutorials set it: clip norm 1, lr = .1·B/64, which is the lr and batch size of
  Opacus' ``examples/mnist.py`` under linear scaling (Goyal et al., 2017); last iterate and EMA.
  ``DPSGLD(temperature=0, prior_std=inf)`` has the law of Opacus' optimizer: tests/scripts.
* the oracle: of DP-SGD at every clip norm, lr and {last, EMA} of a grid the one with the least mean
  test NLL. Its tuning looks at the test records and is free of charge: nobody can have it.
* ours at the defaults, ``DPSGLD(lr=.5)``, .1 for regression: last iterate, and posterior average.

Networks have one tanh layer of 32. MNIST and Fashion-MNIST are averaged over squares of 2 x 2
pixels. "topics" is a synthetic stand-in for text, bags of words drawn from five topics. The text,
the splits and the initial weights follow from the seed; noise and batches do not.

``temperature`` is how the default of 1 was chosen: random teacher networks with label noise, none
of the table's data, at T = .3 and 1; "T = 1 unless .3 is ahead by 5 %", in the geometric mean of
the NLL over the classifiers. ``rates`` is ours at half and twice the lr. ``plane`` is the NLL over
lr and T on digits at ε = 3.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import metrics

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "reproductions"), str(ROOT / "examples")]
import private_bnn  # noqa: E402
import reproduction  # noqa: E402

DELTA, EPSILONS, HIDDEN = 1e-5, (1.0, 3.0, 8.0), 32
LR, REGRESSION_LR = 0.5, 0.1  # a Gaussian's curvature, 1/σ² of each output, has no bound
TUTORIAL_CLIP, TUTORIAL_LR, TUTORIAL_BATCH = 1.0, 0.1, 64
CLIPS, LRS, TUNED_SEEDS = (0.3, 1.0, 4.0), (0.25, 1.0, 4.0), 2  # the oracle's grid
TEMPERATURES, PLANE_LRS, PLANE_TS = (0.3, 1.0), (0.125, 0.25, 0.5, 1.0, 2.0), (0.1, 0.3, 1.0, 3.0)
RATE_DATA = ("digits", "adult")
AHEAD = 0.95
# batch size and passes; about 250 to 600 steps each
SIZES = {
    "digits": (256, 60),
    "breast cancer": (128, 60),
    "diabetes": (128, 60),
    "abalone": (256, 30),
    "topics": (512, 30),
    "adult": (1024, 15),
    "mnist": (1024, 10),
    "fashion-mnist": (1024, 10),
}
# records, inputs, share of inputs that are zero, hidden units, classes (1: regression), label noise
TEACHERS = {
    "teacher 1": (2_000, 10, 0.0, 16, 3, 0.1),
    "teacher 2": (5_000, 20, 0.0, 32, 2, 0.2),
    "teacher 3": (20_000, 40, 0.0, 32, 10, 0.05),
    "teacher 4": (4_000, 100, 0.9, 0, 5, 0.2),
    "teacher 5": (10_000, 20, 0.0, 16, 1, 0.5),
}
REGRESSIONS = ("diabetes", "abalone", "teacher 5")
# the largest value of each input, stated in scikit-learn's description of the data set
BREAST_LARGEST = (
    *(28.11, 39.28, 188.5, 2501, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097, 2.873, 4.885, 21.98),
    *(542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03, 36.04, 49.54, 251.2, 4254, 0.223, 1.058),
    *(1.252, 0.291, 0.664, 0.208),
)
# mean and spread of each input and of the rings, stated in UCI's abalone.names
ABALONE_MEAN = (0.524, 0.408, 0.140, 0.829, 0.359, 0.181, 0.239, 9.934)
ABALONE_SPREAD = (0.120, 0.099, 0.042, 0.490, 0.222, 0.110, 0.139, 3.224)
ADULT_NUMBERS = {0: 90, 4: 16, 10: 99_999, 11: 4356, 12: 99}  # column: largest value by UCI
ADULT_WORDS = (1, 3, 5, 6, 7, 8, 9, 13)


class Data(NamedTuple):
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float = 1.0  # of a regression's target


def split_data(x: Tensor, y: Tensor, seed: int, unit: float = 1.0) -> Data:
    train, test = private_bnn.split(len(x), seed)
    return Data(x[train], y[train], x[test], y[test], unit)


def adult(root: Path) -> Data:
    def rows(name: str) -> list[list[str]]:
        lines = (root / "adult" / name).read_text().splitlines()
        return [line.rstrip(".").split(", ") for line in lines if line.count(",") == 14]

    both = [rows("adult.data"), rows("adult.test")]
    words = {c: sorted({row[c] for part in both for row in part}) for c in ADULT_WORDS}

    def encoded(part: list[list[str]]) -> tuple[Tensor, Tensor]:
        numbers = [
            torch.tensor([float(r[c]) / top for r in part]) for c, top in ADULT_NUMBERS.items()
        ]
        places = [torch.tensor([words[c].index(row[c]) for row in part]) for c in words]
        hot = [F.one_hot(place, len(words[c])) for c, place in zip(words, places, strict=True)]
        x = torch.cat([torch.stack(numbers, 1), *hot], 1)
        return x, torch.tensor([int(">50K" in row[14]) for row in part])

    return Data(*encoded(both[0]), *encoded(both[1]))


def abalone(root: Path, seed: int) -> Data:
    lines = (root / "abalone" / "abalone.data").read_text().splitlines()
    rows = [line.split(",") for line in lines if line]
    sex = F.one_hot(torch.tensor(["FIM".index(row[0]) for row in rows]), 3)
    values = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    values = (values - torch.tensor(ABALONE_MEAN)) / torch.tensor(ABALONE_SPREAD)
    return split_data(torch.cat([sex, values[:, :-1]], 1), values[:, -1], seed, ABALONE_SPREAD[-1])


def topics(seed: int, records: int = 8_000, words: int = 500, classes: int = 5) -> Data:
    """Roots of word frequencies, of 20 to 60 words; a third of them from the class' own law."""
    random = torch.Generator().manual_seed(seed)
    common = 1 / torch.arange(1.0, words + 1)  # Zipf
    own = torch.rand(classes, words, generator=random).pow(8)
    laws = 2 / 3 * common / common.sum() + 1 / 3 * own / own.sum(1, keepdim=True)
    y = torch.randint(0, classes, (records,), generator=random)
    drawn = torch.multinomial(laws[y], 60, replacement=True, generator=random)
    lengths = torch.randint(20, 61, (records, 1), generator=random)
    x = torch.zeros(records, words).scatter_add_(1, drawn, (torch.arange(60) < lengths).float())
    return split_data(8 * (x / lengths).sqrt(), y, seed)  # as long as a record of digits


def teacher(name: str, seed: int) -> Data:
    records, inputs, zeros, hidden, classes, noise = TEACHERS[name]
    random = torch.Generator().manual_seed(1000 * list(TEACHERS).index(name) + seed)
    x = torch.randn(records + 5_000, inputs, generator=random)
    x = x * (torch.rand(x.shape, generator=random) >= zeros)
    features = x
    if hidden:
        weights = torch.randn(inputs, hidden, generator=random) * 2 / math.sqrt(inputs)
        features = (x @ weights).tanh()
    scores = features @ torch.randn(features.shape[1], classes, generator=random)
    if classes == 1:
        y = scores[:, 0] / math.sqrt(hidden)
        y = y + noise * torch.randn(y.shape, generator=random)
    else:
        y = scores.argmax(1)
        other = torch.randint(0, classes, y.shape, generator=random)
        y = torch.where(torch.rand(y.shape, generator=random) < noise, other, y)
    return Data(x[:records], y[:records], x[records:], y[records:])


@cache
def images(name: str, root: Path) -> Data:
    problem = private_bnn.images(name, root / "mnist")
    x, y = problem.train.tensors
    small, small_test = (F.avg_pool2d(t, 2).flatten(1) for t in (x, problem.test_x))
    return Data(small, y, small_test, problem.test_y)


def load(name: str, root: Path, seed: int) -> Data:
    if name in TEACHERS:
        return teacher(name, seed)
    if name in ("digits", "diabetes"):
        problem = private_bnn.load(name, None, seed)
        (x, y), unit = problem.train.tensors, 1.0
        if name == "diabetes":
            unit = private_bnn.SCORE_UNIT
        y, test_y = (t.flatten() for t in (y, problem.test_y))
        return Data(x.flatten(1), y, problem.test_x.flatten(1), test_y, unit)
    if name == "breast cancer":
        from sklearn.datasets import load_breast_cancer

        values, labels = load_breast_cancer(return_X_y=True)
        x = torch.tensor(values).float() / torch.tensor(BREAST_LARGEST)
        return split_data(2 * x - 1, torch.tensor(labels), seed)
    if name == "topics":
        return topics(seed)
    if name == "abalone":
        return abalone(root, seed)
    return adult(root) if name == "adult" else images(name, root)


def gaussian_loss(output: Tensor, y: Tensor) -> Tensor:
    """−log N(y; mean, variance) less a constant, of outputs that are mean and log variance."""
    return 0.5 * ((y - output[:, 0]).square() * (-output[:, 1]).exp() + output[:, 1]).mean()


def score(data: Data, net: nn.Module, samples: dpb.PosteriorSamples) -> dict[str, float]:
    point = samples.predict(net, data.test_x)
    if samples.likelihood == "normal":  # in the target's own unit
        low, high = samples.predictive_quantiles(net, data.test_x, (0.05, 0.95))
        nll = -samples.log_likelihood(net, data.test_x, data.test_y).mean()
        return {
            "RMSE": data.unit * float((point - data.test_y).square().mean().sqrt()),
            "NLL": float(nll) + math.log(data.unit),
            "coverage": float(((low <= data.test_y) & (data.test_y <= high)).float().mean()),
        }
    hot = F.one_hot(data.test_y, point.shape[1])
    tiny = torch.finfo(point.dtype).tiny
    return {
        "accuracy": float((point.argmax(1) == data.test_y).float().mean()),
        "NLL": float(F.nll_loss(point.clamp_min(tiny).log(), data.test_y)),
        "ECE": metrics.expected_calibration_error(point, data.test_y),
        "Brier": float((point - hot).square().sum(1).mean()),
    }


def run(
    root: Path,
    data: str,
    epsilon: float,
    seed: int,
    clip: float | None,
    lr: float,
    temperature: float | None,
    settings: str,
) -> dict[str, Any]:
    """One training run and what its predictors reach. ``clip`` is DP-SGD's; ours has None."""
    problem = load(data, root, seed)
    batch_size, epochs = size_of(data)
    torch.manual_seed(seed)
    normal = data in REGRESSIONS
    outputs = 2 if normal else int(problem.y.max()) + 1
    net: Any = nn.Sequential(
        nn.Linear(problem.x.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
    )
    options: dict[str, Any] = {"lr": lr}
    if clip is not None:
        options |= {"temperature": 0.0, "prior_std": math.inf}
    elif temperature is not None:
        options |= {"temperature": temperature}
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, **options),
        data_loader=DataLoader(TensorDataset(problem.x, problem.y), batch_size=batch_size),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        **({} if clip is None else {"max_grad_norm": clip}),
    )
    loss = gaussian_loss if normal else F.cross_entropy
    likelihood: Any = "normal" if normal else "categorical"
    samples, steps = dpb.PosteriorSamples(likelihood), epochs * len(loader)
    moving = {name: p.detach().clone() for name, p in net.named_parameters()}
    begun, step = time.process_time(), 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
            if clip is None:
                samples.collect(net)
            step += 1
            weight = max(10 / steps, 9 / (10 + step))  # the last tenth, and less at first
            for name, p in net.named_parameters():
                moving[name].lerp_(p.detach(), weight)
    result: dict[str, Any] = {
        "seconds": time.process_time() - begun,
        "spent": engine.get_epsilon(),
        "clip norm": optimizer.max_grad_norm,
        "T": optimizer.effective_temperature,
    }
    last = {name: p.detach() for name, p in net.named_parameters()}
    predictors = {"last": last} if clip is None else {"last": last, "EMA": moving}
    rows = {}
    for name, one in predictors.items():
        draws = {key: torch.stack([value, value]) for key, value in one.items()}
        single = dpb.PosteriorSamples.from_draws(draws, likelihood)
        rows[name] = score(problem, net, single)
    if clip is None:
        rows["average"] = score(problem, net, samples)
    return result | {"rows": rows}


def size_of(data: str) -> tuple[int, int]:
    """Batch size and passes."""
    if data not in TEACHERS:
        return SIZES[data]
    records = TEACHERS[data][0]
    return (256, 40) if records < 5_000 else (512, 30) if records < 15_000 else (1024, 20)


def job(data: str, epsilon: float, seed: int, **given: Any) -> dict[str, Any]:
    default_lr = REGRESSION_LR if data in REGRESSIONS else LR
    made = {"clip": None, "lr": default_lr, "temperature": None} | given
    settings = reproduction.digest(size=size_of(data), hidden=HIDDEN, teacher=TEACHERS.get(data))
    return {"data": data, "epsilon": epsilon, "seed": seed} | made | {"settings": settings}


def tutorial(data: str) -> dict[str, float]:
    return {"clip": TUTORIAL_CLIP, "lr": TUTORIAL_LR * size_of(data)[0] / TUTORIAL_BATCH}


def grid(data: str) -> list[dict[str, float]]:
    """What the oracle chooses from, the tutorials' settings among it."""
    pairs = itertools.product(CLIPS, LRS)
    return [{"clip": clip, "lr": lr} for clip, lr in pairs] + [tutorial(data)]


class Runs:
    """What is stored or made of jobs, and means over its seeds."""

    def __init__(self, root: Path, results: Path, stored: bool) -> None:
        self.made = partial(
            reproduction.runs_of, partial(run, root), results=results, stored=stored
        )
        self.all: dict[str, reproduction.Run] = {}

    def make(self, jobs: Sequence[dict[str, Any]]) -> None:
        self.all |= {reproduction.key(done.job): done for done in self.made(jobs)}

    def values(
        self, seeds: int, data: str, epsilon: float, row: str, **given: Any
    ) -> list[dict[str, float]]:
        """Of each seed that is there."""
        keys = [reproduction.key(job(data, epsilon, seed, **given)) for seed in range(seeds)]
        results = [self.all[key].result for key in keys if key in self.all]
        return [
            {k: v for k, v in found.items() if k != "rows"} | found["rows"][row]
            for found in results
        ]

    def mean(self, *where: Any, **given: Any) -> dict[str, float]:
        found = self.values(*where, **given)
        measures = found[0] if found else {}
        return {"seeds": len(found)} | {
            name: sum(value[name] for value in found) / len(found) for name in measures
        }


def table(runs: Runs, names: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """The rows of each data set and ε; the oracle's choice is run on all seeds."""
    tuned = min(TUNED_SEEDS, seeds)
    cells = list(itertools.product(names, EPSILONS))
    runs.make(
        [
            job(data, epsilon, seed, **given)
            for seed in range(seeds)
            for data, epsilon in cells
            for given in ({}, tutorial(data))
        ]
    )
    runs.make(
        [
            job(data, epsilon, seed, **given)
            for seed in range(tuned)
            for data, epsilon in cells
            for given in grid(data)
        ]
    )
    best = {
        (data, epsilon): min(
            itertools.product(grid(data), ("last", "EMA")),
            key=lambda choice: runs.mean(tuned, data, epsilon, choice[1], **choice[0]).get(
                "NLL", math.inf
            ),
        )
        for data, epsilon in cells
    }
    runs.make(
        [
            job(data, epsilon, seed, **given)
            for seed in range(tuned, seeds)
            for (data, epsilon), (given, _) in best.items()
        ]
    )
    rows = []
    for (data, epsilon), (given, predictor) in best.items():
        for name, row, settings in (
            ("DP-SGD, last", "last", tutorial(data)),
            ("DP-SGD, EMA", "EMA", tutorial(data)),
            ("oracle", predictor, given),
            ("ours, last", "last", {}),
            # to come, at the same total ε: the average with a private temperature
            ("ours, average", "average", {}),
        ):
            found = runs.mean(seeds, data, epsilon, row, **settings)
            rows.append({"data": data, "epsilon": epsilon, "row": name} | found)
            if name == "oracle":
                rows[-1]["row"] = f"oracle: C {given['clip']:g}, lr {given['lr']:g}, {predictor}"
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """In how many cells the average is ahead, by what the figures are to be."""
    cells = [rows[k : k + 5] for k in range(0, len(rows), 5)]
    pairs = [(min(c[0], c[1], key=lambda row: row["NLL"]), c[2], c[4]) for c in cells]

    def share(what: str, of: Sequence[Any], holds: Callable[[Any, Any, Any], bool]) -> str:
        return f"{what}: {sum(holds(*p) for p in of)} of {len(of)} cells"

    classes = [p for p in pairs if "ECE" in p[0]]
    yield share("NLL better than DP-SGD's", pairs, lambda s, o, a: a["NLL"] < s["NLL"])
    yield share("by 15 %", pairs, lambda s, o, a: a["NLL"] < 0.85 * s["NLL"])
    yield share("ECE better than DP-SGD's", classes, lambda s, o, a: a["ECE"] < s["ECE"])
    yield share(
        "accuracy at most .3 points lower",
        classes,
        lambda s, o, a: a["accuracy"] >= s["accuracy"] - 0.003,
    )
    yield share(
        "NLL at most 5 % above the oracle's", pairs, lambda s, o, a: a["NLL"] <= 1.05 * o["NLL"]
    )


def temperature(runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """The NLL at each temperature, on teachers; the last row is the geometric mean of T = .3 over
    T = 1 over the classifiers.
    """
    cells = list(itertools.product(TEACHERS, EPSILONS))
    runs.make(
        [
            job(data, epsilon, seed, temperature=heat)
            for seed in range(seeds)
            for data, epsilon in cells
            for heat in TEMPERATURES
        ]
    )
    rows: list[dict[str, Any]] = []
    for data, epsilon in cells:
        row: dict[str, Any] = {"data": data, "epsilon": epsilon}
        for heat in TEMPERATURES:
            found = runs.mean(seeds, data, epsilon, "average", temperature=heat)
            row |= {f"NLL at {heat:g}": found["NLL"], "seeds": found["seeds"]}
            for measure in ("accuracy", "ECE"):
                if measure in found:
                    row[f"{measure} at {heat:g}"] = found[measure]
        rows.append(row | {"ratio": row["NLL at 0.3"] / row["NLL at 1"]})
    logs = [math.log(row["ratio"]) for row in rows if row["data"] not in REGRESSIONS]
    mean = math.exp(sum(logs) / len(logs))
    rows.append({"data": f"all classifiers: T = {0.3 if mean < AHEAD else 1:g}", "ratio": mean})
    return rows


def rates(runs: Runs, seeds: int) -> list[dict[str, Any]]:
    cells = list(itertools.product(RATE_DATA, EPSILONS, (LR / 2, LR, 2 * LR)))
    runs.make(
        [job(data, epsilon, seed, lr=lr) for seed in range(seeds) for data, epsilon, lr in cells]
    )
    return [
        {"data": data, "epsilon": epsilon, "row": row, "lr": lr}
        | runs.mean(seeds, data, epsilon, row, lr=lr)
        for data, epsilon, lr in cells
        for row in ("last", "average")
    ]


def plane(runs: Runs, seeds: int) -> list[dict[str, Any]]:
    cells = list(itertools.product(PLANE_LRS, PLANE_TS))
    runs.make(
        [
            job("digits", 3.0, seed, lr=lr, temperature=heat)
            for seed in range(seeds)
            for lr, heat in cells
        ]
    )
    return [
        {"row": row, "lr": lr, "T": heat}
        | runs.mean(seeds, "digits", 3.0, row, lr=lr, temperature=heat)
        for row in ("last", "average")
        for lr, heat in cells
    ]


def draw_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """NLL over DP-SGD's, and ECE, of each data set; one mark for each ε."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    cells = [rows[k : k + 5] for k in range(0, len(rows), 5)]
    names = list(dict.fromkeys(cell[0]["data"] for cell in cells))
    for axes, measure in zip(figure.subplots(1, 2), ("NLL", "ECE"), strict=True):
        of = [name for name in names if measure == "NLL" or name not in REGRESSIONS]
        for cell in cells:
            if cell[0]["data"] not in of:
                continue
            usual = min(cell[:2], key=lambda row: row["NLL"])
            shift = (EPSILONS.index(cell[0]["epsilon"]) - 1) / 4
            scale = usual[measure] if measure == "NLL" else 1.0
            for row, colour, marker, label in (
                (usual, "0.6", "s", "DP-SGD"),
                (cell[2], "tab:orange", "_", "oracle"),
                (cell[4], "tab:blue", "o", "posterior average"),
            ):
                new = label not in axes.get_legend_handles_labels()[1]
                axes.plot(
                    [of.index(row["data"]) + shift],
                    [row[measure] / scale],
                    marker,
                    color=colour,
                    label=label if new else None,
                )
        axes.set_xticks(range(len(of)), [n.replace(" ", "\n").replace("-", "-\n") for n in of])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(bottom=0)
        axes.set_title("NLL, over DP-SGD's" if measure == "NLL" else "ECE")
        axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)


def draw_plane(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Two maps of the NLL, with its numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.9), layout="constrained")
    worst = max(row["NLL"] for row in rows)
    least = min(row["NLL"] for row in rows)
    for axes, name in zip(figure.subplots(1, 2), ("last", "average"), strict=True):
        values = {(row["lr"], row["T"]): row["NLL"] for row in rows if row["row"] == name}
        grid = [[values[lr, heat] for lr in PLANE_LRS] for heat in PLANE_TS]
        axes.imshow(grid, vmin=least, vmax=worst, origin="lower", aspect="auto", cmap="viridis_r")
        for (k, row), i in itertools.product(enumerate(grid), range(len(PLANE_LRS))):
            axes.text(
                i,
                k,
                f"{row[i]:.2f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if row[i] > (least + worst) / 2 else "black",
            )
        axes.set_xticks(range(len(PLANE_LRS)), [f"{lr:g}" for lr in PLANE_LRS])
        axes.set_yticks(range(len(PLANE_TS)), [f"{heat:g}" for heat in PLANE_TS])
        axes.set(xlabel="lr", ylabel="T")
        axes.set_title("last iterate" if name == "last" else "posterior average")
    figure.savefig(path, dpi=90)


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "does_bayes_pay")
    parser.add_argument("what", choices=("table", "temperature", "rates", "plane"))
    parser.add_argument("--data-root", type=Path, default=Path())
    parser.add_argument("--seeds", type=reproduction.positive, default=5)
    parser.add_argument("--data", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--picture", type=Path, help="of the table or the plane")
    parser.add_argument("--quick", action="store_true", help="breast cancer alone, one seed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.data, options.seeds = ["breast cancer"], 1
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    runs = Runs(options.data_root, options.results, options.stored)
    if options.what == "table":
        rows = table(runs, options.data, options.seeds)
    else:
        rows = {"temperature": temperature, "rates": rates, "plane": plane}[options.what](
            runs, options.seeds
        )
    if options.csv:
        reproduction.write_csv(rows, options.csv)
    if options.picture:
        (draw_table if options.what == "table" else draw_plane)(rows, options.picture)
    numbers = {name: ".3f" for row in rows for name, v in row.items() if isinstance(v, float)}
    text = {name: "" for row in rows for name, v in row.items() if isinstance(v, str)}
    columns = {name: {**text, **numbers}.get(name, "") for row in rows for name in row}
    formats = {"epsilon": "g", "seeds": "d", "lr": "g", "seconds": ".1f"}
    columns |= {name: form for name, form in formats.items() if name in columns}
    print(reproduction.markdown(rows, columns))
    if options.what == "table":
        print(*verdict(rows), sep="\n")
    dates = sorted({done.date for done in runs.all.values()})
    print(f"{len(runs.all)} runs, {dates[0]} to {dates[-1]}")


if __name__ == "__main__":
    main()
