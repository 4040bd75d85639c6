"""What happens to a model after the check: whatever could make it mix records is an error."""

import copy
import functools
import itertools
import sys
import types
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.checks.model_state import ModelAsChecked

MODES = pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
IS_CENTRED = False
BY_NAME = {"centred": False}


class Settings:
    __slots__ = ("centred", "inner")

    def __init__(self, inner=None):
        self.centred, self.inner = False, inner


class Public:
    centred = False


elsewhere = types.ModuleType("a_file_of_settings")
elsewhere.IS_CENTRED, elsewhere.STEPS = False, 0


def is_centred_by_a_global():
    return elsewhere.IS_CENTRED or IS_CENTRED or BY_NAME["centred"] or Public.centred


def switchable():
    centred = False

    def is_on():
        return centred

    def switch():
        nonlocal centred
        centred = True

    return is_on, switch


def centred(h):
    return h - h.mean(0)


class Net(nn.Module):
    """Mixes records wherever one of many switches is on."""

    by_class = False

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2)
        self.flag, self.share, self.kind = False, 0.0, "plain"
        self.tensor, self.array = torch.zeros(8), numpy.zeros(8)
        self.items, self.by_name, self.names = [False, [0.0]], {"centred": {"yes": False}}, {"a"}
        self.settings = Settings(types.SimpleNamespace(centred=False))
        self.activation = torch.tanh
        self.part = partial(F.leaky_relu, negative_slope=0.1)
        self.is_on, self.switch = switchable()
        self.hidden = [nn.Dropout(0.0)]
        self.none = None
        self.counter = itertools.count()

    def forward(self, x, is_wanted=False):
        h = self.a(x)
        numbers = (
            self.share,
            self.items[1][0],
            float(self.tensor.abs().sum()),
            self.array.sum(),
            self.settings.inner.centred,
            self.part.keywords["negative_slope"] != 0.1,
            self.hidden[0].p,
            "b" in self.names,
            repr(self.counter) != "count(0)",
        )
        flags = (self.flag, self.items[0], self.by_name["centred"]["yes"], self.settings.centred)
        others = (self.by_class, self.is_on(), is_centred_by_a_global(), self.none is not None)
        if is_wanted or any(numbers) or any(flags) or any(others) or self.kind != "plain":
            h = centred(h)
        return self.b(self.activation(h))


def private(net=None, mode=None, lr=0.01):
    loader = DataLoader(TensorDataset(torch.randn(32, 5), torch.randint(2, (32,))), batch_size=8)
    return dpb.PrivacyEngine().make_private(
        module=Net() if net is None else net,
        optimizer=partial(dpb.optim.DPSGLD, lr=lr),
        data_loader=loader,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        grad_sample_mode=mode,
    )


def train(net, optimizer, loader, passes=1, before=lambda step: None, dtype=torch.float32):
    steps = itertools.count()
    for _ in range(passes):
        for x, y in loader:
            before(next(steps))
            F.cross_entropy(net(x.to(dtype)).float(), y).backward()
            optimizer.step()


def mix(_module, _given, out):
    return centred(out)


def set_item(values, key, value):
    values[key] = value


def replace_class(net):
    net.a.__class__ = type(
        "Centring", (nn.Linear,), {"forward": lambda self, x: centred(F.linear(x, self.weight))}
    )


