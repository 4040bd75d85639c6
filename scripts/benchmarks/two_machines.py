#!/usr/bin/env python3
"""Data parallelism over two machines, simulated on one: two network namespaces with a cable between
them, and two ranks in each.

    sudo python scripts/benchmarks/two_machines.py [--passes 6] [--timeout 20]

Linux, as root, with iproute2. The same training runs

* with four ranks on one machine, and with two on each of two: parameters and charges are to be the
  same, to the last bit. Bytes are what the first machine's kernel counts as sent over the cable in
  a step, headers included;
* on two machines of which the second is lost after two passes: its processes are killed, or its
  cable is pulled. What a rank on the first raises is printed, and after how long;
* once more on two machines, from the checkpoint that the first one wrote after each pass: at the
  end parameters and charges are to be those of the run that nothing interrupted.

Batches and noise come from generators with a seed, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

RECORDS, BATCH = 4_000, 512
PORT = "29600"
LOST_AFTER = 2  # passes


def bytes_sent() -> int:
    """By all interfaces of this machine but the loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = (line.partition(":") for line in lines)
    return sum(int(numbers.split()[8]) for name, _, numbers in fields if name.strip() != "lo")


def rank(folder: Path, passes: int, timeout: float) -> None:
    """Trains from the last checkpoint on. Rank 0 writes one after each pass, and what it has."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import torch_dpbayes as dpb

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(torch.randn(RECORDS, 784), torch.randint(10, (RECORDS,)))
    engine = dpb.PrivacyEngine(process_group=dist.group.WORLD)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1, generator=torch.Generator().manual_seed(1)),
        data_loader=DataLoader(data, BATCH, generator=torch.Generator().manual_seed(2)),
        max_grad_norm=1.0,
    )
    checkpoint, done = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        done = engine.load_checkpoint(checkpoint, module=net, optimizer=optimizer)["passes"]
    try:
        while done < passes:
            before, steps = bytes_sent(), 0
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                steps += 1
            sent, done = (bytes_sent() - before) / steps, done + 1
            if is_first:
                numbers = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()
                found = {
                    "passes": done,
                    "parameters": hashlib.blake2b(numbers.tobytes()).hexdigest()[:16],
                    "number of parameters": len(numbers),
                    "charges": [[repr(c.event), c.count] for c in engine.accountant.history],
                    "epsilon": engine.accountant.get_epsilon(1e-5),
                    "bytes": sent,
                }
                engine.save_checkpoint(
                    checkpoint, module=net, optimizer=optimizer, checkpoint_dict={"passes": done}
                )
                write(folder / "found", found)
    except Exception as error:
        if is_first:
            said = f"{type(error).__name__}: {error}"
            write(folder / "error", {"at": time.time(), "said": said.splitlines()[0]})
        raise
    dist.destroy_process_group()


def write(path: Path, what: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(what))
    beside.replace(path)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def ip(*arguments: str) -> str:
    """What iproute2's ``ip`` prints."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_not() -> str:
    """Why no machine can be simulated here; empty where it can."""
    if shutil.which("ip") is None:
        return "there is no program ip: install iproute2"
    name = f"dpb-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "one", "type", "veth", "peer", "other")
        finally:
            ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces can be made here ({error.stderr.strip()}): run as root"
    return ""


class Machines:
    """Two of them, and what runs there.

    Args:
        folder: on a disk that both have.
        passes: over the data.
        timeout: of the process group, in seconds.
    """

    def __init__(self, folder: Path, passes: int, timeout: float) -> None:
        self.folder, self.passes, self.timeout = folder, passes, timeout
        self.names = [f"dpb-{os.getpid()}-{i}" for i in (0, 1)]
        self.running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        for name in self.names:
            ip("netns", "add", name)
        here, there = self.names
        ip("link", "add", "cable", "netns", here, "type", "veth", "peer", "cable", "netns", there)
        for i, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for i, name in enumerate(self.names):
            self.kill(i)
            ip("netns", "delete", name)

    def start(self, machine: int, machines: int) -> None:
        """``torchrun`` on one of so many machines, with four ranks in all."""
        command = ["ip", "netns", "exec", self.names[machine], sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes", str(machines)]
        command += ["--node-rank", str(machine), "--nproc-per-node", str(4 // machines)]
        command += ["--master-addr", "10.99.0.1", "--master-port", PORT, __file__, "--rank"]
        command += [str(self.folder), str(self.passes), str(self.timeout)]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        with open(self.folder / f"machine {machine}", "wb") as told:
            self.running.append(
                subprocess.Popen(
                    command, env={**os.environ, **settings}, stdout=told, stderr=subprocess.STDOUT
                )
            )

    def kill(self, machine: int) -> None:
        """What runs there ends at once."""
        for pid in ip("netns", "pids", self.names[machine]).split():
            os.kill(int(pid), signal.SIGKILL)

    def wait(self) -> list[int]:
        """Exit statuses of ``torchrun`` on each."""
        statuses = [process.wait() for process in self.running]
        self.running.clear()
        return statuses

    def run(self, machines: int) -> dict[str, Any]:
        """What rank 0 has at the end of a run that goes on from the checkpoint, if there is one."""
        for machine in range(machines):
            self.start(machine, machines)
        if any(self.wait()):
            raise SystemExit((self.folder / "machine 0").read_text())
        return read(self.folder / "found")

    def lose_the_second(self, *, cable: bool) -> tuple[float, str]:
        """Seconds until rank 0 raises what it then says."""
        for machine in (0, 1):
            self.start(machine, 2)
        while read(self.folder / "found").get("passes", 0) < LOST_AFTER:
            if self.running[0].poll() is not None:
                raise SystemExit((self.folder / "machine 0").read_text())
            time.sleep(0.02)
        if cable:
            ip("-n", self.names[1], "link", "set", "cable", "down")
        else:
            self.kill(1)
        lost = time.time()
        self.running[0].wait()
        self.kill(1)
        self.wait()
        if cable:
            ip("-n", self.names[1], "link", "set", "cable", "up")
        error = read(self.folder / "error")
        return error["at"] - lost, error["said"]

    def forget(self) -> None:
        """The next run begins anew."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def same(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Print whether a run came to the same, and fail if it did not."""
    for what in ("parameters", "charges"):
        if found[what] != expected[what]:
            raise SystemExit(f"{name}: other {what}, {found[what]} instead of {expected[what]}")
    print(f"{name}: the same parameters and charges, epsilon {found['epsilon']:.6g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--passes", type=int, default=6, help=f"more than {LOST_AFTER}; default: 6")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds; default: 20")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, passes, timeout = options.rank
        rank(Path(folder), int(passes), float(timeout))
        return
    if why := why_not():
        parser.error(why)
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "run"
        folder.mkdir()
        with Machines(folder, options.passes, options.timeout) as machines:
            expected = machines.run(1)
            print(f"one machine, four ranks: epsilon {expected['epsilon']:.6g}", flush=True)
            machines.forget()
            found = machines.run(2)
            same("two machines, two ranks each", found, expected)
            of_parameters = 4 * found["number of parameters"]
            print(
                f"bytes that the first machine sends in a step: {found['bytes']:.0f},"
                f" {found['bytes'] / of_parameters:.3f} times those of the"
                f" {found['number of parameters']} parameters",
                flush=True,
            )
            for how, cable in (("killed", False), ("unplugged", True)):
                machines.forget()
                seconds, said = machines.lose_the_second(cable=cable)
                print(f"the second machine is {how}: after {seconds:.1f} s rank 0 raises {said}")
                same("restarted from the checkpoint", machines.run(2), expected)


if __name__ == "__main__":
    main()
