"""Work that a forked process does."""

import multiprocessing
import os
import warnings

import torch


def in_child(work):
    """What ``work`` returns in a forked process, or the exit code of one that was killed."""
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process may have threads
        pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        theirs.send(answer)
        os._exit(0)
    theirs.close()
    assert ours.poll(60), "the child did not answer"
    try:
        answer = ours.recv()
    except EOFError:
        answer = None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or answer
