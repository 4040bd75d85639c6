"""Lightning trains privately by the page's recipe; whatever else it does ends in an error."""

import logging
from functools import partial

import pytest
import torch
from support.frameworks import BATCH, DELTA, LIGHTNING_WARNS, made, moves_nothing
from support.refusals import refused
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

pytestmark = [pytest.mark.slow, *LIGHTNING_WARNS]
EPOCHS = 2


def module_of(net, optimizers, seen):
    """A module that appends losses and hits to ``seen``."""
    import lightning.pytorch as lightning
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.accuracy = net, torchmetrics.Accuracy("multiclass", num_classes=3)

        def training_step(self, batch, _index):
            out = self.net(batch[0])
            loss = nn.functional.cross_entropy(out, batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
            self.accuracy(out, batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            seen.append((loss.detach(), (out.argmax(1) == batch[1]).long()))
            return {"loss": loss, "out": out.detach()}

        def validation_step(self, batch, _index):
            self.log("of validation", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in optimizers]

    return Classifier()


def trainer_of(folder, engine, *callbacks, max_epochs=EPOCHS, **options):
    """With the callback of an engine, if there is one."""
    import lightning.pytorch as lightning

    from torch_dpbayes.frameworks.lightning import PrivacyCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outputs = "logger enable_checkpointing enable_progress_bar enable_model_summary"
    options |= dict.fromkeys(outputs.split(), False)
    own = [] if engine is None else [PrivacyCallback(engine, DELTA)]
    return lightning.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[*own, *callbacks],
        **options,
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_step_is_charged_and_metrics_are_logged_as_usual(precision, tmp_path):
    seen = []
    engine, net, optimizer, loader = made()
    start = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(tmp_path, engine, precision=precision)
    validation = DataLoader(TensorDataset(torch.randn(9, 4), torch.randint(3, (9,))), 3)
    trainer.fit(module_of(net, [optimizer], seen), loader, validation)
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.global_step == len(seen)
    assert all((a != b).any() for a, b in zip(start, net.parameters()))
    last = seen[len(loader) :]
    losses, hits = ([torch.as_tensor(t.tolist()) for t in column] for column in zip(*last))
    expected = {
        "epsilon": engine.get_epsilon(DELTA),
        "loss_step": float(losses[-1]),
        "loss_epoch": float(torch.stack(losses).mean()),
        "accuracy": float(torch.cat(hits).float().mean()),
    }
    shown = {name: float(trainer.callback_metrics[name]) for name in expected}
    assert shown == pytest.approx(expected, rel=1e-2, nan_ok=True)


# what Lightning can do to a private run, and whether it is told so without the callback
REPLACED = {
    "another loader": True,
    "accumulation": True,
    "an optimizer without noise": False,  # there is no gradient, and nothing moves
    "a loader of another call": True,
}


@pytest.mark.parametrize(("has_callback", "mode"), [(True, None), (False, None), (False, "hooks")])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_ends_in_an_error(name, has_callback, mode, tmp_path):
    engine, net, optimizer, loader = made(**recorded(mode))
    if name == "another loader":
        loader = DataLoader(loader.dataset, batch_size=BATCH, shuffle=True)
    if name == "a loader of another call":
        loader = made()[-1]
    if name == "an optimizer without noise":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"accumulate_grad_batches": 2} if name == "accumulation" else {}
    trainer = trainer_of(tmp_path, engine if has_callback else None, **options)
    run = partial(trainer.fit, module_of(net, [optimizer], []), loader)
    moves_nothing(run, engine, net, has_callback or REPLACED[name])


def test_a_lightning_module_that_was_made_private_itself_is_refused(tmp_path):
    optimizers = []
    engine, module, optimizer, loader = made(module=module_of(nn.Linear(4, 3), optimizers, []))
    optimizers.append(optimizer)
    with refused("framework-module"):
        trainer_of(tmp_path, engine).fit(module, loader)
    assert len(engine.accountant) == 0


def test_the_end_of_the_budget_ends_the_training_after_its_last_step(tmp_path):
    import lightning.pytorch as lightning

    accountant, seen, steps = dpb.PrivacyAccountant(1.0, DELTA), [], []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_):
            steps.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())

    engine, net, optimizer, loader = made(dpb.PrivacyEngine(accountant))
    fit = accountant.remaining(PoissonSampledDpEvent(1 / 6, GaussianDpEvent(2.0)))
    trainer = trainer_of(tmp_path, engine, Watch(), max_epochs=fit)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        trainer.fit(module_of(net, [optimizer], seen), loader)
    assert len(accountant) == len(steps) == len(seen) - 1 == fit > 0
    assert torch.equal(nn.utils.parameters_to_vector(net.parameters()), steps[-1])
    assert accountant.get_epsilon() <= 1.0
