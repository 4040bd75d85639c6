"""Several chains of one kernel: Pyro's runner, which gives every parallel chain its number."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue
from typing import Any

import pyro.infer
import torch
from pyro.infer.mcmc.api import _MultiSampler, _Worker
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentTypeError
from .kernel import Draw, PrivateKernel
from .mixing import complaint_of

_SECONDS_TO_STOP, _SECONDS_TO_CHARGE, _SECONDS_TO_SEND = 40.0, 30.0, 1.0
_SECONDS_TO_NOTICE, _SECONDS_TO_LOOK = 0.2, 0.02


class MCMC(pyro.infer.MCMC):
    """``pyro.infer.MCMC`` for private kernels, needed for parallel chains.

    Each parallel chain gets its own copy of the kernel, with the chain's number and start. The
    kernel keeps every draw as it arrives: :meth:`PrivateKernel.get_samples` has them also when the
    budget, an error or Ctrl-C ends the run. The chains that still run are then asked to stop and
    return what they reserved of the budget. A chain that is killed keeps what it was charged, and
    what it had reserved. A warning says so if the chains have not mixed.

    Args:
        kernel: a kernel of this package; its accountant needs ``path=`` for parallel chains.
        num_samples, warmup_steps, initial_params, num_chains, hook_fn, mp_context: as for
            ``pyro.infer.MCMC``.
        disable_progbar, disable_validation, save_params: likewise. ``transforms=`` is not taken,
            for the kernel's own are those of the sites' supports.

    Raises:
        TypeError: ``kernel`` is not a private kernel.

    **Privacy.** As the kernel's. Every chain is charged.
    """

    def __init__(
        self,
        kernel: PrivateKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: dict[str, Tensor] | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        mp_context: str | None = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        save_params: list[str] | None = None,
    ) -> None:
        if not isinstance(kernel, PrivateKernel):
            raise ArgumentTypeError(
                f"mcmc.MCMC runs private kernels, got {type(kernel).__name__}: use pyro.infer.MCMC"
                " for Pyro's own."
            )
        super().__init__(
            kernel,
            num_samples,
            warmup_steps,
            initial_params,
            num_chains,
            hook_fn,
            mp_context,
            disable_progbar,
            disable_validation,
            save_params=save_params,
        )
        if isinstance(self.sampler, _MultiSampler):
            starts = self.sampler.initial_params
            self.sampler.terminate()
            self.sampler = _ParallelChains(
                kernel,
                num_samples,
                self.warmup_steps,
                num_chains,
                mp_context,
                disable_progbar,
                initial_params=starts,
                hook=hook_fn,
            )

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run the chains on the data.

        Raises:
            PrivacyBudgetExceeded: an iteration did not fit into the budget.
        """
        with self.kernel.in_run():
            super().run(*args, **kwargs)
        if (complaint := complaint_of(self.kernel.diagnostics())) is not None:
            warnings.warn(complaint, stacklevel=2)


class _ParallelChains(_MultiSampler):
    """Pyro's parallel chains, with a copy of the kernel for each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a chain that is killed may hold this queue's lock: the process must end without it
        self.log_queue.cancel_join_thread()
        self._context: BaseContext = self.ctx.get_context()
        self._sent: SimpleQueue[tuple[int, dict[str, Any]]] = self._context.SimpleQueue()
        # one pipe a chain: an event would be a lock of all, which one that ends may hold
        self._stops: list[tuple[Any, Any]] = []
        self._receiving = threading.Lock()

    def init_workers(self, *args: Any, **kwargs: Any) -> None:
        self.workers, starts = [], self.initial_params
        self._stops = [self._context.Pipe(duplex=False) for _ in range(self.num_chains)]
        for number in range(self.num_chains):
            start = None if starts is None else {name: v[number] for name, v in starts.items()}
            kernel = self.kernel.for_chain(Chain(number, self._stops[number][0], self._sent), start)
            worker = _Worker(
                number,
                self.result_queue,
                self.log_queue,
                self.events[number],
                kernel,
                self.num_samples,
                self.warmup_steps,
                hook=self.hook,
            )
            self.workers.append(
                self.ctx.Process(
                    name=str(number), target=worker.run, args=args, kwargs=kwargs, daemon=True
                )
            )

    def run(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._chains, ended = self.kernel.begin_chains(self.num_chains), threading.Event()
        threading.Thread(target=self._keep_receiving, args=(ended,), daemon=True).start()
        try:
            yield from super().run(*args, **kwargs)
        finally:
            ended.set()
            self._receive()

    def _keep_receiving(self, ended: threading.Event) -> None:
        """A chain whose draw is larger than a pipe waits until it is taken."""
        while not ended.wait(_SECONDS_TO_LOOK):
            self._receive()

    def terminate(self, terminate_workers: bool = False) -> None:
        if terminate_workers:
            for worker, (_, stop) in zip(self.workers, self._stops, strict=True):
                if worker.is_alive():
                    stop.send_bytes(b"stop")
            end = time.monotonic() + _SECONDS_TO_STOP
            while any(worker.is_alive() for worker in self.workers) and time.monotonic() < end:
                self._receive()
                time.sleep(0.02)
            self._receive()
        super().terminate(terminate_workers)

    def _receive(self) -> None:
        """Keep the draws that have arrived."""
        with self._receiving:
            while not self._sent.empty():
                number, draw = self._sent.get()
                own = {name: torch.as_tensor(value) for name, value in draw.items()}
                self._chains[number].append(own)


@dataclass
class Chain:
    """What a kernel knows of the parallel chain that it runs, in a process of its own.

    Attributes:
        number: of the chain.
        stop: where the chain hears that it has to end.
        sent: where draws go: to the process that started the chains.
    """

    number: int
    stop: Connection
    sent: SimpleQueue[tuple[int, dict[str, Any]]]
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _sending=threading.Lock())

    def begin(self, accountant: PrivacyAccountant) -> None:
        """End this process when it is asked to, or when the one that started it has ended. The
        chain may be waiting for Pyro, so a thread does it.
        """
        threading.Thread(target=self._end_when_asked, args=(accountant,), daemon=True).start()

    def send(self, draw: Draw) -> None:
        """Hand on a draw, which was charged."""
        with self._sending:
            self.sent.put((self.number, {name: value.numpy() for name, value in draw.items()}))

    def _end_when_asked(self, accountant: PrivacyAccountant) -> None:
        parent, starter = multiprocessing.parent_process(), os.getppid()
        asks: list[Any] = [self.stop] if parent is None else [self.stop, parent.sentinel]
        # what else the starter forked may keep its sentinel open
        while not wait(asks, timeout=_SECONDS_TO_NOTICE) and os.getppid() == starter:
            pass
        with ExitStack() as at_the_end:
            at_the_end.callback(os._exit, 1)
            accountant.close_for_good(_SECONDS_TO_CHARGE)  # no iteration begins any more
            self._sending.acquire(timeout=_SECONDS_TO_SEND)
