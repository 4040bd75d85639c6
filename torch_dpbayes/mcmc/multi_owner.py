r"""Chains over data that lie with several owners, who do not show them to each other.

Every owner is a rank of a ``torch.distributed`` process group, with its own records, its own
accountant and its own noise. In an iteration a rank sends its clipped sum with its own noise on it,
and nothing else that stems from records. All ranks compute everything else alike, from randomness
that they share, and hence draw the same samples.

**Who sees what.** Each owner is protected against all others together, whatever they do: read what
passes through them (in a ring each rank receives partial sums of the ranks before it, and the first
of these is what one owner sent), pool what they saw and subtract their own sums and noise, or send
anything at all instead of what they should. For what an owner sends is the same Gaussian mechanism
for every θ and θ', its noise alone gives the multiplier that it is charged with, and its own
accountant counts. The noise of the others protects it too, against those who see the samples only,
but no ε takes credit for that. The *samples* are right only if all owners follow the protocol.

**What is not protected.** That an owner takes part; when its budget ends; how long it computes,
which hints at the number of its records; and what is compared at set-up: settings, noise
multipliers, shapes and types of the data but for the number of records, densities on made-up
records. A person with records at several owners is released by each of them: such losses add up
over the owners' accountants. Process groups neither encrypt nor authenticate: run them inside a
private network. What others send is read as numbers and text, and never unpickled.

**In step.** Every message is one ``all_reduce`` of the same length. In it each rank says where it
is, so that a rank that fails, has no budget left, or runs something else, is known to all in the
same message, and none waits for it. A rank that is interrupted between two iterations, in Pyro's
code, says so when its process ends or ``kernel.cleanup()`` is called; one that says nothing any
more, when the group's timeout is over.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from .density import Model
from .hmc import DPHMC
from .many_owners import ManyOwners
from .penalty import DPPenalty


class MultiOwnerPenalty(DPPenalty):
    r"""Differentially private random-walk Metropolis-Hastings over the data of J owners, who keep
    them.

    .. math::
        \tilde R = \sum_{j=1}^J \Big[\sum_i \mathrm{clip}_{\pm c d}\big(
        \log p(x_{ji}|\theta') - \log p(x_{ji}|\theta)\big)
        + \sigma_j\xi_j\Big],
        \qquad \sigma_j = z_j c d, \quad d = \|\theta' - \theta\|

    Accepts θ' iff log u < R̃ + log prior ratio − (σ_1² + … + σ_J²)/2, with u and θ' from randomness
    that the owners share. Each bracket is computed, hidden by noise and charged by its owner; see
    :mod:`torch_dpbayes.mcmc.multi_owner` for who sees what. The chain is that of
    :class:`~torch_dpbayes.mcmc.DPPenalty` with the noise multiplier √(Σ z_j²) on the pooled data: σ
    ≈ 2.4 for all together moves farthest.

    Source: Yıldırım and Ermiş (2019), Algorithm 2, there with equal noise for all owners.

    Every owner makes this kernel in its own process, with the same settings, and runs
    ``MCMC(kernel, ...).run(own data)``; all get the same draws. Owners may hold different numbers
    of records, also none, and have different budgets, relations and noise.

    Args:
        model: as for ``DPPenalty``; the same for all owners, as are all settings but those marked
            *own*.
        proposal_scale: of the random walk, as for ``DPPenalty``.
        log_ratio_slope: c.
        noise_multiplier: *own* z_j, known to the others; positive.
        accountant: *own*, where every iteration is charged.
        data_plate: name of the data plate.
        target_accept_prob: acceptance rate that warm-up adapts the scale to. None: no adaptation.
        owner: *own* name, for messages that all owners see.
        process_group: the process group, one rank an owner. None: that of all processes. Its
            timeout is how long an owner waits for the others. A group with ``gloo`` exchanges on
            the CPU, one with ``nccl`` alone on the GPU, where torch ends a process whose exchange
            fails.

    Raises:
        ValueError: an argument is out of range; or, in ``MCMC.run``, the model is not fit for it.
        OwnerError: there is no process group; or, in ``MCMC.run``, owners differ, or one failed,
            ended or cannot be reached.
        PrivacyBudgetExceeded: in ``MCMC.run`` of all owners, before the first iteration that one of
            them cannot pay.

    **Privacy.** An iteration releases an owner's bracket to the other owners, whose sum a record of
    that owner moves as in ``DPPenalty``: ``GaussianDpEvent(z_j)``, charged to that owner alone, by
    its own noise and in its own relation, before anything is sent.
    """

    def __init__(
        self,
        model: Model,
        *,
        proposal_scale: float | Tensor,
        log_ratio_slope: float,
        noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        target_accept_prob: float | None = 0.23,
        owner: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            proposal_scale=proposal_scale,
            log_ratio_slope=log_ratio_slope,
            noise_multiplier=noise_multiplier,
            accountant=accountant,
            data_plate=data_plate,
            target_accept_prob=target_accept_prob,
        )
        self._owners: ManyOwners = ManyOwners(
            owner,
            process_group,
            noise={"noise_multiplier": self._multiplier},
            settings={
                "kernel": type(self).__name__,
                "proposal_scale": _comparable(proposal_scale),
                "log_ratio_slope": self._slope,
                "data_plate": self._plate,
            },
        )


class MultiOwnerHMC(DPHMC):
    r"""Differentially private Hamiltonian Monte Carlo over the data of J owners, who keep them.

    .. math::
        \tilde g(\theta) = -\sum_{j=1}^J \Big[\sum_i
        \mathrm{clip}_b\big(\nabla\log p(x_{ji}|\theta)\big)
        + z_{g,j} b\,\zeta_j\Big]
        - \nabla\log p(\theta)

    in the trajectories of :class:`~torch_dpbayes.mcmc.DPHMC`, whose ends are tested as in
    :class:`MultiOwnerPenalty`: it is ``DPHMC`` with the noise multipliers √(Σ z_{g,j}²) and √(Σ
    z_{l,j}²) on the pooled data. The owners share momenta and jitter.

    Source: Räisä, Koskela and Honkela (2021), Algorithm 1, on the sums of Yıldırım and Ermiş
    (2019), Algorithm 2.

    Args:
        model, step_size, num_steps, log_ratio_slope, max_grad_norm: as for ``DPHMC``, and the
            same for all owners.
        data_plate, mass_matrix, jitter, reuse_gradients, target_accept_prob: likewise.
        ratio_noise_multiplier, grad_noise_multiplier: *own* z_l and z_g, known to the others;
            positive.
        accountant, owner, process_group: as for :class:`MultiOwnerPenalty`.

    Raises:
        ValueError, RuntimeError, PrivacyBudgetExceeded: as :class:`MultiOwnerPenalty`.

    **Privacy.** An iteration releases an owner's L noisy gradient sums (the first one L + 1;
    without reuse every one) and its noisy ratio to the other owners: ``GaussianDpEvent(z_g)`` and
    ``GaussianDpEvent(z_l)``, charged to that owner by its own noise, before the trajectory starts.
    """

    def __init__(
        self,
        model: Model,
        *,
        step_size: float,
        num_steps: int,
        log_ratio_slope: float,
        max_grad_norm: float,
        ratio_noise_multiplier: float,
        grad_noise_multiplier: float,
        accountant: PrivacyAccountant,
        data_plate: str = "data",
        mass_matrix: Tensor | None = None,
        jitter: float = 0.2,
        reuse_gradients: bool = True,
        target_accept_prob: float | None = 0.65,
        owner: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            step_size=step_size,
            num_steps=num_steps,
            log_ratio_slope=log_ratio_slope,
            max_grad_norm=max_grad_norm,
            ratio_noise_multiplier=ratio_noise_multiplier,
            grad_noise_multiplier=grad_noise_multiplier,
            accountant=accountant,
            data_plate=data_plate,
            mass_matrix=mass_matrix,
            jitter=jitter,
            reuse_gradients=reuse_gradients,
            target_accept_prob=target_accept_prob,
        )
        self._owners: ManyOwners = ManyOwners(
            owner,
            process_group,
            noise={
                "ratio_noise_multiplier": self._ratio_multiplier,
                "grad_noise_multiplier": self._grad_multiplier,
            },
            settings={
                "kernel": type(self).__name__,
                "step_size": self._step_size,
                "num_steps": self._num_steps,
                "log_ratio_slope": self._slope,
                "max_grad_norm": self._max_norm,
                "data_plate": self._plate,
                "mass_matrix": _comparable(mass_matrix),
                "jitter": self._jitter,
                "reuse_gradients": self._reuse,
            },
        )


def _comparable(value: float | Tensor | None) -> float | str | None:
    """A setting in a form in which owners can compare it."""
    if not isinstance(value, Tensor):
        return None if value is None else float(value)
    digest = hashlib.sha256(
        value.detach().cpu().double().contiguous().numpy().tobytes()
    ).hexdigest()
    return f"tensor {tuple(value.shape)} with digest {digest[:16]}"
