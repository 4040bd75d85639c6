"""Ranks of a process group that train one model together: consistency checks, sums, errors.

All ranks of a training work for one data holder: each may read every record, and they exchange
clipped sums without noise. Together they make the same release as one process: every record
belongs to one rank, rank 0 adds the Gaussian noise to its own clipped sum, and then the ranks add
up their sums. A step has two messages. Before anything is charged, every rank sends a short text
with its place in the program, or its error. Then follows the sum. Its length is the number of
parameters and does not depend on the number of records.

If one rank raises, every rank raises: it reports the error in its next message.

The owners of a private chain use the same messages, but they do not trust each other. They add
noise to their sums before they send them (``mcmc/multi_owner.py``), and send errors without text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .accounting.accountant import PrivacyBudgetExceeded
from .errors import ArgumentError, ArgumentTypeError, RankError, StateError

# places in the program at which ranks exchange messages
MAKE_PRIVATE, STEP = "make_private", "optimizer.step()"
CALIBRATION = "the calibration of make_private_with_epsilon"
SET_UP, ITERATION = "the set-up of a chain", "an iteration of a chain"
CHAIN_END = "the end of a chain"
_AT_ONCE = 1024  # bytes of a text that are sent with its length; a step's message is shorter
_LONGEST_TEXT = 2**20  # bytes
_LONGEST_ERROR = 10_000  # characters
_SHOWN = 200  # an error shows two values if their text is shorter (characters)
_KNOWN = "_dpbayes_known_to_all_ranks"


def require_single_process() -> None:
    """Raise if this process is one of several ranks: each would take steps without the others."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise StateError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, but no"
            " process_group= is given. To train one model together:"
            " PrivacyEngine(process_group=torch.distributed.group.WORLD); for a separate model on"
            " this rank: PrivacyEngine(process_group=torch.distributed.new_subgroups(1)[0]).",
            code="ranks-alone",
        )


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if another library adds up this model's gradients over ranks."""
    for name, part in module.named_modules():
        is_sharded = type(part).__name__ == "FullyShardedDataParallel"
        if isinstance(part, DistributedDataParallel) or is_sharded:
            where = "the module" if not name else f"module {name!r}"
            raise ArgumentTypeError(
                f"{where} is wrapped in {type(part).__name__}, which averages gradients without"
                " clipping and noise. Pass the bare module to"
                " PrivacyEngine(process_group=torch.distributed.group.WORLD).make_private: its"
                " optimizer adds up clipped sums over ranks.",
                code="ranks-wrapped",
            )
    for name, p in module.named_parameters():
        if hasattr(p, "device_mesh"):
            raise ArgumentTypeError(
                f"parameter {name!r} is sharded over ranks, but a gradient's norm needs the whole"
                " gradient on one rank: use unsharded parameters",
                code="ranks-wrapped",
            )


class _Message(NamedTuple):
    """A rank's message: its place, its settings and numbers, or its error."""

    place: str = ""
    facts: dict[str, Any] = {}  # noqa: RUF012 - it is never changed
    beside: Any = None
    norm: float = 0.0
    error: str = ""


