"""All figures of a benchmark page: runs the page's commands in turn, and writes their tables there.

    python scripts/benchmarks/figures.py accuracy|speed|accounting --data-root ROOT

ROOT has ``adult`` and ``abalone`` with UCI's files, and ``mnist`` in torchvision's layout. What a
command prints goes to FOLDER/PAGE/NAME.txt, below a line with the command, the version and the
date. What is there is not made again. A command that fails leaves NAME.part.

A table that was printed takes the place of the page's table with the same header, if it has as many
rows or more; rows of several commands below one header are one table. The page's version and dates
are those of the commands. Sentences are written by hand: read them again.
"""

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from tqdm import tqdm

import torch_dpbayes as dpb

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "benchmarks"
HERE = "scripts/benchmarks"
PAY = f"{HERE}/does_bayes_pay.py --data-root {{root}} --results {{folder}}/pay.jsonl"
DEMO = "examples/private_bnn.py --plot {folder}/demo.png"
MNIST = f"{DEMO} --dataset mnist --data-root {{root}}/mnist --lr 32 --max-grad-norm 0.1"
WAVELETS = "examples/scattering_features.py --runs 3 --data-root {root}/mnist --dataset"


PAGES = {  # programs with their arguments, by the name of what they print
    "accuracy": {
        "pay": f"{PAY} table --csv {{folder}}/pay.csv",
        "picture": f"{PAY} table --data adult fashion-mnist topics --picture {{folder}}/pay.png",
        **{f"pay_{what}": f"{PAY} {what}" for what in ("linear", "rates", "plane")},
        **{"mnist": MNIST, "mnist_clipped": f"{MNIST} --epsilon inf"},
        **{f"digits_{seed}": f"{DEMO} --seed {seed}" for seed in range(5)},
        "wavelets_fashion": f"{WAVELETS} fashion-mnist --epsilon 2.7",
        "wavelets_fashion_1": f"{WAVELETS} fashion-mnist --epsilon 1 --epochs 20",
        "wavelets_mnist": f"{WAVELETS} mnist --epsilon 2.93",
        "wavelets_mnist_1": f"{WAVELETS} mnist --epsilon 1 --epochs 20",
        "samplers": f"{HERE}/compare_samplers.py --steps 4000",
    },
    "speed": {
        "clipping": f"{HERE}/bench_clipping.py --seconds 8",
        "parts": f"{HERE}/speed.py --seconds 2",
        **({"gpu": f"{HERE}/gpu.py --repeats 9"} if torch.cuda.is_available() else {}),
    },
    "accounting": {
        "others": f"{HERE}/bench_accounting.py --others --limit 30",
        "scattered": f"{HERE}/bench_accounting.py --scattered",
        "compositions": f"{HERE}/random_compositions.py --lines {{folder}}/compositions.jsonl",
        "charges": f"{HERE}/random_charges.py --seconds 900",
        "audits": f"{HERE}/audit_power.py --repeats 100 --sound 160",
        "sets": f"{HERE}/noise_aware_calibration.py --sets 5 --results {{folder}}/sets.jsonl",
        "tables": f"{HERE}/noise_aware_tables.py --prior-std 3 --data-root {{root}}"
        " --results {folder}/tables.jsonl",
    },
}


TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
DAY = r"20\d\d-\d\d-\d\d"
STAMP = re.compile(rf"version [\d.]+, ({DAY})(?: to {DAY})?")


def written(page: str, printed: list[str], is_whole: bool) -> tuple[str, list[str]]:
    """The page with the printed tables and their dates; and what was printed but has no place."""
    rows: dict[str, list[str]] = {}
    for table in TABLE.findall("".join(printed)):
        header, _, *found = table.splitlines(keepends=True)
        rows.setdefault(header, []).extend(found)

    def newer(match: re.Match[str]) -> str:
        header, rule, *lines = match.group().splitlines(keepends=True)
        if len(rows.get(header, ())) >= len(lines):
            lines = rows.pop(header)
        return "".join([header, rule, *lines])

    page = TABLE.sub(newer, page)
    dates = [re.search(DAY, text.partition("\n")[0])[0] for text in printed]
    dates += [stamp[1] for stamp in STAMP.finditer(page) if not is_whole]
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    return STAMP.sub(f"version {dpb.__version__}, {when}", page, count=1), [h.strip() for h in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--data-root", type=Path, default=Path())
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "figures")
    parser.add_argument("--only", metavar="NAME", help="run this command alone")
    given = parser.parse_args(arguments)
    root, folder = given.data_root.resolve(), (given.folder / given.page).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    commands, code = PAGES[given.page], 0
    for name in tqdm([given.only] if given.only else commands, unit="command"):
        if (target := folder / f"{name}.txt").exists():
            continue
        command = [part.format(root=root, folder=folder) for part in commands[name].split()]
        with (part := folder / f"{name}.part").open("w") as file:
            day = datetime.now(UTC).date()
            print("python", *command, f"({dpb.__version__}, {day})", file=file, flush=True)
            run = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file)
        if run.returncode == 0:
            part.rename(target)
        code = max(code, int(run.returncode != 0))
    printed = [path.read_text() for name in commands if (path := folder / f"{name}.txt").exists()]
    page = DOCS / f"{given.page}.md"
    if printed:
        text, left = written(page.read_text(), printed, len(printed) == len(commands))
        page.write_text(text)
        print(*(f"not on the page: {header}" for header in left), sep="\n", end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
