"""Statements on which a guarantee rests: kept with the history, wherever it goes, and shown."""

import json
import multiprocessing

import pytest
from support.ledgers import WHERE, made

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.events import GaussianDpEvent, RecordwiseBatchGaussianDpEvent

EVENT = GaussianDpEvent(10.0)
FIRST = "DPSGLD: records are independent: by construction"
SECOND = "DPSGLD: the loss was not seen"


def statements(accountant):
    """What the summary shows, by its lines."""
    lines = accountant.summary().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("  rests on")]
    if not starts:
        return []
    found = [lines[starts[0]].removeprefix("  rests on    ")]
    for line in lines[starts[0] + 1 :]:
        if not line.startswith(" " * 14):
            break
        found.append(line.strip())
    return found


@WHERE
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_each_statement_is_kept_once_in_order(path, where, relation):
    """Also what a charged event states."""
    accountant = made(where, path, neighboring=relation)
    assert accountant.notes == () and "rests on" not in accountant.summary()
    for statement in (FIRST, SECOND, FIRST, " DPSGLD:  the loss\nwas not seen "):
        accountant.note(statement)
    accountant.compose(EVENT, label="report")
    assert accountant.notes == (FIRST, SECOND)
    accountant.compose(RecordwiseBatchGaussianDpEvent(20.0), 3)
    first, second, third = statements(accountant)
    assert (first, second) == (FIRST, SECOND) and "does not depend on other records" in third
    assert accountant.notes == (first, second, third)


@WHERE
def test_saved_states_carry_them(path, where):
    accountant = PrivacyAccountant(1.0, 1e-5).compose(EVENT)
    accountant.note(FIRST)
    state = json.loads(json.dumps(accountant.state_dict()))
    loaded = made(where, path, 1.0, 1e-5)
    loaded.note(SECOND)
    loaded.load_state_dict(state)
    assert set(loaded.notes) >= {FIRST, SECOND}


def test_a_file_keeps_them_for_all_jobs(path, capsys):
    with PrivacyAccountant(1.0, 1e-5, path=path) as accountant:
        accountant.compose(EVENT)
        accountant.note(FIRST)
        other = PrivacyAccountant(path=path)
        other.note(SECOND)
        other.note(FIRST)
        assert (
            accountant.notes == other.notes == PrivacyAccountant(path=path).notes == (FIRST, SECOND)
        )
    before = path.read_bytes()
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert FIRST in said and SECOND in said
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rests_on"] == [FIRST, SECOND]
    assert path.read_bytes() == before


def _note_several(accountant, worker):
    for i in range(10):
        accountant.note(f"statement {i}")
        accountant.note(f"statement {i} of {worker}")


@pytest.mark.thorough
def test_processes_note_at_once(path):
    accountant = PrivacyAccountant(path=path)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_note_several, args=(accountant, i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(accountant.notes) == len(set(accountant.notes)) == 10 + 3 * 10
