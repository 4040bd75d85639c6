"""Attaches the private loader and the source of gradients to model and optimizer, and checks that
all ranks have the same settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

import opacus
import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from .. import __version__
from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import GaussianDpEvent
from ..batches.datasets import records_digests
from ..batches.poisson_loader import PoissonLoader, users_collate
from ..distributed import MAKE_PRIVATE, Ranks, refuse_wrapped
from ..errors import ArgumentError, ArgumentTypeError, DPBayesError, ModelError
from ..noise import digest, stream_position
from ..optim.base import PrivateOptimizer
from ..per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from ..per_sample.derived import FixedTensors
from ..per_sample.gradient_source import GradientSource
from ..per_sample.hooks import HooksGradientSource
from ..per_sample.model_check import check_layers, check_model
from ..per_sample.nested import Keywords, map_tensors, ways_to_pass
from ..release import options_of
from .plan import Run
from .settings import Settings

# the accountant of a model's last training
_accountants: WeakKeyDictionary[nn.Module, ref[PrivacyAccountant]] = WeakKeyDictionary()
_CHARGED_ELSEWHERE = (
    "the model was made private with another accountant before: for records in both trainings,"
    " epsilon is that of both accountants together"
)
_COLLATE_OF_BATCHES = "collate_fn gets whole batches: you vouch that it does not mix records"
_COLLATE_OF_RECORDS = (
    "collate_fn gets each record alone, so it cannot use other records or their number, as mixup"
    " does: vouch by assume_independent_records=True for one that needs whole batches but does not"
    " mix records"
)
_log = logging.getLogger("torch_dpbayes")


def made_private(
    settings: Settings[Any], found: PrivacyAccountant | None, ranks: Ranks | None, *, is_alone: bool
) -> tuple[PrivateOptimizer, PoissonLoader]:
    """Build loader and optimizer, check the model, connect all three, and log warnings.
    ``is_alone``: the process trains alone, even if a process group of several ranks exists.
    """
    module = settings.module
    refuse_wrapped(module)
    run = Run(settings, found, ranks)
    loader, draws, accountant = run.loader, run.draws, run.accountant
    optimizer, floor = run.optimizer()
    if optimizer.noise_multiplier < floor:
        raise ArgumentError(
            f"the optimizer was built with noise_multiplier = {optimizer.noise_multiplier};"
            f" epsilon = {run.target} after {settings.epochs} epochs needs at least"
            f" {floor:.4f}: build it with this noise, or pass a factory",
            code="optimizer-settings",
        )
    _require_own_streams(optimizer, loader)
    is_vouched = settings.assume_independent_records
    loader.recordwise.is_vouched = is_vouched
    source = _source_for(settings, loader, is_in_parts=ranks is not None)
    try:
        if ranks is not None:
            _check_consistent(ranks, settings, optimizer, loader)
    except BaseException:
        source.remove()
        raise
    module.__dict__.pop("_dpbayes_buffers", None)  # written by an earlier training
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # for PosteriorSamples.collect: without a change since now, the parameters are not a sample
    trained = [p for p in module.parameters() if p.requires_grad]
    module.__dict__["_dpbayes_start"] = [(id(p), p._version) for p in trained]
    optimizer.release.bind(source, draws, FixedTensors(module), parameters, is_alone=is_alone)

    _log.info("records are kept apart %s", source.independence)
    if not optimizer.derives_clip_norm:
        optimizer.release.bound_from = (
            f"clip norm {optimizer.max_grad_norm:.4g}, as given: temperature"
            f" {optimizer.effective_temperature:.4g}, noise multiplier"
            f" {optimizer.effective_noise_multiplier:.4g} at the first lr"
        )
    _log.info("%s", optimizer.release.bound_from)
    warnings = []
    if not loader.recordwise.is_torchs:
        warnings.append(_COLLATE_OF_BATCHES if is_vouched else _COLLATE_OF_RECORDS)
    known = _accountants.get(module)
    before = accountant if known is None else known()
    # the earlier accountant may hold charges that this new one does not have
    if (
        not len(accountant)
        and before is not accountant
        and (before is None or before.path is not None or len(before))
    ):
        accountant.note(_CHARGED_ELSEWHERE)
        warnings.append(
            f"{_CHARGED_ELSEWHERE}. Use that accountant, PrivacyEngine(accountant), or a new model."
        )
    _accountants[module] = ref(accountant)
    if not isinstance(settings.data_loader, PoissonLoader):
        warnings.append(f"the data loader is replaced by {loader!r}")
    if run.target is not None:
        warnings += run.warnings(optimizer)
    elif settings.noise_multiplier is not None:
        warnings += optimizer.unused_floor
    if ranks is None or ranks.rank == 0:
        for warning in warnings:
            _log.warning("%s", warning)
    return optimizer, loader


def _source_for(
    settings: Settings[Any], loader: PoissonLoader, *, is_in_parts: bool
) -> GradientSource:
    """Attach the source of per-sample gradients to the model, and check the model on synthetic
    arguments, with the shapes of its own arguments. ``is_in_parts``: ranks share a batch.
    """
    module, mode, examples = settings.module, settings.grad_sample_mode, settings.example_inputs
    is_vouched = settings.assume_independent_records
    if isinstance(module, AbstractGradSampleModule):
        raise ArgumentTypeError(
            f"the model is wrapped in Opacus' {type(module).__name__} already: pass the model"
            " inside, module=model._module",
            code="model-wrapped",
        )
    if mode == "hooks" and not is_vouched:
        raise ModelError(
            'grad_sample_mode="hooks" runs model and loss on whole batches, so they could mix'
            " records: leave it out, or vouch for both by assume_independent_records=True",
            code="model-vouch",
        )
    if examples is not None:
        ways = [(Keywords(examples),) if isinstance(examples, Mapping) else examples]
    else:
        device = next(module.parameters()).device
        record = loader.collate_fn([loader.dataset[0]])
        made = ways_to_pass(module, record, is_loss_apart=settings.loss is not None)
        ways = map_tensors(made, methodcaller("to", device))
    check_layers(module)
    reduction = settings.loss_reduction
    if mode == "hooks":
        return HooksGradientSource(module, loss_reduction=reduction)
    kind = VmapGradientSource if mode == "vmap" else BookkeepingGradientSource
    for shown in (ways, ()):  # without: the first pass shows the arguments
        source = kind(
            module, loss_reduction=reduction, assume_independent=is_vouched, loss=settings.loss
        )
        source.is_in_parts = is_in_parts
        try:
            check_model(module, source, shown)
            break
        except BaseException as error:
            source.remove()
            code = error.code if isinstance(error, DPBayesError) else None
            if code == "model-map" and is_vouched and mode is None:
                return HooksGradientSource(module, loss_reduction=reduction)
            # the loop may pass more arguments, which use more parameters
            if examples is not None or code not in ("model-unused", "model-output"):
                raise
    return source


def _check_consistent(
    ranks: Ranks, settings: Settings[Any], optimizer: PrivateOptimizer, loader: PoissonLoader
) -> None:
    """Raise on all ranks if their settings differ; else make all ranks draw the same batches."""
    module: nn.Module = settings.module
    accountant, sampler = optimizer.accountant, loader.sampler_of_draws
    saved = accountant.state_dict()
    # accountants in memory have different job ids, but the same history
    history = [repr(charge) for charge in accountant.history]
    tensors = [t for t in module.state_dict().values() if isinstance(t, torch.Tensor)]
    device = next(module.parameters()).device
    ranks.require_backend_for(device)
    versions = f"{__version__}, {torch.__version__}, {opacus.__version__}"
    budget = accountant.epsilon, accountant.delta, accountant.method, accountant.neighboring
    ranks.compare(
        {
            "the versions of torch_dpbayes, torch and opacus": versions,
            "the number of records": sampler.num_samples,
            "the sampling rate": loader.sample_rate,
            "the way in which batches are drawn": repr(sampler.event(GaussianDpEvent(1.0))),
            "the parameters' names, shapes or types": [
                (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
            ],
            "the kind of device": device.type,
            "the initial parameters or buffers (call torch.manual_seed before the model is"
            " built, or load one state_dict)": digest(tensors).hex(),
            "the algorithm": type(optimizer).__name__,
            "the settings of the optimizer": optimizer.described(),
            "the parameter groups' settings": [
                (options_of(group), len(group["params"])) for group in optimizer.param_groups
            ],
            "loss_reduction": settings.loss_reduction,
            "the accountant's settings": budget,
            "the accountant's history (open a ledger file on every rank, on one machine)": (
                saved["ledger"] or {**saved, "history": history, "job": None}
            ),
        }
    )
    generators = [
        None if generator is None else stream_position(generator)
        for generator in (optimizer.release.noise.generator, sampler.generator)
    ]
    digests = records_digests(loader.dataset, users_collate(loader))
    secrets = {  # no error message shows these values
        "the records or their order (pass the whole data set on every rank)": digests,
        "the generators of noise and sampling (seeds must be equal)": repr(generators),
    }
    ranks.check_consistent(MAKE_PRIVATE, secrets)
    sampler.draw_as_rank_0(ranks)


def _require_own_streams(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
    noise, draws = optimizer.release.noise.generator, loader.sampler_of_draws.generator
    if draws is None:
        return
    if optimizer.accountant.path is not None:
        raise ArgumentError(
            "the data loader's generator= draws the same batches in every job with the same seed,"
            " and a ledger cannot charge this: leave it out, or the accountant's path=.",
            code="loader-generator",
        )
    if noise is not None and (
        noise is draws
        or (noise.device == draws.device and stream_position(noise) == stream_position(draws))
    ):
        raise ArgumentError(
            "noise and sampling would use the same random numbers, so batches would reveal the"
            " noise: give DataLoader and optimizer generators with different seeds",
            code="loader-generator",
        )
