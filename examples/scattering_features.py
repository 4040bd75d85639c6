"""Trains a private linear classifier on wavelet features, which are computed from each picture
alone.

    python examples/scattering_features.py            # scikit-learn's digits, some seconds
    python examples/scattering_features.py --dataset mnist --epsilon 2.93 --data-root ROOT

The features of a picture depend only on this picture, so they cost no privacy. One private release
whitens them: it takes 2 % of the budget at ε = 3, and 14 % at ε = 1. DP-SGHMC at temperature 0
spends the rest. After Tramèr and Boneh (2021), "Differentially private learning needs better
features (or much more data)". All printed results are for the test pictures, which count as public.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import metrics

DELTA = 1e-5
# groups: of channels; within each, a record's features get mean 0 and variance 1
SETTINGS = {
    "digits": dict(size=8, scales=1, groups=1, lr=2.0, epochs=150, batch_size=512),
    "mnist": dict(size=28, scales=2, groups=27, lr=6.0, epochs=40, batch_size=8192),
    "fashion-mnist": dict(size=28, scales=2, groups=27, lr=6.0, epochs=40, batch_size=8192),
}


class Scattering(nn.Module):
    r"""Two layers of a wavelet scattering transform, at every 2^J-th pixel.

    .. math::
        S_0 x = x * \phi_J, \qquad
        S_1 x = |x * \psi_{j\theta}| * \phi_J, \qquad
        S_2 x = ||x * \psi_{j\theta}| * \psi_{j'\theta'}| * \phi_J, \quad j < j'

    with Morlet wavelets ψ of J scales and L directions and a Gaussian φ. The envelope of ψ_j has
    the standard deviation 0.8·2^j and the slant 4/L; the frequency is 3π/4·2^-j. Pictures are
    padded by reflection, then treated as periodic.

    Sources: Bruna and Mallat (2013), "Invariant scattering convolution networks"; filters and
    order of channels are those of Kymatio (Andreux et al., 2020). Kymatio also skips pixels between
    the layers; this code does not.

    Args:
        size: height and width of the pictures, in pixels.
        scales: J.
        orientations: L.
    """

    def __init__(self, size: int = 28, scales: int = 2, orientations: int = 8) -> None:
        super().__init__()
        step = 2**scales
        self.padded = ((size + step) // step + 1) * step
        self.size, self.before = size, (self.padded - size) // 2
        angles = [
            (int(orientations / 2 - 1) - k) * math.pi / orientations for k in range(orientations)
        ]
        wavelets = np.stack(
            [[self._morlet(j, angle, 4 / orientations) for angle in angles] for j in range(scales)]
        )
        self.register_buffer("wavelets", torch.tensor(wavelets).float(), persistent=False)
        distance = np.arange(-2 * self.padded, 3 * self.padded)
        std = 0.8 * 2 ** (scales - 1)
        bell = np.exp(-(distance**2) / (2 * std**2)) / (math.sqrt(2 * math.pi) * std)
        bell = bell.reshape(5, self.padded).sum(0)
        rows = np.stack([np.roll(bell, k) for k in range(0, self.padded, step)])[1:-1]
        self.register_buffer("average", torch.tensor(rows).float(), persistent=False)

    def _morlet(self, j: int, angle: float, slant: float) -> np.ndarray:
        """The (real) Fourier transform of a wave, minus a multiple of its envelope so that the mean
        is 0.
        """
        std, frequency = 0.8 * 2**j, 3 * math.pi / 4 / 2**j
        place = np.arange(-2 * self.padded, 3 * self.padded, dtype=float)
        row, column = np.meshgrid(place, place, indexing="ij")
        along = row * math.cos(angle) + column * math.sin(angle)
        across = column * math.cos(angle) - row * math.sin(angle)
        envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * std**2))
        envelope *= slant / (2 * math.pi * std**2)
        shape = (5, self.padded, 5, self.padded)
        wave = (envelope * np.exp(1j * frequency * along)).reshape(shape).sum((0, 2))
        envelope = envelope.reshape(shape).sum((0, 2))
        return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real

    @torch.no_grad()
    def forward(self, pictures: Tensor) -> Tensor:
        """``[n, size, size]`` to ``[n, channels, size // 2^J, size // 2^J]``."""
        after = self.padded - self.size - self.before
        edges = (self.before, after, self.before, after)
        padded = F.pad(pictures[:, None], edges, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        zeroth, first, second = [self._averaged(padded)], [], []
        for j, bank in enumerate(self.wavelets):
            moduli = torch.fft.ifft2(spectrum * bank).abs()
            first.append(self._averaged(moduli))
            spectra = torch.fft.fft2(moduli)[:, :, None]
            # Kymatio's order: all (j', direction) after each (j, direction)
            deeper = [torch.fft.ifft2(spectra * other).abs() for other in self.wavelets[j + 1 :]]
            if deeper:
                second.append(self._averaged(torch.cat(deeper, 2).flatten(1, 2)))
        return torch.cat(zeroth + first + second, 1)

    def _averaged(self, maps: Tensor) -> Tensor:
        return self.average @ maps @ self.average.T


def load(name: str, root: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures from 0 to 1 and labels, of the training and of the test set."""
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        x = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 8, 8)
        order = torch.randperm(len(x))
        x, y = x[order], torch.tensor(labels)[order]
        return x[:1437], y[:1437], x[1437:], y[1437:]
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    train, test = (kind(root, train=part, download=False) for part in (True, False))
    return train.data / 255, train.targets, test.data / 255, test.targets


def features(pictures: Tensor, settings: dict) -> Tensor:
    """``[n, positions, channels]``; each record is normalised within groups of its channels."""
    scattering = Scattering(settings["size"], settings["scales"])
    maps = torch.cat([scattering(part) for part in pictures.split(100)])
    return F.group_norm(maps, settings["groups"]).flatten(2).transpose(1, 2)


def whitened(x: Tensor, matrix: Tensor) -> Tensor:
    """Whitened features ``[n, positions * channels]``, all rows scaled to one norm."""
    rows = (x @ matrix).flatten(1)
    return F.normalize(rows) * math.sqrt(rows.shape[1])


def fit(
    x: Tensor, y: Tensor, accountant: dpb.PrivacyAccountant, settings: dict
) -> tuple[nn.Linear, dpb.PosteriorSamples]:
    """The last iterate, and 50 iterates of the second half of the run."""
    net = nn.Linear(x.shape[1], 10)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    net, optimizer, loader = dpb.PrivacyEngine(accountant).make_private_with_epsilon(
        module=net,
        optimizer=partial(dpb.optim.DPSGHMC, lr=settings["lr"], momentum=0.9, temperature=0.0),
        data_loader=DataLoader(TensorDataset(x, y), settings["batch_size"]),
        max_grad_norm=0.1,
        target_epsilon=accountant.epsilon,
        target_delta=DELTA,
        epochs=settings["epochs"],
    )
    steps = settings["epochs"] * len(loader)
    samples = dpb.PosteriorSamples(burn_in=steps // 2, thin=max(1, steps // 100), max_samples=50)
    for _ in range(settings["epochs"]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
            samples.collect(net)
    return net, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=SETTINGS, default="digits")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, help="passes over the records")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--data-root", type=Path, help="a folder in torchvision's layout")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw accuracy by certainty")
    options = parser.parse_args()
    if options.dataset != "digits" and options.data_root is None:
        parser.error(f"--dataset {options.dataset} needs --data-root ROOT")
    settings = dict(SETTINGS[options.dataset])
    settings["epochs"] = options.epochs or settings["epochs"]

    pictures, y, test_pictures, y_test = load(options.dataset, options.data_root)
    x, x_test = (features(part, settings) for part in (pictures, test_pictures))
    figures: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(options.runs):
        begun = time.process_time()
        accountant = dpb.PrivacyAccountant(options.epsilon, DELTA)
        matrix = dpb.noise_aware.covariance(x, accountant=accountant).whitening()
        net, samples = fit(whitened(x, matrix), y, accountant, settings)
        seconds = time.process_time() - begun

        test = whitened(x_test, matrix)
        mean = nn.Linear(test.shape[1], 10)
        for name, parameter in mean.named_parameters():
            parameter.data = torch.from_numpy(samples.draws_of(name)).mean(0)
        with torch.no_grad():
            found = {
                "last iterate": net(test).softmax(1),
                "averaged weights": mean(test).softmax(1),
                "average of predictions": samples.predict(net, test),
            }
        for name, p in found.items():
            sure = torch.special.entr(p).sum(1).argsort()[: int(0.9 * len(p))]
            measured = (
                100 * metrics.accuracy(p, y_test),
                metrics.negative_log_likelihood(p, y_test),
                metrics.expected_calibration_error(p, y_test),
                100 * metrics.accuracy(p[sure], y_test[sure]),
            )
            figures.setdefault(name, []).append(measured)
        print(f"epsilon {accountant.get_epsilon(DELTA):.3f}, {seconds:.0f} s of a processor")
    print("\n| data, ε | predictor | accuracy, % | NLL | ECE | accuracy on the surest 90 %, % |")
    print("|---" * 6 + "|")
    for name, runs in figures.items():
        accuracy, nll, ece, sure = torch.tensor(runs).mean(0).tolist()
        cells = f"{accuracy:.2f} | {nll:.4f} | {ece:.4f} | {sure:.2f}"
        print(f"| {options.dataset}, {options.epsilon:g} | {name} | {cells} |")
    if options.plot is not None:
        picture(found["average of predictions"], y_test, options)


def picture(p: Tensor, labels: Tensor, options: argparse.Namespace) -> None:
    """Draws accuracy against coverage: only the most certain predictions are used."""
    from matplotlib.figure import Figure

    order = torch.special.entr(p).sum(1).argsort()
    counts = torch.arange(1, len(order) + 1)
    accuracy = (p.argmax(1) == labels)[order].double().cumsum(0) / counts
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    first = len(order) // 10
    axes.plot(100 * counts[first:] / len(counts), 100 * accuracy[first:], color="tab:blue")
    axes.set(
        xlabel="answered, the surest first (% of test pictures)",
        ylabel="accuracy among these (%)",
        title=f"a private classifier of {options.dataset}, ε = {options.epsilon:g}",
    )
    axes.grid(alpha=0.3)
    figure.savefig(options.plot, dpi=100)


if __name__ == "__main__":
    main()
