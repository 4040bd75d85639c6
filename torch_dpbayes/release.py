"""The only place that releases a function of the data: collect the clipped sum, check that nothing
changed, charge, add noise.

Each release is one vector and nothing else::

    S = Σ_{i in batch} g_i·min(1, C/‖g_i‖) + z·C·ξ,   ξ ~ N(0, I)    the only access to the data

On several ranks the sum over the batch is a sum over ranks, and the noise is rank 0's. Parameter
groups with different step sizes have their own z. The gradient is clipped over all groups together,
and the smallest z is charged: with this z for every group there would be less noise, so the charge
is an upper bound.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.distributed import is_initialized
from torch.overrides import TorchFunctionMode

from .accounting import events
from .accounting.accountant import PrivacyAccountant
from .batches.sampler import PoissonSampler
from .batches.sampling_schemes import RandomAllocationSampler
from .distributed import STEP, Ranks, require_single_process
from .errors import ArgumentError, StateError, StepError
from .noise import GaussianNoise, PrivateRandomness, add_gaussian, digest
from .per_sample.derived import FixedTensors, is_private
from .per_sample.followed import flatten
from .per_sample.gradient_source import GradientSource
from .per_sample.hooks import HooksGradientSource
from .per_sample.operations import Delivery
from .per_sample.record_map import require_no_modes
from .processes import Lock

# sums of so many records are in float64: float32 would round by more than 10⁻³·C
_MANY_RECORDS = 2**14

_IMMUTABLE = frozenset((float, int, str, bool, type(None)))

Settings = Callable[[], Mapping[str, Any]]
# a parameter group with the names and the tensors of its trainable parameters
Member = tuple[dict[str, Any], list[str], list[Tensor]]


class GroupGradient:
    """One parameter group's share of a step: the argument of an algorithm's ``_update``.

    Attributes:
        group: torch's parameter group with its options.
        names, parameters: names and tensors of the trainable parameters.
        gradient: ĝ as one flat vector; the update may overwrite it.
        gradients: the same memory, shaped like the parameters.
        noise_multiplier: z of this step; infinite if lr = 0 and no data was used.
        prior_stds: standard deviations of the Gaussian prior, one for each parameter.
        options: the group's, from which ``noise_multiplier`` and ``prior_stds`` were computed.
    """

    def __init__(self, member: Member, gradient: Tensor) -> None:
        self.group, self.names, self.parameters = member
        pieces = gradient.split([p.numel() for p in self.parameters])
        self.gradient = gradient
        self.gradients = [g.view(p.shape) for g, p in zip(pieces, self.parameters, strict=True)]
        self.noise_multiplier, self.prior_stds = math.inf, list[float]()
        self.options: dict[str, Any] = {}

    def current_options(self) -> dict[str, Any]:
        """The group's options, which are public; mutable ones are copied."""
        found = dict(self.group)
        for name in ("params", "param_names"):  # the layout has both
            found.pop(name, None)
        if not _IMMUTABLE.issuperset(map(type, found.values())):
            for name, value in found.items():
                require_public("a parameter group", [value])
                found[name] = value.tolist() if isinstance(value, Tensor) else copy(value)
        return found


