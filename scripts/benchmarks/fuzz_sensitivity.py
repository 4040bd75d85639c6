"""A standing search for the next hole: can one record move the released sum by more than C?

    scripts/benchmarks/fuzz_sensitivity.py --seconds 600 --modes bookkeeping hooks

Builds models at random (random_models.py) and asks ``PrivacyEngine.make_private`` for each. Where
it accepts, full-batch steps without noise are taken on pairs of data sets, one of which has one
record more: outliers of many magnitudes, ties, duplicates, zeros, NaN and infinities, short
records, a lone label, and records that a simple search moves to where others' rows move most. What
is measured is ‖S(D) − S(D′)‖ in units of the clip norm C. The accountant charges for 1 under
"add_or_remove_one": anything above is a *finding*, a program that a user could have written and
whose stated ε is not true. A finding counts after it was seen again in fresh runs of the two data
sets through public names alone. It is shortened, measured in float64 as well (where the movement
comes from float32's rounding it stays within C there), printed as a program and added to a file of
JSON lines.

How to read the summary: "free" models keep records apart by construction; how many of them are
refused says what the check costs its users, who do what the error says: example records that are
all equal are exchanged, and a loss that is not taken is left in the loop. All other models mix
records in the way that their kind says, and may be refused or be harmless. "Pairs" are accepted
model × data pairs. The largest movement of free models is 1 up to rounding if all is well.

A model follows from its own seed, which is in the finding; the search starts from fresh entropy
unless it is given ``--seed``. With the same ``--file`` it goes on: totals add up over all sessions,
and what was found before is not reported again. The exit status is 1 if something was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import random
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_models import (
    CATEGORIES,
    IGNORED,
    INPUT,
    KINDS,
    LATE,
    LOSSES,
    PARTS,
    Recipe,
    Spec,
    build,
    random_recipe,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

import torch_dpbayes as dpb
from torch_dpbayes.batches.draws import _Draw

MODES = ("bookkeeping", "hooks", "vmap")
LIMIT = (
    1.01  # in units of C, of which 0.01 for rounding of the parameters that the sum is read from
)
MOST = 65  # records in a data set
ROUNDS, CANDIDATES = 5, 12  # data sets for a model, and records that are added to each
TRIALS = 5  # of shorter forms of a finding

Records = list[Tensor]  # x, perhaps the category, y; records in dimension 0


# -- one step --------------------------------------------------------------------------------------


class Table(Dataset[tuple[Tensor, ...]]):
    """Records that are exchanged between steps."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __len__(self) -> int:
        return MOST

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        return tuple(t[place] for t in self.records)


class DrawsByRecord(TorchDispatchMode):
    """Every record has random numbers of its own, which stay when another one comes or goes.

    What is drawn for the batch as a whole, with another first dimension, is the same for all
    batches. Given these numbers a step is no longer random, and its sensitivity must still be C.
    Which draw it is stands in the seed of torch's generator, so that records that are run again
    from the generator's state draw the same.
    """

    def __init__(self, records: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        self._records, self._seed = records, seed

    def __enter__(self) -> Any:
        torch.default_generator.manual_seed(self._seed)
        return super().__enter__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, n = kwargs or {}, len(self._records)
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        draw = torch.default_generator.initial_seed()
        drawn = self._drawn(draw, "all", function, args, kwargs)
        for k, record in enumerate(self._records):
            part = [
                (
                    a.narrow(0, k, 1)
                    if isinstance(a, Tensor) and a.dim() > 0 and len(a) == n
                    else [1, *a[1:]]
                    if isinstance(a, list) and a[:1] == [n]
                    else a
                )
                for a in args
            ]
            one = self._drawn(draw, record, function, part, kwargs)
            for whole, row in zip(_tensors(drawn), _tensors(one), strict=True):
                if whole.dim() > 0 and len(whole) == n and whole.shape[1:] == row.shape[1:]:
                    whole[k : k + 1].copy_(row)
        torch.default_generator.manual_seed(_hash(draw, "next"))
        return drawn

    def _drawn(self, draw: int, record: int | str, function: Any, args: Any, kwargs: Any) -> Any:
        torch.default_generator.manual_seed(_hash(draw, record))
        return function(*args, **kwargs)


def _hash(*what: Any) -> int:
    return zlib.crc32(repr(what).encode())


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]


