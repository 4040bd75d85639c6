"""Whatever is called in whatever order: what was released is never more than what was charged.

An oracle stands beside the library. It sees which records each draw holds and every Gaussian that
is drawn, recomputes the clipped sum of exactly those records, and compares: every change of the
parameters must be that sum, each draw used once, plus noise of at least the multiplier that was
charged for it, plus nothing.
"""

import contextlib
import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support.examples import examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import release
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.noise import GaussianNoise, add_gaussian

RECORDS, FEATURES, CLIP = 30, 3, 0.5
WAYS = ["whole", "twice", "half", "all data", "two backward passes", "forward only"]
SLIPS = ["none", "skip a batch", "step again", "leave in the middle of a draw", "copies"]
# PrivacyBudgetExceeded is a RuntimeError
CLUMSY = (RuntimeError, ValueError, TypeError, IndexError, StopIteration)


class AnySequence(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([None, 1.0, 20.0]),
        batch_size=st.sampled_from([5, 15, 30]),
        lr=st.sampled_from([0.1, 50.0]),
    )
    def start(self, budget, batch_size, lr):
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.draws, self.noise, self.charged, self.used = [], [], 0, Counter()
        self.watch(patch)
        self.x = torch.randn(RECORDS, FEATURES, dtype=torch.float64)
        self.y = torch.randn(RECORDS, 1, dtype=torch.float64)
        self.net = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)
        limits = () if budget is None else (budget, 1e-5)
        self.engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(*limits))
        self.batch, self.saved, self.batches = None, None, iter(())
        self.attach(lr, 1.0, math.inf)

    def watch(self, patch):
        """Every draw's records, and every Gaussian as it is added."""
        drawn, normal, add = PoissonSampler._next_draw, GaussianNoise.standard_normal, add_gaussian

        def watched_draw(sampler):
            draw = drawn(sampler)
            self.draws.append(draw.records.tolist())
            return draw

        def watched_normal(source, size, **options):
            self.noise.append(normal(source, size, **options))
            return self.noise[-1]

        def watched_add(target, std, divisor, stream):
            before = target.clone()
            add(target, std, divisor, stream)
            self.noise.append((target * divisor - before) / std)

        patch.setattr(PoissonSampler, "_next_draw", watched_draw)
        patch.setattr(GaussianNoise, "standard_normal", watched_normal)
        patch.setattr(release, "add_gaussian", watched_add)

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()

    @rule(
        lr=st.sampled_from([0.05, 1.0, 100.0]),
        floor=st.sampled_from([0.0, 1.0, 3.0]),
        prior_std=st.sampled_from([math.inf, 1.0]),
    )
    def attach(self, lr, floor, prior_std):
        factory = partial(dpb.optim.DPSGLD, lr=lr, prior_std=prior_std, noise_multiplier=floor)
        self.net, self.optimizer, self.loader = self.engine.make_private(
            module=self.net, optimizer=factory, data_loader=self.loader, max_grad_norm=CLIP
        )

    @rule()
    def new_pass(self):
        self.batches = iter(self.loader)

    @rule(size=st.sampled_from([2, 7]))
    def new_pass_in_parts(self, size):
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        ) as parts:
            self.batches = iter(parts)

    @rule()
    def next_batch(self):
        with contextlib.suppress(*CLUMSY):
            self.batch = next(self.batches)

    @rule(way=st.sampled_from(WAYS))
    def backward(self, way):
        if self.batch is None:
            return
        x, y = self.batch
        with contextlib.suppress(*CLUMSY):
            if way == "twice":
                x, y = torch.cat([x, x]), torch.cat([y, y])
            elif way == "half":
                x, y = x[: len(x) // 2], y[: len(y) // 2]
            elif way == "all data":
                x, y = self.x, self.y
            if way == "forward only":
                self.net(x)
            else:
                nn.functional.mse_loss(self.net(x), y).backward()
                if way == "two backward passes":
                    nn.functional.mse_loss(self.net(x), y).backward()

    def one_step(self, way):
        self.batch = None
        self.next_batch()
        if self.batch is None:
            self.new_pass()
            self.next_batch()
        self.backward(way)
        self.step(False)

    @rule(way=st.sampled_from(WAYS), slip=st.sampled_from(SLIPS), zero=st.booleans())
    def train(self, way, slip, zero):
        """A few steps as people write them, with a slip in between."""
        self.one_step("whole")
        if slip == "skip a batch":
            self.next_batch()
        elif slip == "step again":
            self.backward("whole")
            self.step(False)
        elif slip == "leave in the middle of a draw":
            self.new_pass_in_parts(2)
            self.one_step("whole")
            self.new_pass()
        elif slip == "copies":
            self.go_on_with_a_copy()
            self.one_step("whole")
            self.go_on_with_a_copy()
        if zero:
            self.optimizer.zero_grad()
        self.one_step(way)

    @rule(closure=st.booleans())
    def step(self, closure):
        before = self.net.weight.detach().clone()
        lr, prior_std = (self.optimizer.param_groups[0][k] for k in ("lr", "prior_std"))

        def evaluate():
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.net(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        count = len(self.noise)
        try:
            self.optimizer.step(evaluate if closure and self.batch is not None else None)
        except CLUMSY:
            assert torch.equal(before, self.net.weight.detach())
            return
        if torch.equal(before, self.net.weight.detach()):
            # a part of a draw: nothing came out, nothing was charged
            assert len(self.engine.accountant) == self.charged
            return
        self.charged += 1
        assert len(self.noise) == count + 1
        optimizer, size = self.optimizer, self.optimizer.expected_batch_size
        released = (before - self.net.weight.detach()) / lr * size
        if math.isfinite(prior_std):
            released -= size * before / prior_std**2 / RECORDS
        z = optimizer.effective_noise_multiplier
        self.explain(released.flatten() - z * CLIP * self.noise[-1], before)
        charged = [c.event for c in self.engine.accountant.history]
        assert any(self.multiplier_of(e) == pytest.approx(z) for e in charged)

    def explain(self, total, weight):
        """The sum is that of one draw, whole, every record once, and of a draw that was not
        used before.
        """
        for k in range(len(self.draws) - 1, -1, -1):
            x, y = self.x[self.draws[k]], self.y[self.draws[k]]
            gradients = 2 * (x @ weight.T - y) * x
            norms = gradients.norm(dim=1, keepdim=True)
            expected = (gradients * (CLIP / norms).clamp(max=1.0)).sum(0)
            scale = (1 + weight.abs().max()) * max(1.0, self.optimizer.effective_noise_multiplier)
            if (total - expected).abs().max() < 1e-6 * scale and not self.used[k]:
                self.used[k] += 1
                return
        raise AssertionError("parameters moved by something that is not one unused draw")

    @staticmethod
    def multiplier_of(event):
        return event.event.noise_multiplier if hasattr(event, "event") else event.noise_multiplier

    @rule()
    def zero_grad(self):
        self.optimizer.zero_grad()

    @rule()
    def look_at_norms(self):
        loss, own = nn.functional.mse_loss, (self.net, self.optimizer, self.loader)
        with contextlib.suppress(*CLUMSY):
            dpb.private_clipped_fraction(*own, noise_multiplier=2.0, criterion=loss)
            self.charged += 1
        public = TensorDataset(torch.randn(4, FEATURES).double(), torch.randn(4, 1).double())
        dpb.simulate_gradient_norms(self.net, DataLoader(public, 2), criterion=loss)

    @rule()
    def evaluate(self):
        with torch.no_grad():
            self.net(self.x)

    @rule(lr=st.sampled_from([0.01, 0.5, 10.0]))
    def change_lr(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr

    @rule()
    def save(self):
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    @rule()
    def load(self):
        if self.saved is not None:
            with contextlib.suppress(*CLUMSY):
                self.optimizer.load_state_dict(self.saved)

    @rule()
    def go_on_with_a_copy(self):
        """A copy on the same parameters: original and copy must not use one draw twice, and
        never draw the same noise.
        """
        self.optimizer = copy.deepcopy(self.optimizer, {id(p): p for p in self.net.parameters()})

    @invariant()
    def every_release_is_charged(self):
        if hasattr(self, "engine"):
            assert len(self.engine.accountant) == self.charged
            if self.engine.accountant.epsilon is not None and self.charged:
                assert self.engine.accountant.get_epsilon() <= self.engine.accountant.epsilon

    @invariant()
    def no_noise_repeats(self):
        if len(getattr(self, "noise", [])) > 1:
            assert len({tuple(n.tolist()) for n in self.noise}) == len(self.noise)


AnySequence.TestCase.settings = examples(52, stateful_step_count=50)
TestAnySequence = AnySequence.TestCase


class ManySequences(AnySequence):
    pass


ManySequences.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
TestManySequences = pytest.mark.slow(ManySequences.TestCase)
