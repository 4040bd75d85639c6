"""The privacy accountant: what was released, what it cost, what is left."""

from __future__ import annotations

import inspect
import math
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing import parent_process, util
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

from . import bounds, events, failures, renyi, report, saved_state
from .charging import Charging, Run
from .choices import (
    Method,
    Neighboring,
    NeighboringRelation,
    accounting_method,
    neighboring_relation,
)
from .events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    RecordwiseBatchGaussianDpEvent,
    SelfComposedDpEvent,
)
from .failures import SMALLEST_DELTA
from .filters import Budget, Filter
from .gate import Gate
from .history import Guarantee, History, Part, PrivacyBudgetExceeded, Settings, needed
from .ledger import Ledger, LedgerError, Row, Session
from .pairs import Concentrated, Pair
from .report import guarantee_in_words

__all__ = ["Charge", "EpsilonBounds", "PrivacyAccountant", "PrivacyBudgetExceeded"]

_KNOWN_EVENTS = 4096
_IN_THE_MIDDLE = (
    "this accountant was called from within one of its own charges, which only a signal handler can"
    " do: let the handler raise SystemExit or KeyboardInterrupt instead; reserved steps are"
    " returned."
)

_PROGRAM = uuid.uuid4().hex  # the same in forked children

_RESUMED = (
    "resumed from a saved state: nothing was released after it was saved, nor from another copy"
    " of it"
)
_RECORDWISE = "RecordwiseBatchGaussianDpEvent: who is in a batch does not depend on other records"

T = TypeVar("T")


class Charge(NamedTuple):
    """One line of an accountant's history: ``count`` releases of one elementary event."""

    event: DpEvent
    count: int = 1  # type: ignore[assignment]
    label: str | None = None
    adaptive: bool = False


class EpsilonBounds(NamedTuple):
    """``upper`` is the guarantee; ``lower`` is what no accountant that knows only the events
    can go below.
    """

    lower: float
    upper: float


