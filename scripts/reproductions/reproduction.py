"""What the scripts of this folder share: they store finished runs, and their tables say which
command made them, and when.

A run is a function of JSON-able keyword arguments that returns a JSON-able dict. Its arguments are
its key: whatever changes the result belongs among them, constants of the script as their
:func:`digest`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


class Run(NamedTuple):
    """A finished run, one line of the results file."""

    job: Row
    result: Row
    seconds: float
    date: str


class Panel(NamedTuple):
    """One diagram of a picture: lines by label, each x, y and, for points, the errors of y."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Any]]
    log: str = "xy"


# -- runs ------------------------------------------------------------------------------------------


def run_jobs(
    function: Callable[..., Row], jobs: Sequence[Mapping[str, Any]], results: Path
) -> list[Run]:
    """``function(**job)`` of every job that ``results`` does not have yet, each stored as soon as
    it is finished.

    Args:
        jobs: keyword arguments, JSON-able. Copies of one job differ by an argument such as
            ``repeat``.
        results: file of JSON lines; runs of other jobs in it are left alone.
    """
    done = stored_runs(results)
    torch.set_num_threads(1)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a+") as file:
        file.seek(0)
        if not ("\n" + file.read()).endswith("\n"):  # cut short when a process was killed
            file.write("\n")
    for job in tqdm(jobs, unit="run"):
        if key(job) in done:
            continue
        start = time.perf_counter()
        result, date = function(**job), datetime.now(UTC).strftime("%Y-%m-%d")
        run = Run(dict(job), result, round(time.perf_counter() - start, 2), date)
        with results.open("a") as file:
            file.write(json.dumps(run._asdict()) + "\n")
        done[key(job)] = run
    return [done[key(job)] for job in jobs]


def stored_runs(results: Path) -> dict[str, Run]:
    """What a results file holds, by :func:`key`, without lines that were cut short."""
    found = {}
    for line in results.read_text(errors="replace").splitlines() if results.exists() else []:
        try:
            run = Run(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[key(run.job)] = run
    return found


def key(job: Mapping[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def digest(**settings: Any) -> str:
    """A short hash of settings, so that runs with other settings are other runs."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]


def one_of(*functions: Callable[..., Row]) -> Callable[..., Row]:
    """A run of the function run_WHAT, by ``what``; ``settings`` tell runs apart only."""
    named = {function.__name__: function for function in functions}

    def run(what: str, settings: str, **arguments: Any) -> Row:
        return named[f"run_{what}"](**arguments)

    return run


def chain_of(
    theta: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    gradients: Callable[[Tensor], Tensor],
    steps: int,
) -> Tensor:
    """The states of a private chain on these per-record gradients; NaN once it has diverged."""
    chain = torch.full((steps, len(theta)), math.nan, dtype=torch.float64)
    with suppress(FloatingPointError):
        for state in chain:
            theta.grad_sample = gradients(theta.detach())  # type: ignore[attr-defined]
            optimizer.step()
            state.copy_(theta.detach())
    return chain


# -- rows ------------------------------------------------------------------------------------------


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Jobs with their results: a row for a run, or for each of its ``"rows"``."""
    return [run.job | row for run in runs for row in run.result.get("rows", [run.result])]


def having(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by these columns, in the order of their first rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def columns(rows: Iterable[Row], *names: str) -> list[list[Any]]:
    rows = list(rows)
    return [[row[name] for row in rows] for name in names]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error by the spread of the values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows, numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{v:.6g}" for name, v in row.items() if isinstance(v, float)}
            writer.writerow(row | numbers)


# -- what is printed and drawn ---------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """A table, numbers to four digits; a value that is missing or None leaves its cell empty."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)

    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def origin(runs: Sequence[Run]) -> str:
    """One sentence: the command, and the dates of the runs."""
    program = Path(sys.argv[0])
    command = " ".join(["python", f"scripts/{program.parent.name}/{program.name}", *sys.argv[1:]])
    dates = sorted({run.date for run in runs})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    hours = sum(run.seconds for run in runs) / 3600
    return f"`{command}`: {len(runs)} runs, {hours:.1f} hours of one core, {when}."


def draw(panels: Sequence[Panel], path: Path) -> None:
    """All panels, two or three beside each other; one legend if all of them have the same lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    across = len(panels) if len(panels) < 4 else 2
    down = -(-len(panels) // across)
    together = all(panel.lines.keys() == panels[0].lines.keys() for panel in panels)
    longest = max(len(panel.lines) for panel in panels)
    size = (4.4 * across, (4.2 if together else 4 + 0.2 * longest) * down)
    figure, grid = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(grid.flat, panels, strict=False):
        colours = {label: f"C{i}" for i, label in enumerate(sorted(panel.lines))}
        for label, (x, y, *errors) in panel.lines.items():
            shown = {"label": label, "color": colours[label]}
            if errors:
                axis.errorbar(x, y, errors[0], fmt="o", markersize=3, capsize=2, **shown)
            else:
                axis.plot(x, y, ".-", linewidth=1.5, **shown)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axis.set(**{f"{name}scale": "log" for name in panel.log})
        for name in panel.log:
            getattr(axis, f"{name}axis").set_minor_formatter(LogFormatter())
        if not together:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize="small")
    if together:
        named = grid.flat[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside lower center", ncols=2 * across - 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


# -- a script --------------------------------------------------------------------------------------


def parser_of(description: str | None, script: str) -> argparse.ArgumentParser:
    """Of a script whose runs are in ``runs/<script>.jsonl``."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    results = ROOT / "runs" / f"{script}.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="default: %(default)s")
    parser.add_argument("--csv", type=Path, help="write all rows here")
    parser.add_argument("--picture", type=Path, help="draw the picture here")
    return parser


def finish(
    options: argparse.Namespace,
    function: Callable[..., Row],
    jobs: Sequence[Mapping[str, Any]],
    rows_of: Callable[[Sequence[Run]], list[Row]] = rows_of,
    tables: Callable[[list[Row]], Mapping[str, Sequence[Row]]] = lambda rows: {"": rows},
    panels: Callable[[list[Row]], Sequence[Panel]] | None = None,
) -> list[Row]:
    """Make the runs that are missing, then the CSV and the picture that are asked for; print the
    tables.

    Args:
        options: of the parser of :func:`parser_of`.
        function: makes a run.
        rows_of: what the CSV has.
        tables: from captions to tables.
        panels: of the picture.
    """
    runs = run_jobs(function, jobs, options.results)
    rows = rows_of(runs)
    if options.csv:
        write_csv(rows, options.csv)
    if options.picture and panels is not None:
        draw(panels(rows), options.picture)
    for caption, lines in tables(rows).items():
        if lines:
            print(f"\n{caption}\n\n{markdown(lines)}")
    print(f"\n{origin(runs)}")
    return rows
