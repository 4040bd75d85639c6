"""A history that outlives its process: one SQLite file that many processes charge.

The file only grows. A row is a charge, a *block* (releases reserved ahead by one process, which
count as spent for all the others), the *return* of what a block did not use, or a note. Rows are
numbered without gaps. Each carries a digest of itself and of the row before, the first one of the
settings, so a row that was changed, lost or brought back from a copy is noticed. The *seal* repeats
the last digest, so missing ends are noticed too.

``schema`` says what is written, ``file`` reads and appends, and ``session`` is one process at it.

Why the budget is never passed, whoever charges:

* *Processes.* A block is committed in an exclusive transaction, and only if the last row is still
  the one on which the decision rests (``Ledger.append``). Blocks of others count in full.
* *Threads.* One of them charges or reads at a time (``file.LOCK``).
* *Forks.* A fork waits for the lock. A session is of one process: a child begins anew from the
  file, and owns no block (``Session.begun_anew``).
* *Crashes.* What is released was taken out of a block that is on disk (``synchronous = FULL``).
  What nobody returns stays charged.
* *Interruptions.* While the file and what is known of it may differ, a session is ``stale``, and
  the next call begins anew. A block is returned once, by a unique index.
* *Copies of an accountant* hold the path and the file's identity, and no block. So do two
  accountants that one process opens.
* *Copies of the file.* Its identity, and the digest of the row that was read last, must be there.
* *Two names.* A hard link and a file that is a mount point are refused: SQLite keeps a journal for
  each name.
"""
