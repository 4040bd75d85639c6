"""The front door: model, optimizer and loader in, their private versions out."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import opacus
import torch
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from . import __version__
from .accounting.accountant import PrivacyAccountant
from .accounting.calibration import calibrated
from .accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from .clipping.bookkeeping import BookkeepingGradientSource
from .clipping.gradient_source import GradientSource, HooksGradientSource
from .clipping.isolated import IsolatedGradientSource
from .clipping.mapped_forward import Loss
from .clipping.record_map import CannotBeMapped
from .data_parallel import CALIBRATION, Ranks, refuse_wrapped, require_alone
from .fixed_tensors import FixedTensors, forward_passes_leave_buffers
from .model_checks import Unrecorded, check_layers, check_mapped_model, check_model, made_up_inputs
from .model_state import ModelAsChecked, global_hooks
from .noise import stream_position
from .optim.base import PrivateOptimizer, options_of
from .poisson_loader import PoissonLoader

OptimizerFactory = Callable[..., PrivateOptimizer]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_log = logging.getLogger("torch_dpbayes")


@dataclass(frozen=True)
class Plan:
    """What a run will cost and sample, known before anything is spent."""

    langevin_noise_multiplier: float
    noise_multiplier: float
    effective_noise_multiplier: float
    effective_temperature: float
    temperature: float
    sample_rate: float
    steps: int
    epsilon: float
    delta: float
    target_epsilon: float | None
    lr: float
    free_lr: float

    def __str__(self) -> str:
        lines = [
            (
                f"noise multiplier      z_L = {self.langevin_noise_multiplier:.4g} (the sampler's"
                f" own), z_min = {self.noise_multiplier:.4g} (the floor); in force:"
                f" {self.effective_noise_multiplier:.4g}"
            ),
            (
                f"temperature           {self.effective_temperature:.4g} from the Gaussian noise;"
                f" asked for: {self.temperature:.4g}"
            ),
            f"steps                 {self.steps} at sampling rate {self.sample_rate:.6g}",
            (
                f"privacy               ({self.epsilon:.4g}, {self.delta:.3g}) at the end, what was"
                " spent before included"
            ),
            f"privacy is free up to lr = {self.free_lr:.4g} (now {self.lr:.4g})",
        ]
        if (
            self.target_epsilon is not None
            and self.langevin_noise_multiplier > self.noise_multiplier > 0
        ):
            colder = (
                self.temperature * (self.noise_multiplier / self.langevin_noise_multiplier) ** 2
            )
            lines.append(
                f"epsilon = {self.target_epsilon:.4g} was asked for, but at temperature"
                f" {self.temperature:.4g} the sampler's own noise decides. lr = {self.free_lr:.4g}"
                f" or temperature = {colder:.3g} would use the rest."
            )
        return "\n".join(lines)


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private, and holds the accountant they share.

    Args:
        accountant: where everything is charged. None: one is made by the first ``make_private``;
            ``make_private_with_epsilon`` gives it the target as a budget that cannot be overrun.
        process_group: the ranks that train one model together, as ``torch.distributed.group.WORLD``
            (which is None, one process, where no process group was initialised). Every rank makes
            the same calls with the same data set, all of whose records each of them may read; batch
            sizes are those of all ranks together. Only rank 0 charges a ledger, which all of them
            have open (``path=``); in memory each rank keeps the same history.

    Raises:
        RuntimeError: another rank failed, was lost or differs from this one; the message says in
            what. Errors of one rank are errors on all.

    **Privacy.** The ranks are one data holder's machines: clipped sums without noise travel between
    them, over connections which ``torch.distributed`` does not encrypt. Who sees only what the
    ranks hand out sees the releases of one process.
    """

    def __init__(
        self,
        accountant: PrivacyAccountant | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self._accountant = accountant
        self._is_alone = (
            process_group is not None and torch.distributed.get_world_size(process_group) == 1
        )
        self._ranks = None if process_group is None or self._is_alone else Ranks(process_group)

    @property
    def accountant(self) -> PrivacyAccountant:
        """The accountant that all optimizers of this engine charge."""
        if self._accountant is None:
            raise RuntimeError(
                "the accountant is made by make_private; pass PrivacyEngine(accountant=...) to have"
                " it earlier"
            )
        return self._accountant

    def make_private(
        self,
        *,
        module: ModuleT,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        max_grad_norm: float | None = None,
        noise_multiplier: float | None = None,
        grad_sample_mode: str | None = None,
        clipping_kernels: Mapping[str, str] | None = None,
        loss_reduction: str = "mean",
        loss: Loss | None = None,
        example_inputs: tuple[Any, ...] | None = None,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """Attach per-record gradients to the model, Poisson sampling to the loader, and both to the
        optimizer.

        The model is checked on made-up records first, in batches of 2 to 33: a record's output must
        not depend on other records, and the recorded gradients must be the gradients of the
        records. The loader is replaced by one that draws every record independently at rate q =
        batch size / number of records. From the first batch on the model's buffers and frozen
        parameters must stay as they are, and from here on its modules, hooks, modes and plain
        attributes: ``forward`` takes what changes, a schedule say, as an argument.

        Args:
            module: the model, in training mode. The same object is returned, with hooks attached.
            optimizer: what makes the optimizer, as ``partial(dpb.optim.DPSGLD, lr=0.25)``; called
                with the named trainable parameters and ``num_data=, expected_batch_size=,
                max_grad_norm=, noise_multiplier=, sampling="poisson", accountant=``. Or a built
                optimizer, whose values hold.
            data_loader: a loader over a map-style data set with a fixed batch size; its order of
                records is not used.
            max_grad_norm: clip norm C of one record's gradient.
            noise_multiplier: floor of the noise std on the clipped sum, in units of C.
            grad_sample_mode: all give the same sum. ``"bookkeeping"``, the default, gets it from
                one ordinary backward pass of a map over records; a model whose program cannot be
                run for one record at a time it runs on whole batches, and says so. ``"isolated"``
                runs everything for one record at a time by ``torch.func``, which takes more time,
                knows no layers, and holds few per-record gradients. ``"hooks"`` are Opacus'
                per-record gradients of whole batches, and leave ``p.grad_sample`` behind.
            clipping_kernels: for book-keeping, ``{layer name: way}`` where another way of computing
                is wanted than the one with the least estimated cost: ``"gram"`` or
                ``"instantiate"`` for linear layers on sequences, ``"gram"``, ``"unfold"``,
                ``"grouped"`` or ``"loop"`` for convolutions.
            loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over the batch. A mean loss
                must divide by the number of records in the batch, as torch's criteria do.
            loss: ``(output, *targets) -> scalar`` of one record, which then runs for each record
                alone: train with ``net.private_loss(x, y).backward()``. None: the loop computes the
                loss from the outputs of the batch.
            example_inputs: positional arguments of the model for two made-up records, where the
                first items of a batch are not what the model takes. No real records.

        Returns:
            The model, the optimizer and the private loader.

        Raises:
            ValueError, TypeError: what is wrong with the model, the loader or the arguments, and
                what to write instead.

        **Privacy.** Nothing is released. Of the data, the number of records is used, which is a
        public constant, and shapes and types of the first record. Every later ``optimizer.step()``
        charges ``PoissonSampledDpEvent(q, GaussianDpEvent(z))``.
        """
        with self._together():
            refuse_wrapped(module)
            loader = _poisson_loader(data_loader, self._ranks)
            built = _build(
                module, optimizer, loader, self._accountant, max_grad_norm, noise_multiplier
            )
            return self._attach(
                module,
                built,
                loader,
                data_loader,
                grad_sample_mode,
                clipping_kernels,
                loss_reduction,
                loss,
                example_inputs,
            )

    def make_private_with_epsilon(
        self,
        *,
        module: ModuleT,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | None = None,
        grad_sample_mode: str | None = None,
        clipping_kernels: Mapping[str, str] | None = None,
        loss_reduction: str = "mean",
        loss: Loss | None = None,
        example_inputs: tuple[Any, ...] | None = None,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """:meth:`make_private` with the noise floor that meets (``target_epsilon``,
        ``target_delta``) after ``epochs`` passes.

        What the accountant was charged before counts. lr and temperature are never changed: where
        the sampler's own noise exceeds the floor, less than the target is spent (:meth:`plan` shows
        it beforehand).

        Args:
            target_epsilon: ε of everything on the accountant after the last epoch.
            target_delta: its δ.
            epochs: passes over the loader.
            module, optimizer, data_loader, max_grad_norm, grad_sample_mode, clipping_kernels,
            loss_reduction, loss, example_inputs: as in
                :meth:`make_private`.

        Raises:
            ValueError: nothing is left of the target, the target exceeds the accountant's budget,
                or a built optimizer's floor is too low.
        """
        with self._together():
            refuse_wrapped(module)
            accountant = self._accountant_for(optimizer, target_epsilon, target_delta)
            loader = _poisson_loader(data_loader, self._ranks)
            built, floor = _build_calibrated(
                module,
                optimizer,
                loader,
                accountant,
                max_grad_norm,
                target_epsilon,
                target_delta,
                epochs,
                self._ranks,
            )
            if built.noise_multiplier < floor:
                raise ValueError(
                    f"the optimizer was built with noise_multiplier = {built.noise_multiplier};"
                    f" epsilon = {target_epsilon} after {epochs} epochs needs at least {floor:.4f}:"
                    " build it with that, or pass a factory"
                )
            return self._attach(
                module,
                built,
                loader,
                data_loader,
                grad_sample_mode,
                clipping_kernels,
                loss_reduction,
                loss,
                example_inputs,
            )

    def plan(
        self,
        *,
        module: nn.Module,
        optimizer: OptimizerFactory | PrivateOptimizer,
        data_loader: DataLoader[Any],
        epochs: int,
        target_delta: float | None = None,
        target_epsilon: float | None = None,
        max_grad_norm: float | None = None,
        noise_multiplier: float | None = None,
    ) -> Plan:
        """What :meth:`make_private` (or, with ``target_epsilon``,
        :meth:`make_private_with_epsilon`) will do; printed (by rank 0) and returned.

        Nothing is spent and nothing is changed. lr is taken to stay what it is.

        Args:
            target_delta: δ; None takes the accountant's.
            module, optimizer, data_loader, epochs, target_epsilon, max_grad_norm, noise_multiplier:
            as for those two.
        """
        accountant = self._accountant_for(optimizer, target_epsilon, target_delta)
        delta = accountant.delta if target_delta is None else target_delta
        if delta is None:
            raise ValueError("target_delta is needed: the accountant has no budget to take it from")
        loader = _poisson_loader(data_loader, self._ranks)
        if target_epsilon is not None:
            if noise_multiplier is not None:
                raise ValueError("target_epsilon sets the floor: leave out noise_multiplier")
            built, _ = _build_calibrated(
                module,
                optimizer,
                loader,
                accountant,
                max_grad_norm,
                target_epsilon,
                delta,
                epochs,
                None,
            )
        else:
            built = _build(module, optimizer, loader, accountant, max_grad_norm, noise_multiplier)
        steps = epochs * len(loader)
        z = built.effective_noise_multiplier
        after = PrivacyAccountant(method=accountant.method, neighboring=accountant.neighboring)
        for charge in accountant.history:
            after.compose(charge.event, charge.count)
        if math.isfinite(z):
            # a built optimizer hears of it from make_private only
            after.compose(built._event(z, "poisson"), steps)
        result = Plan(
            langevin_noise_multiplier=built.langevin_noise_multiplier,
            noise_multiplier=built.noise_multiplier,
            effective_noise_multiplier=z,
            effective_temperature=built.effective_temperature,
            temperature=built.temperature,
            sample_rate=loader.sample_rate,
            steps=steps,
            epsilon=_limit(accountant, delta) if _is_held(accountant) else after.get_epsilon(delta),
            delta=delta,
            target_epsilon=target_epsilon,
            lr=max(float(group["lr"]) for group in built.param_groups),
            free_lr=built.free_lr,
        )
        if self._ranks is None or self._ranks.rank == 0:
            print(result)
        return result

    def _accountant_for(
        self,
        optimizer: OptimizerFactory | PrivateOptimizer,
        epsilon: float | None,
        delta: float | None,
    ) -> PrivacyAccountant:
        """The engine's accountant, else a built optimizer's, else a new one with the target
        as its budget.
        """
        if self._accountant is not None:
            return self._accountant
        if isinstance(optimizer, PrivateOptimizer):
            return optimizer.accountant
        return PrivacyAccountant() if epsilon is None else PrivacyAccountant(epsilon, delta)

    def _together(self) -> AbstractContextManager[None]:
        """What goes wrong inside on one rank is an error on all."""
        if self._ranks is not None:
            return self._ranks.reporting()
        if not self._is_alone:
            require_alone()
        return nullcontext()

    def _attach(
        self,
        module: ModuleT,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader,
        data_loader: DataLoader[Any],
        grad_sample_mode: str | None,
        clipping_kernels: Mapping[str, str] | None,
        loss_reduction: str,
        loss: Loss | None,
        example_inputs: tuple[Any, ...] | None,
    ) -> tuple[ModuleT, PrivateOptimizer, PoissonLoader]:
        """Check the model, then tie model, optimizer and loader together."""
        if grad_sample_mode not in (None, "bookkeeping", "isolated", "hooks"):
            raise ValueError(
                'grad_sample_mode must be "bookkeeping", "isolated" or "hooks", got'
                f" {grad_sample_mode!r}"
            )
        if clipping_kernels and grad_sample_mode in ("isolated", "hooks"):
            raise ValueError('clipping_kernels are those of grad_sample_mode="bookkeeping"')
        _require_own_streams(optimizer, loader)
        if example_inputs is None:
            example_inputs = _to_device_of(
                module, made_up_inputs(loader.collate_fn([loader.dataset[0]]))
            )
        source = _checked_source(
            module,
            grad_sample_mode,
            clipping_kernels,
            loss_reduction,
            loss,
            example_inputs,
            loader.expected_batch_size,
        )
        try:
            if self._ranks is not None:
                _compare(self._ranks, module, optimizer, loader, loss_reduction)
        except BaseException:
            source.remove()
            raise
        source.watch_loss()
        _log.info("records are independent: %s", source.independence)
        fixed = FixedTensors(module)
        module.__dict__["_dpbayes_buffers"] = fixed.values  # for PosteriorSamples
        as_checked = ModelAsChecked(module, source.passing_attributes)
        optimizer._bind(source, loader.sampler_of_draws, fixed, as_checked, is_alone=self._is_alone)
        self._accountant = optimizer.accountant
        if not isinstance(data_loader, PoissonLoader) and (
            self._ranks is None or self._ranks.rank == 0
        ):
            _log.warning(
                "the data loader now draws Poisson batches: each of %d records joins a batch with"
                " probability %.6g, %d batches a pass%s",
                optimizer.num_data,
                loader.sample_rate,
                len(loader),
                "" if self._ranks is None else f", divided among {self._ranks.size} ranks",
            )
        return module, optimizer, loader


def _checked_source(
    module: nn.Module,
    mode: str | None,
    clipping_kernels: Mapping[str, str] | None,
    loss_reduction: str,
    loss: Loss | None,
    inputs: tuple[Any, ...],
    batch_size: float,
) -> GradientSource:
    """Where the model's per-record gradients come from: a map over records where its program
    can be one, else whole batches, tested.
    """

    def checked(
        source: GradientSource, check: Callable[[nn.Module, GradientSource, tuple[Any, ...]], None]
    ) -> GradientSource:
        try:
            with forward_passes_leave_buffers(module):
                check(module, source, inputs)
        except BaseException:
            source.remove()
            raise
        return source

    def check_whole_batches(
        module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]
    ) -> None:
        check_model(module, source, inputs, batch_size)

    if (before := GradientSource.attached_to(module)) is not None:
        before.remove()
    ModelAsChecked.remove_from(module)
    reason = _hooks_on(module)
    if mode == "isolated":
        if reason:
            raise ValueError(reason)
        check_layers(module, is_mapped=True)
        try:
            return checked(
                IsolatedGradientSource(module, loss_reduction=loss_reduction, loss=loss),
                check_mapped_model,
            )
        except CannotBeMapped as error:
            raise ValueError(f'grad_sample_mode="isolated": {error}') from error
    if mode != "hooks" and not reason:
        check_layers(module, is_mapped=True)
        unrecorded: list[str] = []
        while True:
            try:
                source = BookkeepingGradientSource(
                    module,
                    loss_reduction=loss_reduction,
                    clipping_kernels=clipping_kernels,
                    is_mapped=True,
                    unrecorded=unrecorded,
                    loss=loss,
                )
                return checked(source, check_mapped_model)
            except Unrecorded as found:
                if not set(found.names) - set(unrecorded):
                    raise ValueError(
                        f"parameters {found.names} are used outside the model's forward pass"
                    ) from found
                unrecorded += found.names
            except CannotBeMapped as error:
                reason = str(error)
                break
    if loss is not None:
        raise ValueError(
            "loss= runs for each record alone, which this model cannot:"
            f" {reason or 'hooks run on whole batches'}"
        )
    check_layers(module)
    if mode == "hooks":
        return checked(
            HooksGradientSource(module, loss_reduction=loss_reduction), check_whole_batches
        )
    _log.warning(
        "records are kept apart by a test on made-up records only, for the model cannot be run for"
        " one record at a time: %s",
        reason,
    )
    source = BookkeepingGradientSource(
        module, loss_reduction=loss_reduction, clipping_kernels=clipping_kernels
    )
    source.independence += f": {reason}"
    return checked(source, check_whole_batches)


def _hooks_on(module: nn.Module) -> str:
    """Why the model cannot be run for one record at a time: what surrounds its forward pass
    sees whole batches.
    """
    if (
        type(module).__call__ is not nn.Module.__call__
        or {"_call_impl", "_wrapped_call_impl"} & vars(module).keys()
    ):
        return (
            f"{type(module).__name__} has a __call__ of its own, which sees whole batches: write"
            " forward"
        )
    if any(global_hooks().values()):
        return (
            "hooks for all modules are registered (torch.nn.modules.module), which see whole"
            " batches: remove them"
        )
    if any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ):
        return "the model itself has hooks, which see whole batches: put them on a module inside it"
    return ""


def _build(
    module: nn.Module,
    optimizer: OptimizerFactory | PrivateOptimizer,
    loader: PoissonLoader,
    accountant: PrivacyAccountant | None,
    max_grad_norm: float | None,
    noise_multiplier: float | None,
) -> PrivateOptimizer:
    """The optimizer that a factory makes for this model and loader, or the built one if its
    values agree.
    """
    given = {"max_grad_norm": max_grad_norm, "noise_multiplier": noise_multiplier}
    stated = {name: value for name, value in given.items() if value is not None}
    declared: dict[str, float] = {
        "num_data": loader.sampler_of_draws.num_samples,
        "expected_batch_size": loader.expected_batch_size,
    }
    if isinstance(optimizer, PrivateOptimizer):
        built = optimizer
        if accountant is not None and accountant is not built.accountant:
            raise ValueError(
                "engine and optimizer have different accountants: build the optimizer with"
                " accountant=engine.accountant"
            )
    else:
        if isinstance(optimizer, Optimizer):
            lr = optimizer.param_groups[0]["lr"]
            raise TypeError(
                f"{type(optimizer).__name__} is not private: pass"
                f" partial(torch_dpbayes.optim.DPSGLD, lr={lr})"
            )
        if accountant is None:
            accountant = PrivacyAccountant()
        if isinstance(optimizer, partial):
            for name, value in {**stated, **declared, "accountant": accountant}.items():
                if optimizer.keywords.get(name, value) != value:
                    raise ValueError(
                        f"{name} = {optimizer.keywords[name]} in the optimizer factory, but here it"
                        f" is {value}"
                    )
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("every parameter of the model is frozen: there is nothing to sample")
        built = optimizer(
            parameters, **declared, **stated, sampling="poisson", accountant=accountant
        )
        if not isinstance(built, PrivateOptimizer):
            raise TypeError(
                f"the factory made a {type(built).__name__}, which is not one of"
                " torch_dpbayes.optim"
            )
        if built.accountant is not accountant:
            raise ValueError(
                "the factory must pass on the accountant= that it is called with:"
                " PrivacyEngine(accountant=...) chooses it"
            )
    for name, value in {**stated, **declared}.items():
        if not math.isclose(getattr(built, name), value, rel_tol=1e-9):
            raise ValueError(
                f"the optimizer was built with {name} = {getattr(built, name)}, but here it is"
                f" {value}"
            )
    mine = {id(p) for group in built.param_groups for p in group["params"] if p.requires_grad}
    theirs = {id(p) for p in module.parameters() if p.requires_grad}
    if mine != theirs:
        raise ValueError(
            "the optimizer must have exactly the model's trainable parameters, for a record's"
            " gradient is clipped over all of them: use parameter groups for different settings,"
            " and requires_grad_(False) to freeze"
        )
    return built


def _compare(
    ranks: Ranks,
    module: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PoissonLoader,
    loss_reduction: str,
) -> None:
    """Raise on all ranks if they are not about to do the same; then let them draw the same
    batches.
    """
    accountant, sampler, noise = (
        optimizer.accountant,
        loader.sampler_of_draws,
        optimizer._noise.generator,
    )
    history = accountant.state_dict()
    # in memory each rank's accountant is a job of its own, with the same history
    kept = {"ledger": history["ledger"]} if history["ledger"] else {**history, "jobs": None}
    values = hashlib.blake2b(digest_size=16)
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            values.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
    constants = (bool, int, float, str, type(None))
    settings = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, constants) and not name.startswith("_pending")
    }
    ranks.require_backend_for(next(module.parameters()).device)
    generators = (
        None if noise is None else stream_position(noise),
        stream_position(sampler.generator) if sampler.has_user_generator else None,
    )
    ranks.compare(
        {
            "the versions of torch_dpbayes, torch and opacus": (
                __version__,
                torch.__version__,
                opacus.__version__,
            ),
            "the number of records": sampler.num_samples,
            "the sampling rate": loader.sample_rate,
            "the records or their order (pass all of the data set on every rank)": (
                loader.records_digests()
            ),
            "the parameters' names, shapes or types": [
                (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
            ],
            "the kind of device": next(module.parameters()).device.type,
            "the initial parameters or buffers (call torch.manual_seed before the model is"
            " built, or load one state_dict)": (values.hexdigest()),
            "the algorithm": type(optimizer).__name__,
            "the settings of the optimizer": settings,
            "the parameter groups' settings": [
                (options_of(group), len(group["params"])) for group in optimizer.param_groups
            ],
            "loss_reduction": loss_reduction,
            "the accountant's settings": (
                accountant.epsilon,
                accountant.delta,
                accountant.method,
                accountant.neighboring,
            ),
            "the accountant's history (one that is kept in a file has to be opened on every"
            " rank, and is on one machine)": (kept),
            "the generators of noise and sampling (seeds must be equal)": generators,
        }
    )
    sampler.draw_from(ranks.gather(sampler.generator.get_state() if ranks.rank == 0 else None)[0])


def _poisson_loader(data_loader: DataLoader[Any], ranks: Ranks | None) -> PoissonLoader:
    """A private loader in place of the user's, or an error that says why there is none."""
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(data_loader).__name__}"
        )
    if isinstance(data_loader.dataset, IterableDataset):
        raise ValueError(
            "an iterable data set hands out records in its own order, so no record can be left out"
            " at random, and amplification by sampling does not hold. Use a map-style data set"
            " (__len__ and __getitem__)."
        )
    if isinstance(data_loader, DPDataLoader):  # PoissonLoader included
        return PoissonLoader(data_loader, float(data_loader.sample_rate), ranks)
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "a batch sampler decides itself which records share a batch; amplification holds only"
            " for records drawn independently. Pass DataLoader(dataset, batch_size=...): it is"
            " redrawn by Poisson sampling at that expected size."
        )
    dataset: Any = data_loader.dataset
    num_data = len(dataset)
    sampler: Any = data_loader.sampler
    if (
        type(sampler) not in (SequentialSampler, RandomSampler)
        or getattr(sampler, "replacement", False)
        or len(sampler) != num_data
    ):
        raise ValueError(
            f"{type(sampler).__name__} does not visit every record once a pass: the sampling rate"
            " of a record would not be batch size / number of records. Use torch.utils.data.Subset"
            " for a part of the data, and no sampler; records are divided among ranks without one."
        )
    if data_loader.batch_size > num_data:
        raise ValueError(
            f"batch_size = {data_loader.batch_size} is larger than the data set ({num_data}"
            f" records): use batch_size={num_data}"
        )
    return PoissonLoader(data_loader, data_loader.batch_size / num_data, ranks)


