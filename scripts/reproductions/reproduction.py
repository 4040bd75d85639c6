"""What the scripts reproduce_*.py share: finished runs are stored, and tables say which command
made them, when, and at which commit.

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
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]


class Run(NamedTuple):
    """A finished run, one line of the results file."""

    job: dict[str, Any]
    result: dict[str, Any]
    seconds: float
    date: str
    commit: str


class Rows(list[dict[str, Any]]):
    """Jobs with their results."""

    def of(self, what: str, **having: Any) -> Self:
        return type(self)(
            row
            for row in self
            if row["what"] == what and all(row[name] == value for name, value in having.items())
        )

    def columns(self, *names: str) -> list[NDArray[Any]]:
        return [np.array([row[name] for row in self]) for name in names]

    def slope(self, x: str, y: str) -> float:
        """Least squares on logarithms."""
        return float(np.polyfit(np.log(self.columns(x)[0]), np.log(self.columns(y)[0]), 1)[0])

    def at(self, name: str, **near: float) -> float:
        """One value, of the row where others are ``near`` these."""
        return float(
            next(
                row[name]
                for row in self
                if all(math.isclose(row[key], value) for key, value in near.items())
            )
        )


def run_jobs(
    function: Callable[..., dict[str, Any]],
    jobs: Sequence[Mapping[str, Any]],
    results: Path,
    workers: int = 1,
) -> list[Run]:
    """``function(**job)`` of every job that ``results`` does not have yet, each stored as soon as
    it is finished.

    Args:
        function: at the top level of its module, which worker processes import.
        jobs: keyword arguments, JSON-able. Copies of one job differ by an argument such as
            ``repeat``.
        results: file of JSON lines; runs of other jobs in it are left alone.
        workers: processes with one thread each. 1: in this process.

    Returns:
        the runs in the order of ``jobs``.
    """
    done = stored_runs(results)
    todo = [dict(job) for job in jobs if key(job) not in done]
    head = commit()
    torch.set_num_threads(1)
    results.parent.mkdir(parents=True, exist_ok=True)
    with (
        results.open("a+") as file,
        tqdm(total=len(jobs), initial=len(jobs) - len(todo), unit="run") as bar,
    ):
        if file.tell():
            file.seek(file.tell() - 1)
            if file.read() != "\n":  # a line cut short when an earlier process was killed
                file.write("\n")

        def store(job: dict[str, Any], result: dict[str, Any], seconds: float) -> None:
            run = Run(job, result, round(seconds, 2), datetime.now(UTC).strftime("%Y-%m-%d"), head)
            file.write(json.dumps(run._asdict()) + "\n")
            file.flush()
            done[key(job)] = run
            bar.update()

        if workers == 1:
            for job in todo:
                bar.set_description(", ".join(str(value) for value in job.values()))
                store(job, *_timed(function, job))
        elif todo:
            pool = ProcessPoolExecutor(
                workers,
                mp_context=get_context("spawn"),
                initializer=torch.set_num_threads,
                initargs=(1,),
            )
            try:
                futures = {pool.submit(_timed, function, job): job for job in todo}
                for future in as_completed(futures):
                    store(futures[future], *future.result())
            finally:
                pool.shutdown(cancel_futures=True)
    return [done[key(job)] for job in jobs]


def stored_runs(results: Path) -> dict[str, Run]:
    """What a results file holds, by :func:`key`; the last one of equal keys, and no line that
    was cut short.
    """
    found = {}
    if results.exists():
        for line in results.read_text(errors="replace").splitlines():
            try:
                run = Run(**json.loads(line))
            except (ValueError, TypeError):
                continue
            found[key(run.job)] = run
    return found


def parser_of(description: str | None, script: str) -> argparse.ArgumentParser:
    """With ``--stored``, ``--results`` and ``--csv``, of a script whose runs are in
    ``runs/<script>.jsonl``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stored", action="store_true", help="the finished runs, no others")
    results = ROOT / "runs" / f"{script}.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="default: %(default)s")
    parser.add_argument("--csv", type=Path, help="write all rows here")
    return parser


