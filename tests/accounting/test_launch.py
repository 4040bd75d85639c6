"""Workers of one launch are one job, whenever each of them opens the ledger; a second launch of the
same name is not.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.ledgers import DELTA, STEP, counted, forks, in_child, later_job

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.ledger import session

pytestmark = forks
ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "{}"},
    "srun": {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "{}"},
    "mpirun": {"PMIX_NAMESPACE": "prterun-17@1", "PMIX_RANK": "{}"},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.db"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Also where the tests themselves run under Slurm."""
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)


class Worker:
    """A forked process that opens the ledger when it is told to, and charges when it is told to."""

    def __init__(self, open_ledger, environment):
        told, self._tell = os.pipe()
        self._answers, answer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            code = 1
            try:
                os.environ.update(environment)
                if os.read(told, 1) == b"0":
                    os._exit(0)
                accountant = open_ledger()
                os.write(answer, b".")
                while (steps := int(os.read(told, 16) or b"0")) and steps > 0:
                    released = 0
                    try:
                        for _ in range(steps):
                            accountant.compose(STEP)
                            released += 1
                    except PrivacyBudgetExceeded:
                        pass
                    os.write(answer, f"{released} {accountant.guarantee}".encode())
                accountant.close()
                code = 0
            finally:
                os._exit(code)

    def open(self):
        os.write(self._tell, b".")
        assert os.read(self._answers, 1) == b".", "the worker could not open the ledger"

    def charge(self, steps):
        os.write(self._tell, str(steps).encode())
        released, guarantee = os.read(self._answers, 64).decode().split()
        return int(released), guarantee

    def end(self):
        os.write(self._tell, b"0")
        assert os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]) == 0


@contextmanager
def started(path, number, environment, method="pld", **options):
    """Workers that were launched together."""
    workers = [
        Worker(
            lambda: PrivacyAccountant(path=path, method=method, **options),
            {name: value.format(rank) for name, value in environment.items()},
        )
        for rank in range(number)
    ]
    time.sleep(0.05)  # a start is known to a hundredth of a second, rounded up
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("who", ["job", *LAUNCHERS])
def test_workers_of_one_launch_are_one_job_and_lose_no_step(path, who):
    PrivacyAccountant(1.2, DELTA, path=path, method="rdp")
    fit = PrivacyAccountant(1.2, DELTA, method="rdp").remaining(STEP)
    options = {"job": "sweep"} if who == "job" else {}
    with started(path, 4, LAUNCHERS.get(who, {}), method="rdp", **options) as workers:
        released, guarantees = 0, set()
        for worker in workers:  # each one opens what the ones before it charged
            worker.open()
            steps, guarantee = worker.charge(20)
            released += steps
            guarantees.add(guarantee)
        for worker in workers:
            released += worker.charge(10_000)[0]
            worker.charge(1)  # what others had reserved and gave back
        assert guarantees == {"fixed"}
        assert released > 0.95 * fit
    assert counted(path) <= fit
    rows = look_at(path)[1]
    assert len({row.job for row in rows}) == 1
    assert len({row.writer for row in rows}) == 4
    assert look_at(path)[0].guarantee == "fixed"


def test_without_a_name_each_worker_that_opens_what_others_charged_is_a_later_job(path):
    PrivacyAccountant(3.0, DELTA, path=path)
    with started(path, 2, {}) as (first, second):
        first.open()
        assert first.charge(5) == (5, "fixed")
        second.open()
        assert second.charge(5) == (5, "filter")


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("who", ["job", *LAUNCHERS])
@pytest.mark.parametrize("place", [0, 3])
def test_a_second_launch_of_the_same_name_is_a_later_job(path, who, place):
    """torchrun's name is "none" unless it is given one, and whoever writes ``job="sweep"`` into a
    program starts it tomorrow again.
    """
    options = {"job": "sweep"} if who == "job" else {}
    PrivacyAccountant(3.0, DELTA, path=path)
    with started(path, 2, LAUNCHERS.get(who, {}), **options) as workers:
        for worker in workers:
            worker.open()
            worker.charge(5)
    with started(path, 4, LAUNCHERS.get(who, {}), **options) as workers:
        workers[place].open()  # 3: a place in which nobody charged yet
        assert workers[place].charge(5) == (5, "filter")


def test_a_second_program_in_the_place_of_a_worker_is_a_later_job(path):
    """As two notebooks on one node of Slurm, both of which were open before the first charge."""
    notebook = {**LAUNCHERS["srun"], "SLURM_PROCID": "0"}
    PrivacyAccountant(3.0, DELTA, path=path)
    with started(path, 2, notebook) as (first, second):
        first.open()
        assert first.charge(5) == (5, "fixed")
        second.open()
        assert second.charge(5) == (5, "filter")


@pytest.mark.parametrize("options", [{"job": "sweep"}, {"launcher": "torchrun"}, {}])
def test_a_process_that_opens_the_file_again_goes_on_with_its_job(
    path, options, monkeypatch, caplog
):
    """As a cell of a notebook that runs twice, with the accountant before still in use or not."""
    options = dict(options)
    for name, value in LAUNCHERS.get(options.pop("launcher", ""), {}).items():
        monkeypatch.setenv(name, value.format(0))
    first = PrivacyAccountant(3.0, DELTA, path=path, **options).compose(STEP, 700)
    left = first.remaining(STEP)
    again = PrivacyAccountant(3.0, DELTA, path=path, **options)
    assert not again.is_later_job and again.remaining(STEP) == left
    assert again.compose(STEP).guarantee == first.guarantee == "fixed"
    del first
    third = PrivacyAccountant(path=path, **options).compose(STEP)
    assert third.guarantee == "fixed" and third.remaining(STEP) == left - 2
    assert not caplog.text
    again.close()
    third.close()
    assert counted(path) == 702 and len({row.job for row in look_at(path)[1]}) == 1


