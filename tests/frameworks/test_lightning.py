"""Lightning trains privately by the page's recipe; whatever else it does ends in an error."""

import logging
import math
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


def module_of(net, optimizers, seen=None):
    import lightning.pytorch as lightning
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.accuracy = net, torchmetrics.Accuracy("multiclass", num_classes=3)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _index):
            out = self.net(batch[0])
            loss = nn.functional.cross_entropy(out, batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
            self.accuracy(out, batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            if seen is not None:
                seen.append((loss.detach(), (out.argmax(1) == batch[1]).long()))
            return {"loss": loss, "out": out.detach()}

        def validation_step(self, batch, _index):
            x, y = batch
            self.log("of validation", (self.net(x).argmax(1) == y).float().mean())

        def configure_optimizers(self):
            schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in optimizers]
            return list(optimizers), schedules

    return Classifier()


def trainer_of(folder, *callbacks, **options):
    import lightning.pytorch as lightning

    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            **options,
        }
    )


def callback_of(engine):
    from torch_dpbayes.frameworks.lightning import PrivacyCallback

    return PrivacyCallback(engine, DELTA)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_step_is_charged_and_metrics_are_logged_as_usual(precision, tmp_path):
    seen = []
    engine, net, optimizer, loader = made()
    start = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(tmp_path, callback_of(engine), precision=precision)
    validation = DataLoader(TensorDataset(torch.randn(9, 4), torch.randint(3, (9,))), 3)
    trainer.fit(module_of(net, [optimizer], seen), loader, validation)
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.global_step == len(seen)
    assert all((a != b).any() for a, b in zip(start, net.parameters()))
    shown = trainer.callback_metrics
    assert math.isclose(float(shown["epsilon"]), engine.get_epsilon(DELTA), rel_tol=1e-6)
    last = seen[len(loader) :]
    losses, hits = ([torch.as_tensor(t.tolist()) for t in column] for column in zip(*last))
    torch.testing.assert_close(
        shown["loss_step"].detach().float(), losses[-1], rtol=1e-2, atol=0, equal_nan=True
    )
    assert float(shown["loss_epoch"]) == pytest.approx(
        float(torch.stack(losses).mean()), rel=1e-2, nan_ok=True
    )
    assert float(shown["accuracy"]) == pytest.approx(float(torch.cat(hits).float().mean()))


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
    callbacks = [callback_of(engine)] if has_callback else []
    options = {"accumulate_grad_batches": 2} if name == "accumulation" else {}
    trainer = trainer_of(tmp_path, *callbacks, **options)
    run = partial(trainer.fit, module_of(net, [optimizer]), loader)
    moves_nothing(run, engine, net, has_callback or REPLACED[name])


def test_a_lightning_module_that_was_made_private_itself_is_refused(tmp_path):
    chosen = []
    engine, module, optimizer, loader = made(module=module_of(nn.Linear(4, 3), chosen))
    chosen.append(optimizer)
    with refused("framework-module"):
        trainer_of(tmp_path, callback_of(engine)).fit(module, loader)
    assert len(engine.accountant) == 0


def test_the_end_of_the_budget_ends_the_training_after_its_last_step(tmp_path):
    import lightning.pytorch as lightning

    accountant, seen, steps = dpb.PrivacyAccountant(1.0, DELTA), [], []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_):
            steps.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())

    engine, net, optimizer, loader = made(dpb.PrivacyEngine(accountant))
    fit = accountant.remaining(PoissonSampledDpEvent(1 / 6, GaussianDpEvent(2.0)))
    trainer = trainer_of(tmp_path, callback_of(engine), Watch(), max_epochs=fit)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        trainer.fit(module_of(net, [optimizer], seen), loader)
    assert len(accountant) == len(steps) == len(seen) - 1 == fit > 0
    assert torch.equal(nn.utils.parameters_to_vector(net.parameters()), steps[-1])
    assert accountant.get_epsilon() <= 1.0