def runs_of(
    function: Callable[..., dict[str, Any]],
    jobs: Sequence[Mapping[str, Any]],
    results: Path,
    *,
    stored: bool,
) -> list[Run]:
    """:func:`run_jobs`, or those of the jobs alone that are ``stored``."""
    if not stored:
        return run_jobs(function, jobs, results)
    found = stored_runs(results)
    return [found[k] for k in map(key, jobs) if k in found]


def key(job: Mapping[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def digest(**settings: Any) -> str:
    """So that runs with other settings are other runs."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]


def positive(text: str) -> int:
    """For argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{value} is not a number of repeats or processes: at least 1"
        )
    return value


def command(
    run: Callable[..., dict[str, Any]],
    jobs: Callable[[bool], Sequence[Mapping[str, Any]]],
    draw: Callable[[Rows, Path], None],
    description: str | None,
    arguments: Sequence[str] | None,
) -> tuple[Rows, list[Run]]:
    """What a script of two sizes has to do: make the runs, then the CSV and the picture that are
    asked for.

    Args:
        run: makes one, at the top level of the script.
        jobs: of ``--full`` (True) or ``--quick`` (False).
        arguments: None: ``sys.argv``'s.
    """
    script = Path(sys.modules[run.__module__].__file__ or "").stem
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--quick", action="store_true", help="a coarse one, for a look and for the tests"
    )
    size.add_argument("--full", action="store_true", help="the one of docs/reproductions")
    results = ROOT / "runs" / f"{script}.jsonl"
    parser.add_argument(
        "--results",
        type=Path,
        default=results,
        help="finished runs, which are not made again; default: %(default)s",
    )
    parser.add_argument(
        "--workers", type=positive, default=1, help="processes with one thread each; default: 1"
    )
    parser.add_argument("--csv", type=Path, help="write all rows here")
    parser.add_argument("--picture", type=Path, help="draw the picture here")
    options = parser.parse_args(arguments)
    runs = run_jobs(run, jobs(options.full), options.results, options.workers)
    rows = Rows({**done.job, **done.result} for done in runs)
    if options.csv:
        write_csv(rows, options.csv)
    if options.picture:
        draw(rows, options.picture)
    return rows, runs


def _timed(
    function: Callable[..., dict[str, Any]], job: Mapping[str, Any]
) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    return function(**job), time.perf_counter() - start


def commit() -> str:
    """Of this checkout, with "-dirty" where files differ from it; "unknown" outside of one."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def origin(runs: Iterable[Run], arguments: Sequence[str] | None = None) -> str:
    """One sentence: the command, and the dates and commits of the runs.

    Args:
        runs: those that went into the table.
        arguments: of the script; None: ``sys.argv``'s.
    """
    runs = list(runs)
    command = " ".join(
        [
            "python",
            f"scripts/reproductions/{Path(sys.argv[0]).name}",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
    )
    dates, commits = (
        sorted({run.date for run in runs}),
        list(dict.fromkeys(run.commit for run in runs)),
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    hours = sum(run.seconds for run in runs) / 3600
    return (
        f"`{command}`: {len(runs)} runs, {hours:.1f} hours of one core, {when}, commit"
        f" {' and '.join(commits)}."
    )


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table.

    Args:
        columns: heading by column, and its format, such as ``".3g"``; "" for text. A value that is
            missing or None leaves its cell empty.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        values = [(row.get(column), form) for column, form in columns.items()]
        lines.append(
            "| "
            + " | ".join(
                "" if v is None else v if isinstance(v, str) else format(v, form)
                for v, form in values
            )
            + " |"
        )
    return "\n".join(lines)


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """All rows, numbers to six digits; the columns are the first row's, and those that later
    rows bring.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(
            {
                name: float(f"{value:.6g}") if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in rows
        )
