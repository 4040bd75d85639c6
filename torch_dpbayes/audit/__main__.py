"""``python -m torch_dpbayes.audit``: audit a training from the command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..optim.sgld import DPSGLD
from .training_run import one_run

_DELTA = 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print the report, write what is asked for; 1 where the stated ε is refuted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if (options.train is None) != (options.data is None):
        raise SystemExit("--train and --data belong together: a function and its data set")
    train, dataset = (
        (_small_training, _made_up_records())
        if options.train is None
        else (_named(options.train), _named(options.data))
    )
    try:
        result = one_run(
            train,
            dataset() if callable(dataset) else dataset,
            num_canaries=options.canaries,
            delta=options.delta,
            confidence=options.confidence,
            bound=options.bound,
            scores=options.scores,
            seed=options.seed,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    result = replace(result, command=shlex.join(["python", "-m", "torch_dpbayes.audit", *given]))
    print(result)
    if options.json is not None:
        options.json.write_text(result.to_json() + "\n", encoding="utf-8")
    if options.picture is not None:
        _draw(result, options.picture)
    return int(result.is_refuted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_dpbayes.audit",
        description="A lower bound on the epsilon of one training run, by white-box canaries."
        " Without --train, a small training of this library's own. Exits with 1 where the stated"
        " epsilon is refuted.",
    )
    add = parser.add_argument
    add("--train", metavar="MODULE:NAME", help="train(dataset, engine), as for audit.one_run")
    add("--data", metavar="MODULE:NAME", help="the data set, or a function that returns it")
    add("--canaries", type=int, default=1000, metavar="M", help="how many (default 1000)")
    add("--delta", type=float, default=_DELTA, help="at which epsilons are compared (1e-5)")
    add("--confidence", type=float, default=0.95, help="of the bound (0.95)")
    add("--bound", choices=["gaussian", "independent", "basic"], default="gaussian")
    add("--scores", choices=["sums", "differences"], default="sums")
    add("--seed", type=int, help="of coins and directions")
    add("--json", type=Path, metavar="FILE", help="write the result for a pipeline")
    add("--picture", type=Path, metavar="FILE", help="draw it, with Matplotlib")
    return parser


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SystemExit(f"{name!r} names no object: write MODULE:NAME")
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} is not there: {error}") from None


def _draw(result: Any, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    result.plot().figure.savefig(path, dpi=150)


def _made_up_records() -> TensorDataset:
    return TensorDataset(torch.randn(200, 20), torch.randint(0, 5, (200,)))


def _small_training(dataset: Any, engine: Any) -> nn.Module:
    """Four full batches at ε = 8."""
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=nn.Sequential(nn.Linear(20, 1000), nn.Tanh(), nn.Linear(1000, 5)),
        optimizer=partial(DPSGLD, lr=0.01, temperature=0.0),
        data_loader=DataLoader(dataset, batch_size=len(dataset)),
        max_grad_norm=1.0,
        target_epsilon=8.0,
        target_delta=_DELTA,
        epochs=4,
    )
    for _ in range(4):
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    trained: nn.Module = net
    return trained


if __name__ == "__main__":
    sys.exit(main())
