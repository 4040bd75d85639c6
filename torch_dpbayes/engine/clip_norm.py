"""Two ways to choose a clip norm: a charged count on private data, or free norms on public data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting import events
from ..batches.datasets import reads_private_data
from ..batches.poisson_loader import PoissonLoader
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import check_positive
from ..optim.base import PrivateOptimizer
from ..per_sample.bookkeeping import BookkeepingGradientSource
from ..per_sample.gradient_source import GradientSource
from ..per_sample.nested import tensors_in
from ..per_sample.operations import Delivery
from ..release import Release

Criterion = Callable[[Any, Any], Tensor]
_COUNT = "private_clipped_fraction"  # its name in the accountant's summary


def private_clipped_fraction(
    module: nn.Module,
    optimizer: PrivateOptimizer,
    data_loader: PoissonLoader,
    *,
    noise_multiplier: float,
    max_grad_norm: float | None = None,
    criterion: Criterion = nn.functional.cross_entropy,
) -> float:
    """Measure which share of the gradients is longer than the clip norm, at the current parameters.
    This is charged.

    It takes one Poisson draw of the data and releases ``½ + (Σ_i (1[‖g_i‖ > C] − ½) + z/2·ξ)/B``, ξ
    ~ N(0, 1), clamped to [0, 1]. The indicator rises linearly from .995·C to 1.005·C: an added
    record changes the rounding of all norms, and with a jump this could change many counts. The
    noise has the standard deviation z/(2B). The random size of the draw adds an error that is at
    most as large as the sampling error.

    Args:
        module, optimizer, data_loader: as ``PrivacyEngine.make_private`` returned them. A batch is
            a tuple of the model's inputs and the target.
        noise_multiplier: z > 0.
        max_grad_norm: C; None: the optimizer's.
        criterion: as for :func:`simulate_gradient_norms`.

    Returns:
        The noisy share, between 0 and 1.

    Raises:
        PrivacyBudgetExceeded: the count does not fit into the budget; nothing is released.
        ValueError: an argument is out of range, or the first three are not from one call.

    **Privacy.** A record contributes ±½, so the clip bound of the sum is ½: adding or removing a
    record moves it by ½, replacing one by at most 1 = 2·½. Event: ``PoissonSampledDpEvent(q,
    GaussianDpEvent(z))``, on the optimizer's accountant.
    """
    source = GradientSource.attached_to(module)
    if (
        source is None
        or not isinstance(data_loader, PoissonLoader)
        or optimizer.release.source is not source
        or optimizer.release.draws is not data_loader.sampler_of_draws
    ):
        raise ArgumentError(
            "pass the model, optimizer and loader that one PrivacyEngine.make_private call returned"
        )
    noise_multiplier = events.gaussian_noise_multiplier(noise_multiplier)
    given = optimizer.max_grad_norm if max_grad_norm is None else max_grad_norm
    bound = check_positive("max_grad_norm", given)
    # a separate draw: it does not change the caller's pass over the data
    loader = data_loader.aside()
    draws = loader.sampler_of_draws
    draws.before_delivery = data_loader.sampler_of_draws.before_delivery
    shown = data_loader.expected_batch_size  # the number of records is private
    norms = _norms(module, source, next(iter(loader)), criterion, shown)
    if len(norms) != draws.size:
        raise ArgumentError(
            "the gradients do not contain each record of the draw exactly once: pass each whole"
            " batch through the model once",
            code="step-records",
        )
    share = share_of(optimizer.release, noise_multiplier, bound, norms)
    draws.mark_used()
    return share


def share_of(release: Release, noise_multiplier: float, bound: float, norms: Tensor) -> float:
    """The release of :func:`private_clipped_fraction`, for a separate draw."""
    if release.fixed is not None:
        release.fixed.require_unchanged()
    release.noise.require_usable(norms.device)
    event: events.DpEvent = events.GaussianDpEvent(float(noise_multiplier))
    if release.sample_rate < 1:
        event = events.PoissonSampledDpEvent(release.sample_rate, event)
    release.accountant.compose(event, label=_COUNT)
    release.accountant.note(f"{_COUNT}: records are kept apart {release.source.independence}")
    # a ramp, not a jump: one added record changes the rounding of all norms
    longer = norms.double().nan_to_num(nan=math.inf, posinf=math.inf) / bound
    total = longer.sub(1).mul(100).clamp(-0.5, 0.5).sum()
    hides = (repr((bound, noise_multiplier)), norms)
    noise = release.noise.standard_normal(1, dtype=torch.float64, device=norms.device, hides=hides)
    batch = release.query.expected_batch_size
    share = 0.5 + (total + 0.5 * noise_multiplier * noise.item()) / batch
    return float(share.clamp(0.0, 1.0))


def simulate_gradient_norms(
    module: nn.Module,
    public_or_synthetic_loader: Iterable[Any],
    *,
    criterion: Criterion = nn.functional.cross_entropy,
) -> Tensor:
    """Compute every record's gradient norm on public data. Choose a clip norm that few norms
    exceed.

    Args:
        module: the model, in training mode, private or not; it is not changed.
        public_or_synthetic_loader: batches as tuples of the model's inputs and the target.
        criterion: ``criterion(module(*inputs), target)``, the mean over the batch, or the sum if
            the model was made private for sums.

    Returns:
        ‖g_i‖₂ of all records, a float32 tensor.

    Raises:
        ValueError: the loader is a private loader of this process, or it reads the data set of one
            or a ``torch.utils.data.Subset`` of it.

    **Privacy.** Nothing is charged, so the records must be public or synthetic. Copies of private
    records are not recognised.
    """

    def public(what: Any) -> Any:
        if any(map(reads_private_data, [what, *tensors_in(what)])):
            raise ArgumentError(
                "this loader reads a data set that was passed to make_private or plan: use"
                " private_clipped_fraction, or a new data set of public or synthetic records.",
                code="data-private",
            )
        return what

    attached = GradientSource.attached_to(module)
    source = attached or BookkeepingGradientSource(module)
    try:
        batches = map(public, public(public_or_synthetic_loader))
        return torch.cat([_norms(module, source, batch, criterion) for batch in batches])
    finally:
        if attached is None:
            source.remove()


def _norms(
    module: nn.Module,
    source: GradientSource,
    batch: Any,
    criterion: Criterion,
    shown: float | None = None,
) -> Tensor:
    if not isinstance(batch, (tuple, list)) or not all(isinstance(x, Tensor) for x in batch):
        raise ArgumentTypeError(
            "a batch must be a tuple of tensors, the model's inputs and then the target; got"
            f" {type(batch).__name__}"
        )
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    *inputs, target = (x.to(parameters[0].device) for x in batch)
    grads = [p.grad for p in parameters]
    source.discard(parameters)
    for p in parameters:
        p.grad = None
    if source.follows:
        deliver = Delivery(len(target) if shown is None else shown, source.randomness)
        inputs, target = deliver((inputs, target), len(target))
    try:
        with torch.enable_grad():
            criterion(module(*inputs), target).backward()
        return source.norms(named)
    finally:
        source.discard(parameters)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
