"""Work that a forked process does."""

import multiprocessing
import os

import torch


def in_child(work):
    """What ``work`` returns in a forked process."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        theirs.send(answer)
        os._exit(0)
    assert ours.poll(60), "the child did not answer"
    answer = ours.recv()
    os.waitpid(pid, 0)
    return answer
