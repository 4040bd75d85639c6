"""Tasks of a reader who has the README and the pages of docs/ and nothing else. Each test puts
together what the page named in it says, and goes on to what the reader wanted.
"""

import json
import runpy
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(n=300, width=5):
    x = torch.randn(n, width)
    return TensorDataset(x, (x[:, 0] > 0).long())


def linear(engine, records, epochs, **how):
    """The network, optimizer and loader of getting_started.md, made small."""
    how = {"target_epsilon": 3, **how}
    return engine.make_private_with_epsilon(
        module=nn.Linear(5, 2),
        optimizer=partial(dpb.optim.DPSGLD, lr="free"),
        data_loader=DataLoader(records, batch_size=30),
        max_grad_norm=1.0,
        target_delta=1e-5,
        epochs=epochs,
        **how,
    )


def train(net, opt, loader, epochs, samples=None):
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        if samples is not None:
            samples.collect(net)


def test_a_run_is_resumed():
    """how_to/share_a_budget.md: a run of make_private_with_epsilon"""
    records, samples = table(), dpb.PosteriorSamples()
    engine = dpb.PrivacyEngine()
    net, opt, loader = linear(engine, records, epochs=4)
    train(net, opt, loader, 2, samples)
    engine.save_checkpoint("checkpoint.pt", module=net, optimizer=opt)
    samples.save("samples.pt")
    spent = engine.accountant.get_epsilon()

    engine, samples = dpb.PrivacyEngine(), dpb.PosteriorSamples.load("samples.pt")
    net, opt, loader = linear(engine, records, epochs=4)
    engine.load_checkpoint("checkpoint.pt", module=net, optimizer=opt)
    assert engine.accountant.get_epsilon() == spent
    train(net, opt, loader, 2, samples)
    assert samples.num_collected == 4 and len(samples) == 2  # the second half
    assert spent < engine.accountant.get_epsilon() <= 3
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        train(net, opt, loader, 2)


def test_a_budget_is_shared():
    """how_to/share_a_budget.md: two runs of one program, each with a share, then a later job that
    takes what is left
    """
    records = table()
    with dpb.PrivacyAccountant(epsilon=3, delta=1e-5, path="budget.db") as accountant:
        for end in (1, 2):
            engine = dpb.PrivacyEngine(accountant=accountant)
            share = {"target_epsilon": None, "additional_epsilon": 1}
            train(*linear(engine, records, 1, **share), 1)
            assert accountant.get_epsilon() <= end
    job = """
import sys, torch, torch_dpbayes as dpb
sys.path.insert(0, {folder!r})
from test_reader import linear, table, train
with dpb.PrivacyAccountant(path="budget.db") as accountant:
    engine = dpb.PrivacyEngine(accountant=accountant)
    net, opt, loader = linear(engine, table(), 1)
    train(net, opt, loader, 1)
    print(accountant.guarantee)
"""
    code = job.format(folder=__file__.rpartition("/")[0])
    later = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert later.returncode == 0, later.stderr
    assert "filter" in later.stdout


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(tmp_path):
    """how_to/several_machines.md: steps after the checkpoint are charged twice, and none is lost"""
    (tmp_path / "train.py").write_text(f"""
import os, signal, sys, torch, torch_dpbayes as dpb
from datetime import timedelta
from functools import partial
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
from test_reader import DataLoader, F, nn, table
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = torch.distributed.get_rank()
torch.manual_seed(0)
accountant = dpb.PrivacyAccountant(epsilon=8, delta=1e-5, path="budget.db")
engine = dpb.PrivacyEngine(accountant, process_group=torch.distributed.group.WORLD)
net, opt, loader = engine.make_private(
    module=nn.Linear(5, 2), optimizer=partial(dpb.optim.DPSGLD, lr=0.01),
    data_loader=DataLoader(table(), batch_size=30), max_grad_norm=1.0)
first = 0
if os.path.exists("checkpoint.pt"):
    engine.load_checkpoint("checkpoint.pt", module=net, optimizer=opt)
    first = int(open("epoch").read())
for epoch in range(first, 4):
    for step, (x, y) in enumerate(loader):
        F.cross_entropy(net(x), y).backward()
        opt.step()
        if rank == 1 and (epoch, step) == (2, 4) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        engine.save_checkpoint("checkpoint.pt", module=net, optimizer=opt)
        open("epoch", "w").write(str(epoch + 1))
    torch.distributed.barrier()
# one write: the ranks share a pipe, and parts of their lines would mix
print(f"RANK {{first}} {{net.weight.sum().item()}}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ran = subprocess.run(
        [*command, "2", "--max-restarts", "5", "train.py"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr
    said = sorted(word for line in ran.stdout.splitlines() for word in line.split("RANK") if word)
    assert len(said) == 2 and said[0] == said[1] and said[0].split()[0] == "2"
    asked = [sys.executable, "-m", "torch_dpbayes.accounting", "budget.db", "--json"]
    ledger = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    # 40 steps, 5 of which were taken twice; the one that was lost may have been charged
    assert ledger["releases"] in (45, 46)


def test_epsilon_of_a_finished_job_is_read_off(monkeypatch, capsys):
    """how_to/share_a_budget.md: of a ledger, and of a checkpoint"""
    accountant = dpb.PrivacyAccountant(epsilon=3, delta=1e-5, path="budget.db")
    engine = dpb.PrivacyEngine(accountant=accountant)
    net, opt, loader = linear(engine, table(), 2)
    train(net, opt, loader, 2)
    engine.save_checkpoint("checkpoint.pt", module=net, optimizer=opt)
    spent = accountant.get_epsilon()
    accountant.close()

    def asked(*arguments):
        monkeypatch.setattr(sys, "argv", ["accounting", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("torch_dpbayes.accounting", run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    code, said = asked("budget.db")
    (line,) = [line for line in said.splitlines() if "  spent " in line]
    assert not code and float(line.partition("<= ")[2].split()[0]) == pytest.approx(spent, abs=1e-4)
    assert spent == pytest.approx(json.loads(asked("budget.db", "--json")[1])["epsilon"])
    assert asked("checkpoint.pt")[0]
