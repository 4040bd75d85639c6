"""The private step that all optimizers share: collect, charge, add one Gaussian, hand over.

Each step releases one vector and nothing else::

    S = Σ_{i in batch} g_i·min(1, C/‖g_i‖) + z·C·ξ,   ξ ~ N(0, I)    the only access to the data
    ĝ = S/B + ∇r(θ)/N                               noisy gradient of the mean potential

with N = ``num_data``, B = ``expected_batch_size``, C = ``max_grad_norm`` and r = −log prior. The
noise that the sampler wants *is* the privacy noise: the sampler asks for ``z_L``, the user for at
least ``noise_multiplier``, and z is the larger of the two. Whatever the algorithm does with ĝ is
post-processing. On several ranks the sum over the batch is a sum over ranks, and the noise is rank
0's. Parameter groups with different step sizes have their own z: the gradient is clipped over all
groups together, and the smallest z is charged, which bounds the release whose groups are scaled to
equal noise.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..clipping.gradient_source import GradientSource, HooksGradientSource
from ..data_parallel import STEP, Ranks, require_alone
from ..fixed_tensors import CHANGED, FixedTensors
from ..model_state import ModelAsChecked
from ..noise import GaussianNoise, add_gaussian
from ..poisson_loader import PoissonSampler

_log = logging.getLogger("torch_dpbayes")

LogPrior = Callable[[Mapping[str, Tensor]], Tensor]

_LARGEST_LR = 1e30
_LARGEST_NOISE_MULTIPLIER = 1e30
_MANY_RECORDS = 2**14
_ORDINARY = 1e9  # numbers below it cannot overflow float32 in one step
_OPTIONS_OF_ALL_GROUPS = (
    "num_data",
    "expected_batch_size",
    "max_grad_norm",
    "noise_multiplier",
    "temperature",
    "sampling",
)
_OPTIONS_OF_NO_GROUP = frozenset(("weight_decay", "momentum", *_OPTIONS_OF_ALL_GROUPS))


# parameters, groups, states
_Snapshot = tuple[list[Tensor], list[dict[str, Any]], list[dict[str, Any]]]


class Part:
    """One parameter group's share of a step: what an algorithm's ``_update`` gets.

    Attributes:
        group: torch's parameter group with its options.
        parameters: its trainable parameters.
        gradient: ĝ over all of them, one flat vector; a step's update may use it up.
        gradients: the same memory, shaped like the parameters.
        noise_multiplier: z of this step; infinite where lr = 0 and nothing was taken from the data.
    """

    def __init__(self, group: dict[str, Any], parameters: list[Tensor], gradient: Tensor) -> None:
        self.group, self.parameters, self.gradient = group, parameters, gradient
        self.gradients = self.views(gradient)
        self.noise_multiplier = math.inf
        self.kept: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """``flat`` by pieces that are shaped like the parameters."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


class _Layout:
    """Where the trainable parameters of one step live in the flat buffer, which holds Σ clip(g),
    then S, then ĝ.

    For several ranks it has one number more, 0 unless a rank failed after all of them had agreed to
    take the step.
    """

    def __init__(
        self,
        members: list[tuple[dict[str, Any], list[str], list[Tensor]]],
        second_moment: int,
        records: float,
        *,
        is_shared: bool,
    ) -> None:
        self.parameters = [p for _, _, parameters in members for p in parameters]
        self.names = [name for _, names, _ in members for name in names]
        self.named = list(zip(self.names, self.parameters, strict=True))
        self.records = records
        self.dtype, self.device = _sum_dtype(self.parameters, records), self.parameters[0].device
        self.norm_dtype = (
            None if all(p.dtype is self.dtype for p in self.parameters) else self.dtype
        )
        sizes = [p.numel() for p in self.parameters]
        self.description = repr((self.names, sizes, self.dtype))
        self.buffer = torch.zeros(
            sum(sizes) + second_moment + is_shared, dtype=self.dtype, device=self.device
        )
        self.gradient, self.second_moment, self.failed = self.buffer.split(
            [sum(sizes), second_moment, int(is_shared)]
        )
        self.pieces = list(self.gradient.split(sizes))
        totals = [sum(p.numel() for p in parameters) for _, _, parameters in members]
        self.parts = [
            Part(group, parameters, flat)
            for (group, _, parameters), flat in zip(
                members, self.gradient.split(totals), strict=True
            )
        ]

    def holds(self, members: list[tuple[dict[str, Any], list[str], list[Tensor]]]) -> bool:
        if len(self.parts) != len(members) or (
            self.parameters[0].device,
            _sum_dtype(self.parameters, self.records),
        ) != (self.device, self.dtype):
            return False
        for part, (group, _, parameters) in zip(self.parts, members, strict=True):
            if part.group is not group or [id(p) for p in part.parameters] != [
                id(p) for p in parameters
            ]:
                return False
        return True


