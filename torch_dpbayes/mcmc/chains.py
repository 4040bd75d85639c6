"""Several chains of one kernel: Pyro's runner, with a process and a file for every chain."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyro.infer
import torch
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

    Each parallel chain gets its own copy of the kernel, with its own start. The kernel stores every
    draw at once: :meth:`PrivateKernel.get_samples` also returns the draws if the budget, an error
    or Ctrl-C ends the run. Then the other chains stop after their iteration, and return the charges
    that they made in advance and did not use. If a chain is killed, the run ends, too, and all
    charges of this chain stay. A warning says if the chains have not mixed.

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

    Each chain writes to its own file, and chains share nothing. So a chain that is killed, even in
    the middle of a draw, holds no lock, and everything that it wrote before can be read.
    """

    def __init__(self, pyros: Any, is_silent: bool) -> None:
        pyros.terminate()
        self.kernel: PrivateKernel = pyros.kernel
        self._settings = pyros.warmup_steps, pyros.num_samples, pyros.hook
        self._starts, self._is_silent = pyros.initial_params, is_silent
        self._count, self._context = pyros.num_chains, pyros.ctx.get_context()
        self._processes: list[Any] = []
        self._files: list[BinaryIO] = []

    def run(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int]]:
        """Yield the results of every chain, with the chain's number."""
        self._draws = self.kernel.begin_chains(self._count)
        with TemporaryDirectory() as folder:
            try:
                for number in range(self._count):
                    self._start(number, Path(folder, str(number)), args, kwargs)
                with ProgressBar(
                    *self._settings[:2], disable=self._is_silent, num_bars=self._count
                ) as bars:
                    yield from self._results(bars)
            finally:
                self.terminate()

    def _start(
        self, number: int, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        starts = self._starts
        start = None if starts is None else {name: v[number] for name, v in starts.items()}
        seed = (torch.initial_seed() + number) % MAX_SEED
        defaults = torch.get_default_dtype(), torch.get_default_device()
        own = path, seed, defaults, start, not self._is_silent
        process = self._context.Process(
            name=str(number),
            target=_run_chain,
            args=(*own, self.kernel, self._settings, args, kwargs),
            daemon=True,
        )
        self._files.append(path.open("w+b"))
        process.start()
        self._processes.append(process)

    def _results(self, bars: ProgressBar) -> Iterator[tuple[Any, int]]:
        codes: list[int | None] = [None]
        done = set[int]()
        while None in codes:
            # not only sentinels: a process that a chain forked keeps its sentinel open
            running = [process for process in self._processes if process.exitcode is None]
            wait([process.sentinel for process in running], _SECONDS_TO_NOTICE)
            codes = [process.exitcode for process in self._processes]
            for number, kind, value in self._messages():
                if kind == "error":
                    error, note = value
                    error.add_note(note)
                    raise error
                if kind == "value":
                    yield value, number
                elif kind == "end":
                    done.add(number)
                else:
                    bars.set_postfix(value, pos=number, refresh=False)
                    bars.update(pos=number)
            for number, code in enumerate(codes):
                if code is not None and number not in done:
                    raise StateError(
                        f"chain {number} ended without an error message (exit code {code}), so the"
                        " run ends. kernel.get_samples() returns the draws of all chains; charges"
                        " and reservations stay. Perhaps memory or disk was too small."
                    )

    def _messages(self) -> Iterator[tuple[int, str, Any]]:
        """What the chains have written since the last call. Draws are stored, not returned."""
        for number, file in enumerate(self._files):
            while True:
                place = file.tell()
                try:
                    kind, value = pickle.load(file)
                except BaseException as error:  # also Ctrl-C
                    file.seek(place)
                    if not isinstance(error, EOFError | pickle.UnpicklingError):
                        raise
                    break  # no more, or not yet all of it
                if kind == "draw":
                    self._draws[number].append(value)
                else:
                    yield number, kind, value

    def terminate(self, *_ignored: Any) -> None:
        """Ask the running chains to stop, and store the draws that they have written."""
        for process in self._processes:
            process.terminate()
        end = time.monotonic() + _SECONDS_TO_STOP
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        for _ in self._messages():
            pass
        for file in self._files:
            file.close()
        self._processes, self._files = [], []


def _run_chain(
    path: Path,
    seed: int,
    defaults: tuple[torch.dtype, torch.device],
    start: Start,
    shows_progress: bool,
    kernel: PrivateKernel,
    settings: tuple[int, int, Callable[..., Any] | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """A whole parallel chain, in its own process, which writes everything to ``path``. It stops
    after an iteration if the process that started it asks it to stop, or has ended.
    """
    warmup_steps, num_samples, hook = settings
    starter, asked = os.getppid(), list[int]()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the starter asks it to stop
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    pyro.set_rng_seed(seed)
    torch.set_default_dtype(defaults[0])
    if torch.get_default_device() != defaults[1]:  # torch's mode makes all calls slower
        torch.set_default_device(defaults[1])
    kernel.start_at(start)

    def write(kind: str, value: Any) -> None:
        pickle.dump((kind, value), file)
        file.flush()

    def after_an_iteration(kernel: PrivateKernel, *what: Any) -> None:
        if kernel.newest_draw is not None:
            write("draw", kernel.newest_draw)
        if shows_progress:
            write("progress", kernel.logging())
        if hook:
            hook(kernel, *what)
        if os.getppid() != starter:  # the starter was killed, and left the folder
            shutil.rmtree(path.parent, ignore_errors=True)
        if asked or os.getppid() != starter:
            sys.exit(1)

    with path.open("ab") as file:
        try:
            for value in _gen_samples(
                kernel, warmup_steps, num_samples, after_an_iteration, None, *args, **kwargs
            ):
                write("value", value.cpu() if isinstance(value, Tensor) else value)
            write("end", None)  # exit code 0 does not tell: a hook may call sys.exit()
        except Exception as error:
            told: Exception = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # the error cannot be sent
                told = StateError(f"a chain failed with a {type(error).__name__}.")
            # the traceback is sent separately: pickling loses the notes of some errors
            write("error", (told, f"In a parallel chain:\n{traceback.format_exc()}"))
