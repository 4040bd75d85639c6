"""A history that outlives its process: one SQLite file that many processes charge.

The file only grows. A row is a charge, a *block* (releases reserved ahead by one process, which
count as spent for all the others), or the *return* of what a block did not use. Rows are numbered
without gaps, and each carries a digest of itself and of the row before, the first one of the
settings, so that the last digest is a version: a row that was changed, lost or brought back from a
copy is noticed. The *seal* repeats the last digest (that of the settings where there is no row), so
that missing ends are noticed too.

How a process charges: it reads what is new, decides outside of any transaction whether a block
fits, and commits the block in ``BEGIN IMMEDIATE`` only if the version is still the one it decided
on; otherwise it decides again. Steps are then taken out of the block in memory. What was released
is therefore on disk before it is released, whatever becomes of the process:

* killed: the whole block stays charged, which is more than was released, never less;
* closed (``close()``, the end of a ``with`` block or of the program, also by Ctrl-C): the rest is
  returned, once, which a unique index enforces;
* forked: the child starts afresh from the file and never returns a block of its parent;
* a commit that was interrupted, so that nobody knows whether it reached the disk: its block is not
  used, and is returned once the file can be read.

``database`` opens the file, ``making`` makes it, ``format`` says what is written in it, ``rows``
what that means, ``file`` reads and appends, ``notes`` keeps statements, and ``session`` is one
process' place at it.
"""

from .errors import LedgerError
from .file import Ledger
from .rows import Entry, Flag, Key, Row, checked_flag, open_blocks
from .session import Block, Session

__all__ = [
    "Block",
    "Entry",
    "Flag",
    "Key",
    "Ledger",
    "LedgerError",
    "Row",
    "Session",
    "checked_flag",
    "open_blocks",
]
