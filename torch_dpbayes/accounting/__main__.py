"""What a plan costs, and what a ledger holds.

    python -m torch_dpbayes.accounting epsilon --noise-multiplier 1 --sample-rate .01 --steps 10000
        --delta 1e-5 [--neighboring replace_one] [--method rdp] [--json]
    python -m torch_dpbayes.accounting noise --epsilon 3 --delta 1e-5 --sample-rate .01 --steps 1000
    python -m torch_dpbayes.accounting steps --epsilon 3 --delta 1e-5 --noise-multiplier 1 ...
    python -m torch_dpbayes.accounting compare --noise-multiplier 1 --sample-rate .01 --steps 10000
        --delta 1e-5
    python -m torch_dpbayes.accounting budget.db [--json] [--delta 1e-5] [--plot spent.png]
        [--plot-risk risk.png] [--records-per-person 1]

Nothing is written to the ledger, and neither torch nor Opacus is imported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from . import events
from .accountant import PrivacyAccountant, look_at
from .calibration import get_noise_multiplier, get_num_steps
from .events import Method, Neighboring, check_delta
from .gdp import gaussian_epsilon
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


# --- plans ----------------------------------------------------------------------------------------

_OPTIONS = {
    "noise_multiplier": (float, "noise standard deviation / clip bound"),
    "sample_rate": (float, "expected batch size / number of records"),
    "steps": (int, "number of steps"),
    "epsilon": (float, "target epsilon"),
    "delta": (float, "target delta"),
}
_COMMANDS = {
    "epsilon": ("noise_multiplier", "sample_rate", "steps", "delta"),
    "noise": ("sample_rate", "steps", "epsilon", "delta"),
    "steps": ("noise_multiplier", "sample_rate", "epsilon", "delta"),
    "compare": ("noise_multiplier", "sample_rate", "steps", "delta"),
}


def epsilon_of(
    plan: dict[str, Any], method: Method = "pld", neighboring: Neighboring = "add_or_remove_one"
) -> float:
    """Epsilon of Poisson-sampled Gaussian steps."""
    step = events.PoissonSampledDpEvent(
        plan["sample_rate"], events.GaussianDpEvent(plan["noise_multiplier"])
    )
    accountant = PrivacyAccountant(method=method, neighboring=neighboring)
    return accountant.compose(step, plan["steps"]).get_epsilon(plan["delta"])


def gdp_epsilon(plan: dict[str, Any]) -> float:
    """Epsilon by the central limit of Gaussian differential privacy (Bu, Dong, Long, Su 2020),
    which is below the truth.
    """
    rate, noise = plan["sample_rate"], plan["noise_multiplier"]
    mu = (
        rate * math.sqrt(plan["steps"] * math.expm1(noise**-2))
        if rate < 1
        else (math.sqrt(plan["steps"]) / noise)
    )
    return gaussian_epsilon(mu, check_delta(plan["delta"]))


def plan_report(command: str, plan: dict[str, Any], method: Method, relation: Neighboring) -> Any:
    """What a command says of a plan, as JSON can hold it."""
    targets = {"target_epsilon": plan.get("epsilon"), "target_delta": plan["delta"]}
    settings = {name: plan[name] for name in _COMMANDS[command] if name not in ("epsilon", "delta")}
    if command == "epsilon":
        return {"epsilon": _finite(epsilon_of(plan, method, relation))}
    if command == "noise":
        found = get_noise_multiplier(**targets, **settings, neighboring=relation)
        return {"noise_multiplier": found}
    if command == "steps":
        return {"steps": get_num_steps(**targets, **settings, neighboring=relation)}
    return {
        "pld": _finite(epsilon_of(plan)),
        "rdp": _finite(epsilon_of(plan, "rdp")),
        "gdp_lower_bound": _finite(gdp_epsilon(plan)),
        "replace_one": _finite(epsilon_of(plan, "pld", "replace_one")),
    }


_NAMES = {
    "pld": "privacy loss distributions",
    "rdp": "Renyi curves",
    "gdp_lower_bound": "central limit (below the truth)",
    "replace_one": "privacy loss distributions, replace one",
}


def plan_text(command: str, plan: dict[str, Any], relation: Neighboring, found: Any) -> str:
    """The same as a table."""
    rows = [(name.replace("_", " "), f"{plan[name]:g}") for name in _COMMANDS[command]]
    if command != "compare":
        rows.append(("neighboring", relation))
    for name, value in found.items():
        what = f"epsilon, {_NAMES[name]}" if command == "compare" else name.replace("_", " ")
        number = "infinite" if value is None else f"{value:.6g}"
        rows.append((what, str(value) if command == "steps" else number))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan_main(command: str, arguments: list[str]) -> int:
    """One of the commands that need no ledger."""
    parser = argparse.ArgumentParser(
        f"python -m torch_dpbayes.accounting {command}",
        description="The cost of Poisson-sampled Gaussian steps, planned in advance.",
    )
    for name in _COMMANDS[command]:
        kind, what = _OPTIONS[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True, help=what)
    if command != "compare":
        parser.add_argument(
            "--neighboring",
            choices=get_args(Neighboring),
            default="add_or_remove_one",
            help="the relation between neighbouring data sets",
        )
    if command == "epsilon":
        parser.add_argument("--method", choices=get_args(Method), default="pld")
    parser.add_argument("--json", action="store_true", help="print JSON")
    plan = vars(parser.parse_args(arguments))
    as_json, method = plan.pop("json"), plan.pop("method", "pld")
    relation: Neighboring = plan.pop("neighboring", "add_or_remove_one")
    try:
        found = plan_report(command, plan, method, relation)
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    settings = plan if command == "compare" else {**plan, "neighboring": relation}
    if as_json:
        print(json.dumps({"settings": settings, **found}, indent=2))
    else:
        print(plan_text(command, plan, relation, found))
    return 0


def main(arguments: Iterable[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in _COMMANDS:
        return plan_main(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(
        "python -m torch_dpbayes.accounting",
        description="Prints what a ledger holds, and what is left of its budget. Without a ledger:"
        f" {', '.join(_COMMANDS)} (see epsilon --help) print what a plan costs.",
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
    given = parser.parse_args(arguments)
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
