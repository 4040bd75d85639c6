"""A private last layer: features in, a posterior out, and the bounds that its ε rests on."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import torch_dpbayes as dpb
from torch_dpbayes.heads import SGHMC, HeadPosterior, NoiseAware, OneDraw, PrivateLinear
from torch_dpbayes.heads.methods import Task, _loss, linear
from torch_dpbayes.heads.records import HeadRecords, together

METHODS = {
    "sghmc": SGHMC(epochs=5, batch_size=100),
    "noise_aware": NoiseAware(num_samples=20),
    "one_draw": OneDraw(steps=50),
}


def blobs(n=400, classes=3, width=4):
    y = torch.randint(0, classes, (n,))
    return F.normalize(torch.randn(n, width) + 3 * F.one_hot(y, width)), y


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("classes", [2, 3])
def test_five_lines(method, classes):
    x, y = blobs(classes=classes)
    head = PrivateLinear(classes, method=method)
    posterior = head.fit(x[:300], y[:300], epsilon=5, delta=1e-5)
    probabilities = posterior.predict(x[300:])
    assert isinstance(posterior, HeadPosterior) and probabilities.shape == (100, classes)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(100))
    entropy = posterior.predictive_entropy(x[300:])
    assert entropy.shape == (100,) and (entropy <= math.log(classes) + 1e-5).all()
    assert 4.9 < posterior.accountant.get_epsilon(1e-5) <= 5
    assert "features are a function of this record" in posterior.guarantee()
    if len(posterior.samples) > 1:
        assert (posterior.mutual_information(x[300:]) <= entropy + 1e-5).all()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "method",
    [SGHMC(epochs=5, batch_size=100), NoiseAware(max_grad_norm=2.0), OneDraw(50, 1.0, 2.0)],
)
def test_regression(method):
    x = torch.rand(400, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 + 0.3 * torch.randn(400)
    head = PrivateLinear(None, noise_std=0.3, method=method)
    posterior = head.fit(x, y, epsilon=5, delta=1e-5)
    assert posterior.predict(x).shape == (400,)
    low, high = posterior.predictive_quantiles(x, (0.05, 0.95))
    assert (high - low > 2 * 1.64 * 0.3).all()  # at least as wide as the noise alone
    with pytest.raises(ValueError, match="use predictive_quantiles"):
        posterior.predictive_entropy(x)


def test_digits_are_learnt():
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 4, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    method = SGHMC(lr=2.0, epochs=40, batch_size=512)
    posterior = PrivateLinear(10, method=method).fit(x[train], y[train], epsilon=8, delta=1e-5)
    # 94 to 96 % in a hundred runs; guessing gives 10 %
    assert dpb.metrics.accuracy(posterior.predict(x[test]), y[test]) > 0.8
    assert dpb.metrics.accuracy(posterior.predict_with_mean(x[test]), y[test]) > 0.8


@pytest.mark.thorough
def test_with_little_noise_the_noise_aware_head_is_the_laplace_approximation():
    """Against the mode by Newton's method on the records themselves, and the curvature there."""
    x, y = blobs(n=2000)
    posterior = PrivateLinear(3, method=NoiseAware(num_samples=4000), prior_std=1.0).fit(
        x, y, epsilon=2000, delta=1e-5
    )
    rows = F.pad(x, (0, 1), value=1.0).double()

    def potential(w):
        return F.cross_entropy(rows @ w.reshape(3, 5).T, y, reduction="sum") + w.square().sum() / 2

    w = torch.zeros(15, dtype=torch.float64)
    for _ in range(30):
        hessian = torch.autograd.functional.hessian(potential, w)
        gradient = torch.autograd.functional.jacobian(potential, w)
        w = w - torch.linalg.solve(hessian, gradient)
    draws = torch.from_numpy(posterior.samples.draws_of("weight")).double().reshape(-1, 15)
    std = torch.linalg.inv(hessian).diagonal().sqrt()
    # off by .26 at most, and .84 to .98, in six runs: the curvature is that of the last points
    assert ((draws.mean(0) - w).abs() < std).all()
    assert ((draws.std(0) / std).log().abs() < 0.5).all()


