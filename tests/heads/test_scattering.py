"""Wavelet scattering against its definition, against Kymatio, and by its symmetries."""

import math

import numpy as np
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.heads import Scattering

# Means over the 7 x 7 positions of all 81 maps, and every 8th map at row 2 and column 4, of
# picture(), by Kymatio 0.3.0: ScatteringTorch2D(J=2, shape=(28, 28), L=8)
KYMATIO_MEANS = """
5.34330e-03 3.92913e-02 5.19833e-02 5.06566e-02 3.00403e-02 1.34590e-02 6.90075e-03 2.09284e-02
4.22657e-02 2.76275e-02 8.44575e-02 8.41487e-02 3.28053e-02 8.54932e-03 4.05223e-03 6.91347e-03
3.49383e-02 2.26761e-03 2.08940e-03 2.09216e-03 2.01421e-03 2.49912e-03 5.16929e-03 3.37949e-03
2.65739e-03 3.95711e-03 3.90170e-03 4.00447e-03 3.92000e-03 3.86941e-03 3.92601e-03 3.95929e-03
4.02292e-03 3.90313e-03 3.80384e-03 4.05409e-03 3.97226e-03 3.80227e-03 3.70978e-03 3.85869e-03
4.01058e-03 2.30301e-03 2.13002e-03 2.31337e-03 2.37535e-03 2.25122e-03 2.13015e-03 2.27265e-03
2.42331e-03 1.12648e-03 1.04132e-03 1.37175e-03 1.31997e-03 1.16200e-03 1.04583e-03 1.09760e-03
1.21359e-03 7.07579e-04 5.88453e-04 7.57924e-04 7.15861e-04 5.54779e-04 6.40587e-04 6.52447e-04
6.06094e-04 9.29213e-04 5.87735e-04 4.42989e-04 4.68183e-04 7.20020e-04 1.28963e-03 1.21257e-03
1.07907e-03 6.71185e-04 4.99248e-04 4.18399e-04 4.53050e-04 1.46101e-03 3.95315e-03 2.44677e-03
8.32560e-04
"""
KYMATIO_VALUES = """
1.49591e-01 5.02030e-02 3.68413e-02 2.80846e-03 4.58004e-03 4.68489e-03 3.35594e-03 1.65397e-03
3.76132e-04 3.33971e-04 1.08077e-03
"""


def picture():
    row, column = torch.arange(28.0)[:, None], torch.arange(28.0)[None]
    wave = torch.cos(0.9 * row + 0.02 * column**2)
    return wave * torch.exp(-((row - 13) ** 2 + (column - 15) ** 2) / 60) + 0.1 * torch.sin(
        1.7 * column
    )


def numbers(text):
    return torch.tensor([float(word) for word in text.split()])


def test_kymatios_values():
    found = Scattering()(picture()[None])[0]
    assert found.shape == (81, 7, 7)
    # Kymatio takes 3.1415 for pi, three times at most
    torch.testing.assert_close(found.mean((1, 2)), numbers(KYMATIO_MEANS), rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(found[::8, 2, 4], numbers(KYMATIO_VALUES), rtol=2e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "scales", "orientations"),
    [((28, 28), 2, 8), ((32, 40), 3, 6), ((9, 11), 1, 4), ((30, 33), 2, 5)],
)
def test_kymatio_on_random_images(size, scales, orientations):
    reason = "Kymatio is not installed"
    frontend = pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend", reason=reason)
    images = torch.randn(3, 2, *size)
    theirs = frontend.ScatteringTorch2D(J=scales, shape=size, L=orientations)(images)
    ours = Scattering(size, scales=scales, orientations=orientations)(images)
    torch.testing.assert_close(ours, theirs.flatten(1, 2), rtol=2e-4, atol=1e-4)