class Refused(Exception):
    """The library does not take this model, or this loss or change at its first step."""


class PrivateSteps:
    """A recipe's private model, and the sums that full-batch steps on it release without noise.

    Args:
        recipe: the model.
        mode: ``grad_sample_mode``.
        records: those of the only data set, for which nothing but public names is used; or None to
            take steps on any records, which sets what the private loader draws.

    Raises:
        Refused: by ``make_private``.
    """

    def __init__(self, recipe: Recipe, mode: str, records: Records | None = None) -> None:
        self._recipe, self._loss = recipe, LOSSES[recipe.loss]
        self._table = Table(records or _empty_records(recipe))
        dataset: Dataset[Any] = self._table if records is None else TensorDataset(*records)
        num_data = MOST if records is None else len(records[0])
        self._model = build(recipe)
        self._start = [p.detach().clone() for p in self._model.parameters()]
        # at this lr and without a prior a step moves the parameters by -S/C
        make_optimizer = partial(
            dpb.optim.DPSGLD, lr=num_data / recipe.clip, temperature=0.0, prior_std=math.inf
        )
        try:
            self._model, self._optimizer, self._loader = dpb.PrivacyEngine().make_private(
                module=self._model,
                optimizer=make_optimizer,
                data_loader=DataLoader(dataset, batch_size=num_data),
                max_grad_norm=recipe.clip,
                noise_multiplier=0.0,
                grad_sample_mode=mode,
                loss_reduction=self._loss.reduction,
                loss=self._loss.function if recipe.is_loss_given else None,
                example_inputs=_examples(recipe),
            )
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        self._undo = (
            LATE[recipe.late[0]].make(self._model, recipe.late[1])
            if recipe.late is not None
            else None
        )
        self._drawn: list[int] | None = None  # the places of the records in the table
        if records is None:
            sampler: Any = self._loader.sampler_of_draws
            sampler._next_draw = lambda: _Draw(torch.tensor(self._drawn, dtype=torch.long), 0, None)
            self._drawn = []

    def sum_of(self, records: Records, names: Sequence[int]) -> Tensor:
        """S/C of one step on ``records``, which ``names`` tell apart, in float64."""
        if self._drawn is not None:
            sampler: Any = self._loader.sampler_of_draws
            sampler._draws.clear()  # that of a step which failed
            self._table.records, self._drawn = records, list(range(len(records[0])))
        with DrawsByRecord(names) if self._recipe.is_random else nullcontext():
            for *inputs, y in self._loader:
                self._optimizer.zero_grad()
                self._loss_of(inputs, y).backward()
                self._optimizer.step()
        pairs = list(zip(self._start, self._model.parameters(), strict=True))
        moved = torch.cat([(a.double() - p.detach().double()).flatten() for a, p in pairs])
        with torch.no_grad():
            for a, p in pairs:
                if p.requires_grad:
                    p.copy_(a)
        return moved

    def _loss_of(self, inputs: list[Tensor], y: Tensor) -> Tensor:
        if self._recipe.is_loss_given:
            model: Any = self._model
            loss: Tensor = model.private_loss(*inputs, y)
            return loss
        return self._loss.function(self._model(*inputs), y)

    def close(self) -> None:
        if self._undo is not None:
            self._undo()


def _examples(recipe: Recipe) -> tuple[Tensor, ...] | None:
    if recipe.examples == "none":
        return None
    x, *category, _ = _empty_records(recipe, 2)
    if recipe.examples == "distinct":
        x, category = (
            x + torch.tensor([1, 2]).reshape(2, *[1] * (x.dim() - 1)).to(x.dtype),
            [t + torch.tensor([0, 1]) for t in category],
        )
    return (x, *category)


