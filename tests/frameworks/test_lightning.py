"""Lightning trains privately by the page's recipe; whatever else it does ends in an error."""

import logging
from functools import partial

import pytest
import torch
from support.frameworks import BATCH, DELTA, LIGHTNING_WARNS, made, moves_nothing
from support.refusals import refused
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.slow, *LIGHTNING_WARNS]
EPOCHS = 2


def module_of(net, optimizers, seen=None):
    """A module that logs its losses, and appends them to ``seen``."""
    import lightning.pytorch as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
            if seen is not None:
                seen.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in optimizers]

    return Classifier()


def trainer_of(folder, engine, **options):
    """With the callback of an engine, if there is one."""
    import lightning.pytorch as lightning

    from torch_dpbayes.frameworks.lightning import PrivacyCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outputs = "logger enable_checkpointing enable_progress_bar enable_model_summary"
    return lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[] if engine is None else [PrivacyCallback(engine, DELTA)],
        **dict.fromkeys(outputs.split(), False),
        **options,
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_step_is_charged_and_metrics_are_logged_as_usual(precision, tmp_path):
    seen = []
    engine, net, optimizer, loader = made()
    start = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(tmp_path, engine, precision=precision)
    trainer.fit(module_of(net, [optimizer], seen), loader)
    assert len(engine.accountant) == EPOCHS * len(loader) == trainer.global_step == len(seen)
    assert all((a != b).any() for a, b in zip(start, net.parameters()))
    last = [loss.tolist() for loss in seen[len(loader) :]]  # known after backward()
    expected = {"loss_step": last[-1], "loss_epoch": sum(last) / len(last)}
    expected["epsilon"] = engine.get_epsilon(DELTA)
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
    run = partial(trainer.fit, module_of(net, [optimizer]), loader)
    moves_nothing(run, engine, net, has_callback or REPLACED[name])


def test_a_lightning_module_that_was_made_private_itself_is_refused(tmp_path):
    optimizers = []
    engine, module, optimizer, loader = made(module=module_of(nn.Linear(4, 3), optimizers))
    optimizers.append(optimizer)
    with refused("framework-module"):
        trainer_of(tmp_path, engine).fit(module, loader)
    assert len(engine.accountant) == 0
