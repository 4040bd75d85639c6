"""A history in words, and by labels."""

from __future__ import annotations

import math
from collections.abc import Iterable

from . import renyi
from .charging import Charging
from .failures import apart, without_delta
from .history import History, Part, needed
from .pairs import NonPrivate
from .risk import Risk

Shares = dict[str | None, tuple[float | None, int]]


def summary(
    charging: Charging,
    bounds: tuple[float, float],
    delta: float,
    statements: Iterable[str],
    risk: Risk,
) -> str:
    """Everything there is to say, with the lower and the upper bound on epsilon at ``delta``; see
    ``PrivacyAccountant.summary``.
    """
    history, (lower, upper) = charging.history, bounds
    budget, method, neighboring, unit = history.settings
    allowed = "none" if budget is None else f"epsilon = {budget[0]:g} at delta = {budget[1]:g}"
    lines = [
        f"Privacy accountant: neighbouring data sets differ by {neighboring}"
        f"{'' if unit == 'record' else ' person with all their records'}, method {method}",
        f"  budget      {allowed}",
        f"  spent       epsilon <= {upper:.5g} at delta = {delta:g} (and >= {lower:.5g}),"
        f" {sum(history.charges.values())} releases",
    ]
    if math.isinf(upper) and (why := without_delta(history.guaranteed(), delta)):
        lines.append(f"              {why}")
    lines.append(f"  guarantee   {guarantee_in_words(charging, delta)}")
    if risk.records_per_person > 1:
        lines.append(
            f"  people      of at most {risk.records_per_person} records each: epsilon <="
            f" {risk.epsilon:.5g} at delta = {delta:g}"
        )
    lines.append(
        f"  risk        an attack that accuses {risk.false_positive_rate:.1%} wrongly finds at most"
        f" {risk.true_positive_rate:.4g} of those there; advantage <= {risk.advantage:.4g}"
    )
    if charging.session is not None:
        lines.append(f"  ledger      {charging.session.ledger.path}")
    for i, statement in enumerate(statements):
        lines.append(f"  {'' if i else 'rests on':<11} {statement}")
    by_label = {label or "(no label)": share for label, share in shares(history, delta).items()}
    width = max(map(len, by_label), default=0)
    for label, (share, count) in by_label.items():
        cost = "" if share is None else f"{share:.1%} of the cost, "
        lines.append(f"  {label:<{max(width, 11)}} {cost}{count} releases")
    return "\n".join(lines)


def guarantee_in_words(charging: Charging, delta: float) -> str:
    """What epsilon is a bound for."""
    history = charging.history
    if history.guarantee == "none":
        return (
            "none for jobs that began after others had charged: there is no budget that a"
            " filter could keep. Had all parameters been fixed before the first release,"
            f" epsilon <= {history.price(history.counts, delta):.5g} at delta = {delta:g}"
        )
    if history.guarantee == "registered":
        left = sum(charging.open_registered().values())
        return (
            "upper bound for the schedule that was registered before the first release,"
            f" whoever releases what of it; {left} releases of it are left"
        )
    if history.guarantee == "fixed" or history.filter is None:
        kind = "privacy loss distributions"
        if history.settings.method == "rdp":
            kind = "Renyi curves, at the best order"
        return f"upper bound by {kind}; valid for parameters fixed before the first release"
    text = (
        f"filter on {history.filter.describe()}, valid for parameters chosen from earlier"
        f" outputs; {charging.used_share():.1%} of it used"
    )
    if not history.declared:
        _, own = history.settings.budget or (0.0, 0.0)
        text += (
            "; in force since a second job began: if outputs decided whether there would be"
            f" one, the guarantee is delta = {2 * own:g}"
        )
    return text


def shares(history: History, delta: float) -> Shares:
    """Of each label the share of the cost, and the releases; see ``PrivacyAccountant.shares``."""
    labels: dict[str | None, list[Part]] = {}
    for (event, label, _), count in history.charges.items():
        labels.setdefault(label, []).append(Part(event, count, history.pair(event)))
    found: Shares = {
        label: (None, sum(part.times for part in parts)) for label, parts in labels.items()
    }
    _, others = apart(history.counts)
    if not others or any(isinstance(pair, NonPrivate) for pair in others):
        return found
    total = renyi.curve(others)
    best = renyi.best_order(total, delta)
    if 0 < total[best] < math.inf:
        for label, parts in labels.items():
            share = float(renyi.curve(apart(needed(parts))[1])[best] / total[best])
            found[label] = share, found[label][1]
    return found