class Layout:
    """The flat buffer of one release, which holds Σ clip(g), then S, then S/B.

    After the gradient come the query's further numbers, which are released, and for several ranks a
    flag: not 0 if a rank failed after all had agreed to take the step. Norms, sums and noise are
    in float64 if a parameter is, or if very many records are added. ``is_plain``: all parameters
    have the type of the sum. ``beta``: 0.0 if the next sum replaces the gradient.
    """

    beta = 0.0

    def __init__(self, groups: list[dict[str, Any]], query: ClippedSum, *, is_shared: bool) -> None:
        members = _trainable_members(groups)
        self.parameters = [p for _, _, parameters in members for p in parameters]
        names = [name for _, names, _ in members for name in names]
        self.named = list(zip(names, self.parameters, strict=True))
        types, self.device = {p.dtype for p in self.parameters}, self.parameters[0].device
        is_wide = query.expected_batch_size >= _MANY_RECORDS or torch.float64 in types
        self.dtype = torch.float64 if is_wide else torch.float32
        self.is_plain = types == {self.dtype}
        sizes = [p.numel() for p in self.parameters]
        self.description = repr((names, sizes, self.dtype))
        whole = [sum(sizes), query.extra_size(sum(sizes), self.device), int(is_shared)]
        self.buffer = torch.zeros(sum(whole), dtype=self.dtype, device=self.device)
        self.gradient, self.extra, self.failed = self.buffer.split(whole)
        self.rest = self.buffer[whole[0] :]
        self.pieces = list(self.gradient.split(sizes))
        totals = [sum(p.numel() for p in parameters) for _, _, parameters in members]
        flats = self.gradient.split(totals)
        self.groups = [GroupGradient(m, flat) for m, flat in zip(members, flats, strict=True)]


class ClippedSum:
    """Σ clip(g_i); every step releases S = Σ clip(g_i) + zC·ξ.

    A query that releases more is a subclass: it states the number of further values, fills
    ``layout.extra`` with them, adds their noise, and states the noise multiplier at which a release
    of the clipped sum alone would cost the same.

    **Privacy.** Adding or removing a record moves the sum by at most C, replacing one by 2C.
    """

    def __init__(self, max_grad_norm: float, expected_batch_size: float) -> None:
        # Python floats: immutable, and never rounded to a lower precision
        self.max_grad_norm = float(max_grad_norm)
        self.expected_batch_size = float(expected_batch_size)

    def extra_size(self, num_parameters: int, device: torch.device) -> int:
        """The number of values that a step releases beside the gradient."""
        return 0

    def collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the batch's sum to ``layout``; returns the number of records."""
        return source.add_clipped_sum(
            layout.named, self.max_grad_norm, layout.pieces, beta=layout.beta
        )

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        """Add noise with each group's own z (``smallest``: the smallest), and divide by B. Without
        a stream only divide: another rank adds the noise.
        """
        for group in layout.groups:
            if not math.isfinite(group.noise_multiplier):
                group.gradient.zero_()
            elif stream is None:
                group.gradient.div_(self.expected_batch_size)
            else:
                std = group.noise_multiplier * self.max_grad_norm
                add_gaussian(group.gradient, std, self.expected_batch_size, stream)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        """z at which the clipped sum alone would cost what this query costs."""
        return noise_multiplier


