"""The privacy accountant: what was released, what it cost, what is left."""

from __future__ import annotations

import math
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from multiprocessing import parent_process, util
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

from ..errors import ArgumentError, ArgumentTypeError, StateError
from . import events, odometer, report, risk
from .events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    Method,
    Neighboring,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    Unit,
    accounting_method,
    check_delta,
    check_epsilon,
    check_probability,
    neighboring_relation,
    privacy_unit,
)
from .history import (
    RESUMED,
    Flag,
    Guarantee,
    History,
    Origins,
    Part,
    PrivacyBudgetExceeded,
    SavedState,
    Settings,
    check_saved,
    needed,
    read_saved,
    save,
)
from .ledger.file import LOCK, Ledger
from .ledger.schema import Entry, LedgerError, Row
from .ledger.session import SHARE, Block, Session, launch_and_worker

__all__ = ["Charge", "EpsilonBounds", "PrivacyAccountant", "PrivacyBudgetExceeded"]

POISSON_ASSERTED = "Poisson sampling asserted by the caller"
_PROGRAM = uuid.uuid4().hex  # the same in forked children
_IN_THE_MIDDLE = (
    "this accountant was called from within one of its own charges, which only a signal handler can"
    " do: let the handler raise SystemExit or KeyboardInterrupt instead; reserved steps are"
    " returned."
)

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