class PrivacyAccountant:
    r"""Records releases, and says what they cost together: epsilon such that for all neighbours D,
    D' and all S

    .. math:: \Pr[M(D) \in S] \le e^\varepsilon \Pr[M(D') \in S] + \delta.

    With a budget it also refuses: a charge that would pass the budget raises
    :class:`PrivacyBudgetExceeded` and leaves the accountant as it was. Charge first, release
    second.

    Args:
        epsilon: the budget's epsilon. ``None``: no limit, or, with ``path``, that of the file.
        delta: the budget's delta, also the default of :meth:`get_epsilon`. At least 1e-30.
        method: ``"pld"`` composes privacy loss distributions and is tight. ``"rdp"`` adds Renyi
            curves: 3 to 15 percent above, and knows zero-concentrated releases.
        neighboring: ``"add_or_remove_one"`` record, or ``"replace_one"`` record by another; or that
            member of ``dp_accounting.NeighboringRelation``.
        path: a SQLite file on a local disk that keeps the history, made if there is none. Processes
            share it: the accountant may be forked, copied and sent to multiprocessing workers, and
            other programs may open the same path, or a pickle, as new jobs. Close it (``with``,
            :meth:`close`, or the end of the program), so that steps reserved ahead are given back.
            Back it up while no program uses it, or together with the file ending in ``-wal``, which
            has the newest charges.

    Raises:
        ValueError: a setting is out of range, or is not the one that the file was made with.
        LedgerError: the file cannot be used.

    **Privacy.** Every number returned is an upper bound, discretisation and round-off included.
    What it is a bound for, :meth:`summary` says:

    * *Fixed.* Releases whose parameters and number were fixed before the first of them
      (``method="rdp"``: likewise, because the best order is chosen afterwards). That is one job, or
      several that all opened an empty file.
    * *Registered.* With :meth:`register` before the first release: any selection of the registered
      releases, in any order, by any jobs, chosen in any way. Reason: the expected excess E[(1 -
      e^(epsilon - L))_+] of a set of independent losses does not depend on the order in which they
      are added, and adding one to it never lowers it; so by induction no adaptive choice of the
      next one gains anything over taking them all.
    * *Filter.* Parameters chosen from earlier outputs: ``compose(..., adaptive=True)`` from the
      first charge on, or a job that opens a file which holds charges already. Then the Renyi
      divergence at one order (or, if declared with a Gaussian first charge, mu^2) of everything in
      the file stays below a limit; both follow from the budget and the first charge alone, so they
      were fixed before the first release (Feldman, Zrnic 2021; Smith, Thakurta 2022). The guarantee
      is the budget, however much of it is used. Where a later job makes an undeclared file turn to
      its filter, everything charged before counts against the filter's limit from the start, and
      the file is refused to later jobs if that exceeds the limit already. This is (epsilon, delta)
      provided that whether there would be later jobs was not decided from outputs. If it was, the
      two ways in which the file could have gone on, each of them (epsilon, delta), split the
      outputs between them, and together they are (epsilon, 2 delta). Declare or register to be free
      of the condition.
    * *None.* Later jobs in a file without a budget: no limit was fixed in advance, so epsilon is
      infinite.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        method: Method = "pld",
        neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        method, neighboring = accounting_method(method), neighboring_relation(neighboring)
        if epsilon is not None:
            epsilon = check_epsilon(epsilon)
            if delta is None:
                raise ValueError(
                    "a budget needs both numbers: PrivacyAccountant(epsilon=3.0, delta=1e-5)."
                )
        delta = None if delta is None else check_delta(delta)
        settings = {
            "epsilon": epsilon,
            "delta": delta,
            "method": method,
            "neighboring": neighboring,
        }
        self._set_up(settings, None if path is None else Ledger(path, settings, create=True))

    @classmethod
    def of_ledger(cls, ledger: Ledger, job: str = "", later: bool = False) -> PrivacyAccountant:
        """The accountant of a job at an open file; ``job`` empty: of a new one."""
        self = cls.__new__(cls)
        self._set_up({}, ledger, job, later)
        return self

    def _set_up(
        self, settings: Mapping[str, Any], ledger: Ledger | None, job: str = "", later: bool = False
    ) -> None:
        if ledger is not None:
            settings = ledger.settings
        self._epsilon: float | None = settings["epsilon"]
        self._delta: float | None = settings["delta"]
        self._method: Method = settings["method"]
        self._neighboring: Neighboring = settings["neighboring"]
        self._ledger = ledger
        self._gate = Gate()
        self._run: Run | None = None
        self._last: DpEvent | None = None
        self._known: dict[DpEvent, Part] = {}
        self._memory: dict[float, float] = {}
        self._memory_of = 0
        self._notes: dict[str, None] = {}  # without a ledger
        # Of a history in memory: the job that charges here, and what was taken over of earlier
        # ones. Nothing else charges under this name, so who holds as many of its releases holds the
        # same.
        self._job = job or uuid.uuid4().hex
        self._earlier: dict[str, Counter[DpEvent]] = {}
        self._begin(None if ledger is None else Session(ledger, self._job, later))
        if self._charging.session is not None and not job:
            self._charging.session.later = bool(self._charging.history.counts)
        # what was unpickled in a fork server's worker before it forgets finalizers
        util.register_after_fork(self, PrivacyAccountant._settle_at_exit)

    @property
    def _budget(self) -> Budget | None:
        if self._epsilon is None or self._delta is None:
            return None
        return self._epsilon, self._delta

    def _begin(self, session: Session | None) -> None:
        self._run = None
        self._charging = Charging(Settings(self._budget, self._method, self._neighboring), session)
        self._charging.refresh()
        self._settle_at_exit()

    def _settle_at_exit(self) -> None:
        """Also in children of multiprocessing; but nothing of another process."""
        if self._charging.session is not None and self._charging.process == os.getpid():
            util.Finalize(
                self, _settle_quietly, (self._charging.session, self._gate), exitpriority=100
            )

    def _current(self, *, charging: bool = False) -> Charging:
        """What is known of the history; begun anew from the file in a forked child, and after
        an interruption.
        """
        known = self._charging
        if os.getpid() == known.process and not known.stale:
            return known
        if known.session is None:
            if charging:
                raise RuntimeError(
                    "this accountant was forked into another process, where a charge would be lost"
                    " to its parent: make it with PrivacyAccountant(..., path='budget.db'), or give"
                    " every process an accountant with a share of the budget."
                )
            return known
        known.settle()
        ledger = Ledger(known.session.ledger.path, {"id": known.session.ledger.id})
        self._begin(Session(ledger, known.session.job, known.session.later))
        self._ledger = ledger
        return self._charging

    def _read(self) -> Charging:
        """What is known of the history, and what other processes charged since."""
        if self._gate.is_busy:
            raise RuntimeError(_IN_THE_MIDDLE)
        if self._run is not None:
            self._charging.enter(self._run)
        charging = self._current()
        charging.refresh()
        return charging

    def _change(self, change: Callable[[Charging], T], *, charging: bool = True) -> T:
        """One change at a time: threads wait for each other, and what a signal handler starts
        in the middle of one is refused.
        """
        with self._gate.lock:
            if self._gate.is_busy:
                raise RuntimeError(_IN_THE_MIDDLE)
            self._gate.is_busy = True
            try:
                if self._run is not None:
                    self._charging.enter(self._run)
                    self._run = None
                return change(self._current(charging=charging))
            finally:
                self._gate.is_busy = False

    # --- reading ----------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float | None:
        """The budget's epsilon, or ``None``."""
        return self._epsilon

    @property
    def delta(self) -> float | None:
        """The budget's delta, or ``None``."""
        return self._delta

    @property
    def method(self) -> Method:
        """``"pld"`` or ``"rdp"``."""
        return self._method

    @property
    def neighboring(self) -> Neighboring:
        """``"add_or_remove_one"`` or ``"replace_one"``."""
        return self._neighboring

    @property
    def path(self) -> Path | None:
        """The file that keeps the history, or ``None``."""
        return None if self._ledger is None else self._ledger.path

    @property
    def guarantee(self) -> Guarantee:
        """``"fixed"``, ``"registered"``, ``"filter"`` or ``"none"``: what :meth:`get_epsilon`
        is a bound for; see the class.
        """
        with self._gate.lock:
            return self._read().history.guarantee

    @property
    def is_later_job(self) -> bool:
        """Whether this job began after others had charged the ledger: what it charges is held
        by a filter, or by the registered schedule.
        """
        return self._charging.is_later

    @property
    def history(self) -> tuple[Charge, ...]:
        """What was charged, equal charges added up, in the order of their first occurrence. A
        copy.
        """
        with self._gate.lock:
            found: dict[tuple[DpEvent, str | None, bool], int] = {}
            for (event, label, flag), count in self._read().history.charges.items():
                key = event, label, flag == "adaptive"
                found[key] = found.get(key, 0) + count
            return tuple(
                Charge(event, count, label, adaptive)
                for (event, label, adaptive), count in found.items()
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """On what the guarantee rests: what :meth:`note` was told, and what charged events
        state.
        """
        with self._gate.lock:
            return tuple(self._statements(self._read()))

    def _statements(self, charging: Charging) -> dict[str, None]:
        found = dict.fromkeys(self._notes if self._ledger is None else self._ledger.notes())
        if self._earlier and self._job in self._charged_by_jobs(charging):
            found[_RESUMED] = None
        known = (*charging.history.charges, *charging.history.schedule)
        if any(isinstance(event, RecordwiseBatchGaussianDpEvent) for event, _, _ in known):
            found[_RECORDWISE] = None
        return found

    def _charged_by_jobs(self, charging: Charging) -> dict[str, Counter[DpEvent]]:
        """Whose releases a history in memory holds."""
        own: Counter[DpEvent] = Counter()
        for (event, _, _), count in charging.history.charges.items():
            own[event] += count
        for counts in self._earlier.values():
            own -= counts
        return {**self._earlier, self._job: own} if own else dict(self._earlier)

    def __len__(self) -> int:
        """How many releases were charged."""
        with self._gate.lock:
            return sum(self._read().history.charges.values())

    def __bool__(self) -> bool:
        # Else an empty accountant would be false, and ``accountant or PrivacyAccountant()`` would
        # drop a budget.
        return True

    def __repr__(self) -> str:
        place = "" if self._ledger is None else f", path={str(self._ledger.path)!r}"
        releases = sum(self._charging.history.charges.values()) + (
            self._run.taken if self._run is not None else 0
        )
        return (
            f"PrivacyAccountant(epsilon={self._epsilon}, delta={self._delta},"
            f" method={self._method!r}, neighboring={self._neighboring!r}{place}): {releases}"
            " releases"
        )

    @overload
    def get_epsilon(
        self, delta: float | None = None, return_bounds: Literal[False] = False
    ) -> float: ...

    @overload
    def get_epsilon(
        self, delta: float | None = None, *, return_bounds: Literal[True]
    ) -> EpsilonBounds: ...

    def get_epsilon(
        self, delta: float | None = None, return_bounds: bool = False
    ) -> float | EpsilonBounds:
        """Epsilon of everything charged so far.

        Args:
            delta: defaults to the budget's.
            return_bounds: also return a lower bound, to see how tight the guarantee is.

        Returns:
            An upper bound on epsilon; infinite where releases that may fail outright use all of
            ``delta``, which :meth:`summary` then says. Under a filter it is what the filter
            guarantees, spent or not: a run that may stop depending on its outputs has no smaller
            guarantee. With a registered schedule it is, from the first release on, that of the
            whole schedule, for the same reason.
        """
        delta = self._default_delta(delta)
        with self._gate.lock:
            upper = self._upper(self._read().history, delta)
            if not return_bounds:
                return upper
            known: dict[Pair, int] = {
                pair: n
                for pair, n in self._charging.history.counts.items()
                if not isinstance(pair, Concentrated)
            }
            lower = bounds.lower_epsilon(known, delta) if known else 0.0
            return EpsilonBounds(min(lower, upper), upper)

    def get_delta(self, epsilon: float) -> float:
        """An upper bound on delta at ``epsilon`` >= 0, for everything charged so far."""
        epsilon = float(epsilon)
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be finite and at least 0, got {epsilon!r}.")
        with self._gate.lock:
            history = self._read().history
            if not history.counts:
                return 0.0
            if history.guarantee == "none":
                return 1.0
            if history.guarantee == "filter" and history.filter is not None:
                return history.filter.delta(epsilon)
            if self._method == "rdp":
                return renyi.upper_delta(history.guaranteed(), epsilon)
            return bounds.upper_delta(history.guaranteed(), epsilon)

    def remaining(self, event: DpEvent) -> int | float:
        """How many times ``event`` still fits the budget. ``math.inf`` without a budget, or if it
        costs nothing.

        Exact for one process without open blocks of others; what others have reserved may come
        back. A job that opened a file which held charges already gets the number that its filter
        lets through; before a first charge with ``adaptive=True`` it is not yet that. Of an event
        with several parts, what a registered schedule would cover is left out.
        """
        need = needed(self._parts(event, 1))
        with self._gate.lock:
            left = self._read().remaining(need) if need else None
            return math.inf if left is None else left

    def _default_delta(self, delta: float | None) -> float:
        if delta is not None:
            return check_delta(delta)
        if self._delta is None:
            raise ValueError(
                "delta is needed, as this accountant has no budget: get_epsilon(delta=1e-5)."
            )
        return self._delta

    def _upper(self, history: History, delta: float) -> float:
        if not history.counts:
            return 0.0
        if history.guarantee == "none":
            return math.inf
        if history.guarantee == "filter" and history.filter is not None:
            return history.filter.epsilon(delta)
        if self._memory_of != history.changes:
            self._memory, self._memory_of = {}, history.changes
        if delta not in self._memory:
            value = history.price(history.guaranteed(), delta)
            if self._epsilon is not None and delta == self._delta:
                # What is recorded was admitted by a bound on more releases than these, which kept
                # the budget.
                value = min(value, self._epsilon)
            self._memory[delta] = value
        return self._memory[delta]

    # --- charging ---------------------------------------------------------------------------------

    def compose(
        self, event: DpEvent, count: int = 1, label: str | None = None, adaptive: bool = False
    ) -> PrivacyAccountant:
        """Records ``count`` releases of ``event``, or raises before anything is recorded.

        Args:
            event: see :mod:`torch_dpbayes.accounting.events`.
            count: how often.
            label: what :meth:`summary` adds up the shares by.
            adaptive: the parameters of this charge depend on earlier outputs. The guarantee is then
                a filter: a limit on a Renyi divergence at one order, or on mu^2 if the first charge
                is a Gaussian, derived from the budget and the first charge alone. It needs a
                budget, and must be in force from the first charge. What a registered schedule
                covers needs no filter.

        Raises:
            PrivacyBudgetExceeded: the charge would pass the budget. Nothing may be released.
            LedgerError: the charge could not be written to the file. Nothing may be released.
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        run = self._run
        same = (
            run is not None
            and type(count) is int
            and count == 1
            and label == run.label
            and adaptive is run.adaptive
        )
        if run is not None and same and (event is run.event or event == run.event):
            with self._gate.lock:
                process, charging = os.getpid(), self._charging
                # No call from here on, so no signal handler: what is checked holds when it is used.
                if (
                    run is self._run
                    and run.block.left > 0
                    and run.block.open
                    and process == charging.process
                    and not (charging.stale or self._gate.is_busy)
                ):
                    run.block.left -= 1
                    run.taken += 1
                    return self
        if type(count) is not int or count != 1:
            count = events.positive_count(count)
        if label is not None and (not isinstance(label, str) or not label):
            raise ValueError(f"label must be a non-empty string or None, got {label!r}.")
        parts = self._parts(event, count)
        if parts:
            self._change(
                lambda charging: self._charge(charging, event, parts, label, bool(adaptive))
            )
        return self

    def _charge(
        self,
        charging: Charging,
        event: DpEvent,
        parts: list[Part],
        label: str | None,
        adaptive: bool,
    ) -> None:
        charging.charge(parts, label, adaptive)
        # Known events, whose numbers cannot change, are one object each time.
        repeated, self._last = (
            len(parts) == 1 and parts[0][1] == 1 and parts[0][0] is self._last,
            parts[0][0],
        )
        if repeated:
            self._run = charging.run(event, parts[0], label, adaptive)

    def note(self, statement: str) -> None:
        """Keeps a statement on which the guarantee rests, such as what was asserted about a model.

        :meth:`summary` shows it under ``rests on``, saved states carry it along, and with ``path``
        it stands in the file for all jobs. The same statement is kept once.

        Raises:
            LedgerError: the statement could not be written to the file.
        """
        if not isinstance(statement, str) or not statement.strip():
            raise ValueError(f"a statement must be a string that is not empty, got {statement!r}.")
        statement = " ".join(statement.split())
        if self._ledger is None:
            self._notes[statement] = None
        elif self._charging.session is not None:
            self._ledger.add_note(statement, self._charging.session.job)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """One Poisson-sampled Gaussian release, under the name that Opacus uses.

        The caller asserts Poisson sampling.
        """
        rate = events.sampling_rate(sample_rate)
        self.compose(
            PoissonSampledDpEvent(
                rate, GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier))
            )
        )

    def register(self, schedule: Iterable[tuple[DpEvent, int]]) -> PrivacyAccountant:
        """Fixes, before the first release, all that jobs may release without a filter: events and
        how often each.

        A charge is then taken out of the schedule if it has at least as much noise and at most the
        sampling rate of an event that is left there, and is recorded as that event. Jobs may come
        and go, in any order, and choose from the schedule as they like, also after seeing outputs.
        What is not in it is adaptive. Calling it again with the same schedule does nothing, so that
        every worker can. Where every step has another noise, register a few levels below it: with
        ``path``, each different event is reserved, and written, by itself.

        Args:
            schedule: pairs (event, count).

        Raises:
            PrivacyBudgetExceeded: the schedule costs more than the budget. Nothing was registered.
            ValueError: something was charged or registered before, or there is no budget.

        **Privacy.** Releases nothing. The guarantee for any releases from the schedule is the price
        of the schedule; see the class.
        """
        parts = [
            part
            for event, count in schedule
            for part in self._parts(event, events.positive_count(count))
        ]
        self._change(lambda charging: charging.register(parts))
        return self

    def _parts(self, event: DpEvent, count: int) -> list[Part]:
        try:
            known = self._known.get(event)
        # an event that cannot be hashed; the checks below say what is wrong with it
        except TypeError:
            known = None
        if known is not None:
            return [Part(known.event, count, known.pair)]
        parts = []
        for part, times in events.elementary(event, count):
            pair = self._charging.history.pair(part)
            if self._method == "pld" and isinstance(pair, Concentrated):
                raise ValueError(bounds.ZCDP_REFUSAL)
            parts.append(Part(part, times, pair))
        if len(parts) == 1 and parts[0][0] == event:
            if len(self._known) >= _KNOWN_EVENTS:
                self._known.clear()
            # not under ``event``, whose numbers may be arrays that change
            self._known[parts[0][0]] = parts[0]
        return parts

    def close(self) -> None:
        """Returns to the file what is reserved and was not used. The accountant can still be
        used; without ``path`` nothing happens.
        """
        self._change(Charging.settle, charging=False)

    def close_for_good(self, timeout: float) -> None:
        """:meth:`close` in a process that is about to end: no other thread charges any more.

        Args:
            timeout: seconds to wait for a charge that is being made. After that nothing is
                returned, so that what is reserved stays charged.
        """
        if self._gate.lock.acquire(timeout=timeout):
            self.close()

    def __enter__(self) -> PrivacyAccountant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- handing on -------------------------------------------------------------------------------

    def to_dp_event(self) -> ComposedDpEvent:
        """The history as one event, for any dp_accounting accountant that knows its parts."""
        return ComposedDpEvent(
            [SelfComposedDpEvent(charge.event, charge.count) for charge in self.history]
        )

    def summary(self) -> str:
        """Relation, method, budget, epsilon with bounds, the guarantee and what it rests on, and
        the shares of each label.
        """
        with self._gate.lock:
            delta = self._delta if self._delta is not None else 1e-5
            bounds = self.get_epsilon(delta, return_bounds=True)
            lines = [
                (
                    f"Privacy accountant: neighbouring data sets differ by {self._neighboring},"
                    f" method {self._method}"
                ),
                "  budget      "
                + (
                    "none"
                    if self._epsilon is None
                    else f"epsilon = {self._epsilon:g} at delta = {self._delta:g}"
                ),
                (
                    f"  spent       epsilon <= {bounds.upper:.5g} at delta = {delta:g} (and >="
                    f" {bounds.lower:.5g}), {sum(self._charging.history.charges.values())} releases"
                ),
                f"  guarantee   {guarantee_in_words(self._charging, delta)}",
            ]
            if math.isinf(bounds.upper) and (
                why := failures.without_delta(self._charging.history.guaranteed(), delta)
            ):
                lines.insert(3, f"              {why}")
            if self._ledger is not None:
                lines.append(f"  ledger      {self._ledger.path}")
            for i, statement in enumerate(self.notes):
                lines.append(f"  {'' if i else 'rests on':<11} {statement}")
            shares = {label or "(no label)": share for label, share in self.shares(delta).items()}
            width = max(map(len, shares), default=0)
            for label, (share, count) in shares.items():
                cost = "" if share is None else f"{share:.1%} of the cost, "
                lines.append(f"  {label:<{max(width, 11)}} {cost}{count} releases")
            return "\n".join(lines)

    def shares(self, delta: float | None = None) -> dict[str | None, tuple[float | None, int]]:
        """Of each label the share of the cost, and the releases. The cost that adds up is the Renyi
        divergence at the order which decides epsilon at ``delta``; the share is ``None`` if
        something was released without noise. What fails outright with some probability is not in
        it.
        """
        delta = self._default_delta(delta)
        with self._gate.lock:
            return report.shares(self._read().history, delta)

    def state_dict(self) -> dict[str, Any]:
        """The history and the settings, as strings, numbers, lists and dicts.

        Each release has a name: that of the job which made it, one accountant in memory. With
        ``path`` the state says instead which file it is and how far it was read; what was used of
        open blocks is written down first.
        """

        def saved(charging: Charging) -> dict[str, Any]:
            charging.refresh()
            charging.settle()
            charging.refresh()  # up to the rows that were just written
            jobs: dict[str, Counter[DpEvent]] = {}
            if self._ledger is None:  # itself, too, of which a copy knows nothing
                jobs = {self._job: Counter(), **self._charged_by_jobs(charging)}
            notes = list(self._statements(charging))
            return saved_state.written(charging.history, jobs, self._ledger, notes)

        return self._change(saved, charging=False)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a saved history, and its notes. This accountant must be empty, of the same
        method and relation; its own budget holds, and must be the saved one if the history is
        adaptive.

        A state that was saved from a file belongs to that file, which went on counting: loading it
        there checks that the file holds what was saved, and charges nothing; anywhere else it is
        refused.

        Accountants in memory cannot know of each other. If the saved accountant, or another copy of
        its state, goes on releasing, that is not counted here: once this accountant is charged,
        :meth:`summary` says that the guarantee rests on nobody doing so. With ``path`` all are
        counted.

        Raises:
            PrivacyBudgetExceeded: the history does not fit this accountant's budget. Nothing is
                loaded.
            ValueError: this accountant is not empty, has other settings, or is not the file that
                the state belongs to.
        """
        saved = saved_state.read(state_dict, self._method, self._neighboring)

        def load(charging: Charging) -> None:
            charging.refresh()
            if saved.ledger:
                saved.require_in(self._ledger)
                return
            if charging.history.counts or charging.history.schedule:
                raise ValueError(
                    "this accountant is not empty: loading would forget or double what it holds."
                    " Load into a new PrivacyAccountant."
                )
            own = list(self._budget or ())
            same = saved.budget == own
            if saved.is_adaptive and not same:
                raise ValueError(
                    "the saved history is adaptive or registered, which is private only against"
                    f" its budget {saved.budget}; this accountant's is {own}. Load it into one with"
                    " the saved budget."
                )
            # A history that was admitted under the same budget may be priced a hair above it by
            # another discretisation.
            slack = 1.0 if not same else 1.001 if self._method == "pld" else 1 + 1e-9
            parts = [
                (part, line.label, line.flag, line.job)
                for line in saved.lines
                for part in self._parts(line.event, line.count)
            ]
            rule = Filter.decoded(saved.filter, self._budget)
            charging.load(parts, saved.schedule, rule, slack)
            if self._ledger is None:
                self._earlier = {k: counts for k, counts in saved.jobs.items() if k != self._job}
            elif parts:
                self._ledger.add_note(_RESUMED, self._job)

        self._change(load)
        for statement in saved.notes:
            self.note(statement)

    def resume(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with a saved run: an empty accountant takes its history over, any other has to
        hold it.

        The accountant that the state was saved from holds it ever after, and so does one that took
        it over. Releases of other runs never stand for it, equal ones included. Optimizers call
        this when they load a state.

        Raises:
            ValueError: this accountant does not hold what was saved; or it is not empty, and the
                state, of an earlier version, does not say whose releases it holds.
        """
        if state_dict.get("ledger") or not len(self):
            self.load_state_dict(state_dict)
            return
        saved = saved_state.read(state_dict, self._method, self._neighboring)
        if saved.lines and not saved.names_jobs:
            raise ValueError(
                "this state, saved by an earlier version, does not say whose releases it holds, and"
                " the accountant is not empty: resume with an empty one, which takes them over, and"
                " save again."
            )
        with self._gate.lock:
            charging = self._read()
            if self._ledger is None:
                held = self._charged_by_jobs(charging)
            else:
                held = {job: self._ledger.charged_by(job) for job in saved.jobs}
        if any(counts - held.get(job, Counter()) for job, counts in saved.jobs.items()):
            raise ValueError(
                "this accountant does not know the releases of the saved run, and resuming would"
                " forget them: resume with that run's own accountant, or an empty one, which takes"
                " them over."
            )
        for statement in saved.notes:
            self.note(statement)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        session = self._charging.session
        if session is None:
            raise TypeError(
                "a PrivacyAccountant in memory cannot be copied: both copies would spend the same"
                " budget. Make it with PrivacyAccountant(..., path='budget.db'), pass the object"
                " itself on, or load its state_dict() into a new one."
            )
        starting_worker = get_spawning_popen() is not None  # which alone will read this
        return _open_again, (
            str(session.ledger.path),
            session.ledger.id,
            session.job,
            session.later,
            starting_worker,
            _PROGRAM,
            os.getpid(),
        )

    # --- what Opacus asks of an accountant --------------------------------------------------------

    @classmethod
    def mechanism(cls) -> str:
        """Name under which Opacus files the state."""
        return "torch_dpbayes"

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """The hook that Opacus' ``make_private`` attaches to its optimizer.

        Raises:
            ValueError: Opacus was told ``poisson_sampling=False``.
        """
        rate = events.sampling_rate(sample_rate)
        # Opacus asks in the same words whether it samples or not; the answer stands in the call
        # that asks
        asking = inspect.currentframe()
        caller = None if asking is None else asking.f_back
        if caller is not None and not caller.f_locals.get("poisson_sampling", True):
            raise ValueError(
                "poisson_sampling=False: every step would be charged as a Poisson draw, which costs"
                " far less than these batches. Leave it at True, Opacus' default, or take"
                " torch_dpbayes.PrivacyEngine, which samples itself."
            )

        def hook(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1:
                raise RuntimeError(
                    f"Opacus summed {optimizer.accumulated_iterations} batches before one step, in"
                    " which a record may count more than once: step after every batch, and use"
                    " Opacus' BatchMemoryManager for batches that do not fit into memory."
                )
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

        return hook


def _settle_quietly(session: Session, gate: Gate) -> None:
    """At the end of the program, or of the accountant, where an error could only be printed:
    what is not returned stays charged.
    """
    with gate.lock, suppress(LedgerError, OSError):
        session.settle()


def _open_again(
    path: str, identity: str, job: str, later: bool, starting_worker: bool, program: str, maker: int
) -> PrivacyAccountant:
    """The accountant of the same job, in the program that sent it or in a worker of that;
    anywhere else, as if kept until tomorrow, of a new job.
    """
    parent = parent_process()
    same = starting_worker or program == _PROGRAM or (parent is not None and maker == parent.pid)
    ledger = Ledger(path, {"id": identity})
    return PrivacyAccountant.of_ledger(ledger, job if same else "", later)


def look_at(path: str | os.PathLike[str]) -> tuple[PrivacyAccountant, list[Row]]:
    """A ledger as it is, and its rows, without writing anything; the accountant is that of a
    new job.
    """
    rows = (ledger := Ledger(path, {}, read_only=True)).read()
    return PrivacyAccountant.of_ledger(Ledger(ledger.path, {}, read_only=True)), rows


def check_epsilon(epsilon: Any) -> float:
    """``epsilon`` as a positive finite ``float``."""
    value = float(epsilon)
    if not 0 < value < math.inf:
        raise ValueError(
            f"epsilon must be positive and finite, got {epsilon!r}. No limit is epsilon=None."
        )
    return value


def check_delta(delta: Any) -> float:
    """``delta`` as a ``float`` in [1e-30, 1)."""
    value = float(delta)
    if not 0 < value < 1:
        raise ValueError(
            f"delta must lie in (0, 1), got {delta!r}. A common choice is below 1 / number of"
            " records."
        )
    if value < SMALLEST_DELTA:
        raise ValueError(
            f"delta = {value:g} is below {SMALLEST_DELTA:g}, down to which bounds were compared"
            " with the truth. Use delta >= 1e-30."
        )
    return value
