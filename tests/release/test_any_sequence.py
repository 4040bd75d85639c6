"""Whatever is called in whatever order: what was released is never more than what was charged.

An oracle stands beside the library. It sees which records each draw holds and every Gaussian that
is drawn, recomputes the clipped sum of exactly those records, and compares: every change of the
parameters must be that sum, each draw used once, plus noise of at least the multiplier that was
charged for it, plus nothing.
"""

import contextlib
import copy
import math
from functools import partial

import pytest
import torch
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
clumsy = contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError, StopIteration)
loss_of = nn.functional.mse_loss


class AnySequence(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([None, 1.0, 20.0]),
        batch_size=st.sampled_from([5, 15, 30]),
        lr=st.sampled_from([0.1, 50.0]),
    )
    def start(self, budget, batch_size, lr):
        self.patch = pytest.MonkeyPatch()
        self.draws, self.noise, self.charged, self.used = [], [], 0, set()
        self.watch()
        self.x, self.y = (torch.randn(RECORDS, n, dtype=torch.float64) for n in (FEATURES, 1))
        self.net = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)
        limits = () if budget is None else (budget, 1e-5)
        self.engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(*limits))
        self.batch, self.saved, self.batches = None, None, iter(())
        self.attach(lr, 1.0, math.inf)

    def watch(self):
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

        self.patch.setattr(PoissonSampler, "_next_draw", watched_draw)
        self.patch.setattr(GaussianNoise, "standard_normal", watched_normal)
        self.patch.setattr(release, "add_gaussian", watched_add)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

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

    @rule(size=st.sampled_from([None, 2, 7]))
    def new_pass(self, size):
        self.batches = iter(self.loader)
        if size is not None:
            given = {"max_physical_batch_size": size, "optimizer": self.optimizer}
            with BatchMemoryManager(data_loader=self.loader, **given) as parts:
                self.batches = iter(parts)

    @rule()
    def next_batch(self):
        with clumsy:
            self.batch = next(self.batches)

    @rule(way=st.sampled_from(WAYS))
    def backward(self, way):
        if self.batch is None:
            return
        x, y = self.batch
        with clumsy:
            if way == "twice":
                x, y = torch.cat([x, x]), torch.cat([y, y])
            elif way == "half":
                x, y = x[: len(x) // 2], y[: len(y) // 2]
            elif way == "all data":
                x, y = self.x, self.y
            if way == "forward only":
                self.net(x)
            else:
                loss_of(self.net(x), y).backward()
                if way == "two backward passes":
                    loss_of(self.net(x), y).backward()

    def one_step(self, way="whole"):
        self.batch = None
        self.next_batch()
        if self.batch is None:
            self.new_pass(None)
            self.next_batch()
        self.backward(way)
        self.step(False)

    @rule(way=st.sampled_from(WAYS), slip=st.sampled_from(SLIPS), zero=st.booleans())
    def train(self, way, slip, zero):
        """A few steps as people write them, with a slip in between."""
        self.one_step()
        if slip == "skip a batch":
            self.next_batch()
        elif slip == "step again":
            self.backward("whole")
            self.step(False)
        elif slip == "leave in the middle of a draw":
            self.new_pass(2)
            self.one_step()
            self.new_pass(None)
        elif slip == "copies":
            self.go_on_with_a_copy()
            self.one_step()
            self.go_on_with_a_copy()
        if zero:
            self.optimizer.zero_grad()
        self.one_step(way)

    @rule(closure=st.booleans())
    def step(self, closure):
        before, count = self.net.weight.detach().clone(), len(self.noise)
        lr, prior_std = (self.optimizer.param_groups[0][k] for k in ("lr", "prior_std"))

        def evaluate():
            self.optimizer.zero_grad()
            loss = loss_of(self.net(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        is_done = False
        with clumsy:
            self.optimizer.step(evaluate if closure and self.batch is not None else None)
            is_done = True
        if torch.equal(before, self.net.weight.detach()):
            # refused, or a part of a draw: nothing came out, nothing was charged
            assert not is_done or len(self.engine.accountant) == self.charged
            return
        assert is_done
        self.charged += 1
        assert len(self.noise) == count + 1
        size, z = self.optimizer.expected_batch_size, self.optimizer.effective_noise_multiplier
        released = (before - self.net.weight.detach()) / lr * size
        if math.isfinite(prior_std):
            released -= size * before / prior_std**2 / RECORDS
        self.explain(released.flatten() - z * CLIP * self.noise[-1], before, z)
        events = [charge.event for charge in self.engine.accountant.history]
        gaussians = [getattr(event, "event", event) for event in events]
        assert any(event.noise_multiplier == pytest.approx(z) for event in gaussians)

    def explain(self, total, weight, z):
        """The sum is that of one draw, whole, every record once, and of a draw that was not
        used before.
        """
        scale = (1 + weight.abs().max()) * max(1.0, z)
        for k, records in reversed([*enumerate(self.draws)]):
            x, y = self.x[records], self.y[records]
            gradients = 2 * (x @ weight.T - y) * x
            norms = gradients.norm(dim=1, keepdim=True)
            expected = (gradients * (CLIP / norms).clamp(max=1.0)).sum(0)
            if (total - expected).abs().max() < 1e-6 * scale and k not in self.used:
                self.used.add(k)
                return
        raise AssertionError("parameters moved by something that is not one unused draw")

    @rule()
    def zero_grad(self):
        self.optimizer.zero_grad()

    @rule()
    def look_at_norms(self):
        own = self.net, self.optimizer, self.loader
        with clumsy:
            dpb.private_clipped_fraction(*own, noise_multiplier=2.0, criterion=loss_of)
            self.charged += 1
        public = TensorDataset(torch.randn(4, FEATURES).double(), torch.randn(4, 1).double())
        dpb.simulate_gradient_norms(self.net, DataLoader(public, 2), criterion=loss_of)

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
            with clumsy:
                self.optimizer.load_state_dict(self.saved)

    @rule()
    def go_on_with_a_copy(self):
        """A copy on the same parameters: original and copy must not use one draw twice, and
        never draw the same noise.
        """
        self.optimizer = copy.deepcopy(self.optimizer, {id(p): p for p in self.net.parameters()})

    @invariant()
    def every_release_is_charged_and_no_noise_repeats(self):
        if hasattr(self, "engine"):
            accountant = self.engine.accountant
            assert len(accountant) == self.charged
            if accountant.epsilon is not None and self.charged:
                assert accountant.get_epsilon() <= accountant.epsilon
            assert len({tuple(n.tolist()) for n in self.noise}) == len(self.noise)


AnySequence.TestCase.settings = examples(52, stateful_step_count=50)
TestAnySequence = AnySequence.TestCase