def _empty_records(recipe: Recipe, n: int = MOST) -> Records:
    dtype = torch.float64 if recipe.is_double else torch.float32
    x = torch.zeros(
        n, *INPUT[recipe.family], dtype=torch.long if recipe.family == "tokens" else dtype
    )
    category = [torch.zeros(n, dtype=torch.long)] if recipe.has_category else []
    return [x, *category, torch.zeros(n, dtype=dtype)]


@contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor the library's log, and torch's generator left as found."""
    log = logging.getLogger("torch_dpbayes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def movement_of(
    recipe: Recipe | dict[str, Any],
    mode: str,
    records: Records | list[Any],
    added: int,
    names: Sequence[int] | None = None,
) -> float:
    """How far the released sum moves when record ``added`` is left out, in units of C.

    Each data set has a fresh run of its own, through public names.

    Args:
        recipe: the model.
        mode: ``grad_sample_mode``.
        records: all of them.
        added: the place of the one that is left out.
        names: of the records, for :class:`DrawsByRecord`; None: their places.

    Raises:
        Refused: by the library.
    """
    if isinstance(recipe, dict):
        recipe = Recipe(**recipe)
    x, *category, y = (torch.as_tensor(t) for t in records)
    tensors = [_like_input(x, recipe), *(t.long() for t in category), _as_float(y, recipe)]
    everyone = list(range(len(tensors[0])))
    names = everyone if names is None else names
    sums = []
    with quiet():
        for places in (everyone, [k for k in everyone if k != added]):
            if not places:  # a data loader has to have records; nothing is their sum
                return float(sums[0].norm())
            steps = PrivateSteps(recipe, mode, [t[places] for t in tensors])
            try:
                sums.append(steps.sum_of([t[places] for t in tensors], [names[k] for k in places]))
            except Exception as error:
                raise Refused(f"{type(error).__name__}: {error}") from error
            finally:
                steps.close()
    return float((sums[0] - sums[1]).norm())


def _as_float(t: Tensor, recipe: Recipe) -> Tensor:
    return t.double() if recipe.is_double else t.float()


# -- records ---------------------------------------------------------------------------------------


def random_records(recipe: Recipe, rng: random.Random, n: int) -> Records:
    """``n`` records: copies of a few, or all different; of one length or several; with labels."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    several = min(n, rng.choice([1, 1, 2, n]))
    shape = (n, *INPUT[recipe.family])
    if recipe.family == "tokens":
        x = torch.randint(1, CATEGORIES - 1, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * rng.choice(
            [1.0, 1.0, 0.01, 5.0]
        )
        x = (
            x
            if rng.random() < 0.8
            else x
            * 10
            ** (6 * torch.rand(n, *[1] * (x.dim() - 1), generator=generator, dtype=torch.float64))
        )
    if recipe.family in ("sequence", "tokens") and rng.random() < 0.3:
        lengths = torch.randint(1, shape[1] + 1, (n, 1), generator=generator)
        kept = torch.arange(shape[1]) < lengths
        x = x * (kept.unsqueeze(-1) if x.dim() == 3 else kept)
    x = x[torch.arange(n) % max(several, 1)]
    category = torch.randint(CATEGORIES - 1, (n,), generator=generator) * rng.choice([0, 0, 1])
    rule = rng.choice(["alternating", "alternating", "one", "random", "large"])
    y = (
        torch.arange(n) % 2
        if rule == "alternating"
        else torch.randint(3, (n,), generator=generator)
        if rule == "random"
        else torch.ones(n)
    )
    y = y.double() * (1e4 if rule == "large" else 1)
    return [
        _like_input(x, recipe),
        *([category] if recipe.has_category else []),
        _as_float(y, recipe),
    ]


def _like_input(x: Tensor, recipe: Recipe) -> Tensor:
    return x.long() if recipe.family == "tokens" else _as_float(x, recipe)


def random_record(recipe: Recipe, rng: random.Random, like: Records) -> Records:
    """A record to add to ``like``: one of them, or a new one, changed in a few ways."""
    n = len(like[0])
    if n and rng.random() < 0.5:
        place = rng.randrange(n)
        record = [t[place : place + 1].clone() for t in like]
    else:
        record = random_records(recipe, rng, 1)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        record = changed(recipe, rng, record)
    return record


def changed(recipe: Recipe, rng: random.Random, record: Records) -> Records:
    """The record with one thing changed."""
    x, *category, y = (t.clone() for t in record)
    is_float = recipe.family != "tokens"
    entry = tuple(rng.randrange(size) for size in x[0].shape)
    what = rng.choice(
        [
            "size",
            "size",
            "entry",
            "missing",
            "zeros",
            "shorter",
            "shorter",
            "longer",
            "category",
            "label",
            "label",
            "target",
        ]
    )
    if what == "size" and is_float:
        x *= rng.choice([-1, 1]) * 10 ** rng.uniform(-4, 9)
    elif what == "entry":
        x[0][entry] = (
            rng.gauss(0, 1) * 10 ** rng.uniform(-1, 7) if is_float else rng.randrange(CATEGORIES)
        )
    elif what == "missing" and is_float:
        x[0][entry] = rng.choice([math.nan, math.inf, -math.inf])
    elif what == "zeros":
        x.zero_()
    elif what == "shorter":
        x[:, rng.randrange(x.shape[1]) :] = 0
    elif what == "longer":
        x[x == 0] = 1
    elif what == "category":
        if category:
            category[0][0] = rng.randrange(CATEGORIES)
        else:
            x[0].view(-1)[0] = rng.randrange(CATEGORIES)
    elif what == "label":
        y[0] = rng.choice([0.0, 1.0, 2.0, IGNORED])
    elif what == "target":
        y[0] = rng.choice([-1, 1]) * 10 ** rng.uniform(0, 7)
    return [x, *category, y]


def inserted(records: Records, record: Records, place: int) -> Records:
    return [
        torch.cat([t[:place], r.to(t.dtype), t[place:]])
        for t, r in zip(records, record, strict=True)
    ]


# -- the search ------------------------------------------------------------------------------------


@dataclass
class Finding:
    """One record that moves the released sum by more than C.

    Attributes:
        recipe: the model.
        mode: ``grad_sample_mode``.
        records: all of them, and ``names`` by which their random numbers follow them.
        added: the place of the one record.
        movement: in units of C.
        movement_in_float64: the same in double precision; NaN where it was not measured.
        found_after: seconds by the clock, and of processor time.
    """

    recipe: Recipe
    mode: str
    records: Records
    names: Sequence[int]
    added: int
    movement: float
    movement_in_float64: float = math.nan
    found_after: tuple[float, float] = (math.nan, math.nan)

    @property
    def kinds(self) -> list[str]:
        return self.recipe.kinds or ["free"]

    @property
    def signature(self) -> str:
        """What the finding is told apart by."""
        is_rounding = self.movement_in_float64 <= LIMIT
        what = self.recipe.culprits or sorted({name for name, _, _ in self.recipe.parts()})
        kinds = ", ".join(["rounding", *self.kinds] if is_rounding else self.kinds)
        mode = f"{self.mode}, loss given" if self.recipe.is_loss_given else self.mode
        return f"{mode}: {kinds} ({'; '.join(what)})"

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "finding",
            "signature": self.signature,
            "kinds": self.kinds,
            "mode": self.mode,
            "movement": self.movement,
            "movement_in_float64": self.movement_in_float64,
            "found_after": self.found_after,
            "recipe": self.recipe.as_dict(),
            "records": [t.tolist() for t in self.records],
            "names": list(self.names),
            "added": self.added,
        }

    def as_program(self) -> str:
        """A program that shows it, run in this script's folder."""
        return (
            f"# {self.signature}: one record moves the released sum by {self.movement:.3g} C\n"
            "from math import inf, nan\n"
            "from fuzz_sensitivity import movement_of\n"
            f"recipe = {self.recipe.as_dict()!r}\n"
            f"records = {[t.tolist() for t in self.records]!r}\n"
            f"names = {list(self.names)!r}\n"
            f"print(movement_of(recipe, {self.mode!r}, records, {self.added}, names))\n"
        )


