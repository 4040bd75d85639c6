"""Arrays and pandas frames in the place of tensors; their types decide, never a record."""

import warnings

import numpy as np
import pytest
import torch

import torch_dpbayes as dpb

MODEL = dpb.ops.GLM("bernoulli", prior_std=0.5, max_feature_norm=1.0)


def frames():
    pandas = pytest.importorskip("pandas")
    x, y = np.random.randn(40, 2) / 3, np.random.rand(40) > 0.5
    gaps = pandas.DataFrame({"a": x[:, 0], "b": pandas.array([1, None] * 20, dtype="Int64")})
    return x, y, [(x, y), (pandas.DataFrame(x), pandas.Series(y)), (gaps, y.astype(float))]


def test_arrays_and_frames_are_what_their_tensors_are():
    x, y, given = frames()
    for features, targets in given[:2]:
        made = MODEL.prepare((features, targets))
        torch.testing.assert_close(made[0], torch.as_tensor(x))
        assert torch.equal(made[1].bool(), torch.as_tensor(y))
    features, _ = MODEL.prepare(given[2])
    assert features[:, 1].isnan().tolist() == [False, True] * 20  # a gap, and no error


def test_draws_and_posteriors_of_arrays_and_frames():
    for features, targets in frames()[2]:
        certificate = dpb.ops.FiniteRunLangevin(steps=20)
        release = dpb.ops.OnePosteriorSample(MODEL, certificate, epsilon=1.0, delta=1e-5)
        assert release.sample(features, targets)["weights"].shape == (2,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the budget is small for forty records
            post = dpb.noise_aware.posterior(MODEL, features, targets, epsilon=0.1, delta=1e-5)
        assert post.mean["weights"].shape == (2,)
        predicted = post.predict(MODEL, MODEL.prepare((features, targets))[0], num_samples=20)
        assert predicted.shape == (40,) and bool(((predicted >= 0) & (predicted <= 1)).all())


def test_columns_of_text_are_refused_by_their_type():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": ["secret", "1"], "b": [1.0, 2.0]})
    with pytest.raises(ValueError, match="'a' of the DataFrame is not numeric") as caught:
        MODEL.prepare((table, np.zeros(2)))
    assert "secret" not in str(caught.value)
