"""Trains a Bayesian neural network with differential privacy, and prints accuracy and calibration
of its predictions.

    python examples/private_bnn.py                      # digits of scikit-learn, under a minute
    python examples/private_bnn.py --dataset mnist      # downloads two data sets
    python examples/private_bnn.py --task regression    # scikit-learn's diabetes
    python examples/private_bnn.py --epsilon inf        # without noise: shows the cost of privacy

Each step of DP-SGLD draws one Gaussian, which is both the privacy noise and the sampler's noise.
The clip norm is chosen so that the noise for epsilon equals the noise that the sampler needs at
temperature 1. The networks of the second half of the run are the posterior samples. Using them
costs no further privacy. Inputs and targets are scaled by public constants, never by statistics of
the private records. All printed results are for the test records, which count as public here. The
program shows no loss or accuracy on the training records.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_dpbayes as dpb
from torch_dpbayes import metrics

LR = 0.5  # on the mean loss; the average of predictions hardly depends on it
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": dict(epsilon=5.0, epochs=150, lr=LR, batch_size=512),
    "mnist": dict(epsilon=3.0, epochs=40, lr=LR, batch_size=1024),
    "fashion-mnist": dict(epsilon=3.0, epochs=40, lr=LR, batch_size=1024),
    "diabetes": dict(epsilon=5.0, epochs=100, lr=LR, batch_size=128),
}
NO_CLIPPING = 1e6  # clip norm of the baseline without noise
SURE = 0.9  # share of the test records that have the least entropy

# explanations of the printed quantities
_COMMON = {
    "NLL": "mean negative log likelihood of the true answers, in nats: less is better",
    "clip norm": "C, the largest norm of one record's gradient; a larger epsilon raises it",
    "temperature": "1 samples the posterior, less a narrower distribution",
    "floor": "z_min, the noise that epsilon needs; z_L is the noise that the sampler needs",
}
OF_NOISE = {"clip norm", "temperature", "floor"}
WORDS = {
    "classification": {
        **_COMMON,
        "ECE": "mean difference between confidence and accuracy: 0 is best",
    },
    "regression": {**_COMMON, "RMSE": "root mean squared error, in units of the score"},
}

# published mean and standard deviation of a pixel of each data set; OTHER names the
# out-of-distribution data set
PIXELS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}

# age, sex, body mass index, blood pressure and six blood values: rounded center and spread of an
# adult population
PATIENT_MIDDLE = (50.0, 1.5, 25.0, 95.0, 190.0, 115.0, 50.0, 4.0, 4.6, 90.0)
PATIENT_SPREAD = (15.0, 0.5, 5.0, 15.0, 35.0, 30.0, 15.0, 1.5, 0.5, 15.0)
# the documented range of the score, 25 to 346, taken as four standard deviations
SCORE_MIDDLE, SCORE_UNIT = 185.0, 80.0


@dataclass(frozen=True)
class Problem:
    """The records, the network, and the loss: the batch mean of −log p(record), up to a
    constant.
    """

    name: str
    likelihood: str
    network: nn.Module
    loss: nn.Module
    train: TensorDataset
    test_x: Tensor
    test_y: Tensor
    outside_name: str = ""
    outside_x: Tensor | None = None


def load(name: str, data_root: Path | None, seed: int) -> Problem:
    """The problem of that name. ``seed`` sets the split into training and test records if the data
    set has none.
    """
    if name == "digits":
        return digits(seed)
    if name == "diabetes":
        return diabetes(seed)
    return images(name, data_root)


def digits(seed: int) -> Problem:
    from sklearn.datasets import load_digits, load_sample_images

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1  # 0..16 to -1..1
    y = torch.tensor(labels)
    train, test = split(len(x), seed)
    # [2, 427, 640, 3]
    photographs = torch.stack(
        [torch.tensor(photograph) for photograph in load_sample_images().images]
    )
    patches = (
        photographs.float().mean(3).unfold(1, 8, 8).unfold(2, 8, 8).reshape(-1, 1, 8, 8) / 127.5 - 1
    )
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(1),
        nn.Linear(256, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    return Problem(
        name="digits",
        likelihood="categorical",
        network=network,
        loss=nn.CrossEntropyLoss(),
        train=TensorDataset(x[train], y[train]),
        test_x=x[test],
        test_y=y[test],
        outside_name="patches of photographs",
        outside_x=patches,
    )


def images(name: str, data_root: Path | None) -> Problem:
    from torchvision import datasets

    def read(name: str, *, train: bool) -> tuple[Tensor, Tensor]:
        data_set = datasets.MNIST if name == "mnist" else datasets.FashionMNIST
        try:
            read = data_set(
                data_root or Path.home() / ".cache" / "torch_dpbayes",
                train=train,
                download=data_root is None,
            )
        except RuntimeError:
            if data_root is None:
                raise
            raise ValueError(
                f"{data_root} has no {data_set.__name__}/raw with the files of torchvision. Both"
                " MNIST and Fashion-MNIST are needed; without --data-root they are downloaded."
            ) from None
        return read.data[:, None].float() / 255, read.targets

    mean, std = PIXELS[name]
    train_x, train_y = read(name, train=True)
    test_x, test_y = read(name, train=False)
    outside_x, _ = read(OTHER[name], train=False)
    # Papernot et al. (2021), "Tempered sigmoid activations for deep learning with differential
    # privacy", table 1
    network = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(1),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    return Problem(
        name=name,
        likelihood="categorical",
        network=network,
        loss=nn.CrossEntropyLoss(),
        train=TensorDataset((train_x - mean) / std, train_y),
        test_x=(test_x - mean) / std,
        test_y=test_y,
        outside_name=OTHER[name],
        outside_x=(outside_x - mean) / std,
    )


def diabetes(seed: int) -> Problem:
    from sklearn.datasets import load_diabetes

    # scaled=True would use mean and spread of the private records
    values, scores = load_diabetes(return_X_y=True, scaled=False)
    x = (torch.tensor(values, dtype=torch.float32) - torch.tensor(PATIENT_MIDDLE)) / torch.tensor(
        PATIENT_SPREAD
    )
    y = (torch.tensor(scores, dtype=torch.float32)[:, None] - SCORE_MIDDLE) / SCORE_UNIT
    train, test = split(len(x), seed)
    return Problem(
        name="diabetes",
        likelihood=(
            f"Gaussian, variance 1/2 (implied by MSELoss) in units of {SCORE_UNIT:g}:"
            f" standard deviation {SCORE_UNIT * 0.5**0.5:.1f}"
        ),
        network=nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)),
        loss=nn.MSELoss(),
        train=TensorDataset(x[train], y[train]),
        test_x=x[test],
        test_y=y[test],
    )


def split(num_records: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training records (four fifths) and of the test records."""
    order = torch.randperm(num_records, generator=torch.Generator().manual_seed(seed))
    return order[num_records // 5 :], order[: num_records // 5]


def prepare(
    problem: Problem, options: argparse.Namespace
) -> tuple[dpb.PrivacyEngine, Any, Any, int]:
    """Print the plan, and make network, optimizer and loader private. Returns engine, optimizer,
    loader and number of steps.
    """
    engine = dpb.PrivacyEngine()
    run: dict[str, Any] = dict(
        module=problem.network,
        data_loader=DataLoader(problem.train, batch_size=options.batch_size),
    )
    if options.max_grad_norm is not None:
        run["max_grad_norm"] = options.max_grad_norm
    target: dict[str, Any] = dict(epochs=options.epochs, target_delta=options.delta)
    if options.epsilon != math.inf:
        target["target_epsilon"] = options.epsilon
        target["calibrate"] = options.calibrate
    else:  # plain SGD
        options.temperature = 0.0
        run.setdefault("max_grad_norm", NO_CLIPPING)
    run["optimizer"] = partial(dpb.optim.DPSGLD, lr=options.lr, temperature=options.temperature)
    plan = engine.plan(**run, **target)
    print(plan)
    if options.epsilon != math.inf:
        _, optimizer, loader = engine.make_private_with_epsilon(**run, **target)
    else:
        _, optimizer, loader = engine.make_private(**run)
    return engine, optimizer, loader, plan.steps


def train(
    problem: Problem,
    engine: dpb.PrivacyEngine,
    optimizer: Any,
    loader: Any,
    steps: int,
    options: argparse.Namespace,
) -> tuple[dpb.PosteriorSamples, float]:
    """The posterior samples, and the epsilon spent."""
    network, epochs = problem.network, options.epochs
    samples, spent = posterior_samples(problem), 0.0
    with tqdm(total=steps, unit="step") as bar:
        bar.set_postfix(
            C=f"{optimizer.max_grad_norm:.3g}",
            T=f"{optimizer.effective_temperature:.3g}",
            z=f"{optimizer.effective_noise_multiplier:.3g}",
        )
        for epoch in range(epochs):
            bar.set_description(
                f"epoch {epoch + 1}/{epochs}, {budget(spent, options.epsilon)}", refresh=False
            )
            for x, y in loader:
                optimizer.zero_grad()
                problem.loss(network(x), y).backward()
                optimizer.step()
                samples.collect(network)
                bar.update()
            spent = engine.accountant.get_epsilon(options.delta)
        bar.set_description(f"epoch {epochs}/{epochs}, {budget(spent, options.epsilon)}")
    return samples, spent


def posterior_samples(problem: Problem) -> dpb.PosteriorSamples:
    """An empty set; it will keep the second half of the iterates."""
    if problem.name == "diabetes":  # MSELoss implies the variance 1/2
        return dpb.PosteriorSamples("normal", noise_std=math.sqrt(0.5))
    return dpb.PosteriorSamples()


def budget(spent: float, epsilon: float) -> str:
    return (
        "epsilon inf: not private"
        if epsilon == math.inf
        else f"epsilon {spent:.3f} spent, {max(0.0, epsilon - spent):.3f} left"
    )


def show_classification(
    problem: Problem, samples: dict[str, dpb.PosteriorSamples], plot: Path
) -> None:
    assert problem.outside_x is not None
    inside = {name: s.predict(problem.network, problem.test_x) for name, s in samples.items()}
    outside = {name: s.predict(problem.network, problem.outside_x) for name, s in samples.items()}
    print(f"{'':32}{'test accuracy':>15}{'NLL':>9}{'ECE':>9}{'OOD AUROC':>12}")
    for name, probabilities in inside.items():
        print(
            f"{name:32}{metrics.accuracy(probabilities, problem.test_y):15.2%}"
            f"{metrics.negative_log_likelihood(probabilities, problem.test_y):9.4f}"
            f"{metrics.expected_calibration_error(probabilities, problem.test_y):9.4f}"
            f"{metrics.area_under_roc(entropy(probabilities), entropy(outside[name])):12.3f}"
        )
    print(
        f"OOD AUROC: how well predictive entropy separates {problem.outside_name} from test"
        f" records ({problem.name}); 0.5 is chance"
    )
    name, probabilities = next(iter(inside.items()))
    doubt = entropy(probabilities)
    order, wrong = doubt.argsort(), probabilities.argmax(1) != problem.test_y
    sure = order[: round(SURE * len(order))]
    print(
        f"{name.split(',')[0]}: {wrong.float().mean():.1%} wrong, {wrong[sure].float().mean():.1%}"
        f" among the surest {SURE:.0%}; ask a person about the others, first the test records"
        f" {', '.join(map(str, order.flip(0)[:5].tolist()))}"
    )
    draw(problem, inside, outside, plot)


def show_regression(problem: Problem, samples: dict[str, dpb.PosteriorSamples], plot: Path) -> None:
    print(f"{'':32}{'test RMSE':>12}{'NLL':>9}{'in 90 % interval':>19}")
    for name, s in samples.items():
        x, y = problem.test_x, problem.test_y[:, 0]
        means = s.predict(problem.network, x)
        low, high = s.predictive_quantiles(problem.network, x, (0.05, 0.95))
        error = SCORE_UNIT * float(nn.functional.mse_loss(means, y).sqrt())
        surprise = -float(s.log_likelihood(problem.network, x, y).mean())
        covered = metrics.interval_coverage(low, high, y)
        print(f"{name:32}{error:12.1f}{surprise + math.log(SCORE_UNIT):9.3f}{covered:19.1%}")
        if name == next(iter(samples)):
            draw_intervals(problem, means, low, high, covered, plot)


def entropy(probabilities: Tensor) -> Tensor:
    """The entropy of each row, in nats."""
    return torch.special.entr(probabilities).sum(1)


def draw(
    problem: Problem, inside: dict[str, Tensor], outside: dict[str, Tensor], path: Path
) -> None:
    """Draw a reliability diagram of all predictions, and the entropy of the posterior average's
    predictions in and out of distribution.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    reliability, entropies = figure.subplots(1, 2)
    reliability.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="perfectly calibrated")
    for (name, probabilities), style in zip(inside.items(), ("o-", "s-", "^-"), strict=False):
        curve = metrics.reliability_curve(probabilities, problem.test_y, num_bins=10)
        enough = curve.num_records >= 10
        reliability.plot(
            curve.confidence[enough], curve.accuracy[enough], style, label=name.split(",")[0]
        )
    reliability.set(
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
        xlabel="confidence",
        ylabel="accuracy",
        title=f"{problem.name}: reliability",
    )
    reliability.legend(loc="lower right", frameon=False)
    average = next(iter(inside))
    lowest, highest = 1e-4, math.log(10)  # ten classes
    bins = torch.logspace(math.log10(lowest), math.log10(highest), 36).tolist()
    for name, x in (
        (f"{problem.name} test", inside[average]),
        (problem.outside_name, outside[average]),
    ):
        entropies.hist(
            entropy(x).clamp(lowest, highest).tolist(),
            bins=bins,
            weights=[1 / len(x)] * len(x),
            alpha=0.6,
            label=name,
        )
    separation = metrics.area_under_roc(entropy(inside[average]), entropy(outside[average]))
    entropies.set(
        xscale="log",
        xlabel="predictive entropy in nats (least: 0.0001 or below)",
        ylabel="share of images",
    )
    entropies.set_title(f"entropy of the posterior average, AUROC {separation:.2f}")
    entropies.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=100)


def draw_intervals(
    problem: Problem, means: Tensor, low: Tensor, high: Tensor, covered: float, path: Path
) -> None:
    """Draw every test record's score against the prediction, with its 90 % interval."""
    from matplotlib.figure import Figure

    def scores(values: Tensor) -> Tensor:
        return (SCORE_MIDDLE + SCORE_UNIT * values).reshape(-1)

    predicted, truth = scores(means), scores(problem.test_y)
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(
        predicted.tolist(),
        predicted.tolist(),
        yerr=torch.stack([predicted - scores(low), scores(high) - predicted]).tolist(),
        fmt="none",
        ecolor="0.8",
        label="90 % interval",
    )
    axes.plot(predicted.tolist(), truth.tolist(), "o", markersize=4, label="test record")
    axes.axline((SCORE_MIDDLE, SCORE_MIDDLE), slope=1, color="0.5", linestyle="--")
    axes.set(
        xlabel="predicted score",
        ylabel="score",
        title=f"{problem.name}: {covered:.0%} of the records in their 90 % interval",
    )
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=100)