# --- what cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_records_that_are_infinite_in_any_precision_count_for_nothing(dtype):
    x, y = torch.ones(6, 2, dtype=dtype), torch.zeros(6, dtype=torch.long)
    x[0, 0], x[1, 1], x[2, 0] = math.inf, math.nan, -math.inf
    if dtype != torch.half:
        x[3, 0] = 1e20
    rows, _ = together(HeadRecords(x, y, 2).__getitems__(range(6)))
    unusable = [0, 1, 2] if dtype == torch.half else [0, 1, 2, 3]
    assert rows.dtype == torch.float and not rows[unusable].any() and rows[4:].all()
    _, targets = together(HeadRecords(x[4:], torch.tensor([math.inf, 2.0]).to(dtype), None))
    assert targets.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_no_record_can_raise(method):
    x, y = blobs()
    x = x.double()
    x[3], x[4, 1], x[5], x[8], x[9] = float("nan"), float("inf"), 1e30, -3e38, 1e300
    y[6], y[7] = 99, -100
    posterior = PrivateLinear(3, method=method).fit(x, y, epsilon=5, delta=1e-5)
    assert posterior.module.weight.isfinite().all()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "method",
    [SGHMC(epochs=5, batch_size=100), NoiseAware(max_grad_norm=2.0), OneDraw(50, 1.0, 2.0)],
)
def test_no_target_can_raise(method):
    x = torch.rand(400, 2)
    y = torch.randn(400).double()
    y[2], y[3], y[4], y[5] = float("nan"), float("inf"), 1e30, -1e300
    posterior = PrivateLinear(None, noise_std=1e-3, method=method).fit(x, y, epsilon=5, delta=1e-5)
    assert posterior.module.weight.isfinite().all()


def test_a_record_that_cannot_be_used_has_no_gradient():
    x, y = blobs(8)
    x[2, 0], y[5] = float("nan"), 3
    records = HeadRecords(x, y, 3)
    rows, targets = together(records.__getitems__(range(8)))
    module = linear(5, 3)
    torch.nn.init.normal_(module.weight)
    task = Task(3, None, 1.0, None, None, dpb.PrivacyAccountant(), None)
    for k in range(8):
        (gradient,) = torch.autograd.grad(
            _loss(module(rows[k : k + 1]), targets[k : k + 1], task), [module.weight]
        )
        assert (gradient.norm() == 0) == (k in (2, 5))


def test_a_loss_of_views_is_their_mean():
    task = Task(3, None, 1.0, None, None, dpb.PrivacyAccountant(), None)
    output, y = torch.randn(6, 4, 3), torch.randint(0, 3, (6,))
    of_views = [F.cross_entropy(output[:, v], y) for v in range(4)]
    torch.testing.assert_close(_loss(output, y, task), torch.stack(of_views).mean())


