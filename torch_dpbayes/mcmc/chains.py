"""Several chains of one kernel: Pyro's runner, with a process and a pipe for every chain."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pyro.infer
import torch
from numpy import ndarray
from pyro.infer.mcmc.api import MAX_SEED, _gen_samples, _MultiSampler
from pyro.infer.mcmc.logger import ProgressBar
from torch import Tensor

from ..density.pyro_runs import using_pyro
from ..errors import ArgumentTypeError, StateError
from .kernel import PrivateKernel, Start
from .mixing import complaint_of

_SECONDS_TO_STOP, _SECONDS_TO_NOTICE = 40.0, 0.2


class MCMC(pyro.infer.MCMC):
    """``pyro.infer.MCMC`` for private kernels, needed for parallel chains.

    Each parallel chain gets its own copy of the kernel, with the chain's number and start. The
    kernel stores every draw at once: :meth:`PrivateKernel.get_samples` also returns them if the
    budget, an error or Ctrl-C ends the run. Then the other chains stop after their iteration,
    and return the charges that they made in advance and did not use. If a chain is killed, the run
    ends, too, and all charges of this chain stay. A warning says if the chains have not mixed.

    Args:
        kernel: a kernel of this package; its accountant needs ``path=`` for parallel chains.
        num_samples, warmup_steps, options: as for ``pyro.infer.MCMC``, except ``transforms=``.

    Raises:
        TypeError: ``kernel`` is not a private kernel.

    **Privacy.** As for the kernel. Every chain is charged.
    """

    def __init__(
        self,
        kernel: PrivateKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(kernel, PrivateKernel):
            raise ArgumentTypeError(
                f"mcmc.MCMC runs private kernels, got {type(kernel).__name__}: use pyro.infer.MCMC"
                " for Pyro's own."
            )
        if "transforms" in options:
            raise ArgumentTypeError(
                "transforms= is not supported: the kernel uses those of the sites' supports."
            )
        super().__init__(kernel, num_samples, warmup_steps, **options)
        if isinstance(self.sampler, _MultiSampler):
            ours: Any = _ParallelChains(self.sampler, options.get("disable_progbar", False))
            self.sampler = ours

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run the chains on the data.

        Raises:
            PrivacyBudgetExceeded: an iteration did not fit into the budget.
            StateError: a parallel chain was killed.
        """
        # Pyro runs chains inside a handler on its stack, which all threads share
        with using_pyro, self.kernel.in_run():
            try:
                super().run(*args, **kwargs)
            finally:
                self.sampler.terminate()
                self._args = self._kwargs = None  # the records: a pickle must not have them
        if (complaint := complaint_of(self.kernel.diagnostics())) is not None:
            warnings.warn(complaint, stacklevel=2)


