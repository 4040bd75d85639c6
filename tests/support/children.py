"""Work that a forked process does, and threads that it does not have."""

import multiprocessing
import os
import threading
import warnings
from contextlib import contextmanager

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


@contextmanager
def another_thread_in(work):
    """While the block runs, a thread is where ``work`` calls its argument."""
    entered, done = threading.Event(), threading.Event()

    def wait():
        entered.set()
        done.wait(60)

    thread = threading.Thread(target=work, args=(wait,))
    thread.start()
    entered.wait(60)
    yield
    done.set()
    thread.join()