def _same(options: argparse.Namespace) -> list[str]:
    """The options that select this problem."""
    dataset = [] if options.dataset is None else [f"--dataset {options.dataset}"]
    return [f"--task {options.task}", *dataset]


def parser() -> argparse.ArgumentParser:
    defaults = ["defaults of the other options:"]
    for name, settings in SETTINGS.items():
        defaults.append(
            f"  {name:14}"
            + ", ".join(
                f"{option.replace('_', '-')} {value:g}" for option, value in settings.items()
            )
        )
    result = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(defaults),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add(
        "--task",
        choices=("classification", "regression"),
        default="classification",
        help="default: classification",
    )
    add(
        "--dataset",
        choices=("digits", "mnist", "fashion-mnist", "diabetes"),
        help="default: digits, or diabetes for regression",
    )
    add(
        "--data-root",
        type=Path,
        metavar="PATH",
        help=(
            "folder in torchvision's layout with MNIST and FashionMNIST; without it they are"
            " downloaded"
        ),
    )
    add(
        "--epsilon",
        type=float,
        help="the privacy budget; inf: no noise, and clipping only with --max-grad-norm",
    )
    add("--delta", type=float, default=1e-5, help="default: 1e-5")
    add("--epochs", type=int, help="passes over the training records")
    add("--lr", type=float, help="step size on the mean loss")
    add(
        "--temperature",
        type=float,
        help=(
            "temperature of the sampled posterior; default: 1, the posterior itself, or with"
            " --max-grad-norm the temperature that follows from the noise"
        ),
    )
    add(
        "--calibrate",
        type=float,
        metavar="SHARE",
        help="share of epsilon for one temperature of the predictions, such as 0.02",
    )
    add("--batch-size", type=int, help="expected size of the Poisson batches")
    add(
        "--max-grad-norm",
        type=float,
        help=(
            "clip norm of one record's gradient; default: the one at which the noise for epsilon is"
            " the noise that the sampler needs"
        ),
    )
    add(
        "--seed",
        type=int,
        default=0,
        help=(
            "seed of the initial weights and of the split into training and test records; noise and"
            " batches always use the operating system's entropy, so no two runs are equal;"
            " default: 0"
        ),
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help=(
            "picture of reliability and predictive entropy, or of the intervals for regression;"
            " default: the data set's name .png, in this folder"
        ),
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    command_line = parser()
    options = command_line.parse_args(arguments)
    name = options.dataset or ("diabetes" if options.task == "regression" else "digits")
    if (name == "diabetes") != (options.task == "regression"):
        command_line.error(f"--dataset {name} is not for --task {options.task}")
    if options.plot is None:
        options.plot = Path(f"{name}.png")
    if not options.plot.parent.is_dir():
        command_line.error(f"--plot: there is no folder {options.plot.parent}")
    if options.epochs is not None and options.epochs < 1:
        command_line.error("--epochs must be at least 1")
    if options.epsilon is not None and not options.epsilon > 0:
        command_line.error(
            f"--epsilon {options.epsilon:g}: pass a number above 0, such as 3, or inf for no noise"
        )
    if not 0 < options.delta < 1:
        command_line.error(f"--delta {options.delta:g}: pass a number in (0, 1), such as 1e-5")
    if options.epsilon == math.inf:
        if options.temperature:
            command_line.error(
                "--epsilon inf adds no noise, so there is no temperature: leave out --temperature"
            )
        if options.calibrate is not None:
            command_line.error("--epsilon inf has no share to reserve: leave out --calibrate")
    for option, value in SETTINGS[name].items():
        if getattr(options, option) is None:
            setattr(options, option, value)

    # shows the engine's warnings
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(options.seed)
    try:
        problem = load(name, options.data_root, options.seed)
        num_parameters = sum(p.numel() for p in problem.network.parameters())
        print(
            f"{name}: {len(problem.train)} training and {len(problem.test_x)} test records,"
            f" {num_parameters} parameters"
        )
        print(f"likelihood            {problem.likelihood}")
        for word, meaning in WORDS[options.task].items():
            if options.epsilon < math.inf or word not in OF_NOISE:
                print(f"{word:22}{meaning}")
        engine, optimizer, loader, steps = prepare(problem, options)
        start = time.perf_counter()
        samples, spent = train(problem, engine, optimizer, loader, steps, options)
        seconds = time.perf_counter() - start
    except ValueError as error:  # the message says what to write instead
        command_line.error(str(error))
    last = posterior_samples(problem)
    last.collect(problem.network)

    print()
    many = "posterior average" if options.epsilon < math.inf else "average of the run"
    one = "samples" if options.epsilon < math.inf else "iterates"
    collected = {f"{many}, {len(samples)} {one}": samples, "last iterate": last}
    if options.calibrate is not None:
        calibrated = copy.deepcopy(samples)
        temperature = calibrated.calibrate(problem.network, loader)
        collected[f"average, calibrated: T = {temperature:.2f}"] = calibrated
        spent = engine.accountant.get_epsilon(options.delta)
    if options.task == "classification":
        show_classification(problem, collected, options.plot)
    else:
        show_regression(problem, collected, options.plot)
    print(
        f"epsilon               {spent:.4g} at delta = {options.delta:g}, for adding or removing"
        " one training record"
    )
    print(
        f"temperature           {optimizer.effective_temperature:.4g} at clip norm"
        f" {optimizer.max_grad_norm:.4g}, noise multiplier"
        f" {optimizer.effective_noise_multiplier:.4g}"
    )
    print(f"training took         {seconds:.0f} seconds")
    print(f"picture               {options.plot}")
    if options.epsilon < math.inf:
        same = " ".join(["scripts/demo", *_same(options), "--epsilon inf"])
        print(f"without privacy       {same}")


if __name__ == "__main__":
    main()
