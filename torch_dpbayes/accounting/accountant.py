"""The privacy accountant: releases, their cost, and the rest of the budget."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from multiprocessing import current_process
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from ..errors import ArgumentError, ArgumentTypeError, StateError
from . import events, odometer, report, risk
from .events import DpEvent, Method, Neighboring, NeighboringRelation, Unit
from .history import Guarantee, History, PrivacyBudgetExceeded, Settings, needed, read_saved
from .ledger import LOCK, Ledger, Row
from .session import Exclusive, Session

__all__ = ["Charge", "EpsilonBounds", "PrivacyAccountant", "PrivacyBudgetExceeded"]

POISSON_ASSERTED = "Poisson sampling asserted by the caller"


class Charge(NamedTuple):
    """One line of an accountant's history: ``count`` releases of one elementary event."""

    event: DpEvent
    count: int = 1  # type: ignore[assignment]
    label: str | None = None
    adaptive: bool = False


class EpsilonBounds(NamedTuple):
    """Bounds on epsilon: the guarantee (upper), and what the events cost at least (lower)."""

    lower: float
    upper: float


def _setting(name: str, doc: str) -> Any:
    """A read-only setting of an accountant."""
    return property(attrgetter(f"_session.settings.{name}"), doc=doc)


class PrivacyAccountant:
    r"""Records releases and computes the epsilon of all of them together: for all neighbours D, D'
    and all S

    .. math:: \Pr[M(D) \in S] \le e^\varepsilon \Pr[M(D') \in S] + \delta.

    If it has a budget, a charge that would exceed it raises :class:`PrivacyBudgetExceeded` and
    changes nothing. Charge first, release second.

    Args:
        epsilon: the budget's epsilon. ``None``: no limit, or, with ``path``, the budget of the
            file.
        delta: the budget's delta, also the default of :meth:`get_epsilon`. At least 1e-30.
        method: ``"pld"`` composes privacy loss distributions and is tight. ``"rdp"`` adds Renyi
            curves: it is less tight, mostly for few releases, and accepts zero-concentrated
            releases.
        neighboring: ``"add_or_remove_one"``: data sets differ by one added or removed record;
            ``"replace_one"``: by one replaced record. Or a ``dp_accounting.NeighboringRelation``.
        unit: neighbouring data sets differ by one ``"record"``, or by one ``"user"`` with all their
            records. An accountant for users accepts only user-level charges
            (:class:`~torch_dpbayes.accounting.events.UserLevelDpEvent`).
        path: a SQLite file that keeps the history; it is made if there is none. Processes share it:
            you may fork, copy and reopen the accountant, and send it to multiprocessing workers;
            all of these are one job. Any other process that opens a file with charges is a later
            job. A process reserves releases in advance, and returns them when it closes the
            accountant (``with``, :meth:`close`, or the end of the program). If it is killed, at
            most 64 reserved releases stay charged, or half as many as it made. The file must be on
            a local disk, and have one path for all processes. Back it up while no program uses it,
            or together with the file ending in ``-wal``, which contains the newest charges.

    Raises:
        ArgumentError: a setting is out of range, or differs from that of the file.
        LedgerError: the file cannot be used.

    **Privacy.** Every number returned is an upper bound, discretisation and round-off included.
    :meth:`summary` says which guarantee holds:

    * *Fixed.* The parameters and the number of releases were fixed before the first one (also for
      ``method="rdp"``, because the best order is chosen afterwards). This means one job, or several
      jobs that all opened an empty file.
    * *Filter.* Parameters may depend on earlier outputs: ``compose(..., adaptive=True)`` from the
      first charge on, or a later job. The sum of Renyi divergences at one order (of mu^2, if the
      first charge is adaptive and a Gaussian) must stay below a limit. Order and limit follow from
      the budget and the first charge, so they are fixed before the first release (Feldman, Zrnic
      2021; Smith, Thakurta 2022). The guarantee is the whole budget. If the first charge was not
      adaptive, the filter starts with the first later job, and earlier charges count; if they
      exceed the limit, later jobs are refused. Then the guarantee is (epsilon, delta) if outputs
      did not decide whether there would be later jobs, and (epsilon, 2 delta) if they did. With
      ``adaptive=True`` in the first charge it is (epsilon, delta) in both cases.
    * *None.* A later job charged a file without a budget: no limit was fixed in advance, so epsilon
      is infinite.
    """

    _is_asserted = False  # whether the note on Poisson sampling is stored

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        method: Method = "pld",
        neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
        unit: Unit = "record",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = Settings.checked(epsilon, delta, method, neighboring, unit)
        if epsilon is not None and delta is None:
            raise ArgumentError(
                "a budget needs both numbers, epsilon= and delta=, such as 3.0 and 1e-5."
            )
        if path is None:
            self._turns = Exclusive(History(settings))
        else:
            ledger = Ledger(path, settings._asdict(), create=True)
            with LOCK:
                self._turns = Exclusive(Session.opened(ledger))

    @classmethod
    def at(cls, session: Session) -> PrivacyAccountant:
        """The accountant of an open session."""
        self = cls.__new__(cls)
        self._turns = Exclusive(session)
        return self

    @property
    def _session(self) -> History:
        return self._turns.session

    # --- reading ----------------------------------------------------------------------------------

    epsilon: float | None = _setting("epsilon", "The budget's epsilon, or ``None``.")
    delta: float | None = _setting("delta", "The budget's delta, or ``None``.")
    method: Method = _setting("method", '``"pld"`` or ``"rdp"``.')
    neighboring: Neighboring = _setting(
        "neighboring", '``"add_or_remove_one"``, ``"replace_one"`` or ``"zero_out"``.'
    )
    unit: Unit = _setting("unit", '``"record"`` or ``"user"``: whom epsilon protects.')

    @property
    def path(self) -> Path | None:
        """The file that keeps the history, or ``None``."""
        return self._session.path

    @property
    def guarantee(self) -> Guarantee:
        """``"fixed"``, ``"filter"`` or ``"none"``: which guarantee holds; see the class."""
        return self._turns.read(lambda history: history.guarantee)

    @property
    def is_later_job(self) -> bool:
        """Whether the ledger held charges when this job began, so that a filter enforces the
        budget.
        """
        return self._session.later

    @property
    def history(self) -> tuple[Charge, ...]:
        """A copy of all charges, in order of first occurrence; equal charges are one line."""
        found = Counter[tuple[DpEvent, str | None, bool]]()
        for key, count in self._turns.read(lambda history: dict(history.charges)).items():
            found[key.event, key.label, key.flag == "adaptive"] += count
        return tuple(Charge(line[0], count, *line[1:]) for line, count in found.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions of the guarantee, from :meth:`note` and from charged events."""
        found = self._turns.read(lambda history: [*history.notes(), *history.event_notes()])
        return tuple(dict.fromkeys(found))

    def __len__(self) -> int:
        """The number of charged releases."""
        return self._turns.read(lambda history: sum(history.charges.values()))

    def __bool__(self) -> bool:
        # otherwise an empty accountant would be false, and ``accountant or PrivacyAccountant()``
        # would drop its budget
        return True

    def __repr__(self) -> str:
        place = "" if self.unit == "record" else f", unit={self.unit!r}"
        place += "" if self.path is None else f", path={str(self.path)!r}"
        spent = report.spent_in_words(self)  # it counts the latest charges
        with LOCK:
            number = sum(self._session.charges.values())
        return (
            f"PrivacyAccountant(epsilon={self.epsilon}, delta={self.delta},"
            f" method={self.method!r}, neighboring={self.neighboring!r}{place}):"
            f" {number} releases, {spent}"
        )

    def _repr_html_(self) -> str:
        """The same as HTML for a notebook; if there is a budget, a bar shows ε."""
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
            An upper bound on epsilon. It is infinite if the failures of releases use all of
            ``delta``. Under a filter it is always the whole budget, because outputs may decide when
            the run stops.
        """
        at = self._default_delta(delta)

        def bounds(history: History) -> EpsilonBounds:
            upper = history.epsilon(at)
            return EpsilonBounds(min(history.lower_epsilon(at), upper), upper)

        if return_bounds:
            return self._turns.read(bounds)
        return self._turns.read(lambda history: history.epsilon(at))

    def get_delta(self, epsilon: float) -> float:
        """An upper bound on delta at ``epsilon`` >= 0, for everything charged so far."""
        rule = "be finite and at least 0"
        epsilon = events.within(epsilon, "epsilon", lambda e: 0 <= e < math.inf, rule)
        return self._turns.read(lambda history: history.delta(epsilon))

    def risk(
        self, prior: float = 0.5, false_positive_rate: float = 1e-3, *, delta: float | None = None
    ) -> risk.Risk:
        """Upper bounds on what an attacker can learn about one record, or one user if
        ``unit="user"``; ``print`` the result.

        Args:
            prior: the attacker's probability, before any release, that the record (or user) is
                in the data.
            false_positive_rate: the probability that the attack accuses a record (or user) that
                is not in the data.
            delta: δ of ``epsilon`` and ``gdp_mu``. Defaults to that of the budget, else 1e-5.
        """
        at = report.delta_of(self) if delta is None else events.check_delta(delta)
        chances = {"prior": prior, "false_positive_rate": false_positive_rate}
        checked = {name: events.check_probability(p, name) for name, p in chances.items()}
        return self._turns.read(lambda history: risk.assess(history, delta=at, **checked))

    def plot_risk(self, axes: Any = None, **options: Any) -> Any:
        """Plots the true-positive rate of the best attack against its false-positive rate.

        Args:
            axes: Matplotlib axes; ``None``: those of a new figure.
            options: the arguments of :meth:`risk`.

        Returns:
            The axes.
        """
        return report.draw(self.risk(**options), axes)

    def odometer(self, delta: float | None = None) -> float:
        """An epsilon that is valid at all times, even if noise multipliers, rates and the stopping
        time depend on earlier outputs. It needs no budget and no ``adaptive=True``.

        Let P and Q be the laws of the outputs on neighbouring data sets, and E the odometer when
        the releases end. Then P(S) <= E_Q[exp(E) 1_S] + delta for all S, for any reason
        to stop. It is infinite if a release may fail (``FailureDpEvent``).

        Args:
            delta: must be fixed before the first release, not chosen from outputs. Defaults to that
                of the budget; the odometer is then tightest near the budget.

        Returns:
            An upper bound. It is larger than the epsilon of a filter that these releases exhaust:
            by about 15 percent after 100 sampled steps (9 with a budget), and by up to 35 percent
            (22) after 100 steps on full batches, for which the filter is tighter.
        """
        at = self._default_delta(delta)
        return self._turns.read(
            lambda it: odometer.epsilon(it.counts, at, it.first, it.settings.budget)
        )

    def remaining(self, event: DpEvent) -> int | float:
        """How many times ``event`` still fits the budget; ``math.inf`` without a budget, or if
        ``event`` costs nothing. With more than 48 different releases a few more may fit.

        The number can rise when other processes return reserved releases. For a later job it is
        what the filter allows. Before a first charge with ``adaptive=True`` there is no filter yet.
        """
        need = needed(self._session.decompose(event, 1))
        left = self._turns.read(lambda history: history.remaining(need) if need else None)
        return math.inf if left is None else left

    def _default_delta(self, delta: float | None) -> float:
        delta = self.delta if delta is None else events.check_delta(delta)
        if delta is None:
            raise ArgumentError(
                "the accountant has no budget, so delta is missing: write get_epsilon(delta=1e-5).",
                code="budget-delta",
            )
        return delta

    # --- charging ---------------------------------------------------------------------------------

    def compose(
        self, event: DpEvent, count: int = 1, label: str | None = None, adaptive: bool = False
    ) -> PrivacyAccountant:
        """Records ``count`` releases of ``event``, or raises before anything is recorded.

        Args:
            event: see :mod:`torch_dpbayes.accounting.events`.
            count: the number of releases.
            label: :meth:`summary` shows the share of each label in the cost.
            adaptive: the parameters of this charge depend on earlier outputs. Then the guarantee is
                a filter. It needs a budget, and ``adaptive=True`` from the first charge on.

        Raises:
            PrivacyBudgetExceeded: the charge would exceed the budget. Nothing may be released.
            LedgerError: the charge could not be written to the file. Nothing may be released.
            ArgumentError: the event gives no guarantee under this accountant's settings.
        """
        if self._turns.repeated(event, count, label, adaptive):
            return self
        if type(count) is not int or count != 1:
            count = events.positive_count(count)
        if label is not None and (not isinstance(label, str) or not label):
            raise ArgumentError(f"label must be a non-empty string or None, got {label!r}.")
        parts = self._session.decompose(event, count)
        if parts:
            self._turns.charge(event, parts, label, bool(adaptive))
        elif adaptive:
            raise ArgumentError(
                "this charge has no release, so adaptive=True has no effect: write it in the"
                " first charge that has one."
            )
        return self

    def note(self, statement: str) -> None:
        """Stores an assumption of the guarantee, such as a statement about a model.

        :meth:`summary` shows it under ``rests on``. Saved states contain it; with ``path`` it is in
        the file, for all jobs. Equal statements are stored once.

        Raises:
            LedgerError: the statement could not be written to the file.
        """
        if not isinstance(statement, str) or not statement.strip():
            raise ArgumentError(f"a statement must be a non-empty string, got {statement!r}.")
        self._turns.change(lambda session: session.note(" ".join(statement.split())))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charges one Poisson-sampled Gaussian release; Opacus calls this method.

        The caller asserts Poisson sampling, and :meth:`summary` shows this assumption.
        """
        rate = events.sampling_rate(sample_rate)
        release = events.GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier))
        if not self._is_asserted:
            self.note(POISSON_ASSERTED)
            self._is_asserted = True
        self.compose(events.PoissonSampledDpEvent(rate, release))

    def close(self) -> None:
        """Returns unused reserved releases to the file. The accountant can still be used."""
        self._turns.change(lambda session: session.settle())

    def __enter__(self) -> PrivacyAccountant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- exporting and saving ---------------------------------------------------------------------

    def to_dp_event(self) -> events.ComposedDpEvent:
        """The history as one event, for any dp_accounting accountant that supports its parts."""
        return events.ComposedDpEvent(
            [events.SelfComposedDpEvent(charge.event, charge.count) for charge in self.history]
        )

    def summary(self) -> str:
        """Settings, epsilon with bounds, the guarantee and its assumptions, risk, and shares."""
        with LOCK:
            delta = report.delta_of(self)
            bounds = self.get_epsilon(delta, return_bounds=True)
            found = self.risk(delta=delta)
            return report.summary(self._session, bounds, delta, self.notes, found)

    def state_dict(self) -> dict[str, Any]:
        """The settings, and the history with the job of each release, as strings, numbers, lists
        and dicts; with ``path`` also the file's identity and the last row read.
        """

        def saved(session: History) -> dict[str, Any]:
            session.refresh()
            session.settle()
            session.refresh()  # read the rows that were just written
            own = {"job": session.job, "notes": session.notes()}
            return {**session.saved(), **session.place, **own}

        return self._turns.change(saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a saved history and its notes into this accountant, which must be empty and have
        the same method, relation and unit. It keeps its own budget; if the history is adaptive, the
        saved budget must be the same.

        A state that was saved from a file belongs to that file. If you load it there, the file must
        contain the saved charges, and nothing is charged. Any other accountant refuses it.

        Without ``path``, releases of the saved accountant after it was saved, or of another copy of
        its state, are not counted here: :meth:`summary` names this assumption.

        Raises:
            PrivacyBudgetExceeded: the history does not fit this accountant's budget. Nothing is
                loaded.
            ArgumentError: this accountant is not empty, has other settings, or belongs to another
                file than the state.
        """
        charges = read_saved(state_dict, self._session.settings)
        self._turns.change(lambda session: session.take_over(state_dict, charges))
        for statement in state_dict["notes"]:
            self.note(statement)

    def resume(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes a saved run: an empty accountant copies its history, any other one must contain
        it. Equal releases of other runs do not count as this run's. Optimizers call this when they
        load a state.

        Raises:
            ArgumentError: this accountant does not contain the saved charges.
        """
        charges = read_saved(state_dict, self._session.settings)
        if state_dict["ledger"] or not len(self):
            self.load_state_dict(state_dict)
            return
        self._turns.read(lambda history: history.require(charges))
        for statement in state_dict["notes"]:
            self.note(statement)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        session = self._session
        if not isinstance(session, Session):
            raise ArgumentTypeError(
                "a PrivacyAccountant in memory cannot be copied: both copies would spend the same"
                " budget. Make it with PrivacyAccountant(..., path='budget.db'), pass the same"
                " object, or load its state_dict() into a new one."
            )
        job = session.job, session.later, _this_program()
        return _open_again, (str(session.path), session.ledger.id, *job)

    # --- the methods that Opacus calls ------------------------------------------------------------

    @classmethod
    def mechanism(cls) -> str:
        """The name that Opacus stores with the state."""
        return "torch_dpbayes"

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """The hook that Opacus' ``make_private`` attaches to its optimizer. It charges each step by
        :meth:`step`.
        """
        rate = events.sampling_rate(sample_rate)

        def charge(optimizer: Any) -> None:
            if {"unclipped_num_std", "_adjusted_noise_multiplier"} & vars(optimizer).keys():
                raise StateError(
                    "Opacus' adaptive clipping also releases the number of clipped records, and"
                    " charges too little for it: use another clipping."
                )
            if optimizer.accumulated_iterations != 1:
                raise StateError(
                    f"Opacus summed {optimizer.accumulated_iterations} batches for one step, which"
                    " may contain a record more than once: step after every batch, and use"
                    " Opacus' BatchMemoryManager for batches that do not fit into memory."
                )
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

        def hook(optimizer: Any) -> None:
            try:
                charge(optimizer)
            except BaseException:
                for p in optimizer.params:
                    p.grad = None  # Opacus already put the noisy sum there
                raise

        return hook


def _this_program() -> str:
    """A text that this process shares with its forked children and multiprocessing workers only."""
    return hashlib.blake2b(bytes(current_process().authkey), digest_size=16).hexdigest()


def _open_again(path: str, identity: str, job: str, later: bool, program: str) -> PrivacyAccountant:
    """The unpickled accountant: in the program that pickled it, and its workers, of the same job;
    anywhere else of a later job.
    """
    ledger, is_same = Ledger(path, {"id": identity}), program == _this_program()
    with LOCK:
        session = Session(ledger, job, later) if is_same else Session.opened(ledger)
        return PrivacyAccountant.at(session)


def look_at(path: str | os.PathLike[str]) -> tuple[PrivacyAccountant, list[Row]]:
    """The accountant of a new job at a ledger, and the ledger's rows. Nothing is written."""
    rows = Ledger(path, {}, read_only=True).read()
    with LOCK:
        return PrivacyAccountant.at(Session(Ledger(path, {}, read_only=True))), rows