def _build_calibrated(
    module: nn.Module,
    optimizer: OptimizerFactory | PrivateOptimizer,
    loader: PoissonLoader,
    accountant: PrivacyAccountant,
    max_grad_norm: float | None,
    epsilon: float,
    delta: float,
    epochs: int,
    ranks: Ranks | None,
) -> tuple[PrivateOptimizer, float]:
    """The optimizer, and the floor with which ``epochs`` passes on top of the accountant's
    history stay within (epsilon, delta).
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a positive integer, got {epochs!r}")
    if accountant.epsilon is not None and accountant.delta is not None:
        if epsilon > accountant.epsilon or delta > accountant.delta:
            raise ValueError(
                f"the target ({epsilon}, {delta}) exceeds the accountant's budget"
                f" ({accountant.epsilon}, {accountant.delta}), which includes what was spent before"
            )
    if _is_held(accountant) and (epsilon, delta) != (accountant.epsilon, accountant.delta):
        raise ValueError(
            f"this accountant's guarantee is its budget as a whole, ({accountant.epsilon},"
            f" {accountant.delta}), for its charges may depend on earlier outputs"
            " (accountant.summary() says why): no other target can be met. Pass the budget as the"
            " target, or use make_private"
        )
    steps = epochs * len(loader)

    def enough_noise(event: Callable[[float, str], DpEvent]) -> float:
        if ranks is None:
            return _calibrated(event, steps, accountant, epsilon, delta)
        # a ledger may be charged by others meanwhile, and floats may round differently on another
        # machine
        return ranks.from_rank_0(
            CALIBRATION, lambda: _calibrated(event, steps, accountant, epsilon, delta)
        )

    if isinstance(optimizer, PrivateOptimizer):
        built = _build(module, optimizer, loader, accountant, max_grad_norm, None)
        return built, enough_noise(built._event)

    def plain(noise_multiplier: float, sampling: str) -> DpEvent:
        return PoissonSampledDpEvent(loader.sample_rate, GaussianDpEvent(noise_multiplier))

    floor = enough_noise(plain)
    built = _build(module, optimizer, loader, accountant, max_grad_norm, floor)
    needed = enough_noise(built._event)
    if needed > floor:  # it releases more than the gradient
        built = _build(module, optimizer, loader, accountant, max_grad_norm, needed)
    return built, needed


def _is_held(accountant: PrivacyAccountant) -> bool:
    """Whether the guarantee is a limit that was fixed beforehand, whatever is charged."""
    return accountant.is_later_job or accountant.guarantee in ("filter", "registered")


def _limit(accountant: PrivacyAccountant, delta: float) -> float:
    """Epsilon of an accountant whose guarantee is a limit."""
    if accountant.guarantee in ("filter", "registered"):
        return accountant.get_epsilon(delta)
    return (
        accountant.epsilon
        if accountant.epsilon is not None and delta == accountant.delta
        else math.inf
    )


def _calibrated(
    make_event: Callable[[float, str], DpEvent],
    steps: int,
    accountant: PrivacyAccountant,
    epsilon: float,
    delta: float,
) -> float:
    def event(noise_multiplier: float) -> DpEvent:
        return make_event(noise_multiplier, "poisson")

    def fits(noise_multiplier: float) -> bool:
        left = accountant.remaining(event(noise_multiplier))
        return left is None or left >= steps

    low = 0.01
    if not _is_held(accountant):
        low = calibrated(
            event,
            epsilon,
            delta,
            steps,
            accountant.neighboring,
            accountant.history,
            accountant.method,
        )
    high = low
    # the budget is kept by another rule than the one that the target is priced by: method "rdp", or
    # a filter
    while not fits(high):
        low, high = high, 2 * high
        if high > 1e7:
            raise ValueError(
                f"nothing is left of the accountant's budget for {steps} steps, however large the"
                " noise"
            )
    while high > 1.0005 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _require_own_streams(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
    if loader.sampler_of_draws.has_user_generator and optimizer.accountant.path is not None:
        raise ValueError(
            "the data loader's generator= draws the same batches in every job that seeds it alike,"
            " and equal batches with other noise cost more than the independent draws that the jobs"
            " of a ledger are charged for: leave out the DataLoader's generator= (the optimizer may"
            " have one), or use an accountant without path= and publish one run of each seed."
        )
    noise, draws = optimizer._noise.generator, loader.sampler_of_draws.generator
    if noise is not None and (
        noise is draws
        or (noise.device == draws.device and stream_position(noise) == stream_position(draws))
    ):
        raise ValueError(
            "noise and sampling would use the same random numbers, so the noise could be read off"
            " the batches: give the DataLoader and the optimizer generators with different seeds"
        )


def _to_device_of(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    device = next(module.parameters()).device
    return tuple(x.to(device) if hasattr(x, "to") else x for x in inputs)
