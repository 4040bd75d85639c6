r"""Chains over the records of several owners, who do not show each other their records.

Every owner is a rank of a ``torch.distributed`` process group, with its own records, its own
accountant and its own noise. In an iteration a rank sends its clipped sum plus its own noise, and
nothing else that depends on its records. All ranks compute everything else alike, from shared
randomness, so they draw the same samples.

**Who sees what.** Each owner is protected against all others together, even if they read all
messages, share what they saw, subtract their own sums and noise, or send arbitrary numbers. For
every θ and θ', what an owner sends is the same Gaussian mechanism. An owner's accountant charges
the cost under this owner's noise alone. The others' noise also protects the owner against those who
see only the samples, but no ε includes this. The *samples* are right only if all owners follow the
protocol.

**What is not protected.** That an owner takes part; when its budget ends; how long it computes,
which depends on the number of its records; and what is sent at set-up: settings, the sum of all
squared noise multipliers, shapes and types of the data (not the number of records), densities on
synthetic records. If several owners have records of one person, add up the losses of their
accountants. Process groups neither encrypt nor authenticate: run them inside a private network.
Received messages are read as numbers and text, and never unpickled.

**Synchronisation.** Before each sum every rank sends its position in the protocol. If a rank fails,
is interrupted, has no budget left, or runs something else, this message informs all ranks. If a
rank sends nothing, the others stop at the group's timeout.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyro
import torch
import torch.distributed as dist
from torch import Tensor

from .. import __version__
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.events import DpEvent
from ..density import InvalidPoint, Model, RecordDensity, without_value_checks
from ..density.pyro_runs import nearly_equal
from ..distributed import CHAIN_END, ITERATION, SET_UP, Ranks
from ..errors import ArgumentError, OwnerError, RankError
from ..noise import GaussianNoise
from ..processes import this_process
from .hmc import DPHMC
from .kernel import PrivateKernel
from .penalty import DPPenalty

_NOISE = ("noise_multiplier", "ratio_noise_multiplier", "grad_noise_multiplier")
_NOT_COMPARED = {"model", "accountant", "proposal", *_NOISE}
_COMPARED_ROWS = 5
_CHARGED = "Charges stay; kernel.get_samples() returns the draws."


class MultiOwnerPenalty(DPPenalty):
    r"""Differentially private random-walk Metropolis-Hastings on the data of J owners, who keep
    their data.

    .. math::
        \tilde R = \sum_{j=1}^J \Big[\sum_i \mathrm{clip}_{\pm c d}\big(
        \log p(x_{ji}|\theta') - \log p(x_{ji}|\theta)\big)
        + \sigma_j\xi_j\Big],
        \qquad \sigma_j = z_j c d, \quad d = \|\theta' - \theta\|

    Accepts θ' iff log u < R̃ + log prior ratio − (σ_1² + … + σ_J²)/2. Each owner computes its
    bracket, with its own noise, and is charged for it. The chain is that of
    :class:`~torch_dpbayes.mcmc.DPPenalty` with the noise multiplier √(Σ z_j²) on the pooled data.

    Source: Yıldırım and Ermiş (2019), Algorithm 2, where all owners have equal noise.

    Every owner creates this kernel in its own process, and runs ``MCMC(kernel, ...).run(own
    data)``. All owners get the same draws.

    Args:
        model: as for ``DPPenalty``. All owners need the same model and settings, except
            ``noise_multiplier`` and ``accountant``, which are this owner's.
        process_group: the process group, with one rank for each owner. None: the default group.
            An owner waits for the others until the group's timeout.
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
        self._owners = ManyOwners(process_group, DPPenalty, model, options)


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

    **Privacy.** An iteration releases an owner's L noisy gradient sums (L + 1 in the first
    iteration, and in all without reuse) and its noisy ratio to the other owners:
    ``GaussianDpEvent(z_g)`` and ``GaussianDpEvent(z_l)``, charged to that owner for its own noise,
    before the trajectory starts.
    """

    def __init__(
        self, model: Model, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self._owners = ManyOwners(process_group, DPHMC, model, options)


class ManyOwners:
    """This process' part in a chain over the records of several owners. Sums are sums over the
    owners. Everything else is the same for all owners, also the kernel's ``options`` except noise.
    A message of ``distributed.py`` has numbers with the rank's position, then a sum.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        kernel: type[PrivateKernel],
        model: Model,
        options: dict[str, Any],
    ) -> None:
        noise = {name: float(options[name]) for name in _NOISE if name in options}
        for argument, value in noise.items():
            if not value:
                raise ArgumentError(
                    f"{argument} must be positive: without noise an owner would send the exact sum"
                    " over its records to the others."
                )
        if not dist.is_available() or not dist.is_initialized():
            raise OwnerError(
                "there is no process group: start one process for each owner (torchrun) and call"
                ' torch.distributed.init_process_group("gloo", timeout=...) in each before the'
                " kernel is made."
            )
        world = dist.group.WORLD if group is None else group
        assert world is not None
        self._ranks: Ranks | None = Ranks(world, shares_errors=False)
        self._process = this_process()
        self._own_multiplier = next(iter(noise.values()))  # of the log ratio
        given = inspect.signature(kernel).bind(model, **options)
        given.apply_defaults()
        self._settings = {n: v for n, v in given.arguments.items() if n not in _NOT_COMPARED}
        self._settings["kernel"] = kernel.__name__
        self._together = False
        self._seed: list[int] = []
        self._messages = 0
        self.total_multiplier = math.nan  # of the log ratio, of all owners together

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranks": None, "_together": False}

    @contextmanager
    def running(self, *, begins: bool = False) -> Iterator[None]:
        """Context of a set-up, which ``begins`` a chain, or of an iteration. An error inside ends
        the chains of all owners; the others do not see its text. OwnerError: another owner failed
        or cannot be reached.
        """
        ranks = self._ranks_here()
        if begins:
            self._messages, self._together = 0, True
        elif not self._together:
            raise OwnerError(
                "the owners do not run together: call pyro.infer.MCMC(kernel, ...).run(own data)"
                " on all ranks."
            )
        try:
            with ranks:
                yield
        except RankError as error:
            self._together = False
            if ranks.is_broken:
                raise OwnerError(
                    "the other owners cannot be reached: start all of them again, with"
                    f" initial_params= at the last draw. {_CHARGED}"
                ) from error
            raise OwnerError(f"{error} {_CHARGED}") from error
        except BaseException:
            self._together = False
            raise

    # -- set-up ------------------------------------------------------------------------------------

    def compare(self, density: RecordDensity, settings: dict[str, Any]) -> None:
        """Agree on a seed to which every owner contributes. OwnerError: the owners differ in
        something that must be the same. ``settings`` are public.
        """
        # depends neither on the records nor on their number
        latents = density.prior.unflatten(density.made_up.theta)
        described = {
            "versions": [__version__, torch.__version__, pyro.__version__],
            **{name: _comparable(value) for name, value in (self._settings | settings).items()},
            "latents": {name: list(value.shape) for name, value in latents.items()},
            "data": density.arguments.described(),
            "precision": str(density.prior.dtype),
        }
        self._ranks_here().compare(described, SET_UP)
        words = np.frombuffer(os.urandom(32), "<u4").astype(float)
        own = self._own_multiplier
        variance, *seed = self._sum(torch.tensor([own**2, *words], dtype=torch.float64)).tolist()
        self._seed = [int(word) for word in seed]
        self.total_multiplier = math.sqrt(variance)
        self._compare_densities(density)

    def _compare_densities(self, density: RecordDensity) -> None:
        """Compare prior and likelihood on synthetic rows of the first rank."""
        made_up = density.made_up
        with torch.no_grad(), without_value_checks():
            theta = self.of_first(made_up.theta)
            rows = made_up.rows(_COMPARED_ROWS)
            for k, row in enumerate(rows):
                plain = torch.view_as_real(row) if row.is_complex() else row
                shared = self.of_first(plain)
                rows[k] = torch.view_as_complex(shared) if row.is_complex() else shared
            values = made_up.terms(theta, rows), theta.new_tensor(density.prior.log_density(theta))
            different = not all([nearly_equal(own, self.of_first(own)) for own in values])
        flags = self._ranks_here().check_consistent(SET_UP, beside=different)
        if any(flags):
            raise OwnerError(
                f"the model of rank {flags.index(True)} has another density than rank 0 on"
                " synthetic records: use the same model on all ranks. Nothing was released."
            )

    # -- one iteration -----------------------------------------------------------------------------

    def public_numbers(self, iteration: int, stage: int) -> GaussianNoise:
        """Random numbers that are the same for all owners."""
        return SharedRandomness(*self._seed, iteration, stage)

    def agreed_point(
        self, theta: Tensor, accepted: int, event: DpEvent, accountant: PrivacyAccountant
    ) -> Tensor:
        """The first rank's θ, once the budget of every owner allows the iteration. On different
        processors this rank's θ may differ from it by round-off.
        """
        if accountant.remaining(event) < 1:
            raise PrivacyBudgetExceeded(
                "this owner's budget does not allow another iteration: start a run with a larger"
                " budget. Nothing was charged or released; kernel.get_samples() returns earlier"
                " draws."
            )
        numbers = {"the number of messages": self._messages, "accept decisions": accepted}
        norm = float(torch.linalg.vector_norm(theta.double()))
        self._ranks_here().check_consistent(ITERATION, numbers, norm=norm)
        return self.of_first(theta)

    def gradient_sum(self, own: Callable[[], Tensor], read: Tensor) -> Tensor:
        """The sum of all owners' noisy gradients. InvalidPoint: an owner cannot evaluate the model
        at θ.
        """
        total = torch.zeros(len(read) + 1, dtype=torch.float64)
        try:
            total[:-1] = own().cpu()
        except InvalidPoint:  # on synthetic records; the other owners need to know
            total[-1] = 1.0
        total = self._sum(total)
        if total[-1]:
            raise InvalidPoint
        return total[:-1].to(read.device)

    def together(self, noisy: float, threshold: float, is_valid: bool) -> tuple[float, float, bool]:
        """The sum of the owners' noisy log ratios, the first owner's threshold, and whether the
        point is valid for all owners.
        """
        own = [noisy, threshold if self._ranks_here().rank == 0 else 0.0, float(not is_valid)]
        noisy, threshold, invalids = self._sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return noisy, threshold, not invalids

    # -- messages ----------------------------------------------------------------------------------

    def end_chain(self) -> None:
        """Send the other owners, who may be waiting, the end of this chain."""
        if self._together and self._ranks is not None and self._process == this_process():
            self._together = False
            with suppress(RankError):  # errors of the others no longer matter
                self._ranks.check_consistent(CHAIN_END)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over the owners, (n,) in float64, once all ranks are at the same message."""
        ranks, numbers = self._ranks_here(), {"the number of messages": self._messages}
        ranks.check_consistent(ITERATION, numbers)
        self._messages += 1
        total = values.detach().reshape(-1).to("cpu", torch.float64, copy=True)
        ranks.all_reduce(total)
        return total

    def of_first(self, values: Tensor) -> Tensor:
        """The first rank's ``values``, on all ranks."""
        own = values if self._ranks_here().rank == 0 else torch.zeros_like(values)
        return self._sum(own).reshape(values.shape).to(values)

    def all_have(self, flag: bool) -> bool:
        """Whether ``flag`` is set on all ranks."""
        return all(self._ranks_here().check_consistent(SET_UP, beside=flag))

    def _ranks_here(self) -> Ranks:
        if self._ranks is None or self._process != this_process():
            raise OwnerError(
                "this kernel was copied into another process, but parallel chains are not"
                " supported: leave out num_chains=, and call run() more than once. Nothing was"
                " released."
            )
        return self._ranks


class SharedRandomness(GaussianNoise):
    """Standard normal numbers that are the same on all ranks. They hide nothing."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def standard_normal(
        self, size: int, *, dtype: torch.dtype, device: torch.device, hides: Any = ()
    ) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device, dtype)


def _comparable(value: Any) -> Any:
    """A setting in a form in which owners can compare it."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().double().contiguous().numpy().tobytes()
        return f"tensor {tuple(value.shape)}, {hashlib.sha256(numbers).hexdigest()[:16]}"
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
