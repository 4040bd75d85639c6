"""Messages between the processes of several owners, all of the same length, and the random numbers
that these processes share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..accounting.accountant import PrivacyBudgetExceeded
from ..errors import OwnerError
from ..noise import GaussianNoise

_ROOM = 256  # numbers in a message, after one for each rank
_LONGEST_TEXT = 2**16
_PLACES = 16
CHARGED = "What was charged stays charged; draws are in kernel.get_samples()."


class Place(IntEnum):
    """Where in the protocol a rank is."""

    SET_UP = 1
    ITERATE = 2
    GRADIENT = 3
    RATIO = 4
    NO_BUDGET = 5
    FAILED = 6
    ENDED = 7


class Ranks:
    """The processes of all owners, and what this one tells the others.

    Args:
        group: the process group. None: that of all processes.

    Attributes:
        rank, size: this process' number, and how many there are.
        names: of the owners, by rank.
        live: whether the others count on another message of this one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OwnerError(
                "there is no process group: start one process for each owner (torchrun) and call"
                ' torch.distributed.init_process_group("gloo", timeout=...) in each before the'
                " kernel is made."
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise OwnerError(
                "this process is not in process_group=: make the kernel in the processes of its"
                " owners only."
            )
        on_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = (
            torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        )
        self._pid = os.getpid()
        self.names = [f"owner {rank}" for rank in range(self.size)]
        self.live = False

    @property
    def is_here(self) -> bool:
        """Whether this is the process that is in the group; its forks are not."""
        return os.getpid() == self._pid

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None, "_pid": None, "live": False}

    def sum(self, place: Place, iteration: int, values: Tensor) -> Tensor:
        """Σ over the ranks of ``values`` (n,) in float64; all ranks get the same bits.

        Raises:
            PrivacyBudgetExceeded: a rank cannot pay for the iteration.
            RuntimeError: a rank has failed, ended, is somewhere else, or cannot be reached.
        """
        values = values.detach().reshape(-1).to("cpu", torch.float64)
        sums = [self._reduce(place, iteration, piece) for piece in values.split(_ROOM)]
        return torch.cat(sums)

    def leave(self, place: Place, iteration: int) -> None:
        """Tell the others in their next message, whatever they are at, that this rank does
        not go on.
        """
        if self.live and self.is_here:
            try:
                self._reduce(place, iteration, torch.empty(0))
            except RuntimeError:  # what the others say no longer matters here
                pass
            self.live = False

    def _reduce(self, place: Place, iteration: int, piece: Tensor) -> Tensor:
        message = torch.zeros(self.size + _ROOM, dtype=torch.float64)
        message[self.rank] = place + _PLACES * iteration
        message[self.size : self.size + len(piece)] = piece
        message = message.to(self._device)
        try:
            dist.all_reduce(message, group=self._group)
        except RuntimeError as error:
            self.live = False
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OwnerError(
                f"the other owners cannot be reached ({reason}): start all of them again, with"
                f" initial_params= at the last draw. {CHARGED}"
            ) from error
        message = message.cpu()
        self._require_together(message[: self.size].tolist(), place, iteration)
        return message[self.size : self.size + len(piece)]

    def _require_together(self, found: list[float], place: Place, iteration: int) -> None:
        if len(set(found)) == 1 and place not in (Place.NO_BUDGET, Place.FAILED):
            return
        self.live = False
        at: dict[int, list[int]] = {}
        for rank, code in enumerate(found):
            at.setdefault(int(code) % _PLACES if math.isfinite(code) else 0, []).append(rank)
        if failed := at.get(Place.FAILED):
            raise OwnerError(
                f"{self.listed(failed)} failed, so all owners stop: see the reason in that"
                f" process. {CHARGED}"
            )
        if broke := at.get(Place.NO_BUDGET):
            raise PrivacyBudgetExceeded(
                f"the budget of {self.listed(broke)} does not allow for iteration {iteration + 1}:"
                " start a run with a larger one. "
                + (
                    "Nothing of it was released. The draws so far are in kernel.get_samples()."
                    if place is Place.ITERATE
                    else CHARGED
                )
            )
        if (ended := at.get(Place.ENDED)) and place is not Place.ENDED:
            raise OwnerError(
                f"{self.listed(ended)} ended the run after {int(found[ended[0]]) // _PLACES}"
                " iterations: give all owners the same num_samples and num_chains."
                f" {CHARGED}"
            )
        raise OwnerError(
            f"the owners are not in step at {place.name}, iteration {iteration + 1}: run the same"
            f" program on all ranks, and nothing else in their process group. {CHARGED}"
        )

    def of_first(self, place: Place, iteration: int, values: Tensor) -> Tensor:
        """The first rank's ``values``, on all ranks."""
        return self.sum(
            place, iteration, values if self.rank == 0 else torch.zeros_like(values)
        ).reshape(values.shape)

    def which(self, flag: bool) -> list[int]:
        """At set-up, the ranks whose ``flag`` is set, on all ranks."""
        flags = torch.zeros(self.size)
        flags[self.rank] = flag
        return [rank for rank, found in enumerate(self.sum(Place.SET_UP, 0, flags)) if found]

    def texts(self, own: str) -> list[str]:
        """Every rank's text."""
        encoded = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size)
        lengths[self.rank] = len(encoded)
        sizes = [int(size) for size in self.sum(Place.SET_UP, 0, lengths)]
        if not 0 < min(sizes) <= max(sizes) <= _LONGEST_TEXT:
            raise OwnerError(
                "an owner's settings have no sensible length: run the same version of this library"
                " on all ranks."
            )
        found = []
        for rank, size in enumerate(sizes):
            text = self.sum(Place.SET_UP, 0, encoded if rank == self.rank else torch.zeros(size))
            found.append(bytes(text.to(torch.uint8).tolist()).decode())
        return found

    def listed(self, ranks: Sequence[int]) -> str:
        return " and ".join(self.names[rank] for rank in ranks)


class SharedRandomness(GaussianNoise):
    """Standard normal numbers that all ranks draw alike. They hide nothing."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def standard_normal(
        self, size: int, *, dtype: torch.dtype, device: torch.device, hides: Any = ()
    ) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device, dtype)
