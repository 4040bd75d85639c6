"""What do decisions that a model takes on the batch, and constants in its code, decide?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..clipping.nested import tensors_in
from .decisions import Bounds, Constants, Decisions, Outcome, Place, bounds_after, numbers_near
from .findings import MayFail, MissingGradientsError, MixedRecordsError
from .forward_runs import require_same, run, same_rows
from .gradient_checks import check_trial
from .independence import require_same_alone
from .made_up_records import exchanged, fitting_rows, given, groups_that_stay, map_rows, output_of
from .seeded_draws import SeededDraws
from .tried_model import TriedModel

_MOST_DECISIONS, _DEPTH = 48, 3  # lines that decide; decisions that are forced together
_MOST_CALLS = 16  # of a line that runs once for each record, which are flipped one by one
_LARGEST_BATCH, _LARGEST_NUMBERS, _MOST_SIZES = 4096, 2**20, 8
_FORCED_KINDS = ("given", "short", "ties", "codes")
_FLIP_KINDS = ("given", "short", "plain", "codes", "outliers", "missing")
_MOVE_KINDS = (*_FLIP_KINDS, "ties") * 2
_FACTORS = (30.0, 1e6)  # beyond limits that are set for numbers of usual size
_EXTREMES = (math.nan, math.inf, -math.inf, 3e38, -3e38)  # of one record
_DECIDES = (
    "a decision on the batch, at {}, changes other records' outputs or gradients, and one record"
    " can bring it about. Decide for each record alone: torch.where with a condition per row."
)
_TAKES = (
    "a number taken out of the batch, at {}, changes other records' outputs or gradients, and one"
    " record can change it. Compute it for each record alone, as a tensor with a row for each."
)
_TOO_MANY = (
    "the model takes decisions on the batch at more than {} lines, too many to test each. Decide"
    " for each record alone, with torch.where and a condition per row."
)

# outputs and recorded gradients, each as (records, numbers); and whose are finite
_Observed = tuple[list[Tensor], Tensor]
# arguments, what comes out of the decision, and what is observed
_Suspect = tuple[tuple[Any, ...], list[Outcome], _Observed]
_Forced = Mapping[Place, Outcome]


def check_decisions(tried: TriedModel, batch_size: float) -> None:
    """Raise if decisions that the model takes from a batch, or constants in its code, let a
    record's output or gradient depend on others.
    """
    with tried.source.paused():
        tried.alone = run(tried.module, tried.given(0), SeededDraws())
    constants = Constants()
    with constants.collected():
        first = _seen(tried, {})
    _check_sizes(tried, constants.sizes, batch_size)
    _check_constants(tried, constants.numbers)
    known: set[Place] = set()
    waiting: list[tuple[_Forced, Decisions]] = [({}, first)]
    while waiting:
        forced, seen = waiting.pop(0)
        for place, values in list(seen.outcomes.items()):
            if place in known:
                continue
            known.add(place)
            if len(known) > _MOST_DECISIONS:
                raise ValueError(_TOO_MANY.format(_MOST_DECISIONS))
            outcomes: Sequence[Outcome] = (
                numbers_near(values, constants.numbers) if place.is_number else (True, False)
            )
            changing = _check_flips(tried, place, outcomes, forced, bounds_after(seen))
            for outcome in changing if place.is_number else outcomes:
                together = {**forced, place: outcome}
                _check_forced(tried, together, place, bounds_after(seen))
                if len(together) < _DEPTH:
                    waiting.append((together, _seen(tried, together)))


def _rows(tried: TriedModel) -> int:
    return tried.rows_for(tried.middle)


def _observed(tried: TriedModel, arguments: tuple[Any, ...], decisions: Decisions) -> _Observed:
    source = tried.source
    tried.try_on_cpu(arguments)
    source.discard(tried.parameters)
    decisions.start()
    try:
        with decisions:
            with SeededDraws(0, tried.axes, are_alike=tried.is_aligned):
                outputs = list(tensors_in(output_of(tried.module, arguments)))
            rows = len(outputs[0])
            terms = []
            for t in outputs:
                if t.is_floating_point():
                    generator = torch.Generator().manual_seed(t[:1].numel())
                    weight = torch.randn(t.shape, generator=generator).to(t.device)
                    if decisions.is_watching:
                        decisions.watch([weight])
                    terms.append((t.float() * weight).sum())
            total = torch.stack(terms).sum()
            (total if source.loss_reduction == "sum" else total / rows).backward()
        gradients = [source.per_record_gradients(p) for p in tried.parameters]
    finally:
        tried.discard()
    by_record = [
        t.detach().reshape(rows, -1)
        for t in (*outputs, *gradients)
        if t is not None and len(t) == rows
    ]
    finite = [_are_finite(t).cpu() for t in by_record[len(outputs) :]]
    return by_record, torch.stack([torch.ones(rows, dtype=torch.bool), *finite]).all(0)


def _are_finite(t: Tensor) -> Tensor:
    """Whose numbers are, found by the extremes of each record, which takes a fifth of the time."""
    if t.is_complex() or t.numel() == 0:
        return t.isfinite().all(1)
    return torch.stack([t.amax(1), t.amin(1)]).isfinite().all(0)


def _seen(tried: TriedModel, forced: _Forced) -> Decisions:
    """The decisions of one pass, as far as they depend on the batch."""
    decisions = Decisions(forced)
    arguments = map_rows(torch.clone, tried.neighbours(_rows(tried), "given", 0)[0])
    decisions.watch(list(tensors_in(arguments)))
    with MayFail() if forced else nullcontext():
        _observed(tried, arguments, decisions)
    return decisions


def _changed(
    tried: TriedModel, arguments: tuple[Any, ...], forced: Decisions, natural: _Observed
) -> int | None:
    """How many records come out differently; None where the model fails. Those whose gradients
    are not finite count for nothing.
    """
    with MayFail() as running:
        found, is_finite = _observed(tried, arguments, forced)
    if running.failed:
        return None
    before, was_finite = natural
    if [t.shape for t in found] != [t.shape for t in before]:
        return len(was_finite)
    same = [same_rows(a, b).cpu() for a, b in zip(before, found, strict=True)]
    return int((~torch.stack(same).all(0) & (is_finite | was_finite)).sum())


def _check_flips(
    tried: TriedModel, place: Place, outcomes: Sequence[Outcome], forced: _Forced, bounds: Bounds
) -> list[Outcome]:
    """Raise if a decision may change other records in the direction in which one record can turn
    it, where that is seen, or else in every direction that made-up records show. Returns outcomes
    that change something.
    """
    is_changed, changing = dict[int, bool](), dict[Outcome, None]()
    suspects = []
    kinds = _FLIP_KINDS[: 2 if place.is_number else None]
    batches = [tried.neighbours(_rows(tried), kind, seed)[0] for seed, kind in enumerate(kinds)]
    batches += [_scaled(batches[0], factor) for factor in _FACTORS]
    for seed, whole in enumerate(batches):
        one = given(whole, seed % _rows(tried))
        for arguments in (whole, one):
            decisions = Decisions(forced, bounds=bounds)
            with MayFail() as running:
                natural = _observed(tried, arguments, decisions)
            if running.failed:
                continue
            values = decisions.outcomes.get(place, [])
            for outcome in outcomes if values else ():
                direction = _direction(values, outcome)
                if direction == 0:
                    continue
                other = Decisions({**forced, place: outcome}, bounds=bounds)
                count = _changed(tried, arguments, other, natural)
                is_changed.setdefault(direction, False)
                if count != 0:
                    changing[outcome] = None
                if count:
                    is_changed[direction] = True
                    suspects.append((arguments, values, natural))
    harmful = {direction for direction, changed in is_changed.items() if changed}
    if (
        not harmful
        or (len(harmful) < len(is_changed) and _cannot_move(harmful, tried, place, forced, bounds))
        or _is_of_single_records(tried, place, forced, bounds, suspects)
    ):
        return list(changing)
    raise MixedRecordsError((_TAKES if place.is_number else _DECIDES).format(place))


def _cannot_move(
    harmful: set[int], tried: TriedModel, place: Place, forced: _Forced, bounds: Bounds
) -> bool:
    """Whether values only go in other directions where one record, or all but one, join others.

    A sum may go either way, and which one is chance: so many batches are tried.
    """
    moves = set[int]()
    for whole, fewer in _joined(tried):
        after, *before = (
            _values(tried, arguments, place, forced, bounds) for arguments in (whole, *fewer)
        )
        for values in before:
            if len(values) == len(after):
                moves |= {_move(a, b) for a, b in zip(after, values, strict=True)}
        if moves & harmful:
            return False
    return bool(moves - {0})


def _joined(tried: TriedModel) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
    """Batches, and parts of them which the others join."""
    rows = _rows(tried)
    for seed, kind in enumerate(_MOVE_KINDS):
        whole, last = tried.neighbours(rows, kind, seed)[0], seed % rows
        others = [i for i in range(rows) if i != last]
        yield whole, [given(whole, last), given(whole, *others)]
    plain = tried.neighbours(rows, "given", 0)[0]
    others = list(range(rows - 1))
    scaled = (_scaled(plain, factor) for factor in _FACTORS)
    for there in (plain, *scaled, *(_with_record(plain, 0, number) for number in _EXTREMES)):
        for number in _EXTREMES:
            yield _with_record(there, rows - 1, number), [given(there, *others)]


def _scaled(arguments: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """Real numbers of another size."""
    return map_rows(lambda t: t * factor if t.is_floating_point() else t, arguments)


def _with_record(arguments: tuple[Any, ...], place: int, number: float) -> tuple[Any, ...]:
    """One record's real numbers are all ``number``."""

    def changed(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        found, largest = t.clone(), torch.finfo(t.dtype).max
        is_finite = math.isfinite(number)
        found[place] = max(min(number, largest), -largest) if is_finite else number
        return found

    return map_rows(changed, arguments)


def _move(after: Outcome, before: Outcome) -> int:
    """1: up, or from False to True; -1: down; 2: to what is not a number."""
    if math.isnan(after) or math.isnan(before):
        return 0 if math.isnan(before) else 2
    return int(after > before) - int(after < before)


def _values(
    tried: TriedModel, arguments: tuple[Any, ...], place: Place, forced: _Forced, bounds: Bounds
) -> list[Outcome]:
    """What is taken at ``place``; empty where the model fails."""
    decisions = Decisions(forced, bounds=bounds)
    with MayFail() as running:
        _observed(tried, arguments, decisions)
    return [] if running.failed else decisions.outcomes.get(place, [])


def _direction(values: Sequence[Outcome], outcome: Outcome) -> int:
    """Which way all of ``values`` go if they become ``outcome``, as of :func:`_move`; 0 where they
    stay or part.
    """
    if isinstance(outcome, bool):
        return 0 if all(value == outcome for value in values) else 1 if outcome else -1
    moves = {_move(outcome, value) for value in values}
    return moves.pop() if len(moves) == 1 else 0


def _is_of_single_records(
    tried: TriedModel, place: Place, forced: _Forced, bounds: Bounds, suspects: Sequence[_Suspect]
) -> bool:
    """Whether each call of the line decides on one record: a loop over records."""
    several = [suspect for suspect in suspects if len(suspect[2][1]) > 1]
    if not several:
        return False
    arguments, values, natural = several[0]
    if len(values) < len(natural[1]):
        return False
    for call, value in list(enumerate(values))[:_MOST_CALLS]:
        others = (value + 1, value - 1) if place.is_number else (not value,)
        for other in others:
            decisions = Decisions({**forced, place: other}, call=call, bounds=bounds)
            if (_changed(tried, arguments, decisions, natural) or 0) > 1:
                return False
    return True


def _check_forced(tried: TriedModel, forced: _Forced, place: Place, bounds: Bounds) -> None:
    """Raise if records depend on one another where decisions come out as ``forced``."""
    rows = _rows(tried)
    decisions = Decisions(forced, bounds=bounds)
    handle = tried.module.register_forward_pre_hook(lambda *_: decisions.start(), prepend=True)
    try:
        with decisions:
            for seed, kind in enumerate(_FORCED_KINDS):
                keep = groups_that_stay(rows)[seed % len(groups_that_stay(rows))]
                # a branch left out may leave layers out, too
                with suppress(MissingGradientsError):
                    _compare_exchanged(tried, *tried.neighbours(rows, kind, seed), keep, seed)
            with tried.source.paused(), MayFail():
                require_same_alone(tried, [rows])
    except MixedRecordsError as error:
        raise MixedRecordsError(
            f"where the decision at {place} comes out as {forced[place]}, {error}"
        ) from error
    finally:
        handle.remove()


def _compare_exchanged(
    tried: TriedModel, base: tuple[Any, ...], others: tuple[Any, ...], keep: Tensor, seed: int
) -> bool:
    """Raise if records in ``keep`` fare otherwise when all others are exchanged. Returns whether
    the model could be run on both.
    """
    mixed = exchanged(base, others, keep)
    with tried.source.paused(), MayFail() as running:
        tried.try_on_cpu(base, mixed)
        first, second = (
            tried.run(arguments, SeededDraws(seed, tried.axes)) for arguments in (base, mixed)
        )
        require_same(tried.module, first, second, keep)
    if running.failed:
        return False
    if tried.rows_for(len(keep)) < len(keep):
        return True
    is_aligned = tried.is_aligned
    with MayFail() as running:
        check_trial(
            tried,
            base,
            mixed,
            keep,
            seed=seed,
            power=0,
            are_alike=is_aligned,
            is_comparable=False,
        )
    return not running.failed


def _check_sizes(tried: TriedModel, constants: Sequence[int], batch_size: float) -> None:
    """Raise if a record fares otherwise in a batch larger than a constant in the code, or than
    batches will be.
    """
    most = fitting_rows(tried.inputs, _LARGEST_BATCH, _LARGEST_NUMBERS)
    tested = {1, *tried.sizes}
    fitting = [n for n in constants if n <= most and n not in tested]
    sizes = sorted({*fitting[:_MOST_SIZES], min(math.ceil(2 * batch_size), most)} - tested - {0})
    for k, rows in enumerate(sizes):
        # by what they hold and not by the time that they take, so that no busy machine lets pass
        # what an idle one refuses
        if k >= 2 and sum(sizes[: k + 1]) > 2 * most:
            break
        with tried.source.paused(), MayFail() as running:
            require_same_alone(tried, [rows])
        if not running.failed and rows in fitting and tried.rows_for(rows) == rows:
            base, others = tried.neighbours(rows, "given", rows)
            _compare_exchanged(tried, base, others, torch.arange(rows) % 2 == 0, rows)


def _check_constants(tried: TriedModel, numbers: Sequence[float]) -> None:
    """Raise if records that hold constants of the model's code change what becomes of others."""
    if not numbers:
        return
    shown = [
        (sign * (2 * n + 1 if is_beyond else n), is_first)
        for n in numbers
        for sign, is_beyond, is_first in (
            (1, False, False),
            (1, False, True),
            (1, True, False),
            (-1, False, False),
            (-1, True, True),
        )
    ]
    most = max(1, fitting_rows(tried.inputs, 64, 2**18))
    waiting = [shown[k : k + most] for k in range(0, len(shown), most)]
    left = 2 * len(waiting) + 16
    while waiting and left:
        left -= 1
        some = waiting.pop(0)
        rows = len(some) + 4
        base, others = tried.neighbours(rows, "plain", left)
        limits = iter(tried.limits)
        others = map_rows(partial(_showing, some=some, limits=limits), others)
        keep = (torch.arange(rows) < 2) | (torch.arange(rows) >= rows - 2)
        if not _compare_exchanged(tried, base, others, keep, left) and len(some) > 1:
            waiting += [some[: len(some) // 2], some[len(some) // 2 :]]


def _showing(t: Tensor, some: Sequence[tuple[float, bool]], limits: Iterator[int]) -> Tensor:
    """The records of ``t`` after the first two hold one of the numbers each, all through or in
    their first entry.
    """
    t, limit = t.clone(), next(limits)
    highest = torch.finfo(t.dtype).max if t.is_floating_point() else limit - 1
    for row, (number, is_first) in zip(t[2:].reshape(len(t) - 2, -1), some, strict=False):
        if (t.is_floating_point() and abs(number) <= highest) or 0 <= number <= highest:
            row[: 1 if is_first else None] = number if t.is_floating_point() else int(number)
    return t
