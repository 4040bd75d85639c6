"""Locks that another thread holds while a process is forked."""

from functools import partial

from support import steps
from support.children import another_thread_in, in_child
from torch import nn

from torch_dpbayes.processes import Lock


def entered(lock, wait=None):
    with lock:
        return wait() if wait else "entered"


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have():
    lock = Lock()
    with another_thread_in(partial(entered, lock)):
        answer = in_child(lambda: entered(lock))
    assert "forked while another thread made a step" in answer
    assert entered(lock) == "entered" == in_child(lambda: entered(lock))
    with lock:  # of the thread that forks it is the child's own
        assert in_child(lambda: entered(lock)) == "entered"


def test_a_step_that_was_half_done_is_refused_in_the_child():
    net = nn.Linear(2, 1)
    optimizer = steps.bare(net.parameters())

    def closure(wait):
        steps.fill(net.parameters())
        wait()

    with another_thread_in(lambda wait: optimizer.step(partial(closure, wait))):
        answer = in_child(optimizer.step)
    assert "forked while another thread made a step" in answer
