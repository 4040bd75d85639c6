"""Models as torchvision and transformers publish them, with random weights: records apart by
construction, sums as of records alone.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Padded(nn.Module):
    """A model of transformers on what a tokenizer gives: token ids and an attention mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).logits


class Images(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def bert():
    config = transformers.BertConfig(
        vocab_size=50, max_position_embeddings=16, num_labels=3, **SMALL
    )
    return Padded(transformers.BertForSequenceClassification(config))


def gpt2():
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=3,
    )
    return Padded(transformers.GPT2ForSequenceClassification(config))


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL)
    return Images(transformers.ViTForImageClassification(config))


def torchvision_vit():
    return torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)


def resnet():
    return torchvision.models.resnet18(num_classes=3, norm_layer=partial(nn.GroupNorm, 8))


def tokens(n):
    lengths = torch.randint(3, 9, (n, 1))
    mask = (torch.arange(8) < lengths).long()
    return torch.randint(3, 50, (n, 8)) * mask, mask


MODELS = {
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "vit": (vit, lambda n: (torch.randn(n, 3, 16, 16),)),
    "torchvision's vit": (torchvision_vit, lambda n: (torch.randn(n, 3, 16, 16),)),
    "resnet-18": (resnet, lambda n: (torch.randn(n, 3, 32, 32),)),
}


@pytest.mark.first_cases(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("mode", ["bookkeeping", "isolated"])
@pytest.mark.parametrize("name", MODELS)
def test_published_models_run_by_construction(name, mode):
    make, inputs = MODELS[name]
    net, x, y, clip = make(), inputs(5), torch.randint(3, (5,)), 0.05
    for module in net.modules():  # whose random numbers a record would not draw again alone
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    parameters = list(net.parameters())
    expected = torch.zeros(sum(p.numel() for p in parameters))
    for i in range(5):
        found = torch.autograd.grad(
            F.cross_entropy(net(*(t[i : i + 1] for t in x)), y[i : i + 1]),
            parameters,
            allow_unused=True,
        )
        g = torch.cat(
            [
                torch.zeros(p.numel()) if t is None else t.flatten()
                for t, p in zip(found, parameters)
            ]
        )
        expected += g * min(1.0, clip / float(g.norm()))
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=math.inf),
        data_loader=DataLoader(TensorDataset(*x, y), batch_size=5),
        max_grad_norm=clip,
        noise_multiplier=1e-4,
        grad_sample_mode=mode,
    )
    assert optimizer.independence.startswith("by construction")
    start = torch.cat([p.detach().flatten().clone() for p in parameters])
    for *a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(*a), b).backward()
        optimizer.step()
    moved = (start - torch.cat([p.detach().flatten() for p in parameters])) * 5
    noise = 1e-4 * clip * math.sqrt(len(moved))
    assert (moved - expected).norm() < 1e-4 * 5 * clip + 2 * noise
