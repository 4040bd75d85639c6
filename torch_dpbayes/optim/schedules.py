r"""Step-size schedules that ``torch.optim.lr_scheduler`` does not have. All schedulers of torch
work with the private optimizers, too.

``OneCycleLR`` and ``CyclicLR`` also cycle the momentum of ``DPSGHMC``; its friction and noise
change with it. For the other samplers, and for ``momentum="matched"``, write
``cycle_momentum=False``.

A schedule sets ``lr``, and so the sampler's own noise z_L ∝ lr^-½. Each step is charged for z =
max(z_L, ``noise_multiplier``) at its lr, and the accountant composes the different z. Steps with
the largest lr cost most. ::

    schedule = Cyclical(optimizer, total_steps=10_000, cycles=4)
    for x, y in batches:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
        if schedule.is_sampling:  # about the last step: read it before schedule.step()
            samples.collect(net)
        schedule.step()

**Privacy.** The accountant's guarantee holds for schedules that are fixed in advance. The schedules
in this file depend only on public constants and the number of steps, never on data or losses. At
``lr = 0`` the batch is not used: the step is charged for ``noise_multiplier``, or not at all if
``noise_multiplier`` is 0.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..accounting.events import positive_count
from ..errors import ArgumentError
from ..noise import check_positive
from .settings import require_fraction


class PolynomialDecay(LRScheduler):
    r"""The decreasing step size of stochastic gradient Langevin dynamics, a(b + t)^−γ.

    .. math:: \eta_t = \eta_0 (1 + t / b)^{-\gamma}, \qquad a = \eta_0 b^\gamma

    with t the number of ``step()`` calls. For ½ < γ ≤ 1 the step sizes sum to infinity and their
    squares do not: SGLD then converges to the posterior, if its samples are averaged with the
    weights η_t. Smaller steps cost less, because z_L is larger.

    Source: Welling and Teh (2011), section 2.

    Args:
        optimizer: its groups' ``lr`` are the η_0.
        offset: b > 0, in steps: how long η stays near η_0.
        gamma: γ > 0.
        last_epoch: number of the last step when resuming, as in torch.

    Raises:
        ValueError: an argument is out of range.

    **Privacy.** Fixed in advance: each step is charged for its own z.
    """

    def __init__(
        self, optimizer: Optimizer, offset: float, gamma: float = 0.55, last_epoch: int = -1
    ) -> None:
        self.offset, self.gamma = check_positive("offset", offset), check_positive("gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """η_t of every group."""
        return [lr * (1 + self.last_epoch / self.offset) ** -self.gamma for lr in self.base_lrs]


class Cyclical(LRScheduler):
    r"""Cyclical stochastic gradient MCMC: in each cycle large steps find a mode, and small steps
    then sample it.

    .. math::
        \eta_k = \frac{\eta_0}{2} \Bigl[ \cos \Bigl( \pi \frac{(k-1) \bmod \lceil K/M \rceil}
        {\lceil K/M \rceil} \Bigr) + 1 \Bigr]

    for the steps k = 1, 2, …. The first share β of each cycle explores, the rest samples. Unlike in
    the paper, exploring steps have noise, too, because it protects the data. To explore as in the
    paper, choose a large η_0.

    Source: Zhang, Li, Zhang, Chen and Wilson (2020), "Cyclical stochastic gradient MCMC for
    Bayesian deep learning", eq. (1) and Algorithm 1.

    Args:
        optimizer: its groups' ``lr`` are the η_0, the largest step sizes.
        total_steps: K, the number of ``step()`` calls planned. Cycles continue after it.
        cycles: M, from 1 to K.
        exploration: β in [0, 1).
        last_epoch: number of the last step when resuming, as in torch.

    Raises:
        ValueError: an argument is out of range.

    **Privacy.** Fixed in advance: each step is charged for its own z, exploring or not; the large
    steps at the start of a cycle cost most. The smallest η is above 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        cycles: int,
        exploration: float = 0.8,
        last_epoch: int = -1,
    ) -> None:
        total_steps = positive_count(total_steps, "total_steps")
        if positive_count(cycles, "cycles") > total_steps:
            raise ArgumentError(f"cycles must be at most total_steps = {total_steps}, got {cycles}")
        self.cycle_length = -(-total_steps // cycles)
        self.exploration = require_fraction("exploration", exploration)
        super().__init__(optimizer, last_epoch)

    @property
    def position(self) -> float:
        """The position in the cycle, in [0, 1)."""
        return (self.last_epoch % self.cycle_length) / self.cycle_length

    @property
    def is_sampling(self) -> bool:
        """Whether to collect the step at the current lr: it is in the last share 1 − β of the
        cycle, or its last step.
        """
        is_last = self.last_epoch % self.cycle_length == self.cycle_length - 1
        return self.position >= self.exploration or is_last

    def get_lr(self) -> list[float | Tensor]:
        """η_k of every group, k = ``last_epoch`` + 1."""
        return [lr * (math.cos(math.pi * self.position) + 1) / 2 for lr in self.base_lrs]
