#!/usr/bin/env python3
"""Chains that start from noise-aware posteriors, on real data: how often 90 % intervals hold the
mean of the posterior without privacy, and whether something was said where they do not.

    python kernels_on_real_data.py --data-root FOLDER [--repeats 5] [--data Abalone] [--stored]

Data, ε (for replacing a record), δ, reference and figures are those of ``compare_posteriors.py``,
prior standard deviation 3. ``noise_aware.laplace`` takes half of ε, ``noise_aware.kernel_from``
what is left, for a penalty chain of 2000 iterations; rows are at most 1 long, so that no log ratio
is clipped at slope 1.

"plan" is a warning before the chain runs, that the budget is worth fewer than ten samples; "run"
one at its end, that it has not mixed.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import compare_posteriors as posteriors
import pyro
import pyro.distributions as dist
import reproduce_privacy_for_free as free
import reproduction
import torch
from pyro.infer import MCMC
from torch import Tensor

from torch_dpbayes import noise_aware

SHARE, ITERATIONS, PRIOR_STD, FEW = 0.5, 2000, 3.0, 0.8
DATA = ("breast cancer", "Abalone", "Adult (7)")


def logistic(x: Tensor, y: Tensor) -> None:
    prior = dist.Normal(torch.zeros(x.shape[1]), PRIOR_STD).to_event(1)
    weights = pyro.sample("weights", prior)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def run(root: str, data: str, epsilon: float, repeat: int, iterations: int) -> dict[str, Any]:
    """Figures of the noise-aware posterior and of the chain, and what was said."""
    division = 0 if data.startswith("Adult") else repeat
    records = posteriors.load(data, division, root)
    known = posteriors.reference(data, division, root, PRIOR_STD)
    accountant, begin = posteriors.accountant(epsilon), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = noise_aware.laplace(
            posteriors.glm(PRIOR_STD),
            records.x,
            records.y,
            accountant=accountant,
            epsilon=SHARE * epsilon,
            max_grad_norm=free.CLIP,
        )
        kernel = noise_aware.kernel_from(
            start, logistic, accountant=accountant, num_iterations=iterations, log_ratio_slope=1.0
        )
        runner = MCMC(kernel, num_samples=iterations, warmup_steps=0, disable_progbar=True)
        runner.run(records.x, records.y)
    said = [str(warning.message) for warning in caught]
    draws = {
        "noise_aware.laplace": start.sample(posteriors.DRAWS)["weights"],
        "chain": runner.get_samples()["weights"],
    }
    return {
        "figures": {
            name: posteriors.judged(values.double(), records, known)
            for name, values in draws.items()
        },
        "plan": any("cannot mix" in text for text in said),
        "run": any("have not mixed" in text for text in said),
        "diagnostics": {
            name: value
            for name, value in kernel.diagnostics().items()
            if name in ("acceptance rate", "R-hat", "effective sample size")
        },
        "epsilon": accountant.get_epsilon(),
        "seconds": time.process_time() - begin,
    }


def summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """A row for each data set and ε: means over repeats, and counts of runs."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for done in runs:
        found.setdefault((done.job["data"], done.job["epsilon"]), []).append(done.result)
    rows = []
    for (data, epsilon), results in found.items():
        row: dict[str, Any] = {"data": data, "epsilon": epsilon, "runs": len(results)}
        for name in ("noise_aware.laplace", "chain"):
            for figure in ("error", "width", "covers", "log_likelihood"):
                values = [result["figures"][name][figure] for result in results]
                row[f"{name}: {figure}"] = sum(values) / len(values)
        chains = [(result["figures"]["chain"]["covers"], result) for result in results]
        warned = [result["plan"] or result["run"] for result in results]
        row["plan warned"] = sum(result["plan"] for result in results)
        row["run warned"] = sum(result["run"] for result in results)
        row["covers less than .8"] = sum(covers < FEW for covers, _ in chains)
        row["of these silent"] = sum(
            covers < FEW and not said for (covers, _), said in zip(chains, warned, strict=True)
        )
        row["seconds"] = sum(result["seconds"] for result in results) / len(results)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "kernels_on_real_data")
    parser.add_argument("--data-root", required=True, help="folder with abalone/ and adult/")
    parser.add_argument("--repeats", type=reproduction.positive, default=5)
    parser.add_argument("--iterations", type=reproduction.positive, default=ITERATIONS)
    parser.add_argument("--data", nargs="*", choices=DATA, default=DATA)
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    jobs = [
        {"data": data, "epsilon": epsilon, "repeat": repeat, "iterations": options.iterations}
        for repeat in range(options.repeats)
        for data in options.data
        for epsilon in posteriors.EPSILONS
    ]
    runs = reproduction.runs_of(
        partial(run, options.data_root), jobs, options.results, stored=options.stored
    )
    rows = summary(runs)
    if options.csv:
        reproduction.write_csv(rows, options.csv)
    names = {"error": ".2f", "width": ".2f", "covers": ".2f", "log_likelihood": ".3f"}
    columns = {"data": "", "epsilon": "g", "runs": "d"}
    for name in ("noise_aware.laplace", "chain"):
        columns |= {f"{name}: {figure}": form for figure, form in names.items()}
    columns |= {"plan warned": "d", "run warned": "d", "covers less than .8": "d"}
    columns |= {"of these silent": "d", "seconds": ".0f"}
    print(f"\n{reproduction.markdown(rows, columns)}\n\n")
    print(reproduction.origin(runs, ["--data-root", "FOLDER"]))


if __name__ == "__main__":
    main()
