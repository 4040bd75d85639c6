"""Chains in processes of their own: which chain a process runs, what becomes of its draws, and how
it ends without losing what it had reserved of the budget.

This is all that is known here of how Pyro starts its workers, and of signals.
"""

from __future__ import annotations

import _thread
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from functools import cache
from multiprocessing import connection, util
from pathlib import Path
from typing import Any

import torch
from pyro.infer.mcmc.api import AbstractMCMC
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant

Start = dict[str, Tensor] | None  # where a chain starts, by site; None: nobody said

_SECONDS_TO_CHARGE, _SECONDS_TO_WRITE, _SECONDS_TO_NOTICE = 30.0, 1.0, 0.2
_PYROS_RUNNERS = "pyro.infer.mcmc.api"


class Spool:
    """Draws of worker processes, in files that outlive them. They are releases that were
    charged, not data.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="torch_dpbayes_chains_")
        keep_interrupts()
        self._file: Any = None
        # After all workers have ended. In workers of the standard library nothing else is called at
        # the end; not in forks.
        util.Finalize(
            self,
            shutil.rmtree,
            args=(self.folder,),
            kwargs={"ignore_errors": True},
            exitpriority=-100,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_file": None}

    def write(self, draw: dict[str, Tensor]) -> None:
        if self._file is None or self._file[0] != os.getpid():
            chain = f"-{multiprocessing.current_process().name:0>20}"  # Pyro numbers its workers
            run = sum(path.name.endswith(chain) for path in Path(self.folder).iterdir())
            self._file = (os.getpid(), open(Path(self.folder, f"{run:010d}{chain}"), "xb"))
        pickle.dump({name: value.numpy() for name, value in draw.items()}, self._file[1])
        self._file[1].flush()

    def read(self) -> list[list[dict[str, Tensor]]]:
        """Run by run, chain by chain."""
        return self._read(sorted(Path(self.folder).iterdir()))

    @property
    def num_chains(self) -> int:
        """Of all runs."""
        return sum(1 for _ in Path(self.folder).iterdir())

    def read_last_run(self) -> list[list[dict[str, Tensor]]]:
        """The chains of the last run, or in a process that runs one of them, that one."""
        if self._file is not None and self._file[0] == os.getpid():
            return self._read([Path(self._file[1].name)])
        paths = sorted(Path(self.folder).iterdir())
        runs = [path.name.partition("-")[0] for path in paths]
        return self._read([path for path, run in zip(paths, runs, strict=True) if run in runs[-1:]])

    def _read(self, paths: list[Path]) -> list[list[dict[str, Tensor]]]:
        chains = []
        for path in paths:
            chain = []
            with path.open("rb") as file:
                while True:
                    try:
                        chain.append(
                            {
                                name: torch.as_tensor(value)
                                for name, value in pickle.load(file).items()
                            }
                        )
                    # the last draw of a worker that was stopped may be cut short
                    except (EOFError, pickle.UnpicklingError):
                        break
            chains.append(chain)
        return [chain for chain in chains if chain]


def chain_number() -> int | None:
    """The chain's number in a process that Pyro started to run one of several chains, and
    nothing else.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    worker = getattr(target, "__self__", None)
    return getattr(worker, "chain_id", None) if type(worker).__module__ == _PYROS_RUNNERS else None


def runner_of(kernel: object) -> AbstractMCMC | None:
    """Pyro's ``MCMC`` in whose ``run`` we are, if it runs ``kernel``. Pyro does not tell a kernel
    what else it was given.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _PYROS_RUNNERS:
            runner = frame.f_locals.get("self")
            if isinstance(runner, AbstractMCMC) and runner.kernel is kernel:
                return runner
        frame = frame.f_back
    return None


def is_next_chains_start(params: Start, last: Start) -> bool:
    """Whether Pyro sets ``params`` for the chain after the one for which it set ``last``.

    It sets the starts of parallel chains one after another on one kernel, and does not say whose
    they are. They are the rows of one tensor for each site, so they follow each other in memory.
    """
    if not params or not last or params.keys() != last.keys():
        return False
    pairs = [(params[name], last[name]) for name in params]
    ahead = [int(now.storage_offset()) - int(before.storage_offset()) for now, before in pairs]
    return (
        all(
            now.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            for now, before in pairs
        )
        and min(ahead) >= 0
        and max(ahead) > 0
    )


def give_back_when_terminated(accountant: PrivacyAccountant) -> None:
    """For the rest of this process, which only runs a chain: on SIGTERM, by which Pyro ends it when
    another chain fails or is interrupted, and when its parent has ended, it gives back what it has
    reserved, and ends. Ctrl-C, which all processes get, is left to the parent.

    A thread does it: the chain may be waiting for Pyro, or for a lock that nobody is going to
    release.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent_pid, sentinel = parent.pid, parent.sentinel
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python asks for
    mask: set[Any] = set()

    def note(number: int, _: object) -> None:
        os.write(writer, bytes([number]))

    starter = os.getppid()

    def has_parent() -> bool:
        # Something else that the parent forked may keep its sentinel open, and it may have ended
        # before this began.
        return os.getppid() == starter and _is_running(parent_pid)

    def leave() -> None:
        is_told = False
        while not is_told and has_parent():
            ready = connection.wait([reader, sentinel], timeout=_SECONDS_TO_NOTICE)
            if sentinel in ready:
                break
            is_told = reader in ready and signal.SIGTERM in os.read(reader, 4096)
        try:
            accountant.close_for_good(_SECONDS_TO_CHARGE)  # no iteration begins any more
        finally:  # what was not given back stays charged
            # a thread that writes into a queue holds a lock of all processes
            end = time.monotonic() + _SECONDS_TO_WRITE
            while has_parent() and time.monotonic() < end:
                time.sleep(0.05)
            os._exit(128 + signal.SIGTERM)

    # What the chain forks is no chain: signals to it are held back until it has forgotten all this.

    def hold_back() -> None:
        nonlocal mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is note:
            for number, handler in before.items():
                signal.signal(number, handler)
        let_through()

    threading.Thread(target=leave, daemon=True).start()
    # a handler has to wait where the chain waits, this has not
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, note) or signal.SIG_DFL
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=forget)


def _is_running(pid: int | None) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


@cache
def keep_interrupts() -> None:
    """From now on Ctrl-C is heard though it comes while a process forks. Python calls functions
    then whose exceptions it drops, KeyboardInterrupt among them: the program would go on, and so
    would its chains.
    """
    heard: list[int] = []
    held: list[Any] = []

    def hold() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            held.append(signal.signal(signal.SIGINT, lambda number, _: heard.append(number)))

    def release() -> None:
        if held:
            signal.signal(signal.SIGINT, held.pop())

    def release_in_parent() -> None:
        release()
        if heard:
            heard.clear()
            # not a Thread, for whose start one waits here
            _thread.start_new_thread(interrupt_soon, ())

    def interrupt_soon() -> None:
        time.sleep(0.05)  # until the fork is over
        _thread.interrupt_main()

    def release_in_child() -> None:
        release()
        heard.clear()  # the parent's

    os.register_at_fork(
        before=hold, after_in_parent=release_in_parent, after_in_child=release_in_child
    )
