"""From a noise-aware posterior to an exact chain."""

from __future__ import annotations

from typing import Any

from ..accounting.accountant import PrivacyAccountant
from ..mcmc.density import Model
from ..mcmc.hmc import DPHMC
from ..mcmc.penalty import DPPenalty
from ..mcmc.planning import plan
from .posterior import NoiseAwarePosterior


def kernel_from(
    posterior: NoiseAwarePosterior,
    model: Model,
    *,
    accountant: PrivacyAccountant,
    num_iterations: int,
    log_ratio_slope: float,
    max_grad_norm: float | None = None,
    num_steps: int | None = None,
    num_chains: int = 1,
    data_plate: str = "data",
) -> DPPenalty | DPHMC:
    """A kernel for ``pyro.infer.MCMC`` that starts at draws of a noise-aware posterior, moves in
    its shape, and spends what its accountant has left. The scale of its moves comes from public
    numbers and from the posterior's width, so that no warm-up has to be charged:
    ``MCMC(kernel, num_samples=..., warmup_steps=0)``.

    The posterior given what was released is wider than that of the records by what the noise hides.
    A chain has the records' own posterior as its law, if what is left of the budget lets it arrive:
    a warning says if it will not, as where an earlier run has left next to nothing. Its number of
    samples is that of a Gaussian posterior of this width, an upper bound: one that is bent is worth
    up to eleven times fewer (measured on bananas), which nothing that was released tells. A
    rehearsal on made-up records does.

    Args:
        posterior: of the same latents, whose run was charged to ``accountant`` or to one of its
            own.
        model: the Pyro model, as for :class:`~torch_dpbayes.mcmc.DPPenalty`.
        accountant: with a budget, of which the posterior's run has left something: state
            ``epsilon=`` there.
        num_iterations: of all chains together.
        log_ratio_slope: c, as for ``DPPenalty``.
        max_grad_norm: b of :class:`~torch_dpbayes.mcmc.DPHMC`.
        num_steps: L of ``DPHMC``. None: ``DPPenalty``, which gets farther where noise decides.
        num_chains: how many chains share the iterations.
        data_plate: name of the data plate.

    Raises:
        ValueError: the accountant has no budget, or no noise fits into what is left of it, or an
            argument is out of range. Where noise fits, but no sample to speak of, it only warns.

    **Privacy.** Starts, shape and scale are post-processing of the posterior's releases; the noise
    depends on charges alone. What the kernel releases is charged as it runs.
    """
    if accountant.epsilon is None or accountant.delta is None:
        raise ValueError(
            "the kernel spends what is left of a budget: make the accountant with epsilon and"
            " delta."
        )
    kind: type[DPPenalty] | type[DPHMC] = DPPenalty if num_steps is None else DPHMC
    found = plan(
        kind,
        target_epsilon=accountant.epsilon,
        target_delta=accountant.delta,
        num_iterations=num_iterations,
        num_steps=num_steps,
        log_ratio_slope=log_ratio_slope,
        max_grad_norm=max_grad_norm,
        num_chains=num_chains,
        neighboring=accountant.neighboring,
        history=accountant.history,
    )
    stddev = posterior.unconstrained_stddev
    found.expected_sample_size(stddev, shaped=True)  # warns
    scale = found.step_size(stddev, shaped=True)
    common: dict[str, Any] = {
        "log_ratio_slope": log_ratio_slope,
        "accountant": accountant,
        "data_plate": data_plate,
        "approximation": posterior,
        "target_accept_prob": None,
        **found.noise_multipliers,
    }
    if num_steps is None:
        return DPPenalty(model, proposal_scale=scale, **common)
    assert max_grad_norm is not None  # or the plan would have refused
    return DPHMC(model, step_size=scale, num_steps=num_steps, max_grad_norm=max_grad_norm, **common)