# at once: seen by the first forward pass
AT_ONCE = {
    "forward hook": lambda net: net.a.register_forward_hook(mix),
    "forward pre-hook": lambda net: net.a.register_forward_pre_hook(
        lambda m, given: centred(given[0])
    ),
    "backward hook": lambda net: net.b.register_full_backward_hook(
        lambda m, gi, go: (centred(gi[0]),)
    ),
    "backward pre-hook": lambda net: net.b.register_full_backward_pre_hook(
        lambda m, go: (centred(go[0]),)
    ),
    "state hook": lambda net: net.b.register_state_dict_post_hook(lambda *_: None),
    "loading hook": lambda net: net.b.register_load_state_dict_pre_hook(lambda *_: None),
    "replaced module": lambda net: setattr(net, "a", nn.Sequential(nn.Linear(5, 8))),
    "added module": lambda net: net.add_module("c", nn.BatchNorm1d(8, affine=False)),
    "removed module": lambda net: delattr(net, "b"),
    "replaced forward": lambda net: setattr(net, "forward", lambda x: net.b(centred(net.a(x)))),
    "replaced forward of a layer": lambda net: setattr(
        net.a, "forward", lambda x: centred(F.linear(x, net.a.weight))
    ),
    "replaced class": replace_class,
    "bool": lambda net: setattr(net, "flag", True),
    "float": lambda net: setattr(net, "share", 0.5),
    "string": lambda net: setattr(net, "kind", "centred"),
    "tensor": lambda net: setattr(net, "tensor", torch.ones(8)),
    "tensor in place": lambda net: net.tensor.add_(1),
    "array": lambda net: setattr(net, "array", numpy.ones(8)),
    "list": lambda net: setattr(net, "items", [True, [0.0]]),
    "function": lambda net: setattr(net, "activation", lambda h: torch.tanh(centred(h))),
    "from nothing": lambda net: setattr(net, "none", torch.ones(2)),
    "new attribute": lambda net: setattr(net, "new", 1),
    "attribute gone": lambda net: delattr(net, "flag"),
}
# within: seen by looks 1, 2, 4, … 64 and every 64th
WITHIN = {
    "tensor past its version": lambda net: net.tensor.data.add_(1),
    "array in place": lambda net: net.array.__iadd__(1),
    "list item": lambda net: set_item(net.items, 0, True),
    "list in a list": lambda net: set_item(net.items[1], 0, 1.0),
    "dict in a dict": lambda net: set_item(net.by_name["centred"], "yes", True),
    "set": lambda net: net.names.add("b"),
    "slot of an object": lambda net: setattr(net.settings, "centred", True),
    "object in an object": lambda net: setattr(net.settings.inner, "centred", True),
    "keyword of a partial": lambda net: set_item(net.part.keywords, "negative_slope", 0.2),
    "variable of a closure": lambda net: net.switch(),
    "module in a list": lambda net: setattr(net.hidden[0], "p", 0.5),
    "iterator": lambda net: next(net.counter),
}


class Words(dict):
    pass


def scaled(h):
    return h


def named_as_torchs(h):
    return elsewhere.inner.IS_CENTRED


elsewhere.inner = types.ModuleType("a_file_of_settings.inner")
elsewhere.inner.IS_CENTRED = False
scaled.by = 1.0
of_the_standard_library = types.ModuleType("antigravity")  # the caller's own file of that name
of_the_standard_library.__file__ = "antigravity.py"
of_the_standard_library.IS_ON = False


