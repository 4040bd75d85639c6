#!/usr/bin/env python3
"""How often audits of whole runs of this library catch a fault that was put into it.

    python audit_power.py [--repeats 40] [--sound 120] [--only NAME]

Each run trains an embedding of 20,001 weights by DPSGLD, four full batches at a stated ε of 2, on
10,000 canaries that are records, 100 times longer than the clip norm. Printed is, for each fault,
how many of ``--repeats`` runs refute ε = 2 at 99 % confidence and δ = 1e-5, by either bound; and
how many of ``--sound`` runs without a fault do.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import audits

BOUNDS = ("gaussian", "independent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--sound", type=int, default=120)
    parser.add_argument("--only", choices=audits.FAULTS, help="one line of the table")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| fault | runs | refuted, gaussian | refuted, independent | seconds a run |")
    print("|---" * 5 + "|")
    for name in audits.FAULTS if options.only is None else [options.only]:
        repeats = options.sound if name.startswith("none") else options.repeats
        start = time.process_time()
        runs = [audits.audited_with(name, BOUNDS) for _ in range(repeats)]
        seconds, cells = (time.process_time() - start) / repeats, []
        for results in zip(*runs, strict=True):
            refuted = sum(result.is_refuted for result in results)
            sure = stats.binomtest(refuted, repeats).proportion_ci(0.95, "exact")
            cells.append(f"{refuted} ({sure.low:.1%} to {sure.high:.1%})")
        print(f"| {name} | {repeats} | {' | '.join(cells)} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