@dataclass
class Totals:
    """What was asked and measured, over all sessions of a file."""

    models: int = 0
    refused: int = 0
    free_models: int = 0
    free_refused: int = 0
    pairs: int = 0
    free_pairs: int = 0
    pairs_with_loss_given: int = 0
    unconfirmed: int = 0
    errors: int = 0
    seconds: float = 0.0
    largest: float = 0.0
    largest_of_free: float = 0.0
    findings: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why free models were refused
    error_messages: Counter[str] = field(default_factory=Counter)
    doubts: Counter[str] = field(
        default_factory=Counter
    )  # suspicions that fresh runs did not confirm

    def add(self, other: dict[str, Any]) -> None:
        for name, value in other.items():
            mine = getattr(self, name, None)
            if isinstance(mine, Counter):
                mine.update(value)
            elif mine is not None:
                setattr(
                    self, name, max(mine, value) if name.startswith("largest") else mine + value
                )


def knows(mode: str) -> bool:
    """Whether this version of the library has the ``grad_sample_mode``."""
    try:
        with quiet():
            PrivateSteps(Recipe(seed=0, family="rows", body=[], tail=[]), mode).close()
    except Refused as error:
        if "grad_sample_mode" in str(error):
            return False
        raise
    return True


def search_model(
    recipe: Recipe, mode: str, rng: random.Random, totals: Totals, rounds: int = ROUNDS
) -> Finding | None:
    """Ask for one model, and look for a record that moves its sums too far, seen again if found."""
    is_free = not recipe.kinds
    totals.models += 1
    totals.free_models += is_free
    try:
        steps, recipe = _as_told(recipe, mode)
    except Refused as error:
        totals.refused += 1
        totals.free_refused += is_free
        if is_free:
            totals.reasons[str(error)[:160]] += 1
        return None
    try:
        try:
            steps.sum_of(random_records(recipe, rng, 3), range(3))
        except Exception as error:  # wrong for every batch
            totals.refused += 1
            totals.free_refused += is_free
            if is_free:
                totals.reasons[f"at the first step: {type(error).__name__}: {error}"[:160]] += 1
            return None
        return _worst(steps, recipe, mode, rng, totals, rounds)
    finally:
        steps.close()


