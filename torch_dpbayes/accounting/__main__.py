"""Prints a ledger for a person.

    python -m torch_dpbayes.accounting budget.db [--json] [--delta 1e-5] [--plot spent.png]
        [--plot-risk risk.png] [--records-per-person 1]

Nothing is written to the file, and neither torch nor Opacus is imported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from . import events
from .accountant import PrivacyAccountant, look_at
from .choices import check_delta
from .ledger.schema import LedgerError, Row, open_blocks
from .report import by_labels, draw
from .risk import Risk

_ARCHIVE = b"PK\x03\x04"  # as which torch.save writes
_POINTS = 25  # of the curve, each of which is a composition


def report(
    accountant: PrivacyAccountant, rows: list[Row], delta: float, risk: Risk
) -> dict[str, Any]:
    """What there is to say about a ledger, as JSON can hold it; infinite numbers as ``None``."""
    upper = accountant.get_epsilon(delta)
    charges = [charge[:3] for charge in accountant.history]
    last: dict[str, events.DpEvent] = {}
    for row in rows:
        if row.kind in ("charge", "block") and row.event is not None:
            last.pop(row.label or "", None)
            last[row.label or ""] = row.event
    return {
        "path": str(accountant.path),
        "neighboring": accountant.neighboring,
        "method": accountant.method,
        "budget": (
            None
            if accountant.epsilon is None
            else {"epsilon": accountant.epsilon, "delta": accountant.delta}
        ),
        "guarantee": accountant.guarantee,
        "rests_on": list(accountant.notes),
        "epsilon": _finite(upper),
        "delta": delta,
        "risk": risk.as_dict(),
        "releases": len(accountant),
        "jobs": len({row.job for row in rows}),
        "labels": [
            {"label": label, "releases": count, "share": None if share is None else round(share, 6)}
            for label, (share, count) in by_labels(charges, accountant.neighboring, delta).items()
        ],
        "remaining": (
            [
                {
                    "label": label or None,
                    "event": events.in_words(event),
                    "steps": _finite(accountant.remaining(event)),
                }
                for label, event in reversed(last.items())
            ]
            if accountant.epsilon is not None
            else []
        ),
        "open_blocks": [
            {
                "time": row.time,
                "label": row.label,
                "event": events.in_words(row.event),
                "count": row.count,
                "writer": row.writer.partition(" ")[2].partition(", up ")[0],
            }
            for row in open_blocks(rows)
        ],
        "first": rows[0].time if rows else None,
        "last": rows[-1].time if rows else None,
    }


def text(found: dict[str, Any], summary: str, risk: Risk) -> str:
    """The report for a terminal."""
    lines = summary.splitlines()
    if found["first"]:
        jobs = f"{found['jobs']} job{'s' * (found['jobs'] != 1)}"
        lines.insert(
            5, f"  written     {_minute(found['first'])} to {_minute(found['last'])} UTC, by {jobs}"
        )
    if found["remaining"]:
        lines.append("left for a new job")
        lines += [
            f"  {_number(entry['steps'])} x {entry['event']}  ({entry['label'] or 'no label'})"
            for entry in found["remaining"]
        ]
    if found["open_blocks"]:
        lines.append(
            "open blocks: reserved by a running process, or left behind by one that died, and"
            " charged in full"
        )
        lines += [
            f"  {_minute(block['time'])}  {block['count']} x {block['event']} "
            f" ({block['label'] or 'no label'}, {block['writer']})"
            for block in found["open_blocks"]
        ]
    return "\n".join([*lines, str(risk)])


def plot_risk(risk: Risk, path: str) -> None:
    """The rates of attacks, as a picture."""
    _without_a_screen("--plot-risk")
    draw(risk).figure.savefig(path, dpi=150, bbox_inches="tight")


def _without_a_screen(option: str) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(f"{option} needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")


def plot(accountant: PrivacyAccountant, rows: list[Row], delta: float, path: str) -> None:
    """Epsilon over time, as a picture."""
    _without_a_screen("--plot")
    from matplotlib import dates, pyplot

    times, epsilons = spent(accountant, rows, delta)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.step(dates.date2num(times), epsilons, where="post", label=f"charged, at δ = {delta:g}")
    if accountant.epsilon is not None and delta == accountant.delta:
        axes.axhline(
            accountant.epsilon,
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"budget ε = {accountant.epsilon:g}",
        )
    if accountant.guarantee == "filter":
        axes.set_title(
            "The guarantee is the budget; the curve is what the same releases cost if fixed in"
            " advance.",
            fontsize=9,
        )
    axes.xaxis_date()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ε")
    axes.set_xlabel("time, UTC")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.autofmt_xdate()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def spent(
    accountant: PrivacyAccountant, rows: list[Row], delta: float
) -> tuple[list[datetime], list[float]]:
    """Moments, and epsilon of what stood in the ledger then. Rows are in the order in which
    they were written, whatever the clocks said.
    """
    charged = [
        row for row in rows if row.kind in ("charge", "block", "return") and row.event is not None
    ]
    ends = [
        i
        for i in range(len(charged))
        if i + 1 == len(charged) or charged[i + 1].time != charged[i].time
    ]
    chosen = set(ends[:: max(1, len(ends) // _POINTS)]) | set(ends[-1:])
    times: list[datetime] = []
    epsilons: list[float] = []
    counts: dict[events.DpEvent, int] = {}
    for i, row in enumerate(charged):
        assert row.event is not None
        counts[row.event] = counts.get(row.event, 0) + row.count
        if i in chosen:
            then = PrivacyAccountant(
                method=accountant.method, neighboring=accountant.neighboring, unit=accountant.unit
            )
            for event, count in counts.items():
                if count > 0:
                    then.compose(event, count)
            epsilon = then.get_epsilon(delta)
            if math.isfinite(epsilon):
                moment = datetime.fromisoformat(row.time)
                times.append(max(moment, times[-1]) if times else moment)
                epsilons.append(epsilon)
    return times, epsilons


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(steps: int | None) -> str:
    return "any number" if steps is None else str(steps)


def _minute(time: str) -> str:
    return time[:19].replace("T", " ")


def _require_ledger(path: Path) -> None:
    """Raises where a person has mistaken something else for a ledger."""
    if not path.exists():
        raise LedgerError(f"no such file: {path}")
    if path.is_file():
        with path.open("rb") as file:
            beginning = file.read(len(_ARCHIVE))
        if beginning == _ARCHIVE:
            raise LedgerError(
                f"{path} is a checkpoint, or another archive, and no ledger: give the file of"
                " PrivacyAccountant(path=...). What a run in memory was charged is in its"
                " checkpoint, which engine.load_checkpoint reads."
            )


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m torch_dpbayes.accounting",
        description="Prints what a ledger holds, and what is left of its budget.",
    )
    parser.add_argument("file", help="the ledger, as in PrivacyAccountant(path=...)")
    parser.add_argument(
        "--delta",
        type=float,
        help="report epsilon at this delta (default: that of the budget, else 1e-5)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw epsilon over time")
    parser.add_argument("--plot-risk", metavar="FILE.png", help="also draw what attackers can tell")
    parser.add_argument(
        "--records-per-person",
        type=int,
        default=1,
        metavar="K",
        help="state the risk of people who have up to K records",
    )
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        _require_ledger(Path(given.file).expanduser())
        accountant, rows = look_at(given.file)
        delta = accountant.delta if given.delta is None else check_delta(given.delta)
        delta = 1e-5 if delta is None else delta
        size = given.records_per_person
        risk = accountant.risk(delta=delta, records_per_person=size)
        found = report(accountant, rows, delta, risk)
        summary = accountant.summary(size)
        print(json.dumps(found, indent=2) if given.json else text(found, summary, risk))
        if given.plot_risk:
            plot_risk(risk, given.plot_risk)
            print(f"picture: {given.plot_risk}", file=sys.stderr)
        if given.plot:
            plot(accountant, rows, delta, given.plot)
            print(f"picture: {given.plot}", file=sys.stderr)
    except (LedgerError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
