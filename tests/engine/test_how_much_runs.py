"""How many functions and files of this library a call runs: what a reader of it has to read."""

import gc
import sys
from functools import partial
from pathlib import Path

import torch
from support.training import private
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

ROOT = Path(dpb.__file__).parent


def run_by(call):
    """What ``call`` returns, this library's functions and files that it runs, and all its calls."""
    seen, calls = set(), 0

    def profile(frame, event, _):
        nonlocal calls
        if event == "call":
            calls += 1
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    gc.disable()  # what other tests left behind may end in functions of ours
    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        gc.enable()
    # without comprehensions, some of which run only if another test left a mode of torch
    ours = {(f, q) for f, q in seen if Path(f).is_relative_to(ROOT) and "comp>" not in q}
    return result, len(ours), len({f for f, _ in ours}), calls


def make():
    x, y = torch.randn(2560, 8), torch.randint(3, (2560,))
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return private(net, TensorDataset(x, y), 256, noise_multiplier=1.0)


def test_what_a_reader_has_to_read_is_little():
    net, optimizer, loader = make()  # imports, and what is worked out once
    _, functions, files, _ = run_by(make)
    assert functions <= 228 and files <= 32
    for _ in range(3):  # the first charge is worked out, equal ones are counted
        x, y = next(iter(loader))
        out, *_, calls = run_by(partial(net, x))
        nn.functional.cross_entropy(out, y).backward()
        _, functions, files, of_step = run_by(optimizer.step)
    assert functions <= 41 and files <= 13
    # of torch and of Python, too; 99 and 74 mostly, 106 with torch 2.12
    assert calls <= 107 and of_step <= 76

    plain, private = iter(DataLoader(loader.dataset, batch_size=256)), iter(loader)
    next(plain), next(private)
    assert run_by(lambda: next(private))[3] <= run_by(lambda: next(plain))[3]
