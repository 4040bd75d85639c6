"""What all ranks of a process group must have in common before they train one model."""

from __future__ import annotations

import hashlib

import opacus
import torch
from torch import nn

from .. import __version__
from ..accounting.events import GaussianDpEvent
from ..batches.poisson_loader import PoissonLoader
from ..noise import stream_position
from ..optim.base import PrivateOptimizer
from ..ranks import Ranks
from ..release.release import options_of
from .record_digests import records_digests


def compare(
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
        optimizer.release.noise.generator,
    )
    saved = accountant.state_dict()
    # in memory each rank's accountant is a job of its own, with the same history
    history = [repr(charge) for charge in accountant.history]
    kept = saved["ledger"] or {**saved, "history": history, "job": None}
    values = hashlib.blake2b(digest_size=16)
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            values.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
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
            "the way in which batches are drawn": repr(sampler.event(GaussianDpEvent(1.0))),
            "the records or their order (pass all of the data set on every rank)": (
                records_digests(loader)
            ),
            "the parameters' names, shapes or types": [
                (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
            ],
            "the kind of device": next(module.parameters()).device.type,
            "the initial parameters or buffers (call torch.manual_seed before the model is"
            " built, or load one state_dict)": (values.hexdigest()),
            "the algorithm": type(optimizer).__name__,
            "the settings of the optimizer": optimizer.described(),
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
