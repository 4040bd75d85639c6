#!/usr/bin/env python3
"""Accuracy and uncertainty of private linear heads on tables: Adult, Abalone, breast cancer,
digits and wine.

    python heads_on_tables.py --data-root FOLDER [--repeats 5] [--stored]

FOLDER has UCI's ``adult/`` and ``abalone/``; the others are scikit-learn's. Abalone's classes are
ten rings and more, or fewer; breast cancer has its ten means. Features are scaled by documented
ranges and rows shortened to norm 1, so that a row depends on its own record alone. Every repeat has
other noise and, but for Adult, another division into four fifths for training and one for testing.

One run of DP-SGHMC (temperature 0, lr 4, 40 passes over batches of at most 8,192, clip norm .1:
the defaults of ``dpb.heads.SGHMC``) gives three predictors of one cost: the last iterate, DP-SGD's
averaged weights and the posterior average. "noise-aware" is ``dpb.heads.NoiseAware``. Nothing was
picked on the data. δ = 1e-5, add or remove one record; the number of records is public.
"selective" is the accuracy of the 90 % of test records whose predictions have the least entropy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import compare_posteriors
import reproduce_privacy_for_free as free
import reproduction
import torch
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes import metrics

DELTA, EPSILONS, COVERAGE = 1e-5, (1.0, 3.0), 0.9
TABLES = ("Adult (108)", "Abalone", "breast cancer", "digits", "wine")
PREDICTORS = ("last iterate", "averaged DP-SGD", "posterior average", "noise-aware")
MEASURES = ("accuracy", "NLL", "ECE", "selective")


def load(name: str, repeat: int, root: str) -> free.Data:
    """Rows of norm at most 1, labels from 0."""
    if name not in ("digits", "wine"):
        return compare_posteriors.load(name, repeat, root)
    from sklearn import datasets

    found = datasets.load_digits() if name == "digits" else datasets.load_wine()
    x, y = torch.tensor(found.data).float(), torch.tensor(found.target)
    # wine's ranges are those of scikit-learn's description, which are those of the records
    low, high = (0.0, 16.0) if name == "digits" else (x.min(0).values, x.max(0).values)
    x = (2 * (x - low) / (high - low) - 1).clamp(-1, 1)
    x = free.bounded(x, (x.shape[1] / 3 + 1) ** 0.5)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
    train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
    return free.Data(x[train], y[train], x[test], y[test])


def measures(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """The columns of one predictor."""
    entropy = torch.special.entr(probabilities).sum(1)
    sure = entropy.argsort()[: int(COVERAGE * len(labels))]
    return {
        "accuracy": metrics.accuracy(probabilities, labels),
        "NLL": metrics.negative_log_likelihood(probabilities, labels),
        "ECE": metrics.expected_calibration_error(probabilities, labels),
        "selective": metrics.accuracy(probabilities[sure], labels[sure]),
    }


def run(root: str, data: str, epsilon: float, repeat: int) -> dict[str, Any]:
    """Both fits and their four predictors."""
    found = load(data, repeat, root)
    labels, wanted = found.y.long(), found.y_test.long()
    classes = int(labels.max()) + 1
    rows: list[dict[str, Any]] = []
    for method in (dpb.heads.SGHMC(), dpb.heads.NoiseAware()):
        begun = time.process_time()
        accountant = dpb.PrivacyAccountant(epsilon, DELTA)
        head = dpb.heads.PrivateLinear(classes, method=method, accountant=accountant)
        posterior = head.fit(found.x, labels, num_data=len(labels))
        seconds = time.process_time() - begun
        if isinstance(method, dpb.heads.SGHMC):
            predictors = zip(
                PREDICTORS,
                (posterior.predict_last, posterior.predict_with_mean, posterior.predict),
                strict=False,
            )
        else:
            predictors = zip(PREDICTORS[-1:], (posterior.predict,), strict=True)
        for name, predict in predictors:
            row = {"predictor": name, **measures(predict(found.x_test), wanted)}
            rows.append({**row, "spent": accountant.get_epsilon(DELTA), "seconds": seconds})
    return {"rows": rows}


def summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """Means over repeats."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for done in runs:
        for row in done.result["rows"]:
            where = (done.job["data"], done.job["epsilon"], row["predictor"])
            found.setdefault(where, []).append(row)
    return [
        {"data": data, "epsilon": epsilon, "predictor": predictor, "runs": len(rows)}
        | {name: sum(row[name] for row in rows) / len(rows) for name in (*MEASURES, "seconds")}
        for (data, epsilon, predictor), rows in found.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "heads_on_tables")
    parser.add_argument("--data-root", default="", help="folder with abalone/ and adult/")
    parser.add_argument("--repeats", type=reproduction.positive, default=5)
    parser.add_argument("--data", nargs="*", choices=TABLES, default=TABLES)
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    jobs = [
        {"data": data, "epsilon": epsilon, "repeat": repeat}
        for data in options.data
        for epsilon in EPSILONS
        for repeat in range(options.repeats)
    ]
    runs = reproduction.runs_of(
        partial(run, options.data_root), jobs, options.results, stored=options.stored
    )
    rows = summary(runs)
    if options.csv:
        reproduction.write_csv(rows, options.csv)
    columns = {"data": "", "epsilon": "g", "predictor": "", "runs": "d"}
    columns |= dict.fromkeys(MEASURES, ".3f") | {"seconds": ".1f"}
    print(f"\n{reproduction.markdown(rows, columns)}\n\n")
    print(reproduction.origin(runs, ["--data-root", "FOLDER"]))


if __name__ == "__main__":
    main()
