"""Which launch a process belongs to, and when it was started.

A launcher starts several workers at once: torchrun, ``srun``, ``mpirun``. They are one job: what
they release was decided when they were launched. That another process carries the same name does
not show it: names repeat (torchrun's is "none" unless it is given one), and a shell of Slurm starts
one program after another under one job. So a worker says who it is, and when it came; see
:class:`~torch_dpbayes.accounting.ledger.Session`.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .. import _TAKEN_UP

# variables that name a launch, and the one that tells its workers apart
_LAUNCHERS = (
    (("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), "RANK"),
    (("PMIX_NAMESPACE",), "PMIX_RANK"),
    (("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_PROCID"),
)
_SAID = re.compile(r" (?P<worker>.+?)(?: is .+)?, up (?P<up>[0-9.]+) s of boot (?P<boot>\S+)$")


def launch_and_worker(environment: Mapping[str, str]) -> tuple[str, str]:
    """The name of the launch, the same for all its workers, and which of them this is; two empty
    strings where no launcher says so.
    """
    for named, rank in _LAUNCHERS:
        if all(environment.get(name) for name in (*named, rank)):
            name = " ".join(f"{variable}={environment[variable]}" for variable in named)
            return name, f"{rank} {environment[rank]}"
    return "", ""


def this_worker() -> str:
    """Which worker of its launch this process is; without a launcher each process is one."""
    return launch_and_worker(os.environ)[1] or _this_process()


def _this_process() -> str:
    return f"pid {os.getpid()} on {platform.node()}"


class Moment(NamedTuple):
    """Seconds since the machine was started, which no change of its clock moves."""

    up: float
    boot: str

    def is_before(self, other: Moment) -> bool:
        """Whether it certainly was."""
        return self.boot == other.boot and self.up < other.up


def now() -> Moment | None:
    """This moment; ``None`` where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), boot)
    except (OSError, AttributeError):
        return None


def start_of_this_program() -> Moment | None:
    """When this process was started, or took up this library if that was later, rounded up;
    ``None`` where the system does not tell.

    A shell that ends in a program becomes it, and stays the process that it was: ``sh -c "a; b"``
    began before what ``a`` charged, though ``b`` may have been decided from it.
    """
    moment = now()
    try:
        # the name of the program, in parentheses, may hold spaces
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    if moment is None or _TAKEN_UP is None:
        return None
    return Moment(max(up, _TAKEN_UP + 0.01), moment.boot)


def said() -> str:
    """What a worker says of itself in all its rows, at the moment before the first of them."""
    worker, process, moment = this_worker(), _this_process(), now()
    text = worker if worker == process else f"{worker} is {process}"
    return text if moment is None else f"{text}, up {moment.up:.2f} s of boot {moment.boot}"


def understood(writer: str) -> tuple[str, Moment | None]:
    """The worker that wrote a row, and when it began to write, as far as it says so."""
    found = _SAID.search(writer)
    if found is None:
        return writer.partition(" ")[2], None
    return found["worker"], Moment(float(found["up"]), found["boot"])
