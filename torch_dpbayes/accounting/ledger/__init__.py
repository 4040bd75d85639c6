"""A history that outlives its process: one SQLite file that many processes charge.

The file only grows. A row is a charge, a *block* (releases reserved ahead by one process, which
count as spent for all the others), or the *return* of what a block did not use. Rows are numbered
without gaps. Each carries a digest of itself and of the row before, the first one of the settings,
so a row that was changed, lost or brought back from a copy is noticed. The *seal* repeats the last
digest, so missing ends are noticed too.

``schema`` says what is written, ``file`` reads and appends, and ``session`` is one process at it.
"""