class _ParallelChains:
    """Replaces Pyro's sampler of parallel chains. Each chain has its own copy of the kernel.

    Each chain has its own pipe, and chains share nothing. So a chain that is killed, even in the
    middle of a message, holds no lock, and its pipe is closed.
    """

    def __init__(self, pyros: Any, is_silent: bool) -> None:
        pyros.terminate()
        self.kernel: PrivateKernel = pyros.kernel
        self._settings = pyros.warmup_steps, pyros.num_samples, pyros.hook
        self._starts, self._is_silent = pyros.initial_params, is_silent
        self._count, self._context = pyros.num_chains, pyros.ctx.get_context()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._open: dict[Connection, int] = {}  # pipes that can be read, and their chains

    def run(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int]]:
        """Yield the results of every chain, with the chain's number."""
        self._draws = self.kernel.begin_chains(self._count)
        try:
            for number in range(self._count):
                self._start(number, args, kwargs)
            with ProgressBar(
                *self._settings[:2], disable=self._is_silent, num_bars=self._count
            ) as bars:
                yield from self._received(bars)
        finally:
            self.terminate()

    def _start(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours, theirs = self._context.Pipe()
        starts = self._starts
        start = None if starts is None else {name: v[number] for name, v in starts.items()}
        seed = (torch.initial_seed() + number) % MAX_SEED
        defaults = torch.get_default_dtype(), torch.get_default_device()
        chain = Chain(theirs, not self._is_silent, start, seed, defaults)
        process = self._context.Process(
            name=str(number),
            target=chain.run,
            args=(self.kernel, self._settings, args, kwargs),
            daemon=True,
        )
        process.start()
        # now only the chain can write: the pipe is closed when the chain ends
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)
        self._open[ours] = number

    def _received(self, bars: ProgressBar) -> Iterator[tuple[Any, int]]:
        running = set(range(self._count))
        while running:
            for number, kind, value in self._messages():
                if kind == "gone" and number in running:
                    raise self._ended(number)
                if kind == "error":
                    error, note = value
                    error.add_note(note)
                    raise error
                if kind == "value":
                    yield (torch.as_tensor(value) if isinstance(value, ndarray) else value), number
                elif kind == "progress":
                    bars.set_postfix(value, pos=number, refresh=False)
                    bars.update(pos=number)
                elif kind == "end":
                    running.discard(number)

    def _messages(self, timeout: float | None = None) -> Iterator[tuple[int, str, Any]]:
        """One message of each chain that has sent one. Draws are stored, not returned."""
        for pipe in wait(list(self._open), timeout):
            assert isinstance(pipe, Connection)
            number = self._open.pop(pipe)  # Ctrl-C in the middle of a message breaks the pipe
            try:
                kind, value = pipe.recv()
            except Exception:  # the chain ended, perhaps in the middle of a message
                kind, value = "gone", None
            else:
                self._open[pipe] = number
            if kind == "draw":
                own = {name: torch.as_tensor(part) for name, part in value.items()}
                self._draws[number].append(own)
            else:
                yield number, kind, value

    def _ended(self, number: int) -> StateError:
        process = self._processes[number]
        process.join(_SECONDS_TO_NOTICE)
        process.kill()
        process.join()
        return StateError(
            f"chain {number} ended without an error message (exit code {process.exitcode}), so the"
            " run ends. kernel.get_samples() returns the draws of all chains; charges and"
            " reservations stay. Perhaps memory was too small."
        )

    def terminate(self, *_ignored: Any) -> None:
        """Ask the running chains to stop, and store the draws that they have sent."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"stop")
        end = time.monotonic() + _SECONDS_TO_STOP
        while self._open and time.monotonic() < end:
            for _ in self._messages(_SECONDS_TO_NOTICE):
                pass
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_SECONDS_TO_NOTICE)
            process.kill()
            process.join()
        self._processes, self._pipes, self._open = [], [], {}


class Chain(NamedTuple):
    """A parallel chain, in its own process."""

    pipe: Connection  # to the process that started the chain, whose only message is to stop
    shows_progress: bool
    start: Start
    seed: int
    defaults: tuple[torch.dtype, torch.device]

    def run(
        self,
        kernel: PrivateKernel,
        settings: tuple[int, int, Callable[..., Any] | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Run the whole chain. It stops after an iteration if the process that started it asks it
        to stop, or has ended.
        """
        warmup_steps, num_samples, hook = settings
        starter = os.getppid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the starter asks it to stop
        # else a process that the chain forks would keep the pipe open after the chain's end
        os.register_at_fork(after_in_child=self.pipe.close)
        pyro.set_rng_seed(self.seed)
        torch.set_default_dtype(self.defaults[0])
        if torch.get_default_device() != self.defaults[1]:  # torch's mode makes all calls slower
            torch.set_default_device(self.defaults[1])
        kernel.start_at(self.start)

        def after_an_iteration(kernel: PrivateKernel, *what: Any) -> None:
            if kernel.newest_draw is not None:
                self._send("draw", kernel.newest_draw)
            if self.shows_progress:
                self._send("progress", kernel.logging())
            if hook:
                hook(kernel, *what)
            # after the starter's end, its other children may keep its end of the pipe open
            if self.pipe.poll() or os.getppid() != starter:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            try:
                for value in _gen_samples(
                    kernel, warmup_steps, num_samples, after_an_iteration, None, *args, **kwargs
                ):
                    self._send("value", value)
                self._send("end", None)
            except Exception as error:
                told: Exception = error
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:  # the error cannot be sent
                    told = StateError(f"a chain failed with a {type(error).__name__}.")
                # the traceback is sent separately: pickling loses the notes of some errors
                self._send("error", (told, f"In a parallel chain:\n{traceback.format_exc()}"))

    def _send(self, kind: str, value: Any) -> None:
        if isinstance(value, dict):
            value = {name: _plain(part) for name, part in value.items()}
        try:
            self.pipe.send((kind, _plain(value)))
        except ConnectionError:  # the process that started the chain has ended
            raise KeyboardInterrupt from None


def _plain(value: Any) -> Any:
    """A tensor as an array: torch would send a tensor through shared memory."""
    return value.detach().cpu().numpy() if type(value) is Tensor else value
