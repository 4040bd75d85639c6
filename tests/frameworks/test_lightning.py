"""Lightning trains privately by the page's recipe; whatever else it does ends in an error."""

import logging
import math
from functools import partial

import pytest
import torch
from support.frameworks import BATCH, LIGHTNING_WARNS, RECORDS, made, moves_nothing
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

pytestmark = [pytest.mark.slow, *LIGHTNING_WARNS]
EPOCHS, DELTA = 2, 1e-4


def module_of(net, optimizer):
    import lightning.pytorch as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _index):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch, _index):
            x, y = batch
            self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

        def configure_optimizers(self):
            return optimizer

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


def test_the_recipe_charges_each_step_and_shows_epsilon(tmp_path):
    engine, net, optimizer, loader = made()
    start = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(tmp_path, callback_of(engine))
    validation = DataLoader(TensorDataset(torch.randn(9, 4), torch.randint(3, (9,))), 3)
    trainer.fit(module_of(net, optimizer), loader, validation)
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.global_step
    assert all((a != b).any() for a, b in zip(start, net.parameters()))
    shown = float(trainer.callback_metrics["epsilon"])
    assert math.isclose(shown, engine.get_epsilon(DELTA), rel_tol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_and_metrics_are_logged_as_usual(precision, tmp_path):
    import lightning.pytorch as lightning
    import torchmetrics

    seen = []

    class Classifier(lightning.LightningModule):
        def __init__(self, net):
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

        def configure_optimizers(self):
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    engine, net, optimizer, loader = made()
    trainer = trainer_of(tmp_path, callback_of(engine), max_epochs=1, precision=precision)
    trainer.fit(Classifier(net), loader)
    assert len(engine.accountant) == len(loader) == len(seen)
    losses, hits = ([torch.as_tensor(t.tolist()) for t in column] for column in zip(*seen))
    shown = trainer.callback_metrics
    torch.testing.assert_close(
        shown["loss_step"].detach().float(), losses[-1], rtol=1e-2, atol=0, equal_nan=True
    )
    assert float(shown["loss_epoch"]) == pytest.approx(
        float(torch.stack(losses).mean()), rel=1e-2, nan_ok=True
    )
    assert float(shown["accuracy"]) == pytest.approx(float(torch.cat(hits).float().mean()))


def test_a_run_of_part_of_the_batches_goes_on_where_it_left(tmp_path):
    engine, net, optimizer, loader = made()
    trainer = trainer_of(tmp_path, callback_of(engine), limit_train_batches=2)
    trainer.fit(module_of(net, optimizer), loader)
    assert len(engine.accountant) == 2 * EPOCHS


def test_a_budget_ends_the_run(tmp_path):
    event = dpb.PrivacyAccountant(neighboring="add_or_remove_one")
    event.step(noise_multiplier=20.0, sample_rate=BATCH / RECORDS)
    budget = 2 * event.get_epsilon(DELTA)
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(budget, DELTA))
    data = TensorDataset(torch.randn(RECORDS, 4), torch.randint(3, (RECORDS,)))
    net, optimizer, loader = engine.make_private(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.05),
        data_loader=DataLoader(data, batch_size=BATCH),
        max_grad_norm=1.0,
        noise_multiplier=2.0,
    )
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        trainer_of(tmp_path, max_epochs=1000).fit(module_of(net, optimizer), loader)
    assert engine.get_epsilon(DELTA) <= budget


# what Lightning can do to a private run, and what is said to it by the callback and without
NOT_DELIVERED = "no new batch came|did not deliver|outside the (private )?model"
REPLACED = {
    "another loader": ("replaced the private loader by a DataLoader", NOT_DELIVERED),
    "accumulation": ("got no step", "got no step"),
    "an optimizer without noise": ("with SGD in the place of the private optimizer", None),
    "a loader of another call": ("of another make_private call", NOT_DELIVERED),
    "an accountant of another engine": ("charges another accountant", None),
}


@pytest.mark.parametrize(
    ("has_callback", "mode"), [(True, "bookkeeping"), (False, "bookkeeping"), (False, "hooks")]
)
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_ends_in_an_error(name, has_callback, mode, tmp_path):
    engine, net, optimizer, loader = made(**recorded(mode))
    shown = engine
    if name == "another loader":
        loader = DataLoader(loader.dataset, batch_size=BATCH, shuffle=True)
    if name == "a loader of another call":
        loader = made()[-1]
    if name == "an optimizer without noise":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if name == "an accountant of another engine":
        shown = made()[0]
    callbacks = [callback_of(shown)] if has_callback else []
    options = {"accumulate_grad_batches": 2} if name == "accumulation" else {}
    said = REPLACED[name][0 if has_callback else 1]
    run = partial(
        trainer_of(tmp_path, *callbacks, **options).fit, module_of(net, optimizer), loader
    )
    if said is None and name == "an accountant of another engine":
        run()  # which is charged as it should be
    else:  # without the private optimizer there is no gradient, and nothing moves
        moves_nothing(run, engine, net, said)


def test_a_callback_says_what_it_needs_before_anything_is_spent(tmp_path):
    from torch_dpbayes.frameworks.lightning import PrivacyCallback

    engine, net, optimizer, loader = made()
    with pytest.raises(TypeError, match="takes the engine"):
        PrivacyCallback(engine.accountant)
    with pytest.raises(ValueError, match=r"PrivacyCallback\(engine, delta=1e-5\)"):
        trainer_of(tmp_path, PrivacyCallback(engine)).fit(module_of(net, optimizer), loader)
    assert len(engine.accountant) == 0


def test_a_lightning_module_that_was_made_private_itself_is_refused(tmp_path):
    import lightning.pytorch as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _index):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return chosen[0]

    engine, module, optimizer, loader = made(module=Classifier())
    chosen = [optimizer]
    with pytest.raises(RuntimeError, match=r"make_private\(module=self\.net, \.\.\.\)"):
        trainer_of(tmp_path, callback_of(engine)).fit(module, loader)
    assert len(engine.accountant) == 0