def test_the_definition_of_one_layer():
    """By sums over pixels, without a Fourier transform: J = 1, where nothing is left out between
    the layers.
    """
    image = np.random.default_rng().normal(size=(6, 7))
    padded = np.pad(image, ((2, 2), (1, 2)), mode="reflect")  # to 10 x 10
    reach = range(-2, 3)
    rows, columns = np.mgrid[0:10, 0:10]

    def periodic(function):
        return sum(function(rows + 10 * a, columns + 10 * b) for a in reach for b in reach)

    def convolved(values, kernel):
        return sum(
            values[a, b] * np.roll(kernel, (a, b), (0, 1)) for a in range(10) for b in range(10)
        )

    def average(r, c):
        return np.exp(-(r**2 + c**2) / (2 * 0.8**2)) / (2 * math.pi * 0.8**2)

    low_pass = periodic(average)
    wanted = [convolved(padded, low_pass)]
    for k in range(3):
        angle = (int(3 - 3 / 2 - 1) - k) * math.pi / 3

        def envelope(r, c, angle=angle):
            along = r * math.cos(angle) + c * math.sin(angle)
            across = c * math.cos(angle) - r * math.sin(angle)
            slant = 4 / 3
            weight = slant / (2 * math.pi * 0.8**2)
            return weight * np.exp(-(along**2 + (slant * across) ** 2) / (2 * 0.8**2))

        def wave(r, c, angle=angle, envelope=envelope):
            along = r * math.cos(angle) + c * math.sin(angle)
            return envelope(r, c) * np.exp(1j * 3 * math.pi / 4 * along)

        gabor, bell = periodic(wave), periodic(envelope)
        wavelet = gabor - gabor.sum() / bell.sum() * bell
        wanted.append(convolved(np.abs(convolved(padded, wavelet)), low_pass))
    found = Scattering((6, 7), scales=1, orientations=3)(torch.tensor(image)[None])[0]
    # positions 2, 4, 6 of the padded image: the first and the last of 0, 2, 4, 6, 8 are dropped
    np.testing.assert_allclose(found.numpy(), np.stack(wanted)[:, 2:8:2, 2:8:2], atol=1e-5)


def test_a_shift_by_the_averaging_shifts_the_maps():
    image = torch.zeros(28, 28)
    image[10:14, 10:14] = torch.randn(4, 4)
    scattering = Scattering()
    found = scattering(torch.stack([image, image.roll((4, -4), (0, 1))]))
    torch.testing.assert_close(found[1, :, 1:, :-1], found[0, :, :-1, 1:], rtol=1e-4, atol=1e-6)


def test_an_even_image_has_no_detail():
    found = Scattering()(torch.full((1, 28, 28), 3.0))[0]
    torch.testing.assert_close(found[0], torch.full((7, 7), 3.0))
    assert found[1:].abs().max() < 1e-5


def test_features_change_less_than_images():
    """The moduli and averages contract up to the frame bound of the wavelets, which is near 1."""
    images = torch.randn(2, 28, 28)
    features = Scattering()(images)
    # every 4th pixel of an average has a 16th of its energy
    assert (
        16 * (features[1] - features[0]).square().sum()
        < 2 * (images[1] - images[0]).square().sum() * (36 / 28) ** 2
    )


def test_records_and_colours_are_apart():
    images = torch.randn(3, 2, 16, 12)
    scattering = Scattering((16, 12), orientations=4)
    found = scattering(images)
    count = scattering.num_channels
    assert count == 1 + 2 * 4 + 16 and found.shape == (3, 2 * count, 4, 3)
    alone = scattering(images[1:2, 1])
    torch.testing.assert_close(found[1, count:], alone[0], rtol=1e-4, atol=1e-6)
    images[2] = math.nan
    torch.testing.assert_close(scattering(images)[:2], found[:2])


def test_the_module_has_nothing_to_train_or_to_save():
    scattering = Scattering(8, orientations=2)
    assert not list(scattering.parameters()) and not scattering.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scales": 0}, "scales must be"),
        ({"scales": 2.0}, "scales must be"),
        ({"orientations": 0}, "orientations must be"),
        ({"size": 7, "scales": 3}, "fewer scales"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scattering(**arguments)


@pytest.mark.parametrize(
    "images",
    [torch.randn(1, 28, 27), torch.randn(28, 28), torch.zeros(1, 28, 28, dtype=torch.uint8)],
)
def test_bad_images(images):
    with pytest.raises(ValueError, match="images must be"):
        dpb.heads.Scattering()(images)
