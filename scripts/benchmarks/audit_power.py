#!/usr/bin/env python3
"""How often audits of whole runs of this library catch a fault that was put into it.

    python audit_power.py [--repeats 40] [--sound 120] [--only NAME] [--json FILE]

Each run trains an embedding of 20,001 weights by DPSGLD, four full batches at a stated ε of 2, on
10,000 canaries that are records, 100 times longer than the clip norm. Printed is, for each fault,
how many of ``--repeats`` runs refute ε = 2 at 99 % confidence and δ = 1e-5, by either bound; and
how many of ``--sound`` runs without a fault do.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import audits

BOUNDS = ("gaussian", "independent")
NUMBER = 10_000
SOUND, RANKS = "none", "rank 0 without noise"
UNCHARGED = {f"{4 - k} of 4 steps not charged": k for k in (3, 2, 1)}

Verdict = list[bool]


def verdicts(name: str, repeats: int) -> Iterator[Verdict]:
    """For each run, whether each bound refutes."""
    if name == RANKS:
        with tempfile.TemporaryDirectory() as folder:
            found = audits.audited_on_two_ranks(
                folder, [NUMBER] * repeats, is_faulty=True, bounds=BOUNDS
            )
        yield from ([bound > stated for bound in shown] for *shown, stated in found)
        return
    audit: Callable[..., Any]
    if name == SOUND:
        audit = partial(audits.audit_rows, NUMBER)
    elif name in UNCHARGED:
        charged = UNCHARGED[name]
        fault = (partial(audits.release_without_a_charge, charged=charged), audits.sums, charged)
        audit = partial(audits.audited_with, fault)
    else:
        audit = partial(audits.audited_with, name)
    for _ in range(repeats):
        yield [result.is_refuted for result in audit(bounds=BOUNDS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--sound", type=int, default=120)
    parser.add_argument("--only", help="one line of the table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # charges left out have lines of their own
    faults = [name for name in audits.FAULTS if name != "releases not charged"]
    names = [*faults, *UNCHARGED, RANKS, SOUND]
    rows = []
    print(
        "| fault | runs | refuted, gaussian | refuted, independent | seconds a run |\n"
        + "|---" * 5
        + "|"
    )
    for name in names if options.only is None else [options.only]:
        repeats = options.sound if name == SOUND else options.repeats
        start = time.process_time()
        seen = list(verdicts(name, repeats))
        seconds = (time.process_time() - start) / repeats
        row = {"fault": name, "runs": repeats, "seconds": seconds}
        cells = []
        for i, bound in enumerate(BOUNDS):
            row[bound] = sum(verdict[i] for verdict in seen)
            sure = stats.binomtest(row[bound], repeats).proportion_ci(0.95, "exact")
            cells.append(f"{row[bound]} ({sure.low:.1%} to {sure.high:.1%})")
        rows.append(row)
        print(f"| {name} | {repeats} | {' | '.join(cells)} | {seconds:.2f} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
