"""Does every record's output get its gradient from that record's loss alone?

A clip bound limits what one record does to *its own* gradient. A loss that divides by the batch's
class weights, or by a count of its targets, hands every record a gradient that depends on the
others, wherever it is clipped afterwards.

In an ordinary loop a finished number arrives, and nothing says how it was computed. So the outputs
of a model in training mode are tensors that note what is done with them. At backward passes 1, 2,
4, …, 64, every 64th, and whenever the loss is computed in a way not seen before, what was noted is
run again for a few records, each in a batch of one, and the gradients are compared with those that
reached the outputs.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

from .loss_numbers import Number, numbers_in, read
from .loss_program import NotReplayed, Program
from .loss_verdict import Verdict, explained, verdict_on
from .nested import map_tensors

_RECORDS, _RECORDS_LATER = 8, 2  # compared when a way of computing the loss is new, and later
_PERIOD = 64
_WAYS = 32  # of reading numbers that may or may not stand for the number of records
_SIGNATURES = 256


class LossWatch:
    """Notes what becomes of a model's outputs, and compares what comes back with single records'.

    Args:
        loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over the batch.

    **Privacy.** A test, not a proof. It sees what is computed from the outputs with torch's
    functions, and a number that ``item()`` takes out where it is used as it is. What is computed
    from the targets alone (class weights out of the batch's counts) is taken for a constant of the
    record whose row it is. A branch on a value of the outputs is not seen. A loss that could not be
    compared, or that computes with other numbers in each batch after some left torch, is reported
    as not seen.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.loss_reduction = loss_reduction
        self._program: Program | None = None
        self._passes = 0
        self._known: dict[
            int, tuple[str, ...]
        ] = {}  # signatures of losses, and how their numbers are read
        self._constants: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # records and number when last seen
        self._later: dict[int, list[float]] = {}  # numbers that may be made of the outputs
        self._was_compared = self._was_missed = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes nothing of the data along."""
        return {**self.__dict__, "_program": None}

    @property
    def state(self) -> str:
        """``"compared"``, or ``"not seen"`` unless every loss so far was run again for records."""
        return "compared" if self._was_compared and not self._was_missed else "not seen"

    def outputs(self, value: Any, n: int) -> Any:
        """The outputs of a forward pass in training mode, as they are handed to the user.

        Args:
            value: a tensor, or tensors in nested tuples, lists, mappings and dataclasses.
            n: the number of records, which are rows of every tensor.
        """
        self.forget()
        if n < 2:  # nothing to compare with
            return value
        program = self._program = Program(n)
        return map_tensors(value, program.output)

    def forget(self) -> None:
        """The forward pass will have no backward pass."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def require_each_alone(self) -> None:
        """Compare the last backward pass, if it is one of those to be compared.

        Raises:
            RuntimeError: the gradient of a record's output is not that of its own loss.
        """
        program = self._program
        if program is None:
            return
        self.forget()
        if all(gradient is None for gradient in program.arrived):
            return
        self._passes += 1
        signature = program.signature()
        ways = self._known.get(signature)
        is_due = self._passes % _PERIOD == 0 or (
            self._passes < _PERIOD and self._passes.bit_count() == 1
        )
        if ways is not None and not is_due:
            return
        if len(self._known) >= _SIGNATURES:
            self._known.clear()
            self._later.clear()
        self._known[signature] = ways or ()
        count = _RECORDS if ways is None else _RECORDS_LATER
        try:
            with warnings.catch_warnings(action="ignore"):  # a standard deviation of one number
                was_compared = self._compare(program, signature, count)
        except NotReplayed:
            was_compared = False
        if was_compared:
            self._was_compared = True
        elif was_compared is not None:
            self._was_missed = True

    def _compare(self, program: Program, signature: int, count: int) -> bool | None:
        """True: compared. False: it could not be. None: the next batch will tell."""
        needed = program.needed()
        n, unit = program.n, program.n if self.loss_reduction == "mean" else 1
        records = sorted({(self._passes + k * n // count) % n for k in range(min(count, n))})
        numbers = numbers_in(needed, n)
        options = [number.options for number in numbers]
        last = self._known[signature]
        before = [last] if len(last) == len(options) else []
        first: Verdict | None = None
        guesses = itertools.islice(itertools.product(*options), 2**12)
        readings = [*before, *sorted(guesses, key=lambda ways: ways.count("maybe x/n"))[:_WAYS]]
        for is_wide, ways in itertools.product((False, True), readings):
            reading = {
                number.place: read(number.value, way, n)
                for number, way in zip(numbers, ways, strict=True)
            }
            some = records if first is None else records[:1]
            verdict = verdict_on(program, needed, some, unit, reading, is_wide)
            if verdict.is_same and first is not None:
                verdict = verdict_on(program, needed, records, unit, reading, is_wide)
            if verdict.is_same:
                self._known[signature] = tuple(ways)
                if program.is_guided:
                    return False
                later = program.later_numbers(needed)
                first_seen = self._later.setdefault(signature, later)
                if first_seen != later:
                    return False
                settled = self._is_settled(signature, numbers, ways, n)
                is_first = bool(later) and first_seen is later  # the next batch will tell
                return None if is_first else settled
            if first is None or _is_clearer(verdict, first):
                first = verdict
        if first is None or first.is_same is None:
            raise NotReplayed
        raise RuntimeError(explained(program, needed, first, self.loss_reduction))

    def _is_settled(
        self, signature: int, numbers: Sequence[Number], ways: Sequence[str], n: int
    ) -> bool | None:
        """Was a number rightly taken for x/n? Two batches of different sizes tell."""
        settled: bool | None = True
        for k, (number, way) in enumerate(zip(numbers, ways, strict=True)):
            if way != "maybe x/n":
                continue
            other_n, other = self._constants.get((signature, k), (n, math.nan))
            self._constants[signature, k] = n, number.value
            if other_n != n and other == number.value:
                raise RuntimeError(
                    f"the loss is multiplied by {number.value:.6g}, whatever the number of "
                    "records: divide by it instead, as mean() over dimension 0 does."
                )
            if not (other_n != n and math.isclose(other * other_n, number.value * n, rel_tol=1e-6)):
                settled = None
        return settled


def _is_clearer(verdict: Verdict, first: Verdict) -> bool:
    """Whether ``first`` failed at one operation, and at that one alone it mattered that
    dimensions of n entries hold records.
    """
    return (
        first.is_same is None
        and bool(verdict.widened)
        and all(op is first.failed for op in verdict.widened)
    )