class Ranks:
    """The ranks of a process group that train one model together. ``shares_errors``: they send the
    texts of their errors. ``is_broken``: another rank was lost.
    """

    def __init__(self, group: dist.ProcessGroup, *, shares_errors: bool = True) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError(
                "this process is not in process_group: build the engine only on the group's ranks"
            )
        self._group, self._shares_errors = group, shares_errors
        self.is_broken = False
        self._timeout: timedelta | None = None
        self._talk = group
        backends = dist.get_backend_config(group)
        # without a timeout NCCL waits on the GPU, and finally ends the process
        if "cuda:nccl" in backends and torch.cuda.is_available():
            self._timeout = group._get_backend(torch.device("cuda")).options._timeout
        # messages are read on the CPU, and a rank that died must not block a GPU
        if "cpu:" not in backends:
            members = dist.get_process_group_ranks(group)
            talk = dist.new_group(
                members, timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )
            assert isinstance(talk, dist.ProcessGroup)  # this process is in it
            self._talk = talk

    def require_backend_for(self, device: torch.device) -> None:
        """Raise if the group cannot add up tensors on this device. Otherwise a step would fail
        after its charge.
        """
        backends = dist.get_backend_config(self._group)
        if f"{device.type}:" not in backends:
            raise ArgumentError(
                f"the parameters are on {device.type}, but the process group cannot add up tensors"
                f" there ({backends}): move the model, or call "
                f'init_process_group("{"nccl" if device.type == "cuda" else "gloo"}").'
            )

    # -- messages ----------------------------------------------------------------------------------

    def check_consistent(
        self,
        place: str,
        facts: Mapping[str, Any] | None = None,
        *,
        beside: Any = None,
        norm: float = 0.0,
        shows_values: bool = False,
    ) -> list[Any]:
        """Raise on every rank if one failed, is at another place, or differs in ``facts`` or, by
        more than rounding, in the parameters' ``norm``. ``facts`` are numbers and texts, by the
        names that an error uses. ``shows_values``: the error shows them; they must not depend on
        the records. Returns every rank's ``beside``, which may differ.
        """
        rows = self._exchange(_Message(place, dict(facts or {}), beside, norm))
        if any(row.error for row in rows):
            self._raise_first_of(rows, None)
        first = rows[0]
        for rank, row in enumerate(rows):
            if row.place != first.place:
                self._raise(
                    f"rank {rank} is in {row.place}, rank 0 in {first.place}: every rank must make"
                    " the same calls."
                )
            known = {**first.facts, **row.facts}
            names = [name for name in known if row.facts.get(name) != first.facts.get(name)]
            if not math.isclose(row.norm, first.norm, rel_tol=1e-5):
                names.append("the parameters of the model")
            if names:
                what = " and in ".join(names)
                if shows_values:
                    own, other = row.facts.get(names[0]), first.facts.get(names[0])
                    values = f"({own}, on rank 0 {other})"
                    what = f"{names[0]} {values}" if len(values) < _SHOWN else names[0]
                self._raise(
                    f"rank {rank} and rank 0 differ in {what}: use the same model, settings and"
                    " accountant on all ranks, or load one checkpoint everywhere. Nothing was"
                    " charged."
                )
        return [row.beside for row in rows]

    def compare(self, described: Mapping[str, Any], place: str = MAKE_PRIVATE) -> None:
        """Raise on every rank if one of them describes anything differently from rank 0."""
        facts = {name: repr(value) for name, value in described.items()}
        self.check_consistent(place, facts, shows_values=True)

    def from_rank_0(self, place: str, compute: Callable[[], Any]) -> Any:
        """Numbers or texts that rank 0 computes, on every rank."""
        return self.check_consistent(place, beside=compute() if self.rank == 0 else None)[0]

    def all_reduce(self, buffer: Tensor) -> None:
        """buffer ← Σ of the ranks' buffers, bit for bit the same on all ranks."""
        group = self._group if buffer.is_cuda else self._talk
        timeout = () if self._timeout is None or not buffer.is_cuda else (self._timeout,)
        with self._answering():
            if (work := dist.all_reduce(buffer, group=group, async_op=True)) is not None:
                work.wait(*timeout)

    def _exchange(self, own: _Message) -> list[_Message]:
        """Every rank's message. Messages are JSON, because owners do not trust each other."""
        encoded = json.dumps(own).encode()[:_LONGEST_TEXT]
        rows = self._gather(len(encoded).to_bytes(8, "little") + encoded[:_AT_ONCE], _AT_ONCE + 8)
        lengths = [min(int.from_bytes(row[:8], "little"), _LONGEST_TEXT) for row in rows]
        texts = [row[8:] for row in rows]
        if max(lengths) > _AT_ONCE:
            texts = self._gather(encoded, max(lengths))
        try:
            found = [json.loads(t[:n]) for t, n in zip(texts, lengths, strict=True)]
            return [
                _Message(str(place), {str(k): v for k, v in facts.items()}, b, float(norm), str(e))
                for place, facts, b, norm, e in found
            ]
        # another program wrote the text
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            raise RankError(
                "another rank sent a message that cannot be read: run the same version of this"
                " library on all ranks."
            ) from None

    def _gather(self, own: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, padded to the same size."""
        mine = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._answering():
            dist.all_gather(everyone, mine, group=self._talk)
        return [row.numpy().tobytes() for row in everyone]

    # -- errors ------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Report an error inside to the other ranks, in the next message that they wait for."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # after an interruption the process ends, and the other ranks of a training notice that
        reports = isinstance(error, Exception) or not self._shares_errors
        if error is None or not reports or self.is_broken or getattr(error, _KNOWN, False):
            return
        with suppress(RankError):  # no other rank is left
            self._exchange(_Message(error=self._described(error)))
        setattr(error, _KNOWN, True)

    def raise_together(self, error: Exception | None) -> NoReturn:
        """If all ranks know that one failed: each raises its own error, or else that of the first
        rank that has one.
        """
        described = "" if error is None else self._described(error)
        self._raise_first_of(self._exchange(_Message(error=described)), error)

    def _raise_first_of(self, rows: list[_Message], own: Exception | None) -> NoReturn:
        if own is not None:
            self._raise(own)
        rank, described = next((rank, row.error) for rank, row in enumerate(rows) if row.error)
        name, _, text = described.partition(": ")
        if name == PrivacyBudgetExceeded.__name__:
            self._raise(PrivacyBudgetExceeded(text))
        self._raise(f"rank {rank} failed, so no rank takes this step. {name} there: {text}")

    def _described(self, error: BaseException) -> str:
        name = type(error).__name__
        if self._shares_errors:
            return f"{name}: {error}"[:_LONGEST_ERROR]
        if isinstance(error, PrivacyBudgetExceeded):
            return (
                f"{name}: the budget of rank {self.rank} does not allow another iteration. Charges"
                " stay; kernel.get_samples() returns the draws."
            )
        return "See the error in that process."

    @staticmethod
    def _raise(error: Exception | str) -> NoReturn:
        error = RankError(error) if isinstance(error, str) else error
        setattr(error, _KNOWN, True)
        raise error

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise if another rank does not answer, and from then on in every call."""
        if self.is_broken:
            raise RankError(
                "a rank of this process group was lost before: start all ranks again from a"
                " checkpoint. Nothing was charged now."
            )
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            raise RankError(
                f"rank {self.rank} of {self.size}: another rank died, or did not answer in time."
                " No step was taken; charges stay. Save state_dict(), and start all ranks again"
                " from a checkpoint."
            ) from error
