"""The one place where something of the data becomes public: collect, charge, add noise.

Each release is one vector and nothing else::

    S = Σ_{i in batch} g_i·min(1, C/‖g_i‖) + z·C·ξ,   ξ ~ N(0, I)    the only access to the data

On several ranks the sum over the batch is a sum over ranks, and the noise is rank 0's. Parameter
groups with different step sizes have their own z: the gradient is clipped over all groups together,
and the smallest z is charged, which bounds the release whose groups are scaled to equal noise.
"""

from __future__ import annotations

import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..batches.draws import PoissonSampler
from ..errors import ArgumentError, StateError, StepError
from ..noise import GaussianNoise
from ..per_sample.fixed_tensors import CHANGED, FixedTensors
from ..per_sample.gradient_source import GradientSource
from ..per_sample.hooks import HooksGradientSource
from ..per_sample.operations import Delivery
from ..ranks import STEP, Ranks, require_alone
from .layout import Layout
from .query import ClippedSum


class Release:
    """Everything that a private step needs between the batch and the noisy sum.

    Args:
        query: the sum over records that every step asks for.
        num_data: number of records N, a public constant.
        sampling: what is known about batches, see
            :class:`~torch_dpbayes.optim.base.PrivateOptimizer`.
        accountant: where releases are charged.
        generator: source of the noise; None: operating-system entropy.
        label: by which the accountant's summary names the releases.
        assume_independent: the user vouches for per-sample gradients of the user's own hooks.

    Attributes:
        source: gives the batch's clipped sum.
        draws: the Poisson draws that batches are; None where batches are the caller's.
        ranks: those that release together; None where this process is alone.
        noise: where the Gaussian comes from.
        turn: held from before :meth:`take` until its result was used. Between these the layout of a
            second thread's step would hold a sum without noise.
        watch: is told of every release, with the layout that holds it.

    **Privacy.** A release is charged before its noise is drawn. A refused charge raises, and
    nothing is released.
    """

    def __init__(
        self,
        query: ClippedSum,
        *,
        num_data: int,
        sampling: str | None,
        accountant: PrivacyAccountant,
        generator: torch.Generator | None,
        label: str,
        assume_independent: bool = False,
    ) -> None:
        self.query, self.num_data, self.sampling = query, num_data, sampling
        self.accountant, self.label = accountant, label
        self.noise = GaussianNoise(generator)
        self.turn = threading.RLock()
        self._assume_independent = assume_independent
        self.source: GradientSource = HooksGradientSource(is_vouched=assume_independent)
        self.draws: PoissonSampler | None = None
        self.ranks: Ranks | None = None
        self._fixed: FixedTensors | None = None
        self._is_alone = False  # on purpose, in a process group of several ranks
        self.watch: Callable[[Layout], None] = lambda layout: None
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget what belongs to steps that came before."""
        self.forget_parts()
        self._pending_records, self._pending_draw = 0, -1
        self._last_event: tuple[Any, tuple[events.DpEvent, float]] | None = None
        self._stated = ""  # on what the accountant was told that independence of records rests
        self._compared_pass = -1  # of the loader, in which the ranks compared their histories
        self._warned = False

    def forget_parts(self) -> None:
        """The next part begins a new sum."""
        self._is_pending = False  # whether the buffer holds parts of a draw, not all of them

    def bind(
        self,
        source: GradientSource,
        draws: PoissonSampler,
        fixed: FixedTensors,
        parameters: list[Tensor],
        *,
        is_alone: bool,
    ) -> None:
        """Take gradients from ``source`` from now on, and verify every step.

        It is compared with the ``draws`` and the ``fixed`` tensors. ``is_alone`` says that the
        other ranks of a process group, if there is one, have nothing to do with it.
        """
        self.source, self.draws = source, draws
        self._fixed = fixed
        self.ranks, self._is_alone = draws.ranks, is_alone
        self.sampling = draws.law
        self._last_event = None  # of other draws
        self.forget_parts()

        def before_delivery() -> None:
            # Gradients taken before a batch was delivered are not that batch's; without this, those
            # of an earlier draw could pass for it.
            source.discard(parameters)
            fixed.begin()

        draws.before_delivery = before_delivery
        follows = source.passes is not None and source.passes.follows
        draws.delivery = Delivery(self.query.expected_batch_size) if follows else None

    def duplicate(self, *, has_other_parameters: bool) -> Release:
        """One that charges the same accountant and draws its own noise."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.query, new.noise, new.turn = copy(self.query), GaussianNoise(), threading.RLock()
        if has_other_parameters:  # of a copied model, which needs hooks of its own
            new.source = HooksGradientSource(is_vouched=self._assume_independent)
            new._fixed = None
        new.start_afresh()
        return new

    def together(self) -> AbstractContextManager[None]:
        """What goes wrong inside on one rank is an error on all."""
        return nullcontext() if self.ranks is None else self.ranks.reporting()

    @property
    def independence(self) -> str:
        """How records are kept apart, in the model and in the loss."""
        return self.query.independence(self.source)

    def layout_changed(self) -> None:
        """Other tensors are trainable now: look at the fixed ones themselves once."""
        if self._fixed is not None:
            self._fixed.look_closely()

    # -- the step ----------------------------------------------------------------------------------

    def take(self, layout: Layout, settings: Callable[[], Mapping[str, Any]], norm: float) -> bool:
        """Collect the batch, charge, and leave S/B in ``layout``.

        Args:
            layout: with the noise multiplier of every group.
            settings: gives those on which the law of the release depends.
            norm: that of the parameters, on which ranks must agree.

        Returns:
            False while parts of the draw are outstanding; nothing is released then.
        """
        if self.ranks is None and not self._is_alone:
            require_alone()
        if not self._collect(layout):
            return False
        self._require_unchanged()
        smallest = layout.smallest_noise_multiplier
        if math.isfinite(smallest):
            self.noise.require_usable(layout.device)
        others = [] if self.ranks is None else self._agree(layout, settings, norm, self.ranks)
        if not math.isfinite(smallest):  # every lr is 0: nothing of the sums is used
            layout.buffer.zero_()
        elif self.ranks is None:
            self._charge(smallest)
            stream = self.noise.next_stream(layout.device, _hidden(layout, settings))
            self.query.add_noise(layout, smallest, stream)
        else:
            self._take_together(layout, settings, smallest, others, self.ranks)
        self._retire()
        self.watch(layout)
        return True

    def _collect(self, layout: Layout) -> bool:
        """Add Σ clip(g_i) of the batch to the buffer; False while parts of the draw are
        outstanding.
        """
        self.source.require_pass_in_training_mode()
        is_last = True
        if self.draws is not None:
            is_last = self.draws.use()
            # parts of another draw never join this one
            if self.draws.draw != self._pending_draw:
                self._is_pending, self._pending_draw = False, self.draws.draw
        if not self._is_pending:
            layout.buffer.zero_()
            self._is_pending, self._pending_records = True, 0
        records = self.query.collect(self.source, layout)
        self._pending_records += records
        self._require_whole(records, self._pending_records if is_last else None)
        if is_last:
            self._is_pending = False
        return is_last

    def _require_unchanged(self) -> None:
        """Fixed tensors, and what runs on whole batches, are as they were."""
        if self._fixed is not None and (changed := self._fixed.changed()) is not None:
            raise StepError(CHANGED.format(changed), code="model-buffer")
        self.source.require_unchanged()

    def _require_whole(self, records: int, total: int | None) -> None:
        """The batch is the one that was delivered, every record once; ``total`` is that of a
        draw which it completes.
        """
        if self.draws is not None:
            if records != self.draws.part_size or total not in (None, self.draws.size):
                raise StepError(
                    "the gradients of this step are not those of the batch that the private loader"
                    " delivered, every record once: pass each batch whole through the model once,"
                    " then step().",
                    code="step-records",
                )
        # neighbouring data sets may be one record longer or shorter, and must not be told apart by
        # an error
        elif self._is_full() and abs(records - self.num_data) > 1:
            raise StateError(
                f"expected_batch_size = num_data = {self.num_data} declares full batches, but this"
                " batch is not all of the data: state the batch size, or use"
                " PrivacyEngine.make_private.",
                code="sampling-unknown",
            )

    def _retire(self) -> None:
        """The draw is used up; the accountant hears on what its charge rests."""
        if self.draws is not None:
            self.draws.retire()
        if (independence := self.independence) != self._stated:
            self._state(self.label, independence)
            self._stated = independence

    def _state(self, label: str, independence: str) -> None:
        self.accountant.note(f"{label}: records are kept apart {independence}")

    # -- several ranks -----------------------------------------------------------------------------

    def _agree(
        self, layout: Layout, settings: Callable[[], Mapping[str, Any]], norm: float, ranks: Ranks
    ) -> list[str]:
        """See that all ranks take the same step; what the noise has to hide of the others, if
        it comes from a generator of the caller's.
        """
        assert self.draws is not None
        facts = (
            layout.description,
            settings(),
            [(*options_of(group.group), group.noise_multiplier) for group in layout.groups],
        )
        numbers = {
            "the settings of the optimizer or its parameters": _digest(repr(facts)),
            "the draw": self.draws.checksum,
        }
        if self.accountant.path is None:
            is_compared = self._compared_pass == self.draws.passes
            self._compared_pass = self.draws.passes
            numbers["the number of releases that their accountants hold"] = (
                0 if is_compared else len(self.accountant)
            )
        compared = len(numbers)
        if self.noise.generator is None:
            ranks.agree(STEP, numbers, compare=compared, norm=norm)
            return []
        numbers["the sum"] = _digest(layout.buffer)
        rows = ranks.agree(STEP, numbers, compare=compared, norm=norm)
        return [repr([row[compared] for row in rows])]

    def _take_together(
        self,
        layout: Layout,
        settings: Callable[[], Mapping[str, Any]],
        smallest: float,
        others: list[str],
        ranks: Ranks,
    ) -> None:
        """Charge, add the one Gaussian to rank 0's sum, and add up the ranks'."""
        error = None
        try:
            # a ledger is charged by rank 0, in memory every rank keeps a record
            self._charge(smallest, is_mine=ranks.rank == 0 or self.accountant.path is None)
            hides = [*others, *_hidden(layout, settings)] if ranks.rank == 0 else ()
            stream = self.noise.next_stream(layout.device, hides)
            self.query.add_noise(layout, smallest, stream if ranks.rank == 0 else None)
        except Exception as reason:
            error = reason
            layout.buffer.zero_()
            layout.failed.fill_(1.0)
        ranks.add_up(layout.buffer)
        if float(layout.failed) > 0:
            ranks.raise_together(error)

    # -- a count beside the steps ------------------------------------------------------------------

    def is_of(self, source: GradientSource | None, draws: PoissonSampler) -> bool:
        """Whether it was made private together with these."""
        return source is not None and self.source is source and self.draws is draws

    def share_of(
        self, noise_multiplier: float, bound: float, norms_of: Callable[[], Tensor], label: str
    ) -> float:
        """The noisy share of records whose norm exceeds ``bound``, on a draw of its own.

        ``½ + (Σ_i (1[‖g_i‖ > C] − ½) + z/2·ξ)/B``, clamped to [0, 1].

        **Privacy.** A record contributes ±½: adding or removing one moves the sum by ½, replacing
        one by at most 1 = 2·½, which is the event of a clipped sum at the same z.
        """
        if self._fixed is not None:
            self._fixed.begin()
        norms = norms_of()
        self._require_unchanged()
        self.noise.require_usable(norms.device)
        gaussian = events.GaussianDpEvent(float(noise_multiplier))
        event = (
            gaussian
            if self._is_full()
            else events.PoissonSampledDpEvent(self.sample_rate, gaussian)
        )
        self.accountant.compose(event, label=label)
        self._state(label, self.independence)
        total = (norms.nan_to_num(nan=float("inf")) > bound).double().sub(0.5).sum()
        hides: Iterable[Tensor | str] = (repr((bound, noise_multiplier)), norms)
        noise = self.noise.standard_normal(1, dtype=torch.float64, device=norms.device, hides=hides)
        batch = self.query.expected_batch_size
        share = 0.5 + (total + 0.5 * noise_multiplier * noise.item()) / batch
        return float(share.clamp(0.0, 1.0))

    # -- what a release is charged for -------------------------------------------------------------

    @property
    def sample_rate(self) -> float:
        """q = B/N."""
        return self.query.expected_batch_size / self.num_data

    def _is_full(self) -> bool:
        return self.query.expected_batch_size == self.num_data

    def event(
        self, noise_multiplier: float, sampling: str | None, draws: PoissonSampler | None = None
    ) -> events.DpEvent:
        """The event of one step, in noise std / clip bound; the accountant turns it into
        noise / sensitivity. Of batches that ``draws`` made it is what they say, for as many steps
        as they are charged together.
        """
        z = float(noise_multiplier)
        if z == 0.0:
            return events.NonPrivateDpEvent()
        z = self._equivalent(z, sampling)
        if draws is not None and draws.law == "people":  # of several records each, also of all
            return draws.event(events.GaussianDpEvent(z))
        if self._is_full():
            return events.GaussianDpEvent(z)
        if draws is not None and draws.law != "poisson":
            return draws.event(events.GaussianDpEvent(z))
        if sampling == "poisson":
            return events.PoissonSampledDpEvent(self.sample_rate, events.GaussianDpEvent(z))
        if sampling == "recordwise":
            return events.RecordwiseBatchGaussianDpEvent(z)
        if self.accountant.neighboring != "replace_one":
            raise ArgumentError(
                "who is in these batches is not known, and one record more may change them all: use"
                ' PrivacyEngine.make_private, PrivacyAccountant(neighboring="replace_one"), or'
                ' sampling="recordwise" if no record\'s place depends on others.',
                code="sampling-unknown",
            )
        return events.UnspecifiedBatchGaussianDpEvent(z)

    def _charge(self, noise_multiplier: float, *, is_mine: bool = True) -> None:
        """Charge the step, unless that was done with an earlier one of its pass, or, where it is
        not ``is_mine``, by another rank.
        """
        event, cost = self._event_of(noise_multiplier)
        if self.draws is not None and self.draws.is_paid(cost):
            return
        if is_mine:
            self.accountant.compose(event, label=self.label)
        if self.draws is not None:
            self.draws.paid(cost)

    def _equivalent(self, noise_multiplier: float, sampling: str | None) -> float:
        return self.query.equivalent_noise_multiplier(
            noise_multiplier,
            is_full=self._is_full(),
            sampling=sampling,
            neighboring=self.accountant.neighboring,
        )

    def _event_of(self, noise_multiplier: float) -> tuple[events.DpEvent, float]:
        """:meth:`event` of these steps, and the noise multiplier that it has for a clipped sum
        alone; worked out once for as long as nothing changes.
        """
        made_for = (noise_multiplier, self.sampling)
        if self._last_event is None or self._last_event[0] != made_for:
            event = self.event(noise_multiplier, self.sampling, self.draws)
            cost = self._equivalent(noise_multiplier, self.sampling)
            self._last_event = made_for, (event, cost)
            if isinstance(event, events.UnspecifiedBatchGaussianDpEvent) and not self._warned:
                self._warned = True
                warnings.warn(
                    "steps are charged at sensitivity 2C, without amplification: nothing is known"
                    " of how batches are drawn, except that no record is in one twice."
                    " PrivacyEngine().make_private(...) draws Poisson batches, which cost less.",
                    stacklevel=8,
                )
        return self._last_event[1]


def options_of(group: dict[str, Any]) -> list[Any]:
    """What a parameter group may have of its own."""
    return [group.get(name) for name in ("lr", "prior_std", "prior_mean", "momentum")]


def _hidden(layout: Layout, settings: Callable[[], Mapping[str, Any]]) -> Iterator[Tensor | str]:
    """All that a release is made of."""
    yield repr((settings(), [group.noise_multiplier for group in layout.groups]))
    yield layout.buffer
    yield from layout.parameters


def _digest(value: Tensor | str) -> int:
    """64 bits of a hash."""
    code = value.encode() if isinstance(value, str) else value.cpu().view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(code, digest_size=8).digest(), "little", signed=True)
