"""The privacy accountant: what was released, what it cost, what is left."""

from __future__ import annotations

import inspect
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from html import escape
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from . import events, odometer, picture, report, risk, saved_state
from .access import Access
from .charging import Charging
from .choices import (
    Method,
    Neighboring,
    NeighboringRelation,
    Unit,
    accounting_method,
    check_delta,
    check_epsilon,
    check_probability,
    neighboring_relation,
    privacy_unit,
)
from .events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from .history import Guarantee, Part, PrivacyBudgetExceeded, Settings, needed
from .launch import launch_and_worker
from .ledger import Ledger, Row, Session
from .opacus_hook import charging_hook
from .origins import Origins, load
from .parts import Elements
from .prices import Prices, lower_epsilon
from .spent import bar, spent_in_words
from .statements import RESUMED, Statements

__all__ = ["Charge", "EpsilonBounds", "PrivacyAccountant", "PrivacyBudgetExceeded"]

_PROGRAM = uuid.uuid4().hex  # the same in forked children


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
        unit: what neighbouring data sets differ by: one ``"record"``, or one ``"person"`` with all
            of their records, for ``make_private(..., people=ids)`` and other releases that say so
            (:class:`~torch_dpbayes.accounting.people.PersonDpEvent`); nothing else is taken then.
        path: a SQLite file on a local disk that keeps the history, made if there is none. Processes
            share it: the accountant may be forked, copied and sent to multiprocessing workers, and
            other programs may open the same path, or a pickle, as new jobs. Close it (``with``,
            :meth:`close`, or the end of the program), so that steps reserved ahead are given back.
            Back it up while no program uses it, or together with the file ending in ``-wal``, which
            has the newest charges.
        job: with ``path``, the launch whose workers are one job though each opens the file by
            itself. By default torchrun's, mpirun's or ``srun``'s, if one of them started this
            process. A process is of the job only if it was started, and imported this library,
            before the job's first charge, in a place in which no other process charged; else it is
            a later job, as is a second launch of the same name. (Linux; elsewhere a launch has as
            many jobs as workers.)

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
        unit: Unit = "record",
        path: str | os.PathLike[str] | None = None,
        job: str | None = None,
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
            "unit": privacy_unit(unit),
        }
        if job is not None and (path is None or not isinstance(job, str) or not job.strip()):
            raise ValueError(
                f"job must be the name of a launch whose workers share a file, got {job!r}: write"
                " PrivacyAccountant(path='budget.db', job='sweep 7')."
            )
        if path is None:
            self._set_up(settings, None)
        else:
            name = job or launch_and_worker(os.environ)[0]
            self._set_up(settings, Ledger(path, settings, create=True), name)
            self._join()

    @classmethod
    def of_ledger(cls, ledger: Ledger, job: str = "", later: bool = False) -> PrivacyAccountant:
        """The accountant of a job at an open file; ``job`` empty: of a new one."""
        self = cls.__new__(cls)
        self._set_up(ledger.settings, ledger, job, later)
        if not job:
            self._join()
        return self

    def _set_up(
        self, wanted: Mapping[str, Any], ledger: Ledger | None, job: str = "", later: bool = False
    ) -> None:
        found = wanted if ledger is None else ledger.settings
        self._epsilon: float | None = found["epsilon"]
        self._delta: float | None = found["delta"]
        self._method: Method = found["method"]
        self._neighboring: Neighboring = found["neighboring"]
        self._unit: Unit = found["unit"]
        budget = None
        if self._epsilon is not None and self._delta is not None:
            budget = self._epsilon, self._delta
        settings = Settings(budget, self._method, self._neighboring, self._unit)
        self._elements, self._prices = Elements(settings), Prices()
        self._origins, self._statements = Origins(job), Statements()
        self._last: DpEvent | None = None
        session = None if ledger is None else Session(ledger, self._origins.job, later)
        self._access = Access(settings, session)

    def _join(self) -> None:
        """As a process that nobody handed this accountant to."""
        session = self._access.session
        if session is not None and self._access.charging.history.counts:
            session.join()

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
    def unit(self) -> Unit:
        """``"record"`` or ``"person"``: what epsilon is of."""
        return self._unit

    @property
    def path(self) -> Path | None:
        """The file that keeps the history, or ``None``."""
        ledger = self._access.ledger
        return None if ledger is None else ledger.path

    @property
    def guarantee(self) -> Guarantee:
        """``"fixed"``, ``"registered"``, ``"filter"`` or ``"none"``: what :meth:`get_epsilon`
        is a bound for; see the class.
        """
        with self._access.lock:
            return self._access.read().history.guarantee

    @property
    def is_later_job(self) -> bool:
        """Whether this job began after others had charged the ledger: what it charges is held
        by a filter, or by the registered schedule.
        """
        return self._access.charging.is_later

    @property
    def history(self) -> tuple[Charge, ...]:
        """What was charged, equal charges added up, in the order of their first occurrence. A
        copy.
        """
        with self._access.lock:
            found: dict[tuple[DpEvent, str | None, bool], int] = {}
            for (event, label, flag), count in self._access.read().history.charges.items():
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
        with self._access.lock:
            return tuple(self._statements.of(self._access.read(), self._origins))

    def __len__(self) -> int:
        """How many releases were charged."""
        with self._access.lock:
            return sum(self._access.read().history.charges.values())

    def __bool__(self) -> bool:
        # Else an empty accountant would be false, and ``accountant or PrivacyAccountant()`` would
        # drop a budget.
        return True

    def __repr__(self) -> str:
        place = "" if self._unit == "record" else f", unit={self._unit!r}"
        place += "" if self.path is None else f", path={str(self.path)!r}"
        return (
            f"PrivacyAccountant(epsilon={self._epsilon}, delta={self._delta},"
            f" method={self._method!r}, neighboring={self._neighboring!r}{place}):"
            f" {self._access.known_releases} releases, {spent_in_words(self)}"
        )

    def _repr_html_(self) -> str:
        """The same for a notebook, with ε as a bar where there is a budget."""
        return f"{escape(repr(self))}{bar(self)}"

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
        with self._access.lock:
            history = self._access.read().history
            upper = self._prices.epsilon(history, delta)
            if not return_bounds:
                return upper
            return EpsilonBounds(min(lower_epsilon(history, delta), upper), upper)

    def get_delta(self, epsilon: float) -> float:
        """An upper bound on delta at ``epsilon`` >= 0, for everything charged so far."""
        epsilon = float(epsilon)
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be finite and at least 0, got {epsilon!r}.")
        with self._access.lock:
            return self._prices.delta(self._access.read().history, epsilon)

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
        if self._unit == "person" and records_per_person != 1:
            raise ValueError(
                "this accountant's numbers are of people already, however many records they have:"
                " leave out records_per_person=."
            )
        if delta is None and self._delta is None:
            delta = 1e-5
        delta = self._default_delta(delta)
        with self._access.lock:
            history = self._access.read().history
            return risk.assess(
                history,
                prior=check_probability(prior, "prior"),
                false_positive_rate=check_probability(false_positive_rate, "false_positive_rate"),
                delta=delta,
                records_per_person=events.positive_count(records_per_person, "records_per_person"),
                epsilon=self._prices.epsilon(history, delta),
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
        with self._access.lock:
            history = self._access.read().history
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
        return picture.draw(self.risk(**options), axes)

    def remaining(self, event: DpEvent) -> int | float:
        """How many times ``event`` still fits the budget. ``math.inf`` without a budget, or if it
        costs nothing.

        Exact for one process without open blocks of others; what others have reserved may come
        back. A job that opened a file which held charges already gets the number that its filter
        lets through; before a first charge with ``adaptive=True`` it is not yet that. Of an event
        with several parts, what a registered schedule would cover is left out.
        """
        need = needed(self._elements.of(event, 1))
        with self._access.lock:
            left = self._access.read().remaining(need) if need else None
            return math.inf if left is None else left

    def _default_delta(self, delta: float | None) -> float:
        if delta is not None:
            return check_delta(delta)
        if self._delta is None:
            raise ValueError(
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
                budget, and must be in force from the first charge. What a registered schedule
                covers needs no filter.

        Raises:
            PrivacyBudgetExceeded: the charge would pass the budget. Nothing may be released.
            LedgerError: the charge could not be written to the file. Nothing may be released.
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        if self._access.repeated(event, count, label, adaptive):
            return self
        if type(count) is not int or count != 1:
            count = events.positive_count(count)
        if label is not None and (not isinstance(label, str) or not label):
            raise ValueError(f"label must be a non-empty string or None, got {label!r}.")
        parts = self._elements.of(event, count)
        if parts:
            self._access.change(
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
            self._access.will_repeat(charging.run(event, parts[0], label, adaptive))

    def note(self, statement: str) -> None:
        """Keeps a statement on which the guarantee rests, such as what was asserted about a model.

        :meth:`summary` shows it under ``rests on``, saved states carry it along, and with ``path``
        it stands in the file for all jobs. The same statement is kept once.

        Raises:
            LedgerError: the statement could not be written to the file.
        """
        self._statements.note(statement, self._access.charging)

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
            for part in self._elements.of(event, events.positive_count(count))
        ]
        self._access.change(lambda charging: charging.register(parts))
        return self

    def close(self) -> None:
        """Returns to the file what is reserved and was not used. The accountant can still be
        used; without ``path`` nothing happens.
        """
        self._access.change(lambda charging: charging.settle(), charging=False)

    def close_for_good(self, timeout: float) -> None:
        """:meth:`close` in a process that is about to end: no other thread charges any more.

        Args:
            timeout: seconds to wait for a charge that is being made. After that nothing is
                returned, so that what is reserved stays charged.
        """
        self._access.settle_for_good(timeout)

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
        with self._access.lock:
            delta = self._delta if self._delta is not None else 1e-5
            bounds = self.get_epsilon(delta, return_bounds=True)
            found = self.risk(delta=delta, records_per_person=records_per_person)
            return report.summary(self._access.charging, bounds, delta, self.notes, found)

    def shares(self, delta: float | None = None) -> dict[str | None, tuple[float | None, int]]:
        """Of each label the share of the cost, and the releases. The cost that adds up is the Renyi
        divergence at the order which decides epsilon at ``delta``; the share is ``None`` if
        something was released without noise. What fails outright with some probability is not in
        it.
        """
        delta = self._default_delta(delta)
        with self._access.lock:
            return report.shares(self._access.read().history, delta)

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
            ledger, history = self._access.ledger, charging.history
            jobs = self._origins.saved(history) if ledger is None else {}
            notes = self._statements.of(charging, self._origins)
            return saved_state.written(history, jobs, ledger, notes)

        return self._access.change(saved, charging=False)

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
        saved = saved_state.read(state_dict, self._method, self._neighboring, self._unit)

        def take_over(charging: Charging) -> None:
            charging.refresh()
            ledger = self._access.ledger
            if saved.ledger:
                saved.require_in(ledger)
                return
            load(charging, saved, self._elements)
            if ledger is None:
                self._origins.take_over(saved.jobs)
            elif saved.lines:
                ledger.notes.add(RESUMED, self._origins.job)

        self._access.change(take_over)
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
        saved = saved_state.read(state_dict, self._method, self._neighboring, self._unit)
        with self._access.lock:
            history = self._access.read().history
            self._origins.require_held(saved, history, self._access.ledger)
        for statement in saved.notes:
            self.note(statement)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        session = self._access.session
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
        return charging_hook(self.step, sample_rate, inspect.currentframe())


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
