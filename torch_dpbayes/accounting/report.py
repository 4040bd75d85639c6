"""Show an accountant as text, as a bar, and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import renyi
from .dominating_pairs import NonPrivate, Pair, added, dominating_pair
from .events import Neighboring
from .history import History
from .privacy_loss import apart, without_delta
from .risk import Risk

if TYPE_CHECKING:
    from .accountant import PrivacyAccountant

_DELTA = 1e-5  # without a budget


def delta_of(accountant: PrivacyAccountant) -> float:
    """The delta at which an accountant is reported."""
    return _DELTA if accountant.delta is None else accountant.delta


def summary(
    history: History, bounds: tuple[float, float], delta: float, notes: Iterable[str], risk: Risk
) -> str:
    """The text of ``PrivacyAccountant.summary``; ``bounds``: lower and upper, on epsilon."""
    (lower, upper), settings = bounds, history.settings
    budget = "none"
    if settings.budget is not None:
        budget = f"epsilon = {settings.epsilon:g} at delta = {settings.delta:g}"
    unit = "record" if settings.unit == "record" else "user with all their records"
    lines = [
        f"Privacy accountant: neighbouring data sets differ by one {unit} ({settings.neighboring}),"
        f" method {settings.method}",
        f"  budget      {budget}",
        f"  spent       epsilon <= {upper:.5g} at delta = {delta:g} (and >= {lower:.5g}),"
        f" {sum(history.charges.values())} releases",
    ]
    if math.isinf(upper) and (why := without_delta(history.counts, delta)):
        lines.append(f"              {why}")
    lines.append(f"  guarantee   {guarantee_in_words(history, delta)}")
    lines.append(
        f"  risk        an attack with a false-positive rate of {risk.false_positive_rate:.1%}"
        f" finds at most {risk.true_positive_rate:.3%} of the {settings.unit}s in the data;"
        f" advantage <= {risk.advantage:.4g}"
    )
    if history.path is not None:
        lines.append(f"  ledger      {history.path}")
    for i, note in enumerate(notes):
        lines.append(f"  {'' if i else 'rests on':<11} {note}")
    charges = [(key.event, count, key.label) for key, count in history.charges.items()]
    shares = by_labels(charges, settings.neighboring, delta)
    width = max(11, *(len(label or "(no label)") for label in shares)) if shares else 0
    for label, (share, count) in shares.items():
        cost = "" if share is None else f"{share:.1%} of the cost, "
        lines.append(f"  {label or '(no label)':<{width}} {cost}{count} releases")
    return "\n".join(lines)


def guarantee_in_words(history: History, delta: float) -> str:
    """The condition under which epsilon is a bound, in words."""
    if history.guarantee == "none":
        return (
            "none: a job began after another one had charged, and the filter that this requires"
            " needs a budget. If all parameters were fixed before the first release, epsilon <="
            f" {history.fixed_epsilon(delta):.5g} at delta = {delta:g}"
        )
    if history.filter is None:
        kind = "privacy loss distributions"
        if history.settings.method == "rdp":
            kind = "Renyi curves, at the best order"
        return f"upper bound by {kind}; valid for parameters fixed before the first release"
    text = (
        f"filter on {history.filter}, valid for parameters chosen from earlier"
        f" outputs; {history.used_share(history.filter):.1%} of it used"
    )
    if not history.declared:
        text += (
            "; in force since a second job began: if outputs decided whether to start it,"
            f" the guarantee holds at delta = {2 * (history.settings.delta or 0):g}"
        )
    return text


def by_labels(
    charges: Iterable[tuple[Any, ...]], neighboring: Neighboring, delta: float
) -> dict[str | None, tuple[float | None, int]]:
    """For each label its share of the cost and its number of releases, from (event, count, label,
    ...).

    Shares are of the Renyi divergence, which adds up over releases, at the order that decides
    epsilon at ``delta``. They leave out failures, and are ``None`` if a release has no noise.
    """
    labels: dict[str | None, dict[Pair, int]] = {}
    total: dict[Pair, int] = {}
    for event, count, label, *_ in charges:
        more = {dominating_pair(event, neighboring): count}
        labels[label], total = added(labels.get(label, {}), more), added(total, more)
    found: dict[str | None, tuple[float | None, int]]
    found = {label: (None, sum(counts.values())) for label, counts in labels.items()}
    _, others = apart(total)
    if not others or NonPrivate() in others:
        return found
    curve = renyi.curve(others)
    best = renyi.best_order(curve, delta)
    if 0 < curve[best] < math.inf:
        for label, counts in labels.items():
            share = float(renyi.curve(apart(counts)[1])[best] / curve[best])
            found[label] = share, found[label][1]
    return found


# --- in a few words -------------------------------------------------------------------------------


def _spent(accountant: PrivacyAccountant) -> float:
    """Epsilon of all charges; NaN if the ledger cannot be read."""
    try:
        return accountant.get_epsilon(delta_of(accountant))
    except Exception:  # a repr must not raise
        return math.nan


def spent_in_words(accountant: PrivacyAccountant) -> str:
    """A line such as ``epsilon = 0.5 of 3 spent at delta = 1e-05``."""
    budget = "" if accountant.epsilon is None else f" of {accountant.epsilon:g}"
    return f"epsilon = {_spent(accountant):.4g}{budget} spent at delta = {delta_of(accountant):g}"


def bar(accountant: PrivacyAccountant) -> str:
    """Epsilon as an HTML bar; an empty text without a budget."""
    if accountant.epsilon is None or not math.isfinite(epsilon := _spent(accountant)):
        return ""
    share = min(1.0, epsilon / accountant.epsilon)
    return (
        '<div style="width:20em;border:1px solid #888"><div style="height:0.7em;'
        f'background:#47c;width:{share:.1%}"></div></div>'
    )


# --- pictures -------------------------------------------------------------------------------------


def draw(risk: Risk, axes: Any = None) -> Any:
    """Plot true- against false-positive rates of the best attack, on logarithmic axes."""
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(figsize=(5.5, 4.5))[1]
    at, found = risk.false_positive_rate, risk.true_positive_rate
    lowest = min(1e-5, at / 10)
    rates = np.geomspace(lowest, 1.0, 500)
    best = risk.true_positive_rates(rates)
    axes.fill_between(rates, rates, best, alpha=0.15, linewidth=0)
    axes.plot(rates, best, label="best attack, at most")
    axes.plot(rates, rates, color="black", linestyle=":", linewidth=1, label="guessing")
    axes.plot([at], [found], "o", label=f"finds {found:.3g} at {at:g}")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1.0), ylim=(lowest, 1.2))
    axes.set_xlabel("false-positive rate: accused, but not in the data")
    axes.set_ylabel("true-positive rate: accused, and in the data")
    axes.set_title(f"advantage ≤ {risk.advantage:.3g}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return axes
