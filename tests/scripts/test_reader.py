"""Tasks of a reader who has the README and the pages of docs/ and nothing else. Each test puts
together what the page named in it says, and goes on to what the reader wanted.
"""

import json
import runpy
import socket
import subprocess
import sys
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

pytestmark = pytest.mark.thorough
# one run in a hundred is told that the releases contradict the model; longer rows are shortened
MAY_WARN = pytest.mark.filterwarnings("ignore:the releases contradict")


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


@MAY_WARN
@pytest.mark.slow
def test_logistic_regression_in_pyro_with_honest_intervals():
    """coming_from/pyro.md and choosing_a_method.md"""
    truth = torch.tensor([1.0, -1.0])
    x = F.normalize(torch.randn(3000, 2)) * torch.rand(3000, 1).sqrt()  # no row longer than 1
    y = torch.bernoulli(torch.sigmoid(x @ truth))

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    posterior = dpb.noise_aware.posterior(model, x, y, epsilon=1.0, delta=1e-5)
    assert "epsilon = " in str(posterior.guarantee())
    draws = posterior.sample(1000)["w"]
    low, high = draws.quantile(torch.tensor([0.05, 0.95]), 0)
    assert (low < high).all() and draws.shape == (1000, 2)
    standing = (posterior.mean["w"] - truth) / posterior.stddev["w"]
    assert standing.abs().max() < 8  # wrong by more than that less than once in 10⁵ runs


def test_samples_are_exported_to_arviz():
    """how_to/show_uncertainty.md: two chains on one accountant, R-hat and effective sample size"""
    arviz = pytest.importorskip("arviz")
    accountant = dpb.PrivacyAccountant(epsilon=4, delta=1e-5)
    records, chains = table(), []
    for _ in range(2):
        engine = dpb.PrivacyEngine(accountant=accountant)
        share = {"target_epsilon": None, "additional_epsilon": 1}
        net, opt, loader = linear(engine, records, 6, **share)
        chains.append(dpb.PosteriorSamples())
        train(net, opt, loader, 6, chains[-1])
    summary = arviz.summary(chains[0].to_arviz(chains[1]))
    assert len(summary) == 12 and {"ess_bulk", "r_hat"} <= set(summary)
    assert accountant.get_epsilon() <= 2


def test_the_last_layer_only():
    """how_to/last_layer.md, with BatchNorm in what is frozen"""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net(torch.randn(100, 5))  # its pretraining
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net[-1].requires_grad_(True)
    [m.eval() for m in net.modules() if "BatchNorm" in type(m).__name__]
    records = table()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    engine = dpb.PrivacyEngine()
    net, opt, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr="free"),
        data_loader=DataLoader(records, batch_size=30),
        max_grad_norm=1.0,
        target_epsilon=3,
        target_delta=1e-5,
        epochs=2,
    )
    train(net, opt, loader, 2)
    changed = {n for n, value in net.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"3.weight", "3.bias"}


@pytest.mark.slow
def test_two_machines(tmp_path):
    """how_to/several_machines.md: the two commands, both on this machine"""
    (tmp_path / "train.py").write_text(f"""
import sys, torch, torch_dpbayes as dpb
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
from test_reader import linear, table, train
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
engine = dpb.PrivacyEngine(process_group=torch.distributed.group.WORLD)
net, opt, loader = linear(engine, table(), 2)
train(net, opt, loader, 2)
print("RANK", net.weight.sum().item(), engine.accountant.get_epsilon())
torch.distributed.destroy_process_group()
""")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    machines = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [machine.communicate(timeout=300) for machine in machines]
    assert all(machine.returncode == 0 for machine in machines), said
    first, second = ([line for line in out.splitlines() if "RANK" in line] for out, _ in said)
    assert first == second and len(first) == 1


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
