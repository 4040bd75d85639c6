"""Locks that another thread holds while a process is forked."""

import threading

import torch
from support.children import in_child
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.processes import Lock


def entered(lock):
    with lock:
        return "entered"


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have():
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    answer = in_child(lambda: entered(lock))
    done.set()
    other.join()
    assert "another thread was in the middle of a step" in answer
    assert entered(lock) == "entered" == in_child(lambda: entered(lock))
    with lock:  # of the thread that forks it is the child's own
        assert in_child(lambda: entered(lock)) == "entered"


def test_a_step_that_was_half_done_is_refused_in_the_child():
    held, done, net = threading.Event(), threading.Event(), nn.Linear(2, 1)
    settings = {"lr": 0.1, "num_data": 10, "expected_batch_size": 10, "max_grad_norm": 1.0}
    optimizer = dpb.optim.DPSGLD(net.parameters(), assume_independent_records=True, **settings)

    def closure():
        for p in net.parameters():
            p.grad_sample = torch.zeros(10, *p.shape)
        held.set()
        done.wait(60)

    other = threading.Thread(target=optimizer.step, args=(closure,))
    other.start()
    held.wait(60)
    answer = in_child(optimizer.step)
    done.set()
    other.join()
    assert "another thread was in the middle of a step" in answer