class _Run:
    """Repetitions of one charge, taken out of a block without a decision. ``taken`` of them are not
    in the history yet.
    """

    __slots__ = ("adaptive", "block", "event", "flag", "label", "part", "taken")

    def __init__(
        self,
        event: DpEvent,
        part: Part,
        label: str | None,
        adaptive: bool,
        flag: Flag,
        block: Block,
    ) -> None:
        self.event, self.part, self.label = event, part, label
        self.adaptive, self.flag, self.block, self.taken = adaptive, flag, block, 0


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
            curves, is looser (the more so, the fewer releases there are), and knows
            zero-concentrated releases.
        neighboring: ``"add_or_remove_one"`` record, or ``"replace_one"`` record by another; or that
            member of ``dp_accounting.NeighboringRelation``.
        unit: what neighbouring data sets differ by: one ``"record"``, or one ``"user"`` with all
            of their records, for ``make_private(..., people=ids)`` and other releases that say so
            (:class:`~torch_dpbayes.accounting.events.UserLevelDpEvent`); nothing else is taken.
        path: a SQLite file that keeps the history, made if there is none. Processes share it: the
            accountant may be forked, copied and sent to multiprocessing workers, and other programs
            may open the same path, or a pickle, as later jobs. A process that opens the path again
            goes on with its own job. Close it (``with``, :meth:`close`, or the end of the program),
            so that releases reserved ahead are given back; a process that is killed leaves at most
            64 of them charged, or half as many as it made. The file needs a local disk, in a folder
            that all processes see under one path: a file that is itself a mount point is refused.
            Back it up while no program uses it, or together with the file ending in ``-wal``, which
            has the newest charges.
        job: with ``path``, the name of a launch whose workers are one job though each opens the
            file by itself. By default torchrun's, mpirun's or ``srun``'s, if one of them started
            this process. A process belongs to the job only if it was started, and imported this
            library, before the job's first charge, in a place in which no other process charged;
            else it is a later job, as is a second launch of the same name. (Linux; elsewhere a
            launch has as many jobs as workers.)

    Raises:
        ValueError: a setting is out of range, or is not the one that the file was made with.
        LedgerError: the file cannot be used.

    **Privacy.** Every number returned is an upper bound, discretisation and round-off included.
    What it is a bound for, :meth:`summary` says:

    * *Fixed.* Releases whose parameters and number were fixed before the first of them
      (``method="rdp"``: likewise, because the best order is chosen afterwards). That is one job, or
      several that all opened an empty file.
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
      outputs between them, and together they are (epsilon, 2 delta). Declare it to be free of the
      condition.
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
        unit: Unit = "record",
        path: str | os.PathLike[str] | None = None,
        job: str | None = None,
    ) -> None:
        method, neighboring = accounting_method(method), neighboring_relation(neighboring)
        if epsilon is not None:
            epsilon = check_epsilon(epsilon)
            if delta is None:
                raise ArgumentError(
                    "a budget needs both numbers: PrivacyAccountant(epsilon=3.0, delta=1e-5)."
                )
        delta = None if delta is None else check_delta(delta)
        unit = privacy_unit(unit)
        settings = {
            "epsilon": epsilon,
            "delta": delta,
            "method": method,
            "neighboring": neighboring,
            "unit": unit,
        }
        if job is not None and (path is None or not isinstance(job, str) or not job.strip()):
            raise ArgumentError(
                f"job must be the name of a launch whose workers share a file, got {job!r}: write"
                " PrivacyAccountant(path='budget.db', job='sweep 7')."
            )
        budget = None if epsilon is None or delta is None else (epsilon, delta)
        session: Session | None = None
        if path is not None:
            ledger = Ledger(path, settings, create=True)
            with LOCK:
                session = Session.opened(ledger, job or launch_and_worker(os.environ)[0])
        self._set_up(Settings(budget, method, neighboring, unit), delta, session)

    def _set_up(self, settings: Settings, delta: float | None, session: Session | None) -> None:
        if session is not None:
            settings, delta = session.history.settings, session.ledger.settings["delta"]
        self._settings, self._delta = settings, delta
        self._session, self._memory = session, History(settings)
        self._origins, self._noted = Origins(), dict[str, None]()
        self._process, self._is_busy, self._is_asserted = os.getpid(), False, False
        self._run: _Run | None = None
        self._last: DpEvent | None = None
        self._settle_at_exit()
        # what was unpickled in a fork server's worker before it forgets finalizers
        util.register_after_fork(self, PrivacyAccountant._settle_at_exit)

    @classmethod
    def at(cls, session: Session) -> PrivacyAccountant:
        """The accountant of an open session."""
        self = cls.__new__(cls)
        self._set_up(session.history.settings, None, session)
        return self

    # --- one caller at a time ---------------------------------------------------------------------

    @property
    def _history(self) -> History:
        return self._memory if self._session is None else self._session.history

    def _settle_at_exit(self) -> None:
        """Also in children of multiprocessing; but nothing of another process."""
        if self._session is not None and self._process == os.getpid():
            util.Finalize(self, _settle_quietly, (self._session,), exitpriority=100)

    def _read(self) -> History:
        """The history, with what other processes charged since. Under the lock."""
        if self._is_busy:
            raise StateError(_IN_THE_MIDDLE)
        self._enter_run()
        self._begin_anew_if_needed()
        if self._session is not None:
            self._session.refresh()
        return self._history

    def _change(self, change: Callable[[], T], *, charging: bool = True) -> T:
        """One change at a time: threads wait for each other, and what a signal handler starts in
        the middle of one is refused.
        """
        with LOCK:
            if self._is_busy:
                raise StateError(_IN_THE_MIDDLE)
            self._is_busy = True
            try:
                self._enter_run()
                self._run = None
                self._begin_anew_if_needed()
                if charging and self._session is None and self._process != os.getpid():
                    raise StateError(
                        "this accountant was forked into another process, where a charge would be"
                        " lost to its parent: make it with PrivacyAccountant(...,"
                        " path='budget.db'), or give every process an accountant with a share of"
                        " the budget."
                    )
                return change()
            finally:
                self._is_busy = False

    def _begin_anew_if_needed(self) -> None:
        """Begins anew from the file in a forked child, and after an interruption."""
        session = self._session
        if session is None or (self._process == os.getpid() and not session.stale):
            return
        self._session, self._process, self._run = session.begun_anew(), os.getpid(), None
        self._settle_at_exit()

    def _enter_run(self) -> None:
        """Adds repetitions to the history. In a file that has them already, an interruption must
        not lose them: then the file is read anew. In memory it may count them twice.
        """
        run, session = self._run, self._session
        if run is None or not run.taken:
            return
        part = run.part._replace(times=run.taken)
        if session is None:
            self._memory.keep(part, run.label, run.flag)
            run.taken = 0
            return
        was_stale, session.stale, run.taken = session.stale, True, 0
        session.taken(run.block, part, run.label, run.flag)
        session.stale = was_stale

    def _repeated(self, event: DpEvent, count: int, label: str | None, adaptive: bool) -> bool:
        """Whether this charge was the last one again, and is recorded now."""
        run = self._run
        if (
            run is None
            or type(count) is not int
            or count != 1
            or label != run.label
            or adaptive is not run.adaptive
            or not (event is run.event or event == run.event)
        ):
            return False
        with LOCK:
            process, session = os.getpid(), self._session
            is_stale = session is not None and session.stale
            # No call from here on, so no signal handler: what is checked holds when it is used.
            if (
                run is self._run
                and run.block.left > 0
                and run.block.open
                and process == self._process
                and not (is_stale or self._is_busy)
            ):
                run.block.left -= 1
                run.taken += 1
                return True
        return False

    # --- reading ----------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float | None:
        """The budget's epsilon, or ``None``."""
        return None if self._settings.budget is None else self._settings.budget[0]

    @property
    def delta(self) -> float | None:
        """The budget's delta, or ``None``."""
        return self._delta

    @property
    def method(self) -> Method:
        """``"pld"`` or ``"rdp"``."""
        return self._settings.method

    @property
    def neighboring(self) -> Neighboring:
        """``"add_or_remove_one"`` or ``"replace_one"``."""
        return self._settings.neighboring

    @property
    def unit(self) -> Unit:
        """``"record"`` or ``"user"``: what epsilon is of."""
        return self._settings.unit

    @property
    def path(self) -> Path | None:
        """The file that keeps the history, or ``None``."""
        return None if self._session is None else self._session.ledger.path

    @property
    def guarantee(self) -> Guarantee:
        """``"fixed"``, ``"filter"`` or ``"none"``: what :meth:`get_epsilon` is a bound for; see the
        class.
        """
        with LOCK:
            return self._read().guarantee

    @property
    def is_later_job(self) -> bool:
        """Whether this job began after others had charged the ledger: what it charges is held
        by a filter.
        """
        return self._session is not None and self._session.later

    @property
    def history(self) -> tuple[Charge, ...]:
        """What was charged, equal charges added up, in the order of their first occurrence. A
        copy.
        """
        with LOCK:
            found: dict[tuple[DpEvent, str | None, bool], int] = {}
            for (event, label, flag), count in self._read().charges.items():
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
        with LOCK:
            return tuple(self._statements())

    def _statements(self) -> list[str]:
        history, session = self._read(), self._session
        found = dict.fromkeys(self._noted if session is None else session.ledger.notes())
        if session is None and self._origins.goes_on(history):
            found[RESUMED] = None
        return list(found | dict.fromkeys(history.event_notes()))

    def __len__(self) -> int:
        """How many releases were charged."""
        with LOCK:
            return sum(self._read().charges.values())

    def __bool__(self) -> bool:
        # Else an empty accountant would be false, and ``accountant or PrivacyAccountant()`` would
        # drop a budget.
        return True

    def __repr__(self) -> str:
        place = "" if self.unit == "record" else f", unit={self.unit!r}"
        place += "" if self.path is None else f", path={str(self.path)!r}"
        known = sum(self._history.charges.values()) + (0 if self._run is None else self._run.taken)
        return (
            f"PrivacyAccountant(epsilon={self.epsilon}, delta={self._delta},"
            f" method={self.method!r}, neighboring={self.neighboring!r}{place}):"
            f" {known} releases, {report.spent_in_words(self)}"
        )

    def _repr_html_(self) -> str:
        """The same for a notebook, with ε as a bar where there is a budget."""
        return f"{escape(repr(self))}{report.bar(self)}"

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
            guarantee.
        """
        delta = self._default_delta(delta)
        with LOCK:
            history = self._read()
            upper = history.epsilon(delta)
            if not return_bounds:
                return upper
            return EpsilonBounds(min(history.lower_epsilon(delta), upper), upper)

    def get_delta(self, epsilon: float) -> float:
        """An upper bound on delta at ``epsilon`` >= 0, for everything charged so far."""
        epsilon = float(epsilon)
        if not 0 <= epsilon < math.inf:
            raise ArgumentError(f"epsilon must be finite and at least 0, got {epsilon!r}.")
        with LOCK:
            return self._read().delta(epsilon)

    def risk(
        self,
        prior: float = 0.5,
        false_positive_rate: float = 1e-3,
        *,
        delta: float | None = None,
        records_per_person: int = 1,
    ) -> risk.Risk:
        """What an attacker can tell of one person, at most; ``print`` it.

        Args:
            prior: the attacker's probability, before anything was released, that the person took
                part.
            false_positive_rate: how often the attack may accuse somebody wrongly.
            delta: of ``epsilon`` and ``gdp_mu``. Defaults to the budget's, else 1e-5.
            records_per_person: how many records a person has at most; 1 where the accountant's unit
                is the person.
        """
        if self.unit == "user" and records_per_person != 1:
            raise ArgumentError(
                "this accountant's numbers are of people already, however many records they have:"
                " leave out records_per_person=."
            )
        if delta is None and self._delta is None:
            delta = 1e-5
        delta = self._default_delta(delta)
        with LOCK:
            history = self._read()
            return risk.assess(
                history,
                prior=check_probability(prior, "prior"),
                false_positive_rate=check_probability(false_positive_rate, "false_positive_rate"),
                delta=delta,
                records_per_person=events.positive_count(records_per_person, "records_per_person"),
                epsilon=history.epsilon(delta),
            )

    def odometer(self, delta: float | None = None) -> float:
        """An epsilon that is valid at every moment at once, also where noise multipliers, rates and
        the moment to stop were chosen from earlier outputs, with no budget and nothing declared.

        With E the odometer when the releases end, for whatever reason, P(S) <= E_Q[exp(E) 1_S] +
        delta for all S. Releases that may fail outright make it infinite.

        Args:
            delta: fixed before the first release, as outputs must not choose it. Defaults to the
                budget's; near the budget it is then tightest.

        Returns:
            An upper bound, above what a filter shows when it is used up by the same releases: by
            at most 9 percent there with a budget, and by 15 percent after 100 releases without.
        """
        delta = self._default_delta(delta)
        with LOCK:
            history = self._read()
            first = history.first or {pair: 1 for pair in [*history.counts][:1]}
            return odometer.epsilon(history.counts, delta, first, history.settings.budget)

    def plot_risk(self, axes: Any = None, **options: Any) -> Any:
        """Draws true- against false-positive rates of the best attack.

        Args:
            axes: of matplotlib; a new figure's if ``None``.
            options: those of :meth:`risk`.

        Returns:
            The axes.
        """
        return report.draw(self.risk(**options), axes)

    def remaining(self, event: DpEvent) -> int | float:
        """How many times ``event`` still fits the budget. ``math.inf`` without a budget, or if it
        costs nothing.

        Exact for one process without open blocks of others; what others have reserved may come
        back. A job that opened a file which held charges already gets the number that its filter
        lets through; before a first charge with ``adaptive=True`` it is not yet that.
        """
        need = needed(self._history.decompose(event, 1))
        with LOCK:
            left = self._read().remaining(need, self.is_later_job) if need else None
            return math.inf if left is None else left

    def _default_delta(self, delta: float | None) -> float:
        if delta is not None:
            return check_delta(delta)
        if self._delta is None:
            raise ArgumentError(
                "delta is needed, as this accountant has no budget: get_epsilon(delta=1e-5)."
            )
        return self._delta

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
                budget, and must be in force from the first charge.

        Raises:
            PrivacyBudgetExceeded: the charge would pass the budget. Nothing may be released.
            LedgerError: the charge could not be written to the file. Nothing may be released.
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        if self._repeated(event, count, label, adaptive):
            return self
        if type(count) is not int or count != 1:
            count = events.positive_count(count)
        if label is not None and (not isinstance(label, str) or not label):
            raise ArgumentError(f"label must be a non-empty string or None, got {label!r}.")
        parts = self._history.decompose(event, count)
        if parts:
            self._change(lambda: self._charge(event, parts, label, bool(adaptive)))
        return self

    def _charge(self, event: DpEvent, parts: list[Part], label: str | None, adaptive: bool) -> None:
        session = self._session
        if session is None:
            self._memory.charge(parts, label, adaptive)
        else:
            session.charge(parts, label, adaptive)
        # Known events, whose numbers cannot change, are one object each time.
        first, was, self._last = parts[0], self._last, parts[0].event
        if len(parts) > 1 or first.times > 1 or first.event is not was:
            return
        block: Block | None
        if session is None:
            block = Block(0, (event, label, "fixed"), first.pair, self._memory.cheap(first.pair))
            flag: Flag = "adaptive" if adaptive else "fixed"
        else:
            block, flag = session.covering(first.pair, {}), session.flag(adaptive)
        if block is not None and block.left >= SHARE:
            self._run = _Run(event, first, label, adaptive, flag, block)

    def note(self, statement: str) -> None:
        """Keeps a statement on which the guarantee rests, such as what was asserted about a model.

        :meth:`summary` shows it under ``rests on``, saved states carry it along, and with ``path``
        it stands in the file for all jobs. The same statement is kept once.

        Raises:
            LedgerError: the statement could not be written to the file.
        """
        if not isinstance(statement, str) or not statement.strip():
            raise ArgumentError(f"a statement must be a non-empty string, got {statement!r}.")
        statement = " ".join(statement.split())
        if self._session is None:
            self._noted[statement] = None
        else:
            self._session.ledger.add_note(statement, self._session.job)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """One Poisson-sampled Gaussian release, under the name that Opacus uses.

        The caller asserts Poisson sampling, which :meth:`summary` then says.
        """
        rate = events.sampling_rate(sample_rate)
        release = GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier))
        if not self._is_asserted:
            self.note(POISSON_ASSERTED)
            self._is_asserted = True
        self.compose(PoissonSampledDpEvent(rate, release))

    def close(self) -> None:
        """Returns to the file what is reserved and was not used. The accountant can still be
        used; without ``path`` nothing happens.
        """
        self._change(self._settle, charging=False)

    def close_for_good(self, timeout: float) -> None:
        """:meth:`close` in a process that is about to end: no other thread charges any more.

        Args:
            timeout: seconds to wait for a charge that is being made. After that nothing is
                returned, so that what is reserved stays charged.
        """
        if LOCK.acquire(timeout=timeout):  # and never released
            self.close()

    def _settle(self) -> None:
        if self._session is not None:
            self._session.settle()

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

    def summary(self, records_per_person: int = 1) -> str:
        """Relation, method, budget, epsilon with bounds, the guarantee and what it rests on, what
        an attacker can tell of a person, and the shares of each label.

        Args:
            records_per_person: how many records a person has at most: the risk is that of a person.
        """
        with LOCK:
            delta = self._delta if self._delta is not None else 1e-5
            bounds = self.get_epsilon(delta, return_bounds=True)
            found = self.risk(delta=delta, records_per_person=records_per_person)
            return report.summary(self._history, bounds, delta, self.path, self.notes, found)

    def state_dict(self) -> dict[str, Any]:
        """The history and the settings, as strings, numbers, lists and dicts.

        Each release belongs to the job that made it, which is one accountant in memory. With
        ``path`` the state says instead which file it is and how far it was read; what was used of
        open blocks is written down first.
        """

        def saved() -> dict[str, Any]:
            session = self._session
            if session is not None:
                session.refresh()
                session.settle()
                session.refresh()  # up to the rows that were just written
            history = self._history
            jobs = self._origins.saved(history) if session is None else {}
            identity, place = (
                ("", []) if session is None else (session.ledger.id, session.ledger.place)
            )
            notes = dict.fromkeys(self._noted if session is None else session.ledger.notes())
            if session is None and self._origins.goes_on(history):
                notes[RESUMED] = None
            return save(history, jobs, identity, place, [*notes])

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
        saved = read_saved(state_dict, self._settings)

        def take_over() -> None:
            session = self._session
            if session is not None:
                session.refresh()
            if saved.ledger:
                _require_in(saved, session)
                return
            rule = check_saved(self._history, saved)
            parts = [
                (part, line)
                for line in saved.lines
                for part in self._history.decompose(line.event, line.count)
            ]
            if session is not None:
                entries = [
                    Entry("charge", line.label, part.event, part.times, line.flag, job=line.job)
                    for part, line in parts
                ]
                if rule is not None:
                    entries.insert(0, Entry("filter", rule.code, None, 0, "adaptive"))
                if not session.write(entries):
                    raise ArgumentError(
                        "another process charged this ledger in the meantime: it is not empty any"
                        " more, so nothing was loaded. Take a new ledger."
                    )
            for part, line in parts:
                self._history.first = self._history.first or {part.pair: 1}
                self._history.keep(part, line.label, line.flag)
            if rule is not None:
                self._history.start(rule, declared=True)
            if session is None:
                self._origins.take_over(saved.jobs)
            elif saved.lines:
                session.ledger.add_note(RESUMED, session.job)

        self._change(take_over)
        for statement in saved.notes:
            self.note(statement)

    def resume(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with a saved run: an empty accountant takes its history over, any other has to
        hold it.

        The accountant that the state was saved from holds it ever after, and so does one that took
        it over. Releases of other runs never stand for it, equal ones included. Optimizers call
        this when they load a state.

        Raises:
            ValueError: this accountant does not hold what was saved.
        """
        if state_dict.get("ledger") or not len(self):
            self.load_state_dict(state_dict)
            return
        saved = read_saved(state_dict, self._settings)
        with LOCK:
            held = self._origins.charged(self._read())
            if self._session is not None:
                held = {job: self._session.ledger.charged_by(job) for job in saved.jobs}
        if any(counts - held.get(job, Counter()) for job, counts in saved.jobs.items()):
            raise ArgumentError(
                "this accountant does not know the releases of the saved run, and resuming would"
                " forget them: resume with that run's own accountant, or an empty one, which takes"
                " them over."
            )
        for statement in saved.notes:
            self.note(statement)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        session = self._session
        if session is None:
            raise ArgumentTypeError(
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
        """The hook that Opacus' ``make_private`` attaches to its optimizer: each of its steps is
        charged by :meth:`step`.
        """
        rate = events.sampling_rate(sample_rate)

        def hook(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1:
                raise StateError(
                    f"Opacus summed {optimizer.accumulated_iterations} batches before one step, in"
                    " which a record may count more than once: step after every batch, and use"
                    " Opacus' BatchMemoryManager for batches that do not fit into memory."
                )
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

        return hook


def _settle_quietly(session: Session) -> None:
    """At the end of the program, or of the accountant, where an error could only be printed:
    what is not returned stays charged.
    """
    with LOCK, suppress(LedgerError, OSError):
        session.settle()


def _require_in(saved: SavedState, session: Session | None) -> None:
    """Raises unless this is the file that the state belongs to, and holds what was saved."""
    if session is None or session.ledger.id != saved.ledger:
        raise ArgumentError(
            "the saved history belongs to a ledger file, which goes on counting: open that"
            " file, PrivacyAccountant(path=...), and hand it to whatever resumes."
        )
    held = session.ledger.charged_until(saved.place) if saved.lines else Counter()
    if held is None or saved.counted() - held:
        raise ArgumentError(
            f"the ledger {session.ledger.path} holds less than the saved run was charged for: it"
            " was restored from an older copy. Put the newer file back."
        )


def _open_again(
    path: str, identity: str, job: str, later: bool, starting_worker: bool, program: str, maker: int
) -> PrivacyAccountant:
    """The accountant of the same job, in the program that sent it or in a worker of that;
    anywhere else, as if kept until tomorrow, of a later job.
    """
    parent = parent_process()
    same = starting_worker or program == _PROGRAM or (parent is not None and maker == parent.pid)
    return _of_job(Ledger(path, {"id": identity}), job if same else "", later)


def _of_job(ledger: Ledger, job: str, later: bool) -> PrivacyAccountant:
    """The accountant of a job at an open file; ``job`` empty: of a new one."""
    with LOCK:
        session = Session(ledger, job or uuid.uuid4().hex, later)
        session.refresh()
        if not job:
            session.later = bool(session.history.counts)
    return PrivacyAccountant.at(session)


def look_at(path: str | os.PathLike[str]) -> tuple[PrivacyAccountant, list[Row]]:
    """A ledger as it is, and its rows, without writing anything; the accountant is that of a
    new job.
    """
    rows = (ledger := Ledger(path, {}, read_only=True)).read()
    return _of_job(Ledger(ledger.path, {}, read_only=True), "", False), rows