def test_another_file_of_the_same_name_is_another_ledger(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    path.unlink()

    def first_job():
        PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()

    assert in_child(first_job) == 0
    assert PrivacyAccountant(path=path).is_later_job


def test_a_forked_process_that_opens_the_file_by_itself_is_a_later_job(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    assert in_child(lambda: PrivacyAccountant(path=path).is_later_job and 17) == 17


@pytest.mark.parametrize("budget", [(3.0, DELTA), ()])
def test_the_first_charge_of_a_later_job_says_what_that_costs(path, budget, caplog):
    PrivacyAccountant(*budget, path=path).compose(STEP, 700).close()
    left = PrivacyAccountant(*budget).compose(STEP, 701).remaining(STEP)
    later = later_job(path=path)
    assert later.is_later_job and not caplog.text
    later.compose(STEP)
    (record,) = caplog.records
    assert str(path) in record.message
    if budget:
        assert f"About {later.remaining(STEP)} more such releases" in record.message
        assert f"({left} in the first job)" in record.message
    else:
        assert "epsilon is infinite" in record.message
    later.compose(STEP)
    assert len(caplog.records) == 1
    later_job(path=path).compose(STEP)
    assert len(caplog.records) == 2 and "in the first job" not in caplog.records[1].message


def test_the_second_charge_of_a_launch_that_came_late_is_late_too(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    with started(path, 2, LAUNCHERS["torchrun"]) as (first, second):
        first.open()
        assert first.charge(5) == (5, "filter")
        second.open()
        assert second.charge(5) == (5, "filter")
    first, *others = [row.later for row in look_at(path)[1] if row.kind == "block"]
    assert not first and len(others) >= 2 and all(others)


@pytest.mark.parametrize("unknown", ["now", "start_of_this_program"])
def test_who_cannot_say_when_it_was_started_is_a_later_job(path, monkeypatch, unknown):
    PrivacyAccountant(3.0, DELTA, path=path)
    monkeypatch.setattr(session, unknown, lambda: None)
    with started(path, 2, LAUNCHERS["torchrun"]) as (first, second):
        first.open()
        assert first.charge(5) == (5, "fixed")
        second.open()
        assert second.charge(5) == (5, "filter")


def test_when_a_process_was_started(path):
    """Between two readings of the clock by its parent, up to the clock's ticks."""
    reader, writer = os.pipe()
    before = session.now()

    def child():
        start = session.start_of_this_program()
        os.write(writer, f"{start.up} {start.boot}".encode())

    assert in_child(child) == 0
    up, boot = os.read(reader, 100).decode().split()
    assert boot == before.boot == session.now().boot
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before.up - tick <= float(up) <= session.now().up + tick
    assert session.start_of_this_program().up < before.up


ONE_STEP = """
import sys
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent
with PrivacyAccountant(3.0, 1e-5, path=sys.argv[1], job="sweep") as accountant:
    accountant.compose(GaussianDpEvent(10.0))
    print(accountant.guarantee)
"""


@pytest.mark.thorough
def test_a_program_that_takes_the_place_of_its_shell_is_a_later_job(path):
    """It is the process that the shell was, which began before the first charge."""
    command = 'PYTHON -c "$0" "$1"; exec PYTHON -c "$0" "$1"'.replace("PYTHON", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", command, ONE_STEP, str(path)],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["fixed", "filter"]


def test_moments_of_another_boot_are_not_before():
    assert session.Moment(1.0, "a").is_before(session.Moment(2.0, "a"))
    assert not session.Moment(2.0, "a").is_before(session.Moment(2.0, "a"))
    assert not session.Moment(1.0, "a").is_before(session.Moment(2.0, "b"))


@pytest.mark.parametrize("job", ["", " ", 7])
def test_a_job_is_a_name(path, job):
    with pytest.raises(ValueError, match="job must be the name of a launch"):
        PrivacyAccountant(3.0, DELTA, path=path, job=job)
    with pytest.raises(ValueError, match="whose workers share a file"):
        PrivacyAccountant(3.0, DELTA, job="sweep")


WORKER = """
import os, sys
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
released = 0
with PrivacyAccountant(1.2, 1e-5, path=sys.argv[1]) as accountant:
    try:
        while True:
            accountant.compose(step)
            released += 1
    except PrivacyBudgetExceeded:
        pass
with open(sys.argv[1] + "-told-" + os.environ["RANK"], "w") as file:
    file.write(str(released))
"""


@pytest.mark.slow
def test_torchrun(path, tmp_path):
    """Real workers, which open one new ledger at the same moment; and the same command again."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    ran = [*command, "--master-port", "0", str(script), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(ran, check=True, env=environment, capture_output=True)
    told = [int(Path(f"{path}-told-{rank}").read_text()) for rank in range(4)]
    accountant, rows = look_at(path)
    assert accountant.guarantee == "fixed" and len({row.job for row in rows}) == 1
    fit = PrivacyAccountant(1.2, DELTA).remaining(STEP)
    assert 0.95 * fit < sum(told) == counted(path) <= fit
    PrivacyAccountant(path=path)
    subprocess.run(ran, check=True, env=environment, capture_output=True)
    assert [int(Path(f"{path}-told-{rank}").read_text()) for rank in range(4)] == [0] * 4