class Far(nn.Module):
    """With switches that are hard to see."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.off, self.on = {"on": False}, {"on": True}
        self.short, self.long = (False, 0), (True, 0)
        self.now, self.now_too = self.off, self.short
        self.words = Words(a=1)
        self.words.is_on = False
        self.ordered = {"a": 1, (1, 2): 2}
        self.objects = numpy.array([False, None])
        self.masked = numpy.ma.masked_array(numpy.zeros(2), [False, False])
        self.wrapped = functools.wraps(F.relu)(named_as_torchs)

    def forward(self, x):
        return self.first(scaled(x)) * of_the_standard_library.IS_ON * elsewhere.inner.IS_CENTRED


def reordered(net):
    net.ordered = dict(reversed(net.ordered.items()))


FAR = {
    "another dict that was there": lambda net: setattr(net, "now", net.on),
    "another tuple that was there": lambda net: setattr(net, "now_too", net.long),
    "attribute of a dict": lambda net: setattr(net.words, "is_on", True),
    "order of a dict": reordered,
    "item of an array of objects": lambda net: set_item(net.objects, 0, True),
    "mask of an array": lambda net: net.masked.mask.__setitem__(0, True),
    "attribute of a function": lambda net: setattr(scaled, "by", 2.0),
    "file in a package": lambda net: setattr(elsewhere.inner, "IS_CENTRED", True),
    "wrapper named as what it wraps": lambda net: setattr(elsewhere.inner, "IS_CENTRED", True),
    "file named as one of Python's": lambda net: setattr(of_the_standard_library, "IS_ON", True),
}


@pytest.mark.parametrize("name", FAR)
def test_what_is_hard_to_see_is_seen(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "antigravity", of_the_standard_library)
    if name.startswith("wrapper"):
        monkeypatch.setattr(Far, "forward", lambda self, x: self.wrapped(self.first(x)))
    monkeypatch.setattr(elsewhere.inner, "IS_CENTRED", False)
    monkeypatch.setattr(scaled, "by", 1.0)
    net = Far()
    before = ModelAsChecked(net)
    assert before.changed() is None
    net.words, net.ordered = copy.copy(net.words), dict(net.ordered)  # equal values
    assert before.changed() is None
    FAR[name](net)
    assert before.changed() is not None


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize(
    "name", ["forward hook", "backward hook", "replaced module", "bool", "list item"]
)
def test_a_change_before_the_first_step_is_refused(name, mode):
    net, optimizer, loader = private(mode=mode)
    {**AT_ONCE, **WITHIN}[name](net)
    with pytest.raises(RuntimeError, match=r"since the model was checked, .* make_private again"):
        train(net, optimizer, loader)
    assert len(optimizer.accountant) == 0


@pytest.mark.first_cases(1)
@MODES
@pytest.mark.parametrize("name", ["forward hook", "bool", "list item"])
def test_a_change_later_is_refused_at_once_or_within_64_steps(name, mode):
    net, optimizer, loader = private(mode=mode)
    change = {**AT_ONCE, **WITHIN}[name]
    with pytest.raises(RuntimeError, match="since the model was checked"):
        train(net, optimizer, loader, 17, before=lambda step: change(net) if step == 37 else None)
    assert len(optimizer.accountant) == (37 if name in AT_ONCE else 63)


@pytest.mark.parametrize("name", [*AT_ONCE, *WITHIN])
def test_every_change_is_seen(name):
    change = {**AT_ONCE, **WITHIN}[name]
    net = Net()
    as_checked = ModelAsChecked(net)
    change(net)
    with pytest.raises(RuntimeError, match="since the model was checked"):
        net(torch.randn(3, 5))  # before it computes anything
    with pytest.raises(RuntimeError, match="since the model was checked"):
        as_checked.require_unchanged()
    net = Net()
    as_checked = ModelAsChecked(net)
    for look in range(64):
        if look == 37:
            change(net)
        if look == (37 if name in AT_ONCE else 63):
            break
        as_checked.require_unchanged()
    with pytest.raises(RuntimeError, match="since the model was checked"):
        as_checked.require_unchanged()


def test_a_global_variable_a_class_or_a_hook_on_all_modules(monkeypatch):
    def refused(what):
        with pytest.raises(RuntimeError, match=what):
            train(net, optimizer, loader)
        assert len(optimizer.accountant) == 0

    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "IS_CENTRED", True)
        refused("global variable 'IS_CENTRED'")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setitem(BY_NAME, "centred", True)
        refused("global variable 'BY_NAME'")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setattr(elsewhere, "IS_CENTRED", True)
        refused("global variable 'IS_CENTRED' of a_file_of_settings")
    net, optimizer, loader = private()
    elsewhere.STEPS += 1  # which the model does not read
    with monkeypatch.context() as patch:
        patch.setattr(Public, "centred", True)
        refused("'centred' of class 'Public'")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setattr(Net, "by_class", True)
        refused("'by_class' of class 'Net'")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda self, x: self.b(centred(self.a(x))))
        refused("'forward' of class 'Net'")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setattr(Net.forward, "__defaults__", (True,))
        refused("defaults")
    net, optimizer, loader = private()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: centred(F.linear(x, self.weight)))
        refused("class 'Linear' changed")
    handle = nn.modules.module.register_module_forward_hook(mix)
    try:
        refused("torch's global_forward_hooks")
    finally:
        handle.remove()
    train(net, optimizer, loader)


def test_a_hook_that_is_there_only_during_the_forward_pass_is_refused():
    net, optimizer, loader = private()
    x, _ = next(iter(loader))
    with torch.no_grad():
        handle = net.a.register_forward_hook(mix)
        net(x)  # nothing is taken from this pass
    with pytest.raises(RuntimeError, match="a forward hook of module 'a' was added"):
        net(x)
    handle.remove()
    train(net, optimizer, loader)


class Keeping(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.a, self.b, self.keep = nn.Linear(5, 8), nn.Linear(8, 2), keep
        self.calls, self.log, self.last, self.mask = 0, [], None, None

    def forward(self, x):
        h = self.a(x)
        self.keep(self, h)
        return self.b(h)


KEPT = {
    "counter": lambda net, h: setattr(net, "calls", net.calls + 1),
    "tensor": lambda net, h: setattr(net, "last", h.detach()),
    "tensor with its graph": lambda net, h: setattr(net, "last", h),
    "sum": lambda net, h: setattr(net, "calls", float(h.detach().sum())),
    "shape": lambda net, h: setattr(net, "last", h.shape),
    "log": lambda net, h: net.log.append(1),
}


# records that run alone keep the same shape, and tensors are refused in other words
@pytest.mark.first_cases(1)
@pytest.mark.usefixtures("whole_batches")
@MODES
@pytest.mark.parametrize("name", KEPT)
def test_what_a_forward_pass_keeps_is_refused_by_name(name, mode):
    attribute = {"counter": "calls", "sum": "calls", "log": "log"}.get(name, "last")
    with pytest.raises(
        ValueError, match=rf"attribute '{attribute}' of module 'Keeping'.*in the forward pass"
    ):
        private(Keeping(KEPT[name]), mode)


@pytest.mark.first_cases(1)
@MODES
def test_what_is_kept_from_the_first_pass_on_may_stay(mode):
    def cache(net, h):
        if net.mask is None:
            net.mask = torch.ones(h.shape[1])

    net, optimizer, loader = private(Keeping(cache), mode)
    train(net, optimizer, loader, 2)
    net.mask = None
    with pytest.raises(RuntimeError, match="'mask' of module 'Keeping' changed"):
        train(net, optimizer, loader)


@pytest.mark.first_cases(1)
@MODES
def test_moving_loading_evaluating_and_equal_values_change_nothing(mode):
    net, optimizer, loader = private(mode=mode)
    net.to("cpu")
    net.load_state_dict(Net().state_dict())
    train(net, optimizer, loader)
    net.eval()
    net(torch.randn(3, 5))
    optimizer.release._as_checked.require_unchanged()
    net.train()
    for dtype in (torch.float64, torch.float32):
        net.to(dtype)
        net.tensor = net.tensor.to(dtype)
        train(net, optimizer, loader, dtype=dtype)
    net.share, net.kind = float("0"), "".join(("pl", "ain"))
    net.items = [False, [0.0]]
    net.array = numpy.zeros(8)
    train(net, optimizer, loader, 20)
    assert len(optimizer.accountant) == 4 * 23


def test_modes():
    class Mixing(nn.Module):
        def forward(self, x):
            return x if self.training else centred(x)

    net = nn.Sequential(
        nn.Linear(5, 8), nn.Dropout(0.1), nn.BatchNorm1d(8, affine=False), Mixing(), nn.Linear(8, 2)
    )
    net[2].eval()
    net, optimizer, loader = private(net)
    net[1].eval()  # a layer of torch's, which treats records one by one in eval mode
    train(net, optimizer, loader)
    net[3].eval()
    with pytest.raises(RuntimeError, match=r"'3' was in training mode .* and is in eval mode now"):
        train(net, optimizer, loader)
    net.train()
    with pytest.raises(RuntimeError, match=r"'2' was in eval mode .* and is in training mode now"):
        train(net, optimizer, loader)
    net[2].eval()
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 8


def test_recurrent_layers_keep_lists_of_their_parameters():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.LSTM(5, 4, batch_first=True).requires_grad_(False)
            self.b = nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.frozen(x[:, None])[0][:, 0])

    net, optimizer, loader = private(Recurrent())
    for dtype in (torch.float64, torch.float32):
        net.to(dtype)
        train(net, optimizer, loader, dtype=dtype)


def test_after_another_make_private_and_in_copies_nothing_is_left_of_it():
    net, old, _ = private()
    net.flag = None
    net, optimizer, loader = private(net)
    train(net, optimizer, loader)
    assert (
        sum(
            isinstance(getattr(h, "__self__", None), ModelAsChecked)
            for h in net._forward_pre_hooks.values()
        )
        == 1
    )
    assert old.release._as_checked is not optimizer.release._as_checked
    twin = copy.deepcopy(net)
    twin.flag = False
    twin, optimizer, loader = private(twin)
    train(twin, optimizer, loader)
    assert len(optimizer.accountant) == 4


# -- a loss that runs for each record alone --------------------------------------------------------

WEIGHTS = torch.ones(2)
SETTING = {"scale": 1.0}


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, out, y):
        return F.cross_entropy(out, y) * self.scale


class Trainer(nn.Module):
    """Holds the model and what it counts, and has the loss as a method."""

    def __init__(self, net):
        super().__init__()
        self.net, self.steps = net, 0

    def loss(self, out, y):
        return F.cross_entropy(out, y)


def by_global(out, y):
    return F.cross_entropy(out, y, weight=WEIGHTS, reduction="sum")


def by_item(out, y):
    return F.cross_entropy(out, y) * SETTING["scale"]


def by_closure():
    values = [1.0]
    return (lambda out, y: F.cross_entropy(out, y) * values[0]), lambda: set_item(values, 0, 2.0)


def by_module():
    criterion = Criterion()
    return criterion, lambda: setattr(criterion, "scale", 2.0)


OF_LOSSES = {
    "tensor": lambda: (by_global, lambda: WEIGHTS.mul_(2)),
    "item": lambda: (by_item, lambda: set_item(SETTING, "scale", SETTING["scale"] * 2)),
    "closure": by_closure,
    "module": by_module,
}


def with_loss(net, loss, mode):
    return dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.01),
        data_loader=DataLoader(
            TensorDataset(torch.randn(32, 5), torch.randint(2, (32,))), batch_size=8
        ),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        grad_sample_mode=mode,
        loss=loss,
    )


@pytest.mark.parametrize("mode", ["bookkeeping", "isolated"])
@pytest.mark.parametrize("name", OF_LOSSES)
def test_what_a_given_loss_reads_of_variables_around_it_stays_as_it_was(name, mode):
    """It may be made of a batch, such as weights out of its counts: a record moved the sum by
    30 C.
    """
    loss, change = OF_LOSSES[name]()
    net, optimizer, loader = with_loss(nn.Sequential(nn.Linear(5, 2)), loss, mode)
    x, y = next(iter(loader))
    net.private_loss(x, y).backward()
    optimizer.step()
    change()
    with pytest.raises(RuntimeError, match="since the model was checked"):
        for x, y in loader:
            net.private_loss(x, y).backward()
            optimizer.step()
    assert len(optimizer.accountant) <= 2


def test_the_program_around_a_given_loss_may_count_its_steps():
    for is_method in (True, False):
        trainer, counts = Trainer(nn.Sequential(nn.Linear(5, 2))), Settings()

        def of_both(out, y, trainer=trainer, counts=counts):
            assert counts.inner is None or counts.inner == trainer.steps
            return trainer.loss(out, y)

        loss = trainer.loss if is_method else of_both
        net, optimizer, loader = with_loss(trainer.net, loss, None)
        for x, y in loader:
            net.private_loss(x, y).backward()
            optimizer.step()
            trainer.steps += 1
            counts.inner = trainer.steps
        assert len(optimizer.accountant) == len(loader)


def test_what_changes_in_a_given_loss_goes_with_the_target():
    def loss(out, target):
        y, weight = target
        return F.cross_entropy(out, y) * weight

    net, optimizer, loader = with_loss(nn.Sequential(nn.Linear(5, 2)), loss, None)
    for step, (x, y) in enumerate(loader):
        net.private_loss(x, (y, 1 / (1 + step))).backward()
        optimizer.step()
    assert len(optimizer.accountant) == len(loader)
