"""Command line: the cost of a plan, and the contents of a ledger.

    python -m torch_dpbayes.accounting epsilon --noise-multiplier 1 --sample-rate .01 --steps 10000
        --delta 1e-5 [--neighboring replace_one] [--method rdp] [--json]
    python -m torch_dpbayes.accounting noise --epsilon 3 --delta 1e-5 --sample-rate .01 --steps 1000
    python -m torch_dpbayes.accounting steps --epsilon 3 --delta 1e-5 --noise-multiplier 1 ...
    python -m torch_dpbayes.accounting compare --noise-multiplier 1 --sample-rate .01 --steps 10000
        --delta 1e-5
    python -m torch_dpbayes.accounting budget.db [--json] [--delta 1e-5]

Nothing is written to the ledger, and neither torch nor Opacus is imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from . import events
from .accountant import PrivacyAccountant, look_at
from .calibration import get_noise_multiplier, get_num_steps
from .events import Method, Neighboring, check_delta
from .gdp import gaussian_epsilon
from .ledger import LedgerError, Row, open_blocks
from .report import by_labels, delta_of

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
_NAMES = {
    "pld": "epsilon, privacy loss distributions",
    "rdp": "epsilon, Renyi curves",
    "gdp_lower_bound": "epsilon, central limit (too small for many steps)",
    "replace_one": "epsilon, privacy loss distributions, replace one",
}
_LARGEST_EXPONENT = 700  # exp() of larger numbers overflows


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


# --- a ledger -------------------------------------------------------------------------------------


def ledger_report(accountant: PrivacyAccountant, rows: list[Row], delta: float) -> dict[str, Any]:
    """The contents of a ledger in a form for JSON; infinite numbers are ``None``."""
    last: dict[str | None, events.DpEvent] = {}
    for row in rows:
        if row.kind in ("charge", "block") and row.event is not None:
            last.pop(row.label, None)
            last[row.label] = row.event
    shares = by_labels(accountant.history, accountant.neighboring, delta)
    budget = {"epsilon": accountant.epsilon, "delta": accountant.delta}
    is_limited = accountant.epsilon is not None
    return {
        "path": str(accountant.path),
        "neighboring": accountant.neighboring,
        "method": accountant.method,
        "budget": budget if is_limited else None,
        "guarantee": accountant.guarantee,
        "rests_on": list(accountant.notes),
        "epsilon": _finite(accountant.get_epsilon(delta)),
        "delta": delta,
        "risk": accountant.risk(delta=delta).as_dict(),
        "releases": len(accountant),
        "jobs": len({row.job for row in rows}),
        "labels": [
            {"label": label, "releases": count, "share": None if share is None else round(share, 6)}
            for label, (share, count) in shares.items()
        ],
        "remaining": [
            {
                "label": label,
                "event": events.in_words(event),
                "steps": _finite(accountant.remaining(event)),
            }
            for label, event in reversed(last.items())
            if is_limited
        ],
        "open_blocks": [
            {
                "time": row.time[:19].replace("T", " "),
                "label": row.label,
                "event": events.in_words(row.event),
                "count": row.count,
                "writer": row.writer.partition(" ")[2],
            }
            for row in open_blocks(rows)
        ],
    }


def ledger_text(found: dict[str, Any], summary: str) -> str:
    """The report for a terminal."""
    lines = [summary]
    if found["remaining"]:
        lines.append("left for a new job, of each kind alone")
    for line in found["remaining"]:
        steps = "any number" if line["steps"] is None else line["steps"]
        lines.append(f"  {steps} x {line['event']}  ({line['label'] or 'no label'})")
    if found["open_blocks"]:
        lines.append("open blocks: reserved by a running or killed process, and charged in full")
    for line in found["open_blocks"]:
        whose = f"{line['label'] or 'no label'}, {line['writer']}"
        lines.append(f"  {line['time']}  {line['count']} x {line['event']}  ({whose})")
    return "\n".join(lines)


def ledger_main(arguments: list[str]) -> int:
    """Command ``LEDGER``: print the contents of a ledger."""
    parser = argparse.ArgumentParser(
        "python -m torch_dpbayes.accounting",
        description="Prints the charges in a ledger, and the rest of its budget. Without a ledger,"
        f" {', '.join(_COMMANDS)} print the cost of a plan (see epsilon --help).",
    )
    parser.add_argument("file", help="the ledger, as in PrivacyAccountant(path=...)")
    parser.add_argument(
        "--delta",
        type=float,
        help="report epsilon at this delta (default: that of the budget, else 1e-5)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if not Path(given.file).expanduser().exists():
        raise LedgerError(f"no such file: {given.file}")
    accountant, rows = look_at(given.file)
    delta = delta_of(accountant) if given.delta is None else check_delta(given.delta)
    found = ledger_report(accountant, rows, delta)
    summary = "" if given.json else accountant.summary()
    print(json.dumps(found, indent=2) if given.json else ledger_text(found, summary))
    return 0


# --- a plan ---------------------------------------------------------------------------------------


def epsilon_of(
    plan: dict[str, Any], method: Method = "pld", neighboring: Neighboring = "add_or_remove_one"
) -> float | None:
    """Epsilon of Poisson-sampled Gaussian steps; ``None`` if it is infinite."""
    release = events.GaussianDpEvent(plan["noise_multiplier"])
    step = events.PoissonSampledDpEvent(plan["sample_rate"], release)
    accountant = PrivacyAccountant(method=method, neighboring=neighboring)
    return _finite(accountant.compose(step, plan["steps"]).get_epsilon(plan["delta"]))


def gdp_epsilon(plan: dict[str, Any]) -> float | None:
    """Epsilon by the central limit of Gaussian differential privacy (Bu, Dong, Long, Su 2020). This
    approximation is below the true epsilon if there are many steps.
    """
    rate, noise, root = plan["sample_rate"], plan["noise_multiplier"], math.sqrt(plan["steps"])
    if rate < 1 and noise**-2 > _LARGEST_EXPONENT:
        return None
    mu = rate * root * math.sqrt(math.expm1(noise**-2)) if rate < 1 else root / noise
    return _finite(gaussian_epsilon(mu, check_delta(plan["delta"])))


def plan_report(command: str, plan: dict[str, Any], method: Method, relation: Neighboring) -> Any:
    """The result of a plan command in a form for JSON."""
    if command == "epsilon":
        return {"epsilon": epsilon_of(plan, method, relation)}
    if command == "compare":
        return {
            "pld": epsilon_of(plan),
            "rdp": epsilon_of(plan, "rdp"),
            "gdp_lower_bound": gdp_epsilon(plan),
            "replace_one": epsilon_of(plan, "pld", "replace_one"),
        }
    targets = {f"target_{name}": plan[name] for name in ("epsilon", "delta")}
    rest = {name: value for name, value in plan.items() if f"target_{name}" not in targets}
    if command == "noise":
        return {"noise_multiplier": get_noise_multiplier(**targets, **rest, neighboring=relation)}
    return {"steps": get_num_steps(**targets, **rest, neighboring=relation)}


def plan_main(command: str, arguments: list[str]) -> int:
    """Run one of the commands that need no ledger."""
    parser = argparse.ArgumentParser(
        f"python -m torch_dpbayes.accounting {command}",
        description="Computes the cost of Poisson-sampled Gaussian steps in advance.",
    )
    for name in _COMMANDS[command]:
        kind, what = _OPTIONS[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True, help=what)
    if command != "compare":
        relations, what = get_args(Neighboring), "the relation between neighbouring data sets"
        parser.add_argument("--neighboring", choices=relations, default=relations[0], help=what)
    if command == "epsilon":
        parser.add_argument("--method", choices=get_args(Method), default="pld")
    parser.add_argument("--json", action="store_true", help="print JSON")
    settings = vars(parser.parse_args(arguments))
    as_json, relation = settings.pop("json"), settings.get("neighboring", "add_or_remove_one")
    plan = {name: settings[name] for name in _COMMANDS[command]}
    found = plan_report(command, plan, settings.get("method", "pld"), relation)
    if as_json:
        print(json.dumps({"settings": settings, **found}, indent=2))
        return 0
    table = {name.replace("_", " "): str(value) for name, value in settings.items()}
    for name, value in found.items():
        shown = "infinite" if value is None else f"{value:.6g}"
        what = _NAMES[name] if command == "compare" else name.replace("_", " ")
        table[what] = str(value) if command == "steps" else shown
    width = max(map(len, table))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in table.items()))
    return 0


def main(arguments: Iterable[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given and given[0] in _COMMANDS:
            return plan_main(given[0], given[1:])
        return ledger_main(given)
    except (LedgerError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at the exit
    sys.exit(code)