class PrivateOptimizer(Optimizer):
    """Base of the private samplers. A subclass says how much noise it wants and what it does with
    the noisy gradient.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
            ``lr``, ``prior_std`` and ``prior_mean`` may differ between groups.
        defaults: the options that a group may override.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; under Poisson sampling B/N is the sampling rate.
        max_grad_norm: clip norm C of one record's gradient, over all parameters together; at least
            1e-12.
        noise_multiplier: floor of the noise std on the clipped sum, in units of C.
        temperature: T of the target ∝ exp(−U/T).
        log_prior: ``{name: parameter} -> log p(θ)``, a scalar, instead of the Gaussian prior; needs
            named parameters. It must not look at data.
        sampling: what is known about batches with B < N. ``"poisson"`` asserts that every batch is
            an independent Poisson draw at rate B/N, stepped on once (``PrivacyEngine.make_private``
            sets this and verifies it). ``"recordwise"`` asserts that who is in a batch does not
            depend on other records: whether a record is in it is a function of this record, of
            public things, and of chance that has nothing to do with other records. A hash of the
            record's name or its date decides like that; a shuffled loader does not. None asserts
            only that what the records hold does not decide who is in a batch. The last two are
            charged at sensitivity 2C without amplification, and None is refused under
            add-or-remove-one, where one record more may change whole batches. Full batches, B = N,
            are charged as such, and their length is checked. In every case a record is in a batch
            at most once, which an optimizer without an engine cannot see: one that is there k times
            (a sampler with replacement, a bootstrap) moves the sum by kC.
        accountant: where the steps are charged. None: an accountant of its own.
        generator: source of the noise, for runs that repeat bit for bit; its seed is then a secret.
            None: operating-system entropy.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        num_data: int,
        expected_batch_size: float,
        max_grad_norm: float,
        noise_multiplier: float,
        temperature: float,
        log_prior: LogPrior | None,
        sampling: str | None,
        accountant: PrivacyAccountant | None,
        generator: torch.Generator | None,
    ) -> None:
        if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
            raise ValueError(
                "num_data must be a positive integer, the public number of records; got"
                f" {num_data!r}"
            )
        _require_positive("expected_batch_size", expected_batch_size)
        if expected_batch_size > num_data:
            raise ValueError(
                f"expected_batch_size = {expected_batch_size} is larger than num_data = {num_data}:"
                " their ratio is the sampling rate"
            )
        _require_positive("max_grad_norm", max_grad_norm)
        if max_grad_norm < 1e-12:
            raise ValueError(
                f"max_grad_norm = {max_grad_norm} is below what float32 norms can resolve; use at"
                " least 1e-12"
            )
        _require_not_negative("noise_multiplier", noise_multiplier)
        if (
            noise_multiplier
            and not events.gaussian_noise_multiplier(noise_multiplier) < _LARGEST_NOISE_MULTIPLIER
        ):
            raise ValueError(
                f"noise_multiplier = {noise_multiplier:g} is noise std / clip bound, and so large"
                f" that steps would overflow: take one below {_LARGEST_NOISE_MULTIPLIER:g}"
            )
        _require_not_negative("temperature", temperature)
        if sampling not in (None, "poisson", "recordwise"):
            raise ValueError(f'sampling must be "poisson", "recordwise" or None, got {sampling!r}')
        if (
            log_prior is not None
            and not math.isinf(defaults["prior_std"])
            and defaults["prior_std"] != 1.0
        ):
            raise ValueError("log_prior replaces the Gaussian prior: leave out prior_std")
        self._num_data = num_data
        self._expected_batch_size = float(expected_batch_size)
        self._max_grad_norm = float(max_grad_norm)
        self._noise_multiplier = float(noise_multiplier)
        self._temperature = float(temperature)
        self._log_prior = log_prior
        self._sampling = sampling
        self._accountant = PrivacyAccountant() if accountant is None else accountant
        self._noise = GaussianNoise(generator)
        self._source: GradientSource = HooksGradientSource()
        self._sampler: PoissonSampler | None = None
        self._fixed: FixedTensors | None = None
        self._as_checked: ModelAsChecked | None = None
        self._ranks: Ranks | None = None
        self._is_alone = False  # on purpose, in a process group of several ranks
        self._start_afresh()
        super().__init__(params, defaults)
        if log_prior is not None and any("param_names" not in group for group in self.param_groups):
            raise ValueError(
                "log_prior takes parameters by name: construct the optimizer with"
                " model.named_parameters()"
            )

    def _start_afresh(self) -> None:
        self._layout: _Layout | None = None
        # whether the buffer holds parts of a draw that BatchMemoryManager splits
        self._pending = False
        self._pending_records = 0
        self._pending_draw = -1
        self._largest = math.inf  # at least the norm of the largest parameter before the step
        self._last_event: tuple[Any, events.DpEvent] | None = None
        self._stated = ""  # on what the accountant was told that independence of records rests
        self._compared_pass = -1  # of the loader, in which the ranks compared their histories
        self._warned = False

    # -- what an algorithm's file provides ---------------------------------------------------------

    @abstractmethod
    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        """z_L of a group whose ``lr`` is positive."""

    @abstractmethod
    def _group_temperature(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """Temperature at which the Gaussian noise alone would sample."""

    @abstractmethod
    def _free_lr(self) -> float:
        """The largest lr whose Langevin noise is at least the floor."""

    @abstractmethod
    def _update(self, parts: list[Part]) -> None:
        """New parameters from the noisy gradient ĝ of the mean potential, in place."""

    # torch's GradScaler skips steps when a gradient overflows, which one record decides: step()
    # refuses instead of being skipped
    _step_supports_amp_scaling = True

    # -- public constants and reports --------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """Where every step is charged."""
        return self._accountant

    @property
    def num_data(self) -> int:
        """N, the public number of records."""
        return self._num_data

    @property
    def expected_batch_size(self) -> float:
        """B, the public expected batch size."""
        return self._expected_batch_size

    @property
    def max_grad_norm(self) -> float:
        """C, the clip norm of one record's gradient."""
        return self._max_grad_norm

    @property
    def noise_multiplier(self) -> float:
        """z_min, the floor under the noise multiplier."""
        return self._noise_multiplier

    @property
    def temperature(self) -> float:
        """T of the target ∝ exp(−U/T)."""
        return self._temperature

    @property
    def sampling(self) -> str | None:
        """``"poisson"``, ``"recordwise"``, or None for batches of which neither is stated."""
        return self._sampling

    @property
    def langevin_noise_multiplier(self) -> float:
        """z_L: the sampler's own noise in units of C; the smallest over the groups. Infinite
        where every lr is 0.
        """
        return min(self._langevin(group) for group in self._trained_groups())

    @property
    def effective_noise_multiplier(self) -> float:
        """z in force, which is what a step is charged for; the smallest over the groups."""
        return min(self._multiplier(group) for group in self._trained_groups())

    @property
    def effective_temperature(self) -> float:
        """Temperature of the Gaussian noise in force; the largest over the groups.

        For q < 1 the minibatch noise comes on top, so this is a lower bound on the temperature of
        the samples.
        """
        return max(
            self._group_temperature(g, self._multiplier(g)) if g["lr"] > 0 else 0.0
            for g in self._trained_groups()
        )

    @property
    def free_lr(self) -> float:
        """The largest lr at which privacy is free: the sampler's own noise reaches the floor.
        Infinite without a floor.
        """
        return math.inf if self._noise_multiplier == 0 else self._free_lr()

    @property
    def independence(self) -> str:
        """How records are kept apart in the model, ``"by construction"`` or ``"tested on
        made-up records"``, and in the loss.
        """
        return f"{self._source.independence}, {self._source.loss_state}"

    def _trained_groups(self) -> list[dict[str, Any]]:
        """Groups that are not frozen; all of them if every one is."""
        return [
            group for group in self.param_groups if any(p.requires_grad for p in group["params"])
        ] or self.param_groups

    # -- the private step --------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Charge one release to the accountant, draw it, and move the parameters.

        Args:
            closure: evaluates the model and calls ``backward()``, as in torch; its value is
                returned as it is.

        Raises:
            PrivacyBudgetExceeded: the step does not fit into the budget; parameters, state and
                history are as they were.
            RuntimeError: a parameter has no per-record gradients, the batch is not a fresh draw of
                the private loader, or is not complete; a buffer or a frozen parameter of the model
                was written to since the loader's first batch; or the model is not the one that was
                checked.
            ValueError: parameters or options are not finite.
            FloatingPointError: the step took a parameter beyond its dtype; parameters and state are
                as before, the charge is kept.
        """
        loss = None
        try:
            with nullcontext() if self._ranks is None else self._ranks.reporting():
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                self._step()
        except BaseException:
            self._pending = False
            if self._layout is not None:
                self._layout.buffer.zero_()  # sums without noise
            raise
        finally:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self._source.discard(parameters)
            for p in parameters:
                p.grad = None  # not private: hooks leave the ordinary gradient there
        return loss

    def _step(self) -> None:
        if hasattr(self, "grad_scale"):
            # the scaler leaves them behind when step() raises
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise RuntimeError(
                "GradScaler scales gradients before they are clipped, and skips steps that one"
                " record's overflow decides: the guarantee would not hold. Use torch.autocast with"
                " bfloat16 and no scaler."
            )
        if self._ranks is None and not self._is_alone:
            require_alone()
        layout = self._current_layout()
        if self._collect(layout):
            if self._fixed is not None and (changed := self._fixed.changed()) is not None:
                raise RuntimeError(CHANGED.format(changed))
            if self._as_checked is not None:
                self._as_checked.require_unchanged()
            self._release(layout)

    def _collect(self, layout: _Layout) -> bool:
        """Add Σ clip(g_i) of the batch to the buffer; False while parts of the draw are
        outstanding.
        """
        self._require_finite(layout)
        is_last = True
        if self._sampler is not None:
            is_last = self._sampler.use()
            # parts of another draw never join this one
            if self._sampler.draw != self._pending_draw:
                self._pending, self._pending_draw = False, self._sampler.draw
        if not self._pending:
            layout.buffer.zero_()
            self._pending, self._pending_records = True, 0
        records = self._add_clipped_sum(layout)
        self._pending_records += records
        self._require_whole(records, self._pending_records if is_last else None)
        if is_last:
            self._pending = False
        return is_last

    def _add_clipped_sum(self, layout: _Layout) -> int:
        return self._source.add_clipped_sum(layout.named, self._max_grad_norm, layout.pieces)

    def _release(self, layout: _Layout) -> None:
        """Charge, add the one Gaussian, and hand ĝ to the algorithm."""
        for part in layout.parts:
            part.noise_multiplier = self._multiplier(part.group)
        smallest = min(part.noise_multiplier for part in layout.parts)
        priors = self._prior_gradients(layout)
        before = None if self._cannot_overflow(layout, priors) else self._snapshot(layout)
        if math.isfinite(smallest):
            self._noise.require_usable(layout.device)
        others = [] if self._ranks is None else self._agree(layout, self._ranks)
        if not math.isfinite(smallest):  # every lr is 0: nothing of the sums is used
            layout.buffer.zero_()
        elif self._ranks is None:
            self.accountant.compose(self._event_of(smallest), label=type(self).__name__)
            self._add_noise(
                layout, smallest, self._noise.next_stream(layout.device, self._hidden(layout))
            )
        else:
            self._release_together(layout, smallest, others, self._ranks)
        if self._sampler is not None:
            self._sampler.retire()
            if (independence := self.independence) != self._stated:
                self.accountant.note(
                    f"{type(self).__name__}: records are independent {independence}"
                )
                self._stated = independence
        start = 0
        for part in layout.parts:
            group, members = part.group, slice(start, start + len(part.parameters))
            start = members.stop
            if priors is not None:
                torch._foreach_add_(part.gradients, priors[members], alpha=1.0 / self._num_data)
            elif math.isfinite(group["prior_std"]):
                weight = 1.0 / (group["prior_std"] ** 2 * self._num_data)
                torch._foreach_add_(part.gradients, part.parameters, alpha=weight)
                if group["prior_mean"] != 0.0:
                    part.gradient.sub_(weight * group["prior_mean"])
        self._update(layout.parts)
        if before is not None:
            self._require_still_finite(layout, before)

    def _agree(self, layout: _Layout, ranks: Ranks) -> list[str]:
        """See that all ranks take the same step; what the noise has to hide of the others, if
        it comes from a generator of the caller's.
        """
        assert self._sampler is not None
        settings = (
            layout.description,
            self._settings(),
            [(*options_of(part.group), part.noise_multiplier) for part in layout.parts],
        )
        numbers = {
            "the settings of the optimizer or its parameters": _digest(repr(settings)),
            "the draw": self._sampler.checksum,
        }
        if self.accountant.path is None:
            is_compared, self._compared_pass = (
                self._compared_pass == self._sampler.passes,
                self._sampler.passes,
            )
            numbers["the number of releases that their accountants hold"] = (
                0 if is_compared else len(self.accountant)
            )
        compared = len(numbers)
        if self._noise.generator is not None:
            numbers["the sum"] = _digest(layout.buffer)
        rows = ranks.agree(STEP, numbers, compare=compared, norm=self._largest)
        return [repr([row[compared] for row in rows])] if self._noise.generator is not None else []

    def _release_together(
        self, layout: _Layout, smallest: float, others: list[str], ranks: Ranks
    ) -> None:
        """Charge, add the one Gaussian to rank 0's sum, and add up the ranks'."""
        error = None
        try:
            # a ledger is charged by rank 0, in memory every rank keeps a record
            if ranks.rank == 0 or self.accountant.path is None:
                self.accountant.compose(self._event_of(smallest), label=type(self).__name__)
            stream = self._noise.next_stream(
                layout.device, [*others, *self._hidden(layout)] if ranks.rank == 0 else ()
            )
            self._add_noise(layout, smallest, stream if ranks.rank == 0 else None)
        except Exception as reason:
            error = reason
            layout.buffer.zero_()
            layout.failed.fill_(1.0)
        ranks.add_up(layout.buffer)
        if float(layout.failed) > 0:
            ranks.raise_together(error)

    def _hidden(self, layout: _Layout) -> Iterator[Tensor | str]:
        """All that a release is made of."""
        yield repr((self._settings(), [part.noise_multiplier for part in layout.parts]))
        yield layout.buffer
        yield from layout.parameters

    def _add_noise(self, layout: _Layout, smallest: float, stream: torch.Generator | None) -> None:
        """Σ clip(g_i) turns into S/B, for each group with its own z; without a stream into a
        rank's share of it that has no noise.
        """
        for part in layout.parts:
            if not math.isfinite(part.noise_multiplier):
                part.gradient.zero_()
            elif stream is None:
                part.gradient.div_(self._expected_batch_size)
            else:
                add_gaussian(
                    part.gradient,
                    part.noise_multiplier * self._max_grad_norm,
                    self._expected_batch_size,
                    stream,
                )

    def _kept(self, part: Part, name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector that an algorithm keeps between steps, one number for each of the part's, 0 at
        first: flat, and its views.

        The views are shaped like the parameters and stand in ``self.state``, where ``state_dict``
        and ``deepcopy`` find them.
        """
        kept = part.kept.get(name)
        if kept is None or self.state[part.parameters[0]].get(name) is not kept[1][0]:
            flat = torch.zeros_like(part.gradient)
            kept = part.kept[name] = (flat, part.views(flat))
            for p, view in zip(part.parameters, kept[1], strict=True):
                if name in self.state[p]:
                    view.copy_(self.state[p][name])
                self.state[p][name] = view
        return kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last backward pass, per-record ones included."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._source.zero_grad(parameters)
        if not set_to_none:
            super().zero_grad(False)
            return
        for p in parameters:
            p.grad = None

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Called by Opacus' ``BatchMemoryManager`` before each part of a draw; ``do_skip``
        says that more parts follow.
        """
        if self._sampler is None:
            raise RuntimeError(
                "BatchMemoryManager needs the loader that PrivacyEngine.make_private returns:"
                " without it the parts of two batches cannot be told apart, and a record in both"
                " would exceed the clip bound."
            )
        self._sampler.delivered_part(is_last=not do_skip)

    # -- what a step is charged for ----------------------------------------------------------------

    def _event(self, noise_multiplier: float, sampling: str | None) -> events.DpEvent:
        """The event of one step, in noise std / clip bound; the accountant turns it into
        noise / sensitivity.
        """
        z = float(noise_multiplier)
        rate = self._expected_batch_size / self._num_data
        if z == 0.0:
            return events.NonPrivateDpEvent()
        if rate == 1.0:
            return events.GaussianDpEvent(z)
        if sampling == "poisson":
            return events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(z))
        if sampling == "recordwise":
            return events.RecordwiseBatchGaussianDpEvent(z)
        if self.accountant.neighboring != "replace_one":
            raise ValueError(
                "who is in these batches is not known, and one record more may change them all: use"
                ' PrivacyEngine.make_private, PrivacyAccountant(neighboring="replace_one"), or'
                ' sampling="recordwise" if no record\'s place depends on others.'
            )
        return events.UnspecifiedBatchGaussianDpEvent(z)

    def _event_of(self, noise_multiplier: float) -> events.DpEvent:
        """:meth:`_event` of this optimizer's own steps, made once for as long as nothing
        changes.
        """
        key = (noise_multiplier, self._sampling)
        if self._last_event is None or self._last_event[0] != key:
            self._last_event = (key, self._event(noise_multiplier, self._sampling))
            if (
                isinstance(self._last_event[1], events.UnspecifiedBatchGaussianDpEvent)
                and not self._warned
            ):
                self._warned = True
                warnings.warn(
                    "steps are charged at sensitivity 2C and without amplification, for nothing is"
                    " known about how batches are drawn, except that no record may be in one of"
                    " them twice. Poisson batches cost far less: model, optimizer, loader ="
                    " torch_dpbayes.PrivacyEngine().make_private(module=model,"
                    f" optimizer=partial({type(self).__name__}, lr=...), data_loader=loader,"
                    " max_grad_norm=...)",
                    stacklevel=7,
                )
        return self._last_event[1]

    def _langevin(self, group: dict[str, Any]) -> float:
        if not group["lr"] > 0:
            return math.inf
        noise_multiplier = self._group_langevin_noise_multiplier(group)
        if not noise_multiplier < _LARGEST_NOISE_MULTIPLIER:
            raise ValueError(
                f"lr = {group['lr']} is so small that the sampler's own noise at temperature"
                f" {self._temperature} overflows (noise multiplier {noise_multiplier:.3g}), and a"
                " step would move nothing. Use a larger lr, 0 to leave the group as it is, or"
                " temperature=0."
            )
        return noise_multiplier

    def _multiplier(self, group: dict[str, Any]) -> float:
        """z of a group. lr = 0 uses nothing of the gradient: the floor applies, and without a
        floor nothing is released.
        """
        self._require_options(group)
        if not math.isfinite(group["prior_mean"]):
            raise ValueError(f"prior_mean = {group['prior_mean']} is not finite")
        _require_positive("prior_std", group["prior_std"], allow_infinite=True)
        _require_number("lr", group["lr"])
        if not 0 <= group["lr"] < _LARGEST_LR:
            raise ValueError(
                f"lr = {group['lr']} is negative, not finite, or so large that a step overflows"
            )
        if group["lr"] == 0:
            return self._noise_multiplier or math.inf
        return max(self._langevin(group), self._noise_multiplier)

    def _require_whole(self, records: int, total: int | None) -> None:
        """The batch is the one that was delivered, every record once; ``total`` is that of a
        draw which it completes.
        """
        if self._sampler is not None:
            if records != self._sampler.part_size or total not in (None, self._sampler.size):
                raise RuntimeError(
                    "the gradients of this step do not belong to the batch that the private loader"
                    " delivered: a record must appear once, and all records of the draw must be"
                    " there. Pass each batch whole through the model once, then step()."
                )
        elif self._expected_batch_size == self._num_data:
            # neighbouring data sets may be one record longer or shorter, and must not be told apart
            # by an error
            if abs(records - self._num_data) > 1:
                raise RuntimeError(
                    f"expected_batch_size = num_data = {self._num_data} declares full batches, but"
                    " this batch is not all of the data: it would be charged too little. State the"
                    " batch size, or use PrivacyEngine.make_private."
                )

    def _require_finite(self, layout: _Layout) -> None:
        norms = torch._foreach_norm(layout.parameters, 2, dtype=layout.norm_dtype)
        # or more; NaN if any is
        self._largest = (
            sum(map(float, norms)) if len(norms) <= 4 else float(torch.stack(norms).sum())
        )
        if not math.isfinite(self._largest) and (broken := _not_finite(layout)):
            raise ValueError(
                f"parameter {broken!r} is not finite: every record's gradient would count as zero."
                " The lr is probably too large; go back to a saved state. Nothing was charged for"
                " this step."
            )

    # One step cannot take numbers of ordinary size beyond what float32 holds. Only where they are
    # not, a step keeps what it may have to undo.

    def _cannot_overflow(self, layout: _Layout, priors: list[Tensor] | None) -> bool:
        bound = self._largest
        steepest = 0.0 if priors is None else float(torch.stack(torch._foreach_norm(priors)).amax())
        for part in layout.parts:
            noise = part.noise_multiplier if math.isfinite(part.noise_multiplier) else 0.0
            scale = (self._num_data + 12 * noise) * self._max_grad_norm / self._expected_batch_size
            pull = steepest if priors is not None else self._largest / part.group["prior_std"] ** 2
            bound = max(
                bound,
                scale,
                part.group["lr"] * scale,
                part.group["lr"],
                pull,
                part.group["lr"] * pull,
            )
        return bound < _ORDINARY and all(p.dtype is not torch.float16 for p in layout.parameters)

    def _snapshot(self, layout: _Layout) -> _Snapshot:
        return (
            [p.detach().clone() for p in layout.parameters],
            [dict(group) for group in self.param_groups],
            [
                {
                    name: v.clone() if isinstance(v, Tensor) else v
                    for name, v in self.state[p].items()
                }
                for p in layout.parameters
            ],
        )

    def _require_still_finite(self, layout: _Layout, before: _Snapshot) -> None:
        parameters, groups, states = before
        broken = _not_finite(layout)
        for group in self.param_groups:
            kept = (
                name
                for name, value in group.items()
                if name != "prior_std" and isinstance(value, float) and not math.isfinite(value)
            )
            broken = broken or next(kept, "")
        if not broken:
            return
        for group, old_group in zip(self.param_groups, groups, strict=True):
            group.clear()
            group.update(old_group)
        for p, old, old_state in zip(layout.parameters, parameters, states, strict=True):
            p.copy_(old)
            self.state[p].clear()
            self.state[p].update(old_state)
        for part in layout.parts:
            part.kept.clear()  # built anew from the state
        raise FloatingPointError(
            f"{broken!r} is not finite after this step: the lr"
            f" ({', '.join(str(g['lr']) for g in groups)}) is too large for the prior or the dtype,"
            " and the iterates grow without bound. Parameters and state are back at the last"
            " finite ones; the step's charge is kept, for its noisy gradient was used. Use a"
            " smaller lr."
        )

    def _prior_gradients(self, layout: _Layout) -> list[Tensor] | None:
        """∇r for a ``log_prior``; the Gaussian prior is added in place instead."""
        if self._log_prior is None:
            return None
        with torch.enable_grad():
            named = {
                name: p.detach().requires_grad_()
                for name, p in zip(layout.names, layout.parameters, strict=True)
            }
            value = self._log_prior(named)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError(
                    "log_prior must return a scalar tensor, the log density of the parameters"
                )
            gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        found = [
            torch.zeros_like(p) if g is None else -g
            for p, g in zip(layout.parameters, gradients, strict=True)
        ]
        if not all(bool(torch.isfinite(g).all()) for g in found):
            raise ValueError("the gradient of log_prior is not finite at the current parameters")
        return found

    # -- groups, copies, checkpoints ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ``lr``, ``prior_std`` and ``prior_mean`` are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._require_options(group)
            _require_positive("lr", group["lr"])
            _require_positive("prior_std", group["prior_std"], allow_infinite=True)
            _require_number("prior_mean", group["prior_mean"])
            if not math.isfinite(group["prior_mean"]):
                raise ValueError(f"prior_mean must be finite, got {group['prior_mean']}")
            for p in group["params"]:
                if not p.is_floating_point():
                    raise TypeError(
                        f"parameters must be real floating-point tensors, got {p.dtype}"
                    )
        except Exception:
            self.param_groups.pop()
            raise
        self._layout = None
        self._pending = False

    def _require_options(self, group: dict[str, Any]) -> None:
        if _OPTIONS_OF_NO_GROUP.isdisjoint(group):
            return
        if foreign := [
            name for name in group if name in _OPTIONS_OF_NO_GROUP and name not in self.defaults
        ]:
            raise ValueError(
                f"{foreign[0]} is not an option of a parameter group of {type(self).__name__}: its"
                f" groups take {', '.join(self.defaults)}. Set it for all groups when the optimizer"
                " is made."
            )

    def _current_layout(self) -> _Layout:
        members: list[tuple[dict[str, Any], list[str], list[Tensor]]] = []
        for i, group in enumerate(self.param_groups):
            given = group.get(
                "param_names", [f"{j} of group {i}" for j in range(len(group["params"]))]
            )
            trainable = [
                (name, p) for name, p in zip(given, group["params"], strict=True) if p.requires_grad
            ]
            if trainable:
                members.append((group, [name for name, _ in trainable], [p for _, p in trainable]))
        if not members:
            raise RuntimeError("every parameter is frozen: there is nothing to sample")
        if self._layout is not None and self._layout.holds(members):
            return self._layout
        parameters = [p for _, _, trainables in members for p in trainables]
        if len({p.device for p in parameters}) > 1:
            raise RuntimeError(
                "the parameters live on several devices; one norm per record needs them on one"
            )
        self._pending = False
        second_moment = self._second_moment_size(sum(p.numel() for p in parameters))
        self._layout = _Layout(
            members, second_moment, self._expected_batch_size, is_shared=self._ranks is not None
        )
        if self._fixed is not None:
            self._fixed.look_closely()
        return self._layout

    def _second_moment_size(self, num_parameters: int) -> int:
        """How many numbers a step releases beside the gradient."""
        return 0

    def _bind(
        self,
        source: GradientSource,
        sampler: PoissonSampler,
        fixed: FixedTensors,
        as_checked: ModelAsChecked,
        *,
        is_alone: bool,
    ) -> None:
        """``PrivacyEngine`` only: take gradients from ``source`` and verify every step.

        It is compared with the draws of ``sampler``, the ``fixed`` tensors and the model
        ``as_checked``. ``is_alone`` says that the other ranks of a process group, if there is one,
        have nothing to do with it.
        """
        self._source, self._sampler, self._fixed, self._as_checked = (
            source,
            sampler,
            fixed,
            as_checked,
        )
        self._ranks, self._is_alone = sampler.ranks, is_alone
        self._sampling = "poisson"
        self._pending = False
        self._layout = None
        # Gradients taken before a batch was delivered are not that batch's; without this, those of
        # an earlier draw could pass for it.
        parameters = [p for group in self.param_groups for p in group["params"]]

        def before_delivery() -> None:
            source.discard(parameters)
            fixed.begin()

        sampler.before_delivery = before_delivery

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        """A copy that charges the same accountant and draws its own noise."""
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        shared = {
            k: v
            for k, v in self.__dict__.items()
            if k.startswith("_") and not k.startswith("_optimizer_")
        }
        copy.__dict__.update(shared)
        Optimizer.__setstate__(copy, deepcopy(Optimizer.__getstate__(self), memo))
        copy._noise = GaussianNoise()
        if any(
            a is not b
            for g, h in zip(self.param_groups, copy.param_groups, strict=True)
            for a, b in zip(g["params"], h["params"], strict=True)
        ):
            # of a copied model, which needs hooks of its own
            copy._source, copy._fixed, copy._as_checked = HooksGradientSource(), None, None
        copy._start_afresh()
        return copy

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: a copy would draw the same noise and charge"
            " another accountant. Save state_dict()."
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's state, the accountant's history, and the streams of noise and sampling if
        the caller passed ``generator=``.
        """
        state = super().state_dict()
        private: dict[str, Any] = {
            "algorithm": type(self).__name__,
            "shapes": [[list(p.shape) for p in group["params"]] for group in self.param_groups],
            "accountant": self.accountant.state_dict(),
            "independence": self.independence,
        }
        if self._noise.generator is not None:
            private["noise"] = self._noise.generator.get_state()
        if self._sampler is not None and self._sampler.has_user_generator:
            private["sampler"] = self._sampler.position()
        state["private_step"] = private
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume. What the saved run was charged must be on this accountant: an empty one takes it
        over.

        Releases of other runs never stand for the saved run's, equal ones included. Several copies
        of one state may be resumed: with one ledger (``PrivacyAccountant(path=...)``) all are
        counted; in memory none knows of the others, which a line in the log and
        ``accountant.summary()`` say.

        Raises:
            ValueError: the state belongs to another optimizer or to other parameters, or the
                accountant does not hold what the saved run was charged.
        """
        private = state_dict.get("private_step")
        if private is None or private["algorithm"] != type(self).__name__:
            other = "a non-private optimizer" if private is None else private["algorithm"]
            raise ValueError(f"this is the state of {other}, not of {type(self).__name__}")
        if private["shapes"] != [
            [list(p.shape) for p in group["params"]] for group in self.param_groups
        ]:
            raise ValueError(
                "the state belongs to parameters of another number or other shapes than this"
                " optimizer's"
            )
        self._resume_accountant(private["accountant"])
        draws_again = (
            "sampler" in private and self._sampler is not None and self._sampler.has_user_generator
        )
        if draws_again and len(self.accountant) > _releases(private["accountant"]):
            raise ValueError(
                "the accountant was charged after this state was saved. Its generator would draw"
                " those batches again, to be released on with other noise, which costs more than"
                " the charges say: leave out generator= of the DataLoader."
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "private_step"})
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(
            saved_ids, (p for group in self.param_groups for p in group["params"]), strict=True
        ):
            for name, value in state_dict["state"].get(i, {}).items():
                # torch rounds it to the parameter's dtype
                if isinstance(value, Tensor) and value.dtype != p.dtype:
                    self.state[p][name] = value.detach().clone().to(p.device)
        self._start_afresh()
        if "noise" in private and self._noise.generator is not None:
            self._noise.generator.set_state(private["noise"])
        if draws_again and self._sampler is not None:
            self._sampler.resume(private["sampler"])

    def _settings(self) -> dict[str, Any]:
        """On which the law of a release depends."""
        return {name: getattr(self, name) for name in _OPTIONS_OF_ALL_GROUPS}

    def _resume_accountant(self, saved: dict[str, Any]) -> None:
        accountant, releases = self.accountant, len(self.accountant)
        speaks = self._ranks is None or self._ranks.rank == 0
        if not speaks and accountant.path is None and releases >= _releases(saved):
            return  # the state names the job of rank 0, which looks closer and adds the noise
        accountant.resume(saved)
        if speaks and accountant.path is None and not releases and len(accountant):
            _log.warning(
                "resumed with an accountant in memory: what was released after this state was"
                " saved, or from another copy of it, is not counted. PrivacyAccountant(path=...)"
                " counts all of them."
            )


def _releases(saved: dict[str, Any]) -> int:
    """How many a saved accountant held."""
    return sum(int(count) for _, count, *_ in saved["history"])


def options_of(group: dict[str, Any]) -> list[Any]:
    """What a parameter group may have of its own."""
    return [group["lr"], group["prior_std"], group["prior_mean"]]


def _digest(value: Tensor | str) -> int:
    """64 bits of a hash."""
    code = value.encode() if isinstance(value, str) else value.cpu().view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(code, digest_size=8).digest(), "little", signed=True)


def _not_finite(layout: _Layout) -> str:
    """Name of a parameter that is not finite, or an empty string."""
    return next((name for name, p in layout.named if not bool(torch.isfinite(p).all())), "")


def _sum_dtype(parameters: list[Tensor], records: float) -> torch.dtype:
    """Of norms, sums and noise: float64 where a parameter has it or where so many records are
    added that float32 would round by more than 10⁻³·C.
    """
    wide = records >= _MANY_RECORDS or any(p.dtype == torch.float64 for p in parameters)
    return torch.float64 if wide else torch.float32


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, (float, int, Tensor, Real)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _require_positive(name: str, value: float, *, allow_infinite: bool = False) -> None:
    _require_number(name, value)
    if not value > 0 or (math.isinf(value) and not allow_infinite):
        raise ValueError(
            f"{name} must be positive{'' if allow_infinite else ' and finite'}, got {value}"
        )


def _require_not_negative(name: str, value: float) -> None:
    _require_number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be zero or positive and finite, got {value}")
