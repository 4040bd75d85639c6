"""Features of a record are a function of this record alone."""

import numpy as np
import pytest
import torch
from torch import nn

import torch_dpbayes as dpb


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_normalised_is_mean_0_and_variance_1_in_each_group_of_each_record(groups):
    x = torch.randn(5, 6, 4, 3, dtype=torch.float64) * torch.rand(5, 6, 1, 1) * 100 + 7
    found = dpb.heads.group_normalised(x, groups, eps=0.0)
    for record, values in zip(found, x, strict=True):
        for mine, group in zip(record.chunk(groups), values.chunk(groups), strict=True):
            wanted = (group.numpy() - np.mean(group.numpy())) / np.std(group.numpy())
            np.testing.assert_allclose(mine.numpy(), wanted, atol=1e-9)
    assert found.shape == x.shape


def test_another_record_changes_no_normalised_feature():
    x = torch.randn(3, 4, 5)
    other = torch.cat([x[:1], 1e6 * torch.randn(2, 4, 5)])
    assert torch.equal(dpb.heads.group_normalised(x, 2)[0], dpb.heads.group_normalised(other, 2)[0])


@pytest.mark.parametrize("groups", [0, 4, 2.0, True])
def test_groups_that_do_not_divide_the_channels_are_refused(groups):
    with pytest.raises(ValueError, match="divides the 6 channels"):
        dpb.heads.group_normalised(torch.randn(2, 6, 3), groups)


def test_a_group_of_one_number_is_refused():
    with pytest.raises(ValueError, match="fewer groups"):
        dpb.heads.group_normalised(torch.randn(2, 6), 6)


def test_features_of_a_residual_network():
    resnet = pytest.importorskip("torchvision").models.resnet18(weights=None)
    resnet.fc = nn.Identity()
    with torch.no_grad():  # statistics as pretraining leaves them, so that eval mode matters
        resnet.bn1.running_mean.uniform_(-1, 1)
    before = {name: t.clone() for name, t in resnet.state_dict().items()}
    images = torch.randn(5, 3, 32, 32)
    found = dpb.heads.frozen_features(resnet, images, batch_size=2)
    assert resnet.training and found.shape == (5, 512) and not found.requires_grad
    assert all(torch.equal(before[name], t) for name, t in resnet.state_dict().items())
    with torch.no_grad():
        alone = torch.cat([resnet.eval()(image[None]) for image in images])
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def test_features_of_a_transformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
    )
    bert = transformers.BertModel(config)
    batch = {
        "input_ids": torch.randint(0, 50, (5, 7)),
        "attention_mask": torch.tensor([[1] * 7, [1] * 3 + [0] * 4] * 2 + [[1] * 5 + [0] * 2]),
    }
    first = lambda net, batch: net(**batch).last_hidden_state[:, 0]  # noqa: E731
    found = dpb.heads.frozen_features(bert, batch, forward=first, batch_size=2)
    assert found.shape == (5, 16)
    with torch.no_grad():
        alone = first(bert.eval(), {k: v[1:2] for k, v in batch.items()})
    torch.testing.assert_close(found[1:2], alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="pass forward=lambda"):
        dpb.heads.frozen_features(bert, batch)


def test_features_of_timm():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    net = timm.create_model("resnet10t", pretrained=False, num_classes=0)
    assert dpb.heads.frozen_features(net, torch.randn(3, 3, 32, 32)).shape[0] == 3


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(0)


def test_networks_whose_records_look_at_each_other_are_refused():
    x = torch.randn(10, 3)
    with pytest.raises(ValueError, match="depend on the other records"):
        dpb.heads.frozen_features(nn.Sequential(nn.Linear(3, 3), Centred()), x)
    with pytest.raises(ValueError, match="depend on the other records"):
        images = torch.randn(10, 3, 4, 4)
        dpb.heads.frozen_features(nn.BatchNorm2d(3, track_running_stats=False), images)
    with pytest.raises(ValueError, match="one row a record"):
        dpb.heads.frozen_features(Pooled(), x)


def test_one_record_that_is_not_finite_raises_nothing():
    x = torch.randn(10, 3)
    x[4] = float("nan")
    found = dpb.heads.frozen_features(nn.Linear(3, 2), x)
    assert found.isfinite().all(1).sum() == 9


def test_other_inputs_are_refused():
    for inputs in ([torch.randn(2, 3)], {}, 3, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="a tensor"):
            dpb.heads.frozen_features(nn.Linear(3, 2), inputs)
    with pytest.raises(ValueError, match="different numbers of records"):
        dpb.heads.frozen_features(nn.Linear(3, 2), {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="no record"):
        dpb.heads.frozen_features(nn.Linear(3, 2), torch.empty(0, 3))