class Release:
    """Everything that a private step needs between the batch and the noisy sum. Arguments are as
    for :class:`~torch_dpbayes.optim.DPSGLD`; the accountant's summary names releases by ``label``.

    Attributes:
        source: gives the batch's clipped sum.
        draws: the sampler that draws the batches; None if the caller draws them.
        ranks: the ranks that release together; None for a single process.
        lock: held from before :meth:`take` until its result is used. Without it, another thread
            could see a sum without noise.
        watch: is called after every release, with its layout.
        bound_from: the origin of the clip norm, with temperature and noise; empty if not stated.

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
        self.lock = Lock()
        self._assume_independent = assume_independent
        self.source: GradientSource = HooksGradientSource(is_vouched=assume_independent)
        self.draws: PoissonSampler | None = None
        self.ranks: Ranks | None = None
        self.fixed: FixedTensors | None = None
        self._delivery: Delivery | None = None
        self._is_alone = False  # trains alone on purpose, although there is a process group
        self.bound_from, self._is_warned = "", False
        self.watch: Callable[[Layout], None] | None = None
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget the state of earlier steps."""
        self.forget_parts()
        self._pending_records, self._pending_draw = 0, -1
        self._last_event: tuple[Any, events.DpEvent, float] | None = None
        self._stated = ""  # the note on independent records that the accountant has
        self._compared_pass = -1  # the loader's last pass in which ranks compared their histories

    def forget_parts(self) -> None:
        """The next part begins a new sum."""
        self._is_pending = False  # whether the buffer holds some parts of a draw, but not all

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
        the ``fixed`` tensors. ``is_alone``: this process trains alone, even in a process group.
        """
        self.source, self.draws, self.fixed = source, draws, fixed
        draws.accountant = self.accountant
        self.ranks, self._is_alone = draws.ranks, is_alone
        self.sampling = draws.scheme
        self._last_event = None  # it was of other draws
        self.forget_parts()

        def before_delivery() -> None:  # removes gradients of an earlier draw
            source.discard(parameters)
            fixed.begin()

        draws.before_delivery = before_delivery
        rank = 0 if self.ranks is None else self.ranks.rank
        source.randomness = PrivateRandomness(self.noise.generator, rank)
        shown = self.query.expected_batch_size
        self._delivery = Delivery(shown, source.randomness) if source.follows else None
        draws.delivery = self._delivery

    def duplicate(self, *, has_other_parameters: bool) -> Release:
        """A copy that charges the same accountant and draws its own noise."""
        new = copy(self)
        new.query, new.noise, new.lock = copy(self.query), GaussianNoise(), Lock()
        if has_other_parameters:  # the model was copied, too, and needs its own hooks
            new.source = HooksGradientSource(is_vouched=self._assume_independent)
            new.fixed = None
        new.start_afresh()
        return new

    def layout_of(self, groups: list[dict[str, Any]]) -> Layout:
        """A buffer for the release of these parameter groups; begins a new sum."""
        self.forget_parts()
        if self.fixed is not None:  # compare the values of the fixed tensors once
            self.fixed.look_closely()
        return Layout(groups, self.query, is_shared=self.ranks is not None)

    # -- the step ----------------------------------------------------------------------------------

    def take(self, layout: Layout, settings: Settings, norm: float) -> bool:
        """Collect the batch, charge, and leave S/B in ``layout``, whose groups have their noise
        multipliers. False while parts of the draw are outstanding; nothing is released then.
        ``settings`` returns the settings that determine the distribution of the release. ``norm``
        is the norm of the parameters, which must be the same on all ranks.
        """
        if self.ranks is None and not self._is_alone and is_initialized():
            require_single_process()
        is_watched = _len_torch_function_stack() or _len_torch_dispatch_stack()
        if is_watched and self._delivery is not None:
            require_no_modes()  # they would see all records
        if not self._collect(layout):
            return False
        if self.fixed is not None:
            self.fixed.require_unchanged()
        smallest: float = min(map(attrgetter("noise_multiplier"), layout.groups))
        if self.noise.generator is not None and math.isfinite(smallest):
            self.noise.require_usable(layout.device)
        others = [] if self.ranks is None else self._agree(layout, settings, norm, self.ranks)
        if not math.isfinite(smallest):  # every lr is 0: nothing of the sums is used
            layout.buffer.zero_()
        else:
            self._charge_and_release(layout, settings, smallest, others)
        if self.draws is not None:
            self.draws.mark_used()
        if (independence := self.source.independence) != self._stated:
            self.accountant.note(f"{self.label}: records are kept apart {independence}")
            if self.bound_from:
                self.accountant.note(f"{self.label}: {self.bound_from}")
            self._stated = independence
        if self.watch is not None:
            self.watch(layout)
        return True

    def _collect(self, layout: Layout) -> bool:
        """Add Σ clip(g_i) of the batch to the buffer, every record once; False while parts of the
        draw are outstanding.
        """
        draws = self.draws
        is_last = draws is None or draws.use()
        if draws is not None and draws.draw != self._pending_draw:
            # parts of another draw never join this one
            self._is_pending, self._pending_draw = False, draws.draw
        layout.beta = float(self._is_pending)
        if not self._is_pending:  # the gradient is replaced
            layout.rest.zero_()
            self._is_pending, self._pending_records = True, 0
        records = self.query.collect(self.source, layout)
        self._pending_records += records
        if draws is not None:
            delivery, total = self._delivery, self._pending_records
            batch = self.source.batch
            is_strange = delivery is not None and (
                batch is None or batch is not delivery.batch or batch.refusal is not None
            )
            is_all = records == draws.part_size and (not is_last or total == draws.size)
            if is_strange or not is_all:
                raise StepError(
                    "the gradients of this step do not belong to the private loader's batch, with"
                    " every record once: pass each whole batch through the model once, then call"
                    " step().",
                    code="step-records",
                )
        # tolerates one record more or less: an error must not distinguish neighbouring data sets
        elif self.sample_rate == 1 and abs(records - self.num_data) > 1:
            raise StateError(
                f"expected_batch_size = num_data = {self.num_data} declares full batches, but this"
                " batch is not the whole data set: pass the batch size, or use"
                " PrivacyEngine.make_private.",
                code="sampling-unknown",
            )
        self._is_pending = not is_last
        return is_last

    def _charge_and_release(
        self, layout: Layout, settings: Settings, smallest: float, others: list[str]
    ) -> None:
        """Charge, and leave S/B in the buffer. With several ranks, only rank 0 adds noise."""
        ranks, error = self.ranks, None
        is_first = ranks is None or ranks.rank == 0
        try:
            # rank 0 charges a ledger; without one, each rank charges its own accountant
            self._charge(smallest, is_mine=is_first or self.accountant.path is None)
            hides: Iterable[Tensor | str] = ()
            if self.noise.generator is not None and is_first:  # everything that determines S
                multipliers = [group.noise_multiplier for group in layout.groups]
                described = repr((settings(), multipliers))
                hides = (*others, described, layout.buffer, *layout.parameters)
            stream = self.noise.next_stream(layout.device, hides)
            self.query.add_noise(layout, smallest, stream if is_first else None)
        except Exception as reason:
            if ranks is None:
                raise
            error = reason
            layout.buffer.zero_()
            layout.failed.fill_(1.0)
        if ranks is not None:
            ranks.all_reduce(layout.buffer)
            if float(layout.failed) > 0:
                ranks.raise_together(error)

    # -- the charge --------------------------------------------------------------------------------

    @property
    def sample_rate(self) -> float:
        """q = B/N."""
        return self.query.expected_batch_size / self.num_data

    def event(
        self, noise_multiplier: float, sampling: str | None, draws: PoissonSampler | None = None
    ) -> events.DpEvent:
        """The event of one step, in noise std / clip bound; the accountant turns it into
        noise / sensitivity. If ``draws`` made the batches, they state the event, which may cover
        several steps.
        """
        if noise_multiplier == 0.0:
            return events.NonPrivateDpEvent()
        gaussian = events.GaussianDpEvent(self._cost(noise_multiplier, sampling))
        if draws is not None:
            return draws.event(gaussian)
        if self.sample_rate == 1:
            return gaussian
        if sampling == "poisson":
            return events.PoissonSampledDpEvent(self.sample_rate, gaussian)
        if sampling == "recordwise":
            return events.RecordwiseBatchGaussianDpEvent(gaussian.noise_multiplier)
        if self.accountant.neighboring != "replace_one":
            raise ArgumentError(
                "it is unknown how these batches are drawn, so one more record could change all of"
                " them: use PrivacyEngine.make_private,"
                ' PrivacyAccountant(neighboring="replace_one"), or sampling="recordwise" if no'
                " record influences which batch another one is in.",
                code="sampling-unknown",
            )
        return events.UnspecifiedBatchGaussianDpEvent(gaussian.noise_multiplier)

    def _cost(self, noise_multiplier: float, sampling: str | None) -> float:
        """The noise multiplier that a clipped sum alone would have at the same cost."""
        return self.query.equivalent_noise_multiplier(
            float(noise_multiplier),
            is_full=self.sample_rate == 1,
            sampling=sampling,
            neighboring=self.accountant.neighboring,
        )

    def _charge(self, noise_multiplier: float, *, is_mine: bool = True) -> None:
        """Charge the step, unless an earlier step of its pass was charged for it, or another rank
        charges (``is_mine`` is false). The event is computed again only if something changed.
        """
        made_for, draws = (noise_multiplier, self.sampling), self.draws
        if self._last_event is None or self._last_event[0] != made_for:
            event = self.event(noise_multiplier, self.sampling, draws)
            self._last_event = made_for, event, self._cost(*made_for)
            if isinstance(event, events.UnspecifiedBatchGaussianDpEvent) and not self._is_warned:
                self._is_warned = True
                warnings.warn(
                    "steps are charged at sensitivity 2C, without amplification: it is not known"
                    " how batches are drawn, except that no batch has a record twice."
                    " PrivacyEngine().make_private(...) draws Poisson batches, which cost less.",
                    stacklevel=7,
                )
        _, event, cost = self._last_event
        if isinstance(draws, RandomAllocationSampler) and draws.is_charged(cost):
            return
        if is_mine:
            self.accountant.compose(event, label=self.label)
        if isinstance(draws, RandomAllocationSampler):
            draws.mark_charged(cost)

    # -- several ranks -----------------------------------------------------------------------------

    def _agree(self, layout: Layout, settings: Settings, norm: float, ranks: Ranks) -> list[str]:
        """Check that all ranks take the same step. If the caller passed a generator, returns
        digests of the ranks' sums, which the noise must hide.
        """
        assert self.draws is not None
        groups = [(*options_of(g.group), g.noise_multiplier) for g in layout.groups]
        described = repr((layout.description, settings(), groups))
        facts: dict[str, Any] = {
            "the settings of the optimizer or its parameters": digest([described]).hex(),
            "the draw": self.draws.checksum,
        }
        if self.accountant.path is None and self._compared_pass != self.draws.passes:
            self._compared_pass = self.draws.passes
            facts["the number of releases that their accountants hold"] = len(self.accountant)
        own = None if self.noise.generator is None else digest([layout.buffer]).hex()
        sums = ranks.check_consistent(STEP, facts, beside=own, norm=norm)
        return [] if own is None else [repr(sums)]


def options_of(group: dict[str, Any]) -> list[Any]:
    """Options that may differ between parameter groups."""
    return [group.get(name) for name in ("lr", "prior_std", "prior_mean", "momentum")]


def _trainable_members(groups: list[dict[str, Any]]) -> list[Member]:
    """The parameter groups of an optimizer that have trainable parameters, all on one device."""
    members: list[Member] = []
    for i, group in enumerate(groups):
        given = group.get("param_names", [f"{j} of group {i}" for j in range(len(group["params"]))])
        named = [pair for pair in zip(given, group["params"], strict=True) if pair[1].requires_grad]
        if named:
            members.append((group, [name for name, _ in named], [p for _, p in named]))
    if not members:
        raise StateError("all parameters are frozen: there is nothing to sample")
    if len({p.device for _, _, parameters in members for p in parameters}) > 1:
        raise StateError(
            "the parameters are on several devices: move them to one, because each record has one"
            " norm"
        )
    return members


def require_public(what: str, values: Iterable[Any]) -> None:
    """Refuse values of a batch; a step may use only the noisy gradient and public values."""
    for value in values:
        if isinstance(value, Mapping):
            require_public(what, value.values())
        elif isinstance(value, torch.Tensor) and is_private(value):
            raise StepError(
                f"{what} has values computed from records, which would enter the step without"
                " clipping and noise. Use public values or released ones",
                code="model-written",
            )


class OnlyPublic(TorchFunctionMode):
    """Refuses torch functions of private tensors, in the caller's code that a step runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        require_public("log_prior", flatten((args, kwargs))[0])
        return func(*args, **kwargs)
