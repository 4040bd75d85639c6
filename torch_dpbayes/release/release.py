"""The one place where something of the data becomes public: collect, charge, add noise.

Each release is one vector and nothing else::

    S = Σ_{i in batch} g_i·min(1, C/‖g_i‖) + z·C·ξ,   ξ ~ N(0, I)    the only access to the data

On several ranks the sum over the batch is a sum over ranks, and the noise is rank 0's. Parameter
groups with different step sizes have their own z: the gradient is clipped over all groups together,
and the smallest z is charged, which bounds the release whose groups are scaled to equal noise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..batches.sampler import PoissonSampler
from ..distributed import STEP, Ranks, digest, require_single_process
from ..errors import StateError, StepError
from ..noise import GaussianNoise
from ..per_sample.derived import holds_records
from ..per_sample.fixed_tensors import FixedTensors
from ..per_sample.gradient_source import GradientSource
from ..per_sample.hooks import HooksGradientSource
from ..per_sample.operations import Delivery
from .layout import Layout, trainable_members
from .query import Charged, ClippedSum


class Release(Charged):
    """Everything that a private step needs between the batch and the noisy sum.

    Args:
        query: the sum over records that every step asks for.
        num_data, sampling, accountant, generator, assume_independent: as for
            :class:`~torch_dpbayes.optim.base.PrivateOptimizer`.
        label: by which the accountant's summary names the releases.

    Attributes:
        source: gives the batch's clipped sum.
        draws: the Poisson draws that batches are; None where batches are the caller's.
        ranks: those that release together; None where this process is alone.
        noise: where the Gaussian comes from.
        lock: held from before :meth:`take` until its result was used. Between these the layout of a
            second thread's step would hold a sum without noise.
        watch: is told of every release, with the layout that holds it.
        bound_from: what a derived clip norm was derived from.

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
        self.lock = threading.RLock()
        self._assume_independent = assume_independent
        self.source: GradientSource = HooksGradientSource(is_vouched=assume_independent)
        self.draws = None
        self.ranks: Ranks | None = None
        self._fixed: FixedTensors | None = None
        self._is_alone = False  # on purpose, in a process group of several ranks
        self.bound_from = ""
        self.watch: Callable[[Layout], None] = lambda layout: None
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget what belongs to steps that came before."""
        self.forget_parts()
        self._pending_records, self._pending_draw = 0, -1
        self._last_event = None
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
        """Take gradients from ``source`` from now on, and compare every step with the ``draws`` and
        the ``fixed`` tensors. ``is_alone``: other ranks have nothing to do with it.
        """
        self.source, self.draws = source, draws
        self._fixed = fixed
        self.ranks, self._is_alone = draws.ranks, is_alone
        self.sampling = draws.scheme
        self._last_event = None  # of other draws
        self.forget_parts()

        def before_delivery() -> None:  # gradients of an earlier draw cannot pass for a later one's
            source.discard(parameters)
            fixed.begin()

        draws.before_delivery = before_delivery
        draws.delivery = Delivery(self.query.expected_batch_size) if source.follows else None

    def duplicate(self, *, has_other_parameters: bool) -> Release:
        """One that charges the same accountant and draws its own noise."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.query, new.noise, new.lock = copy(self.query), GaussianNoise(), threading.RLock()
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

    def layout_of(self, groups: list[dict[str, Any]]) -> Layout:
        """A buffer for what these parameter groups release, in a new sum."""
        self.forget_parts()
        members = trainable_members(groups)
        parameters = [p for _, _, own in members for p in own]
        extra = self.query.extra_size(sum(p.numel() for p in parameters), parameters[0].device)
        if self._fixed is not None:  # look at the fixed ones themselves once
            self._fixed.look_closely()
        records, is_shared = self.query.expected_batch_size, self.ranks is not None
        return Layout(members, extra, records, is_shared=is_shared)

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
            require_single_process()
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
        if self._fixed is not None:
            self._fixed.require_unchanged()

    def _require_whole(self, records: int, total: int | None) -> None:
        """Every record of the delivered batch came once; ``total``: of a draw that it completes."""
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
            self.draws.mark_used()
        if (independence := self.independence) != self._stated:
            self._state(self.label, independence)
            if self.bound_from:
                self.accountant.note(f"{self.label}: {self.bound_from}")
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
            "the settings of the optimizer or its parameters": _bits_of(repr(facts)),
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
            ranks.check_consistent(STEP, numbers, compare=compared, norm=norm)
            return []
        numbers["the sum"] = _bits_of(layout.buffer)
        rows = ranks.check_consistent(STEP, numbers, compare=compared, norm=norm)
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
        ranks.all_reduce(layout.buffer)
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


def options_of(group: dict[str, Any]) -> list[Any]:
    """What a parameter group may have of its own."""
    return [group.get(name) for name in ("lr", "prior_std", "prior_mean", "momentum")]


def _hidden(layout: Layout, settings: Callable[[], Mapping[str, Any]]) -> Iterator[Tensor | str]:
    """All that a release is made of."""
    yield repr((settings(), [group.noise_multiplier for group in layout.groups]))
    yield layout.buffer
    yield from layout.parameters


def _bits_of(value: Tensor | str) -> int:
    """64 bits of a hash."""
    return int.from_bytes(digest([value], size=8), "little", signed=True)


def require_public(what: str, values: Iterable[Any]) -> None:
    """Refuse values of a batch among those that a step uses beside the noisy gradient."""
    for value in values:
        if isinstance(value, Mapping):
            require_public(what, value.values())
        elif isinstance(value, torch.Tensor) and holds_records(value):
            raise StepError(
                f"{what} holds values that were computed from records: they would enter the step"
                " without clipping and noise. Use public values, or what opt.step() released",
                code="model-written",
            )