def _as_told(recipe: Recipe, mode: str) -> tuple[PrivateSteps, Recipe]:
    """Ask for a model; if it is refused, ask once more as the message says: with example records
    that differ, or without the loss.
    """
    try:
        return PrivateSteps(recipe, mode), recipe
    except Refused:
        if recipe.examples == "zeros":
            return _as_told(dataclasses.replace(recipe, examples="distinct"), mode)
        if recipe.is_loss_given:
            return _as_told(dataclasses.replace(recipe, is_loss_given=False), mode)
        raise


def _worst(
    steps: PrivateSteps, recipe: Recipe, mode: str, rng: random.Random, totals: Totals, rounds: int
) -> Finding | None:
    is_free = not recipe.kinds

    def sum_of(records: Records, names: Sequence[int]) -> Tensor | None:
        try:
            return steps.sum_of(records, names)
        except Exception as error:  # some records bring about
            totals.errors += 1
            totals.error_messages[f"{type(error).__name__}: {error}"[:200]] += 1
            return None

    suspects = 0
    for _ in range(rounds):
        n = rng.choice([0, 1, 2, 5, 16, 16, 32, 64])
        rest = random_records(recipe, rng, n)
        without = sum_of(rest, range(1, n + 1))
        if without is None:
            continue
        best, best_record = 0.0, None
        for k in range(CANDIDATES):
            if best_record is None or k < CANDIDATES // 3:
                record = random_record(recipe, rng, rest)
            else:
                record = changed(recipe, rng, best_record)
            place = rng.choice([0, 0, n // 2, n])
            both = inserted(rest, record, place)
            names = [*range(1, place + 1), 0, *range(place + 1, n + 1)]
            whole = sum_of(both, names)
            if whole is None:
                continue
            movement = float((whole - without).norm())
            totals.pairs += 1
            totals.free_pairs += is_free
            totals.pairs_with_loss_given += recipe.is_loss_given
            if movement > best:
                best, best_record = movement, record
            if movement > LIMIT and suspects < 2:
                suspects += 1
                found = confirmed(Finding(recipe, mode, both, names, place, movement))
                if found is not None:
                    totals.largest = max(totals.largest, found.movement)
                    totals.largest_of_free = max(
                        totals.largest_of_free, found.movement if is_free else 0.0
                    )
                    return found
                totals.unconfirmed += 1
                totals.doubts[f"{', '.join(recipe.culprits) or 'free'}: {recipe.as_dict()}"] += 1
            elif movement <= LIMIT:
                totals.largest = max(totals.largest, movement)
                totals.largest_of_free = max(totals.largest_of_free, movement if is_free else 0.0)
    return None


def confirmed(finding: Finding) -> Finding | None:
    """The finding as fresh runs through public names see it; None where they do not."""
    try:
        movement = movement_of(
            finding.recipe, finding.mode, finding.records, finding.added, finding.names
        )
    except Refused:
        return None
    return dataclasses.replace(finding, movement=movement) if movement > LIMIT else None


def shortened(finding: Finding) -> Finding:
    """The finding without parts, settings and records that it can do without; and in float64."""
    left, short, is_done = TRIALS, finding, False
    least = max(LIMIT, finding.movement / 2)
    while not is_done:
        is_done = True
        for smaller in _shorter(short):
            left -= 1
            if left >= 0 and smaller.kinds == finding.kinds and _quick_movement(smaller) > least:
                short, is_done = smaller, False
                break
    if short is not finding:
        short = confirmed(short) or finding
    if short.recipe.is_random:  # float64 takes other random numbers
        return short
    x, *category, y = short.records
    exact = dataclasses.replace(short.recipe, is_double=True)
    records = [_like_input(x, exact), *category, y.double()]
    in_float64 = _quick_movement(dataclasses.replace(short, recipe=exact, records=records))
    return dataclasses.replace(short, movement_in_float64=in_float64)


def _quick_movement(finding: Finding) -> float:
    """How far the sum moves on one model for both data sets; 0 where the library refuses it."""
    everyone = list(range(len(finding.records[0])))
    rest = [k for k in everyone if k != finding.added]
    with quiet():
        try:
            steps = PrivateSteps(finding.recipe, finding.mode)
        except Refused:
            return 0.0
        try:
            sums = [
                steps.sum_of(
                    [t[places] for t in finding.records], [finding.names[k] for k in places]
                )
                for places in (everyone, rest)
            ]
        except Exception:
            return 0.0
        finally:
            steps.close()
    return float((sums[0] - sums[1]).norm())


def _shorter(finding: Finding) -> Iterator[Finding]:
    """Shorter forms of a finding, the shortest first."""
    recipe, records, n = finding.recipe, finding.records, len(finding.records[0])
    for with_loss in (recipe.loss, "cross entropy"):
        bare = dataclasses.replace(
            recipe,
            tail=[spec for spec in recipe.tail if PARTS[spec[0]].kind != "free"],
            body=[spec for spec in recipe.body if PARTS[spec[0]].kind != "free"],
            loss=with_loss,
            examples="none",
            has_category=False,
            is_loss_given=False,
        )
        if bare != recipe and (recipe.kinds or bare.body + bare.tail):
            yield dataclasses.replace(finding, recipe=bare, records=[records[0], records[-1]])
    if n > 3:
        kept = sorted({finding.added, *range(0, n, 2)})
        yield dataclasses.replace(
            finding,
            records=[t[kept] for t in records],
            names=[finding.names[k] for k in kept],
            added=kept.index(finding.added),
        )
    rounded = [_rounded(t) if t.is_floating_point() else t for t in records]
    if not all(
        torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(records, rounded, strict=True)
    ):
        yield dataclasses.replace(finding, records=rounded)
    for where in ("tail", "body"):
        for specs in _without_one(getattr(recipe, where)):
            yield dataclasses.replace(finding, recipe=dataclasses.replace(recipe, **{where: specs}))


def _rounded(t: Tensor) -> Tensor:
    """To three digits."""
    return torch.tensor(
        [float(f"{value:.3g}") for value in t.flatten().tolist()], dtype=t.dtype
    ).reshape(t.shape)


def _without_one(specs: list[Spec]) -> Iterator[list[Spec]]:
    """The specs with one left out, or with one replaced by what it has inside, at any depth."""
    for k, (name, options, inside) in enumerate(specs):
        yield [*specs[:k], *specs[k + 1 :]]
        if inside:
            yield [*specs[:k], *inside, *specs[k + 1 :]]
        for fewer in _without_one(inside):
            yield [*specs[:k], [name, options, fewer], *specs[k + 1 :]]


class Search:
    """The search, and the file that it goes on from.

    Args:
        modes: values of ``grad_sample_mode``; those which this version does not know are left out.
        kinds: of models, of ``random_models.KINDS``, and "free".
        seed: None for fresh entropy.
        path: file of JSON lines, or None.
    """

    def __init__(
        self,
        modes: Sequence[str],
        kinds: Sequence[str],
        seed: int | None = None,
        path: Path | None = None,
    ) -> None:
        self.seed = random.SystemRandom().getrandbits(48) if seed is None else seed
        self.modes = [mode for mode in modes if knows(mode)]
        self.kinds, self.path = kinds, path
        self.totals = {mode: Totals() for mode in self.modes}
        self.findings: list[Finding] = []
        self.times: dict[
            str, tuple[float, float]
        ] = {}  # until the first finding of each kind, in this session
        self._signatures: set[str] = set()
        self._rng = random.Random(self.seed)
        if path is not None and path.exists():
            self._resume(path.read_text().splitlines())

    def _resume(self, lines: list[str]) -> None:
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the last line of a session that was killed
                continue
            if entry["type"] == "finding":
                self._signatures.add(entry["signature"])
            elif entry["mode"] in self.totals:
                self.totals[entry["mode"]].add(entry["totals"])

    def run(
        self, seconds: float = math.inf, pairs: float = math.inf, *, is_shown: bool = True
    ) -> list[Finding]:
        """Search for ``seconds``, or until ``pairs`` pairs were measured. Returns what is new."""
        start, before = time.perf_counter(), self._pairs()
        start_of_processor = time.process_time()
        session = {mode: Totals() for mode in self.modes}
        by_pairs = math.isfinite(pairs)
        bar = tqdm(
            total=pairs if by_pairs else seconds,
            unit="pair" if by_pairs else "s",
            disable=not is_shown,
        )
        try:
            while (spent := time.perf_counter() - start) < seconds and (
                done := self._pairs() - before
            ) < pairs:
                bar.n = min(done if by_pairs else round(spent), bar.total)
                bar.set_postfix_str(self._state())
                recipe = random_recipe(self._rng.getrandbits(48), self.kinds)
                for mode in self.modes:
                    self._ask(recipe, mode, (start, start_of_processor), session[mode])
        finally:
            bar.close()
            if self.path is not None:
                with self.path.open("a") as file:
                    for mode, totals in session.items():
                        print(
                            json.dumps({"type": "session", "mode": mode, "totals": vars(totals)}),
                            file=file,
                        )
        return self.findings

    def _ask(self, recipe: Recipe, mode: str, start: tuple[float, float], session: Totals) -> None:
        began, totals = time.perf_counter(), Totals()
        with quiet():
            finding = search_model(recipe, mode, self._rng, totals)
        if finding is not None:
            totals.findings = 1
            after = (time.perf_counter() - start[0], time.process_time() - start[1])
            self._note(dataclasses.replace(finding, found_after=after))
        totals.seconds = time.perf_counter() - began
        for whole in (session, self.totals[mode]):
            whole.add(vars(totals))

    def _note(self, finding: Finding) -> None:
        for kind in finding.kinds:
            self.times.setdefault(f"{finding.mode}: {kind}", finding.found_after)
        if finding.recipe.kinds and finding.signature in self._signatures:
            return
        finding = shortened(finding)
        if finding.signature in self._signatures:
            return
        self._signatures.add(finding.signature)
        self.findings.append(finding)
        tqdm.write("\n" + finding.as_program())
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps(finding.as_json()), file=file)

    def _pairs(self) -> int:
        return sum(totals.pairs for totals in self.totals.values())

    def _state(self) -> str:
        all_of = list(self.totals.values())
        refused, models = (sum(getattr(t, name) for t in all_of) for name in ("refused", "models"))
        largest, findings = max(t.largest for t in all_of), sum(t.findings for t in all_of)
        return (
            f"{self._pairs()} pairs, {refused} of {models} models refused, "
            f"largest {largest:.3g} C, {findings} found"
        )

    def summary(self) -> str:
        lines = []
        for mode, t in self.totals.items():
            mixing, mixing_refused = t.models - t.free_models, t.refused - t.free_refused
            lines += [
                f"{mode}: {t.models} models in {t.seconds:.0f} s",
                (
                    f"  refused: {t.free_refused} of {t.free_models} free models, "
                    f"{mixing_refused} of {mixing} others"
                ),
                (
                    f"  accepted pairs: {t.pairs}, {t.free_pairs} of them of free models, "
                    f"{t.pairs_with_loss_given} with the loss given to make_private"
                ),
                f"  largest movement: {t.largest:.4g} C, of free models {t.largest_of_free:.4g} C",
                f"  models with a finding: {t.findings}",
                f"  suspicions that fresh runs did not confirm: {t.unconfirmed}",
                f"  steps that some records made fail: {t.errors}",
            ]
            lines += [f"    free, refused {n} times: {why}" for why, n in t.reasons.most_common(12)]
            lines += [f"    not confirmed {n} times: {what}" for what, n in t.doubts.most_common(8)]
            lines += [f"    failed {n} times: {why}" for why, n in t.error_messages.most_common(8)]
        for what, (seconds, of_processor) in sorted(self.times.items(), key=lambda item: item[1]):
            lines.append(
                f"first found after {seconds:.0f} s, {of_processor:.0f} s of processor time: {what}"
            )
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--pairs",
        type=float,
        default=math.inf,
        help="accepted model x data pairs after which to stop",
    )
    parser.add_argument("--seed", type=int, help="of the search; fresh entropy without it")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        help="values of grad_sample_mode; unknown ones are left out",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["free", *KINDS],
        choices=["free", *KINDS],
        help="of models; all of them by default",
    )
    parser.add_argument("--file", type=Path, help="JSON lines to go on from and to add to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    search = Search(arguments.modes, arguments.kinds, arguments.seed, arguments.file)
    print(f"seed {search.seed}, modes {', '.join(search.modes)}")
    found = search.run(arguments.seconds, arguments.pairs)
    print(search.summary())
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
