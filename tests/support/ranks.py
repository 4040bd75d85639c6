"""Ranks of a process group on loopback: forked from one process that has imported everything, to
start in milliseconds.
"""

import importlib
import multiprocessing
import os
import pickle
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = 60.0  # seconds; of a process group, where no test is about it


class Server:
    """Runs functions of one test module on ranks.

    Args:
        module: the name of the test module.
        folder: where the groups meet.
    """

    def __init__(self, module, folder):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._pipe, theirs = multiprocessing.Pipe()
        # autograd's threads, which it has where there is an accelerator, do not survive a fork
        context = multiprocessing.get_context(
            "spawn" if torch.accelerator.is_available() else "fork"
        )
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, module))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._folder, self._groups = folder, 0
        self._pipe.recv()  # it has imported the module

    def run(self, function, size, has_group=True, **arguments):
        """What each rank returned of ``function(rank, **arguments)``; None of a rank that died."""
        self._groups += 1
        place = str(self._folder / str(self._groups)) if has_group and size > 1 else None
        self._pipe.send((function.__name__, size, place, pickle.dumps(arguments)))
        answers = self._pipe.recv()
        for kind, value in answers:
            assert kind != "error", value
        return [None if value is None else pickle.loads(value) for _, value in answers]

    def close(self):
        self._process.kill()
        self._process.join()


def _serve(requests, other_end, module):
    other_end.close()  # or nothing would say that the tests are gone
    warnings.simplefilter("default")
    tests = importlib.import_module(module)
    requests.send("ready")
    context = multiprocessing.get_context("fork")
    while True:
        name, size, place, arguments = requests.recv()
        ranks = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            given = (getattr(tests, name), rank, size, place, theirs, pickle.loads(arguments))
            process = context.Process(target=_rank, args=given)
            process.start()
            theirs.close()
            ranks.append((process, mine))
        answers = []
        for _, pipe in ranks:
            try:
                answers.append(pipe.recv() if pipe.poll(2 * TIMEOUT) else ("error", "no answer"))
            except EOFError:
                answers.append(("died", None))
        for process, _ in ranks:
            process.kill()
            process.join()
        requests.send(answers)


def _rank(function, rank, size, place, pipe, arguments):
    torch.set_num_threads(1)
    try:
        if place is not None:
            timeout = timedelta(seconds=TIMEOUT)
            dist.init_process_group(
                "gloo", init_method=f"file://{place}", rank=rank, world_size=size, timeout=timeout
            )
        pipe.send(("ok", pickle.dumps(function(rank, **arguments))))  # tensors by value
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
    os._exit(0)
