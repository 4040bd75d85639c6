"""What several owners do together who do not show their records to each other: agree on a start,
pay, add up, and decide.

Every owner is a rank of a process group. Between them travel the messages of ``distributed.py``: a
few numbers that say where a rank is, then a sum. See :mod:`~torch_dpbayes.mcmc.multi_owner` for who
sees what.
"""

from __future__ import annotations

import hashlib
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
from ..density import InvalidPoint, RecordDensity, without_value_checks
from ..density.pyro_runs import nearly_equal
from ..distributed import CHAIN_END, ITERATION, SET_UP, Ranks
from ..errors import ArgumentError, OwnerError, RankError
from ..noise import GaussianNoise
from ..processes import this_process

_COMPARED_ROWS = 5
_CHARGED = "Charges stay; kernel.get_samples() returns the draws."


class ManyOwners:
    """This process' part in a chain over the records of several owners: sums are sums over the
    owners, and everything else is the same for all of them, as are the kernel's ``settings``.
    ``noise``: this owner's noise multipliers by argument, that of the log ratio first.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, noise: dict[str, float], settings: dict[str, Any]
    ) -> None:
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
        self._noise, self._settings = noise, settings
        self._together = False
        self._seed: list[int] = []
        self._messages = 0
        self.total_multiplier = math.nan  # of the log ratio, of all owners together

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranks": None, "_together": False}

    # -- set-up ------------------------------------------------------------------------------------

    @contextmanager
    def in_set_up(self) -> Iterator[None]:
        """
        Raises:
            OwnerError: another could not set up or be reached.
        """
        self._messages = 0
        with self._stopping_together(self._ranks_here()):
            self._together = True
            yield

    def compare(self, density: RecordDensity, settings: dict[str, Any]) -> None:
        """Compare what has to be the same, and agree on a seed. ``settings`` are public.

        Raises:
            OwnerError: the owners differ.
        """
        # no function of the records, nor of their number
        latents = density.prior.unflatten(density.made_up.theta)
        described = {
            "versions": [__version__, torch.__version__, pyro.__version__],
            **{name: comparable(value) for name, value in (self._settings | settings).items()},
            "latents": {name: list(value.shape) for name, value in latents.items()},
            "data": density.arguments.described(),
            "precision": str(density.prior.dtype),
        }
        self._ranks_here().compare(described, SET_UP)
        self._share_numbers()
        self._compare_densities(density)

    def _share_numbers(self) -> None:
        """A seed that every owner has a part in, and the noise of all together."""
        words = torch.tensor(np.frombuffer(os.urandom(32), "<u4").astype(float))
        own = next(iter(self._noise.values()))
        variance, *seed = self._sum(torch.cat([torch.tensor([own**2]).double(), words])).tolist()
        self._seed = [int(word) for word in seed]
        self.total_multiplier = math.sqrt(variance)

    def _compare_densities(self, density: RecordDensity) -> None:
        """Prior and likelihood on rows that the first rank made up."""
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

    @contextmanager
    def in_iteration(self) -> Iterator[None]:
        """Around everything that an iteration does: what ends it is told to the others."""
        ranks = self._ranks_here()
        if not self._together:
            raise OwnerError(
                "the owners do not run together: call pyro.infer.MCMC(kernel, ...).run(own data)"
                " on all ranks."
            )
        with self._stopping_together(ranks):
            yield

    def public_numbers(self, iteration: int, stage: int) -> GaussianNoise:
        """Numbers that all owners draw alike."""
        return SharedRandomness(*self._seed, iteration, stage)

    def agreed_point(
        self, theta: Tensor, accepted: int, event: DpEvent, accountant: PrivacyAccountant
    ) -> Tensor:
        """The first rank's θ, which differs from this one's by round-off if their processors
        differ; once all can pay.
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
        """The sum of all owners' noisy gradients.

        Raises:
            InvalidPoint: one of them cannot evaluate the model at θ.
        """
        total = torch.zeros(len(read) + 1, dtype=torch.float64)
        try:
            total[:-1] = own().cpu()
        except InvalidPoint:  # for made-up records; the others have to hear of it
            total[-1] = 1.0
        total = self._sum(total)
        if total[-1]:
            raise InvalidPoint
        return total[:-1].to(read.device)

    def together(self, noisy: float, threshold: float, is_valid: bool) -> tuple[float, float, bool]:
        """The sum of the owners' noisy log ratios, the threshold of the first, and whether the
        point is valid for all.
        """
        own = [noisy, threshold if self._ranks_here().rank == 0 else 0.0, float(not is_valid)]
        noisy, threshold, invalids = self._sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return noisy, threshold, not invalids

    # -- messages ----------------------------------------------------------------------------------

    def end_chain(self) -> None:
        """Tell the others, who may be waiting."""
        if self._together and self._ranks is not None and self._process == this_process():
            self._together = False
            with suppress(RankError):  # what the others say no longer matters here
                self._ranks.check_consistent(CHAIN_END)

    def _sum(self, values: Tensor) -> Tensor:
        """Σ over the owners, (n,) in float64; once all are at the same message."""
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

    @contextmanager
    def _stopping_together(self, ranks: Ranks) -> Iterator[Ranks]:
        """An error inside ends the chain of all owners, who are not told its text."""
        try:
            with ranks:
                yield ranks
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


class SharedRandomness(GaussianNoise):
    """Standard normal numbers that all ranks draw alike. They hide nothing."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def standard_normal(
        self, size: int, *, dtype: torch.dtype, device: torch.device, hides: Any = ()
    ) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device, dtype)


def comparable(value: Any) -> Any:
    """A setting in a form in which owners can compare it."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().double().contiguous().numpy().tobytes()
        return f"tensor {tuple(value.shape)}, {hashlib.sha256(numbers).hexdigest()[:16]}"
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
