"""Models as torchvision and transformers publish them, with random weights."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import clipped_rows, gradients_of_records, private, sum_of
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "num_labels": 3}


class Logits(nn.Module):
    """Of images, or of token ids and an attention mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask=None):
        return (self.model(x) if mask is None else self.model(x, attention_mask=mask)).logits


def of_text(kind, config, **settings):
    settings = {"vocab_size": 50, "pad_token_id": 0, **SMALL, **settings}
    return Logits(getattr(transformers, kind)(getattr(transformers, config)(**settings)))


def tokens(n):
    mask = (torch.arange(8) < torch.randint(3, 9, (n, 1))).long()
    return torch.randint(3, 50, (n, 8)) * mask, mask


def images(size):
    return lambda n: (torch.randn(n, 3, size, size, dtype=torch.float64),)


MODELS = {
    "bert": (lambda: of_text("BertForSequenceClassification", "BertConfig"), tokens),
    "gpt2": (
        lambda: of_text("GPT2ForSequenceClassification", "GPT2Config", n_head=2, n_embd=16),
        tokens,
    ),
    "bloom": (  # weights so large that its GELU is no other
        lambda: of_text("BloomForSequenceClassification", "BloomConfig", initializer_range=0.5),
        tokens,
    ),
    "vit": (
        lambda: Logits(
            transformers.ViTForImageClassification(
                transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
            )
        ),
        images(16),
    ),
    "torchvision's vit": (
        lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3),
        images(16),
    ),
    "resnet-18": (
        lambda: torchvision.models.resnet18(num_classes=3, norm_layer=partial(nn.GroupNorm, 8)),
        images(32),
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_published_models_run_by_construction(name, mode):
    make, inputs = MODELS[name]
    net, data = make().double(), (*inputs(5), torch.randint(3, (5,)))
    for module in net.modules():  # whose random numbers a record would not draw again alone
        for attribute in ("p", "dropout", "attn_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)

    def loss(net, *batch):
        return F.cross_entropy(net(*batch[:-1]), batch[-1])

    expected = clipped_rows(gradients_of_records(net, loss, data), 0.05)
    net, optimizer, loader = private(net, *data, clip=0.05, grad_sample_mode=mode)
    assert optimizer.independence.startswith("by construction")
    for batch in loader:
        loss(net, *batch).backward()
        found = sum_of(optimizer.release.source, net, 0.05)
    assert float((found - expected).norm()) < 1e-6 * float(expected.norm())
