"""What tests of ledgers share: an event, a count that SQLite alone reads, later jobs."""

import sqlite3

import pytest

from torch_dpbayes.accounting import PrivacyAccountant, session
from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

DELTA = 1e-5


def sampled(noise, rate=0.01):
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


STEP = sampled(1.0)
WHERE = pytest.mark.parametrize("where", ["memory", "file"])


def made(where, path, *given, **settings):
    """An accountant in memory or at a file."""
    return PrivacyAccountant(*given, **settings, path=path if where == "file" else None)


def counts_of(accountant):
    """How often each pair was charged."""
    counts = {}
    for charge in accountant.history:
        pair = dominating_pair(charge.event, accountant.neighboring)
        counts[pair] = counts.get(pair, 0) + charge.count
    return counts


def counted(path):
    """How many releases the file counts, read with SQLite alone."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(
            "SELECT coalesce(sum(count), 0) FROM rows WHERE kind IN ('charge', 'block', 'return')"
        ).fetchone()[0]
    finally:
        connection.close()


def edited(path, *statements):
    """The database after these statements."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def later_job(*budget, **settings):
    """A ledger, opened as another process would: this one forgets which job it is."""
    session.jobs_of_this_process.clear()
    return PrivacyAccountant(*budget, **settings)