def test_gradients_are_averaged_over_views_before_they_are_clipped():
    """Where nothing is clipped and there is little noise, a step is the mean gradient."""
    x, y = blobs(200)
    views = torch.stack([x, -x, 2 * x], 1)
    method = SGHMC(lr=1.0, epochs=1, batch_size=200, max_grad_norm=10.0, momentum=0.0, burn_in=0.0)
    head = PrivateLinear(3, method=method, prior_std=1e6)
    step = head.fit(views, y, epsilon=1e6, delta=1e-5).module.weight
    w = torch.zeros(3, 5, requires_grad=True)
    rows = F.pad(views, (0, 1), value=1.0)
    F.cross_entropy((rows @ w.T).reshape(-1, 3), y.repeat_interleave(3)).backward()
    torch.testing.assert_close(step, -w.grad, atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x.numpy(), y), "dense floating-point tensor"),
        (lambda x, y: (x.long(), y), "dense floating-point tensor"),
        (lambda x, y: (x[:, 0], y), "dense floating-point tensor"),
        (lambda x, y: (x.reshape(-1, 2, 2, 1), y), "flatten"),
        (lambda x, y: (x[:, :0], y), "nothing to learn"),
        (lambda x, y: (x[:0], y[:0]), "nothing to learn"),
        (lambda x, y: (x, y[:-1]), "targets must be"),
        (lambda x, y: (x, y.float()), "labels must be integers"),
        (lambda x, y: (x, y * 1j), "real numbers"),
        (lambda x, y: (x, F.one_hot(y, 7)), "labels have 7 classes and the head has 3"),
        (lambda x, y: (x, F.one_hot(y, 3)), "argmax"),
        (lambda x, y: (x, F.one_hot(y, 3) * 0.5 + 1 / 6), "mixup"),
    ],
)
def test_bad_input_is_refused_before_anything_is_charged(change, message):
    accountant = dpb.PrivacyAccountant(epsilon=1, delta=1e-5)
    head = PrivateLinear(3, accountant=accountant)
    with pytest.raises(ValueError, match=message):
        head.fit(*change(*blobs()))
    assert len(accountant) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "whole number from 2"),
        ({"num_classes": 3.0}, "whole number from 2"),
        ({"num_classes": None}, "noise_std"),
        ({"num_classes": 3, "noise_std": 1.0}, "noise_std"),
        ({"num_classes": 3, "prior_std": 0.0}, "prior_std"),
        ({"num_classes": 3, "method": "sghmc"}, "method must be"),
        ({"num_classes": 3, "method": SGHMC}, "method must be"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PrivateLinear(**arguments)


def test_settings_that_do_not_fit_the_task():
    x, y = blobs()
    budget = {"epsilon": 1, "delta": 1e-5}
    with pytest.raises(ValueError, match="bound of their own"):
        PrivateLinear(3, method=NoiseAware(max_grad_norm=1.0)).fit(x, y, **budget)
    with pytest.raises(ValueError, match="max_grad_norm"):
        PrivateLinear(None, noise_std=1.0, method=OneDraw()).fit(x, x[:, 0], **budget)
    with pytest.raises(ValueError, match="dense floating-point tensor"):
        PrivateLinear(3, method=NoiseAware()).fit(x[:, None], y, **budget)
    with pytest.raises(ValueError, match="leave it out"):
        PrivateLinear(3).fit(x, y, num_data=7, **budget)
    with pytest.raises(ValueError, match="budget"):
        PrivateLinear(3).fit(x, y)
    with pytest.raises(ValueError, match="share in"):
        SGHMC(burn_in=1.0)
    added = dpb.PrivacyAccountant(1, 1e-5)
    for method in (NoiseAware(), OneDraw(50)):
        with pytest.raises(ValueError, match="num_data="):
            PrivateLinear(3, method=method, accountant=added).fit(x, y)
    assert len(added) == 0


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_fits_share_one_budget(method):
    """The second one has what the first one left, which is nearly nothing."""
    x, y = blobs()
    accountant = dpb.PrivacyAccountant(1, 1e-5, neighboring="replace_one")
    head = PrivateLinear(3, method=method, accountant=accountant)
    head.fit(x, y, epsilon=0.7)
    assert 0.69 < accountant.get_epsilon() <= 0.7
    head.fit(x, y)
    assert 0.99 < accountant.get_epsilon() <= 1
    with pytest.raises((ValueError, dpb.PrivacyBudgetExceeded)):
        head.fit(x, y, epsilon=2, delta=1e-5)
    assert accountant.get_epsilon() <= 1


def test_test_features_that_do_not_fit_are_refused():
    x, y = blobs()
    posterior = PrivateLinear(3, method=OneDraw(50)).fit(x, y, epsilon=1, delta=1e-5)
    with pytest.raises(ValueError, match="trained on 4 features"):
        posterior.predict(x[:, :3])
    with pytest.raises(ValueError, match="must be finite"):
        posterior.predict(x * math.inf)
    with pytest.raises(ValueError, match="one draw says nothing"):
        posterior.mutual_information(x)
    with pytest.raises(ValueError, match="regression"):
        posterior.predictive_quantiles(x, (0.1,))


def test_predictions_see_features_as_the_fit_did():
    """Rows beyond the bound are shortened, those within stay, and the constant stays 1."""
    x, y = blobs()
    posterior = PrivateLinear(3, method=OneDraw(50)).fit(x, y, epsilon=1, delta=1e-5)
    (w,) = torch.from_numpy(posterior.samples.draws_of("weight"))
    seen = torch.cat([F.normalize(x[:1]), x[1:2] / 2])
    wanted = (seen @ w[:, :4].T + w[:, 4]).softmax(1)
    given = torch.cat([1000 * x[:1], x[1:2] / 2])
    torch.testing.assert_close(posterior.predict(given), wanted, atol=1e-5, rtol=0)
