"""scripts/reproductions/reproduction.py: runs are stored as they finish, and never made twice."""

import csv
import json

import pytest
import reproduction


def test_runs_are_stored_one_by_one_and_made_once(tmp_path):
    made, results = [], tmp_path / "new" / "runs.jsonl"

    def work(x, repeat):
        made.append((x, repeat))
        if made.count((3, 0)) == 1 and x == 3:
            raise KeyboardInterrupt
        return {"value": x + repeat}

    jobs = [{"x": x, "repeat": repeat} for x in (1, 3) for repeat in (0, 1)]
    with pytest.raises(KeyboardInterrupt):
        reproduction.run_jobs(work, jobs, results)
    assert len(results.read_text().splitlines()) == 2
    with results.open("a") as file:
        file.write('{"job": {"x": 3, "rep')  # killed while writing
    runs = reproduction.run_jobs(work, jobs, results)
    assert [run.result["value"] for run in runs] == [1, 2, 3, 4]
    assert sorted(made) == [(1, 0), (1, 1), (3, 0), (3, 0), (3, 1)]
    assert reproduction.run_jobs(work, list(reversed(jobs)), results) == list(reversed(runs))
    assert len(made) == 5
    assert all(
        json.loads(line)["commit"] == reproduction.commit()
        for line in results.read_text().splitlines()
        if line.endswith("}")
    )


def test_stored_runs_are_read_and_no_others_made(tmp_path):
    options = reproduction.parser_of("what it does", "some_script").parse_args(
        ["--stored", "--results", str(tmp_path / "runs.jsonl")]
    )
    jobs = [{"x": x} for x in (1, 2, 3)]
    reproduction.run_jobs(lambda x: {"value": x}, jobs[:2], options.results)

    def never(x):
        raise AssertionError(x)

    runs = reproduction.runs_of(never, jobs[1:], options.results, stored=options.stored)
    assert [run.result["value"] for run in runs] == [2]
    with pytest.raises(AssertionError):
        reproduction.runs_of(never, jobs, options.results, stored=False)


@pytest.mark.slow
def test_worker_processes_store_the_same(tmp_path):
    runs = reproduction.run_jobs(
        json.dumps, [{"obj": x} for x in (1, 2, 3)], tmp_path / "runs.jsonl", workers=2
    )
    assert [run.result for run in runs] == ["1", "2", "3"]


def test_tables_say_where_they_come_from(tmp_path):
    runs = [
        reproduction.Run({"x": x}, {"y": 0.12345}, 1800.0, f"2026-01-0{x}", "abc") for x in (1, 2)
    ]
    sentence = reproduction.origin(runs, ["--quick"])
    assert (
        "--quick`" in sentence
        and "2 runs, 1.0 hours" in sentence
        and "2026-01-01 to 2026-01-02" in sentence
        and "commit abc." in sentence
    )
    rows = [{"x": 1, "y": 0.12345}, {"x": 2, "y": None, "z": "later"}]
    assert reproduction.markdown(rows, {"x": "d", "y": ".2f", "z": ""}).splitlines()[2:] == [
        "| 1 | 0.12 |  |",
        "| 2 |  | later |",
    ]
    reproduction.write_csv(rows, tmp_path / "deep" / "rows.csv")
    with (tmp_path / "deep" / "rows.csv").open() as file:
        assert list(csv.reader(file)) == [["x", "y", "z"], ["1", "0.12345", ""], ["2", "", "later"]]
