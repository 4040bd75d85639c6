r"""Chains over data that lie with several owners, who do not show them to each other.

Every owner is a rank of a ``torch.distributed`` process group, with its own records, its own
accountant and its own noise. In an iteration a rank sends its clipped sum with its own noise on it,
and nothing else that stems from records. All ranks compute everything else alike, from randomness
that they share, and hence draw the same samples.

**Who sees what.** Each owner is protected against all others together, whatever they do: read what
passes through them, pool what they saw and subtract their own sums and noise, or send anything at
all instead of what they should. For what an owner sends is the same Gaussian mechanism for every θ
and θ', its noise alone gives the multiplier that it is charged with, and its own accountant counts.
The noise of the others protects it too, against those who see the samples only, but no ε takes
credit for that. The *samples* are right only if all owners follow the protocol.

**What is not protected.** That an owner takes part; when its budget ends; how long it computes,
which hints at the number of its records; and what is told at set-up: settings, the sum of all
squared noise multipliers, shapes and types of the data but for the number of records, densities on
made-up records. A person with records at several owners is released by each of them: such losses
add up over the owners' accountants. Process groups neither encrypt nor authenticate: run them
inside a private network. What others send is read as numbers and text, and never unpickled.

**In step.** Before a sum every rank says where it is. A rank that fails, is interrupted, has no
budget left, or runs something else, is known to all in the same message; one that says nothing any
more, when the group's timeout is over.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from ..density import Model
from ..errors import ArgumentError
from .hmc import DPHMC
from .kernel import PrivateKernel
from .owners import ManyOwners
from .penalty import DPPenalty

_NOISE = ("noise_multiplier", "ratio_noise_multiplier", "grad_noise_multiplier")
_NOT_COMPARED = {"model", "accountant", "proposal", *_NOISE}


class MultiOwnerPenalty(DPPenalty):
    r"""Differentially private random-walk Metropolis-Hastings on the data of J owners, who keep
    their data.

    .. math::
        \tilde R = \sum_{j=1}^J \Big[\sum_i \mathrm{clip}_{\pm c d}\big(
        \log p(x_{ji}|\theta') - \log p(x_{ji}|\theta)\big)
        + \sigma_j\xi_j\Big],
        \qquad \sigma_j = z_j c d, \quad d = \|\theta' - \theta\|

    Accepts θ' iff log u < R̃ + log prior ratio − (σ_1² + … + σ_J²)/2. Each owner computes its
    bracket, adds its own noise and is charged for it. The chain is that of
    :class:`~torch_dpbayes.mcmc.DPPenalty` with the noise multiplier √(Σ z_j²) on the pooled data.

    Source: Yıldırım and Ermiş (2019), Algorithm 2, there with equal noise for all owners.

    Every owner makes this kernel in its own process, and runs ``MCMC(kernel, ...).run(own data)``;
    all get the same draws.

    Args:
        model: as for ``DPPenalty``. All owners need the same model and settings, except
            ``noise_multiplier`` and ``accountant``, which are this owner's.
        process_group: the process group, with one rank for each owner. None: that of all processes.
            An owner waits for the others until its timeout.
        options: as for ``DPPenalty``, without ``proposal``. The noise multiplier is positive, and
            known to the others.

    Raises:
        ValueError: an argument is out of range; or, in ``MCMC.run``, the model is not fit for it.
        OwnerError: there is no process group; or, in ``MCMC.run``, owners differ, or one failed,
            ended or cannot be reached.
        PrivacyBudgetExceeded: in ``MCMC.run`` of all owners, before the first iteration that
            exceeds the budget of one.

    **Privacy.** An iteration releases an owner's bracket to the others. A record of this owner
    moves its sum as in ``DPPenalty``: ``GaussianDpEvent(z_j)``, charged to this owner alone, for
    its own noise and relation, before anything is sent.
    """

    def __init__(
        self, model: Model, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        if options.get("proposal") is not None:
            raise ArgumentError(
                "the other owners would not know this proposal=: pass proposal_scale=."
            )
        super().__init__(model, **options)
        self._owners = _owners(DPPenalty, model, options, process_group)


class MultiOwnerHMC(DPHMC):
    r"""Differentially private Hamiltonian Monte Carlo on the data of J owners, who keep their data.

    .. math::
        \tilde g(\theta) = -\sum_{j=1}^J \Big[\sum_i
        \mathrm{clip}_b\big(\nabla\log p(x_{ji}|\theta)\big)
        + z_{g,j} b\,\zeta_j\Big]
        - \nabla\log p(\theta)

    in the trajectories of :class:`~torch_dpbayes.mcmc.DPHMC`; the accept test is that of
    :class:`MultiOwnerPenalty`. The chain is that of ``DPHMC`` with the noise multipliers √(Σ
    z_{g,j}²) and √(Σ z_{l,j}²) on the pooled data. The owners share momenta and jitter.

    Source: Räisä, Koskela and Honkela (2021), Algorithm 1, on the sums of Yıldırım and Ermiş
    (2019), Algorithm 2.

    Args:
        model, process_group: as for :class:`MultiOwnerPenalty`.
        options: as for ``DPHMC``. The noise multipliers are positive, and known to the others.

    Raises:
        ValueError, OwnerError, PrivacyBudgetExceeded: as :class:`MultiOwnerPenalty`.

    **Privacy.** An iteration releases an owner's L noisy gradient sums (the first one L + 1;
    without reuse every one) and its noisy ratio to the other owners: ``GaussianDpEvent(z_g)`` and
    ``GaussianDpEvent(z_l)``, charged to that owner by its own noise, before the trajectory starts.
    """

    def __init__(
        self, model: Model, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self._owners = _owners(DPHMC, model, options, process_group)


def _owners(
    kernel: type[PrivateKernel],
    model: Model,
    options: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> ManyOwners:
    given = inspect.signature(kernel).bind(model, **options)
    given.apply_defaults()
    settings = {"kernel": kernel.__name__}
    settings |= {n: v for n, v in given.arguments.items() if n not in _NOT_COMPARED}
    noise = {name: float(options[name]) for name in _NOISE if name in options}
    return ManyOwners(group, noise, settings)
