"""What several owners do together in a chain: agree on a start, pay, add up, and decide.

Every owner is a rank of a process group. See :mod:`~torch_dpbayes.mcmc.multi_owner` for who sees
what.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
import torch.distributed as dist
from torch import Tensor

from .. import __version__
from ..accounting import events
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..errors import ArgumentError, OwnerError
from ..noise import GaussianNoise
from .checks import can_hide
from .density import InvalidPoint, Model, RecordDensity, without_value_checks
from .density.arguments import filled_if_empty
from .owners import ChainStart, SoleOwner
from .process_group import CHARGED, Place, Ranks, SharedRandomness

_COMPARED_ROWS = 5
_LONGEST_RUN = 1000  # iterations, after which what is left of a budget is asked for again
_DRAWS = 100


class ManyOwners(SoleOwner):
    """This process' part in a chain over the records of several owners: sums are sums over the
    owners, and everything else is the same for all of them.

    Args:
        name: of this owner, for messages that all owners see.
        group: the process group. None: that of all processes.
        noise: this owner's noise multipliers by argument, that of the log ratio first.
        settings: the kernel's, which have to be the same for all owners.

    Attributes:
        ranks: all owners' processes.
        total_multiplier: the noise multiplier of the log ratio of all owners together.
    """

    def __init__(
        self,
        name: str | None,
        group: dist.ProcessGroup | None,
        noise: dict[str, float],
        settings: dict[str, Any],
    ) -> None:
        for argument, value in noise.items():
            if not value:
                raise ArgumentError(
                    f"{argument} must be positive: without noise of its own an owner sends the"
                    " exact sum over its records to the others."
                )
        if name is not None and (
            not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable()
        ):
            raise ArgumentError(
                "owner must be a name that the other owners may see, of at most 100 printable"
                f" characters; got {name!r}."
            )
        self.ranks = Ranks(group)
        self._name, self._noise, self.settings = name, noise, settings
        self._seed, self._iteration, self._tested = 0, 0, False
        self._made: RecordDensity | None = None
        self._surely_paid = 0  # so many iterations more need not be priced before they are paid
        self.total_multiplier = math.nan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    # -- set-up ------------------------------------------------------------------------------------

    def density(
        self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> RecordDensity:
        """The record terms of this owner's data. Where it has no records, there are rows for their
        shapes alone, which all count as zero.
        """
        (args, kwargs), is_empty = filled_if_empty(args, kwargs)
        self._made = RecordDensity(model, args, kwargs, **options)
        if is_empty:
            self._made.leave_out_all_records()
        return self._made

    def agreed_start(self, set_up: Callable[[], ChainStart]) -> ChainStart:
        """Compare what has to be the same, and agree on a seed, a start and a shape.

        Raises:
            ValueError: this owner's model or data are not fit; nothing was released.
            OwnerError: the owners differ, or another could not set up or be reached.
        """
        ranks = self._ranks_here()
        problem: BaseException | None = None
        try:
            start = set_up()
            assert self._made is not None
            facts, density, self._made = self.facts(start, self._made), self._made, None
        except BaseException as error:
            problem, facts = error, {"failed": True}
        self._iteration, self._surely_paid, ranks.live = 0, 0, True
        with self._telling_the_others():
            everyone = self._read(ranks.texts(json.dumps({"owner": self._name, **facts})))
            if failed := [rank for rank, theirs in enumerate(everyone) if "failed" in theirs]:
                ranks.live = False
                raise problem or OwnerError(
                    f"{ranks.listed(failed)} could not set up, so all owners stop: see the reason"
                    " in that process. Nothing was released."
                )
            self._compare_facts(everyone)
            self._compare_densities(density)
            entropy = "".join(theirs["entropy"] for theirs in everyone)
            self._seed = int.from_bytes(hashlib.sha256(entropy.encode()).digest(), "little")
            ratio = next(iter(self._noise))
            self.total_multiplier = math.hypot(
                *(float(theirs["noise"][ratio]) for theirs in everyone)
            )
            with torch.no_grad():
                theta = self._common_start(start)
                return start._replace(theta=theta)

    def facts(self, start: ChainStart, density: RecordDensity) -> dict[str, Any]:
        """What is told to the other owners: no function of the records, nor of their number."""
        latents = start.prior.unflatten(start.theta)
        return {
            "versions": {
                "torch_dpbayes": __version__,
                "torch": torch.__version__,
                "pyro": pyro.__version__,
            },
            "settings": {**self.settings, **start.settings},
            "model": {
                "latents": {name: list(value.shape) for name, value in latents.items()},
                "data": density.described_data(),
            },
            "precision": str(start.prior.dtype),
            "noise": self._noise,
            "entropy": os.urandom(32).hex(),
        }

    def _read(self, texts: list[str]) -> list[dict[str, Any]]:
        everyone = []
        for rank, text in enumerate(texts):
            try:
                facts = json.loads(text)
                name = facts["owner"]
                if "failed" not in facts and not all(
                    0 < float(value) < math.inf for value in facts["noise"].values()
                ):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise OwnerError(
                    f"owner {rank} sent settings that cannot be read: run the same version of this"
                    " library on all ranks."
                ) from None
            if name is not None:
                self.ranks.names[rank] = f"owner {rank} ({name!r:.102})"
            everyone.append(facts)
        return everyone

    def _compare_facts(self, everyone: list[dict[str, Any]]) -> None:
        names, first = self.ranks.names, everyone[0]
        differences = []
        for topic in ("versions", "settings", "model", "precision", "noise"):
            for rank, theirs in enumerate(everyone):
                expected, found = (
                    facts[topic] if isinstance(facts[topic], dict) else {topic: facts[topic]}
                    for facts in (first, theirs)
                )
                for key in sorted({*expected, *found}):
                    missing = key not in expected or key not in found
                    if missing or (topic != "noise" and expected[key] != found[key]):
                        differences.append(
                            f"{key} is {expected.get(key)!r:.200} for {names[0]} and"
                            f" {found.get(key)!r:.200} for {names[rank]}"
                        )
        if differences:
            self.ranks.live = False
            raise OwnerError(
                f"the owners differ: {'; '.join(differences)}. Give all ranks the same model,"
                " settings and versions; noise multipliers and accountants may differ. Nothing was"
                " released."
            )

    def _compare_densities(self, density: RecordDensity) -> None:
        """Prior and likelihood at two points, on rows that the first owner made up."""
        ranks, made_up = self.ranks, density.made_up
        with torch.no_grad(), without_value_checks():
            theta = self._of_first(Place.SET_UP, made_up.theta).to(made_up.theta)
            rows = made_up.rows(_COMPARED_ROWS)
            for k, row in enumerate(rows):
                plain = torch.view_as_real(row) if row.is_complex() else row
                shared = self._of_first(Place.SET_UP, plain).to(plain)
                rows[k] = torch.view_as_complex(shared) if row.is_complex() else shared
            values = []
            for point in (theta, theta.flip(0) * 0.7):
                values += [
                    made_up.terms(point, rows),
                    torch.tensor([density.prior.log_density(point)]).to(point),
                ]
            own = torch.cat(values)
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(own.dtype, 3e-2)
        if different := ranks.which(
            not _nearly_equal(own, self._of_first(Place.SET_UP, own), tolerance)
        ):
            ranks.live = False
            raise OwnerError(
                f"the model of {ranks.listed(different)} has another density than that of"
                f" {ranks.names[0]} on made-up records: give all ranks the same model. Nothing was"
                " released."
            )

    def _common_start(self, start: ChainStart) -> Tensor:
        ranks, theta = self.ranks, start.theta
        for _ in range(_DRAWS):
            first = self._of_first(Place.SET_UP, theta).to(theta)
            if start.is_given and (different := ranks.which(not torch.equal(first, theta))):
                ranks.live = False
                raise OwnerError(
                    f"{ranks.listed(different)} got other initial_params than {ranks.names[0]}:"
                    " give all owners the same ones, or none. Nothing was released."
                )
            theta = first
            if not ranks.which(not start.is_possible(theta)):
                return theta
            if start.is_given:
                break
            if ranks.rank == 0:
                theta = start.prior.sample()
        ranks.live = False
        raise ArgumentError(
            "the owners found no start at which the model can be evaluated: pass initial_params= to"
            " MCMC, made without data.",
            code="pyro-start",
        )

    # -- one iteration -----------------------------------------------------------------------------

    @contextmanager
    def in_iteration(self, iteration: int) -> Iterator[None]:
        """Around everything that an iteration does: what ends it is told to the others."""
        if not self._ranks_here().live:
            raise OwnerError(
                "the owners are not in a run together: call pyro.infer.MCMC(kernel, ...).run(own"
                " data) on all ranks."
            )
        self._iteration, self._tested = iteration, False
        with self._telling_the_others():
            yield

    def public_numbers(self, own: GaussianNoise, iteration: int, stage: int) -> GaussianNoise:
        """Numbers that all owners draw alike."""
        return SharedRandomness(self._seed, iteration, stage)

    def agreed_point(
        self,
        theta: Tensor,
        accepted: int,
        charges: Callable[[], list[tuple[events.DpEvent, int]]],
        accountant: PrivacyAccountant,
    ) -> Tensor:
        """The first rank's θ, which differs from this one's by round-off if their processors
        differ; once all can pay.
        """
        if not self._can_pay(charges(), accountant):
            self.ranks.leave(Place.NO_BUDGET, self._iteration)
            raise PrivacyBudgetExceeded(
                f"the budget of this owner does not allow for iteration {self._iteration + 1}:"
                " start a run with a larger one. Nothing of it was charged or released; earlier"
                " draws are in kernel.get_samples()."
            )
        position = [theta.detach().cpu().double(), torch.tensor([accepted], dtype=torch.float64)]
        first = self._of_first(Place.ITERATE, torch.cat(position))
        if first[-1] != accepted or not _nearly_equal(theta, first[:-1], 1e-4):
            raise OwnerError(
                f"this owner's chain is at another point than that of {self.ranks.names[0]}, after"
                f" other accept decisions: start all owners again. {CHARGED}"
            )
        return first[:-1].to(theta)

    def _can_pay(
        self, charges: list[tuple[events.DpEvent, int]], accountant: PrivacyAccountant
    ) -> bool:
        """How many iterations fit is a search, and takes as long as the rest of an iteration: it is
        not repeated for half of those that it found, where no other process charges the budget.
        """
        if self._surely_paid:
            self._surely_paid -= 1
            return True
        together = events.ComposedDpEvent(
            [events.SelfComposedDpEvent(event, count) for event, count in charges]
        )
        fitting = accountant.remaining(together)
        if fitting >= 1:
            self._surely_paid = 0 if accountant.path else int(min(fitting, _LONGEST_RUN)) // 2
            return True
        return False

    def gradient_sum(self, own: Callable[[], Tensor], read: Tensor) -> Tensor:
        """The sum of all owners' noisy gradients.

        Raises:
            InvalidPoint: one of them cannot evaluate the model at θ.
        """
        total = torch.zeros(len(read) + 1, dtype=torch.float64)
        try:
            total[:-1] = own().cpu()
        except InvalidPoint:  # for made-up records; the others have to hear of it
            total[-1] = 1.0
        total = self.ranks.sum(Place.GRADIENT, self._iteration, total)
        if total[-1]:
            raise InvalidPoint
        return total[:-1].to(read.device)

    def can_hide_ratio(self, bound: float, multiplier: float) -> bool:
        """Whether this owner's noise, and that of all, hides what one record does."""
        return all(
            can_hide(scale) for scale in (bound, multiplier * bound, self.total_multiplier * bound)
        )

    def accepts(
        self, noisy_ratio: float, log_uniform: float, rest: float, bound: float, multiplier: float
    ) -> tuple[bool, float]:
        """The accept decision of all owners, and the sum of their noisy log ratios."""
        variance = (self.total_multiplier * bound) ** 2
        return self._tested_together(noisy_ratio, log_uniform - rest + variance / 2)

    def end_iteration(self) -> None:
        """Where the point is invalid here, others may have found it valid, and wait for this rank's
        ratio.
        """
        if not self._tested:
            self._tested_together(0.0, 0.0, invalid=True)

    def _tested_together(
        self, noisy: float, threshold: float, invalid: bool = False
    ) -> tuple[bool, float]:
        """Accept where the noisy log ratio of all owners is above the first owner's
        ``threshold``.
        """
        self._tested, ranks = True, self.ranks
        sent = torch.tensor(
            [noisy, threshold if ranks.rank == 0 else 0.0, float(invalid)], dtype=torch.float64
        )
        noisy, first, invalids = ranks.sum(Place.RATIO, self._iteration, sent).tolist()
        if invalids:
            return False, math.nan
        if not _nearly_equal(torch.tensor(threshold), torch.tensor(first), 1e-2):
            raise OwnerError(
                f"the accept test of this owner differs from that of {ranks.names[0]}, as their"
                f" priors or shared randomness do: give all the same versions. {CHARGED}"
            )
        return noisy > first, noisy

    # -- the end -----------------------------------------------------------------------------------

    def end_chain(self, iteration: int) -> None:
        """Tell the others, who may be waiting."""
        self.ranks.leave(Place.ENDED, iteration)

    def _of_first(self, place: Place, values: Tensor) -> Tensor:
        return self.ranks.of_first(place, self._iteration, values)

    def _ranks_here(self) -> Ranks:
        if not self.ranks.is_here:
            raise OwnerError(
                "this kernel was copied into another process than its owner's, where parallel"
                " chains cannot run: leave out num_chains=, and call run() more than once. Nothing"
                " was released."
            )
        return self.ranks

    @contextmanager
    def _telling_the_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._ranks_here().leave(
                Place.NO_BUDGET if isinstance(error, PrivacyBudgetExceeded) else Place.FAILED,
                self._iteration,
            )
            raise


def _nearly_equal(own: Tensor, other: Tensor, tolerance: float) -> bool:
    own, other = own.detach().cpu().double(), other.detach().cpu().double()
    if torch.equal(own, other):
        return True
    scale = float(own.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(
        own, other, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True
    )
