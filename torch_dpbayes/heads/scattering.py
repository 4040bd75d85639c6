"""Wavelet scattering of images: features that no record was needed to find."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_Array = np.ndarray[Any, Any]
_REACH = 2  # periods of a filter that are added up on either side
_BYTES = 2**23  # of the second layer's maps that are held at a time


class Scattering(nn.Module):
    r"""The first two layers of a wavelet scattering transform, averaged over 2^J pixels.

    .. math::
        S_0 x = x * \phi_J, \qquad
        S_1 x = |x * \psi_{j\theta}| * \phi_J, \qquad
        S_2 x = ||x * \psi_{j\theta}| * \psi_{j'\theta'}| * \phi_J, \quad j < j'

    at every 2^J-th pixel, with Morlet wavelets ψ of J scales and L directions and a Gaussian φ:
    ψ_j has the envelope's standard deviation 0.8·2^j, the frequency 3π/4·2^-j and the slant 4/L.
    Images are reflected at their edges, then periodic. Nothing is learnt, so no record has a say in
    another one's features.

    Sources: Bruna and Mallat (2013), "Invariant scattering convolution networks"; the filters and
    the order of the channels are those of Kymatio (Andreux et al., 2020). Tramèr and Boneh (2021),
    "Differentially private learning needs better features", use them with linear models.

    Args:
        size: height and width of the images in pixels, or one number for both. Each is at least
            2^J, and at most that much is missing to the next multiple of 2^J.
        scales: J.
        orientations: L.

    Raises:
        ValueError: an argument is out of range, or images have another size.

    **Privacy.** None is spent: a record's features are a function of this record alone.
    """

    def __init__(
        self, size: int | tuple[int, int] = 28, *, scales: int = 2, orientations: int = 8
    ) -> None:
        super().__init__()
        for name, value in (("scales", scales), ("orientations", orientations)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 2**scales:
            raise ValueError(
                f"images of {height} x {width} pixels are smaller than 2**scales = {2**scales}:"
                " use fewer scales."
            )
        self.size, self.scales, self.orientations = (height, width), scales, orientations
        step = 2**scales
        padded = [((side + step) // step + 1) * step for side in (height, width)]
        self._margins = [
            (whole - side, (whole - side) // 2)
            for side, whole in zip((height, width), padded, strict=True)
        ]
        for j in range(scales):
            for level in range(min(j + 1, max(scales - 1, 1))):
                bank = np.stack([self._wavelet(padded, j, k) for k in range(orientations)])
                self._keep(f"wavelets_{j}_{level}", _at_level(bank, level))
            for axis, side in enumerate(padded):
                self._keep(f"average_{j}_{axis}", _averaging(side, scales, j))

    def _keep(self, name: str, values: _Array) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def _wavelet(self, sides: list[int], j: int, k: int) -> _Array:
        count = self.orientations
        angle = (int(count - count / 2 - 1) - k) * math.pi / count
        return _morlet(sides, 0.8 * 2**j, angle, 3 * math.pi / 4 / 2**j, 4 / count)

    @property
    def num_channels(self) -> int:
        """Maps for each colour: 1 + JL + L²J(J−1)/2."""
        of_one = self.scales * self.orientations
        of_two = self.orientations**2 * self.scales * (self.scales - 1) // 2
        return 1 + of_one + of_two

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The scattering coefficients.

        Args:
            images: ``[n, colours, height, width]`` or ``[n, height, width]``, floating point.

        Returns:
            ``[n, colours * num_channels, height // 2**J, width // 2**J]`` in float32; colours one
            after the other.
        """
        if (
            images.dim() not in (3, 4)
            or tuple(images.shape[-2:]) != self.size
            or not images.is_floating_point()
        ):
            raise ValueError(
                "images must be floating point, [n, colours, height, width] with"
                f" {self.size[0]} x {self.size[1]} pixels; got {images.dtype} of shape"
                f" {list(images.shape)}."
            )
        maps = images.reshape(-1, *self.size).to(self.get_buffer("average_0_0"))
        area = self.size[0] * self.size[1] * 8
        parts = maps.split(max(1, _BYTES // (area * self.orientations**2)))
        found = torch.cat([self._of_maps(part) for part in parts]) if parts else maps
        colours = images.shape[1] if images.dim() == 4 else 1
        return found.reshape(len(images), colours * found.shape[1], *found.shape[2:])

    def _of_maps(self, maps: Tensor) -> Tensor:
        """``[m, height, width]`` to ``[m, channels, rows, columns]``."""
        (more_rows, above), (more_columns, left) = self._margins
        margins = (left, more_columns - left, above, more_rows - above)
        padded = nn.functional.pad(maps[:, None], margins, mode="reflect")[:, 0]
        spectrum = torch.fft.fft2(padded)
        zeroth = [self._averaged(padded[:, None], 0)]
        first, second = [], []
        for j in range(self.scales):
            moduli = self._moduli(spectrum[:, None], j, 0)
            first.append(self._averaged(moduli, j))
            # in the order of Kymatio: all (j', direction) after each (j, direction)
            of_next = [
                self._averaged(
                    self._moduli(torch.fft.fft2(moduli)[:, :, None], other, j).flatten(1, 2), other
                ).unflatten(1, (self.orientations, self.orientations))
                for other in range(j + 1, self.scales)
            ]
            second += [torch.cat(of_next, 2).flatten(1, 2)] if of_next else []
        return torch.cat([*zeroth, *first, *second], 1)

    def _moduli(self, spectra: Tensor, j: int, level: int) -> Tensor:
        """|u * ψ_j| of maps that have every 2^level-th pixel, at every 2^j-th."""
        wavelets = self.get_buffer(f"wavelets_{j}_{level}")
        fold = 2 ** (j - level)
        rows, columns = (side // fold for side in spectra.shape[-2:])
        filtered = None
        # keeping every fold-th pixel is taking the mean of the parts of the spectrum
        for top in range(0, fold * rows, rows):
            for left in range(0, fold * columns, columns):
                part = (..., slice(top, top + rows), slice(left, left + columns))
                product = spectra[part] * (wavelets[part] / fold**2)
                filtered = product if filtered is None else filtered.add_(product)
        return torch.fft.ifft2(filtered).abs()

    def _averaged(self, maps: Tensor, level: int) -> Tensor:
        """u * φ at every 2^J-th pixel of the image: φ is a product over the two axes."""
        rows, columns = (self.get_buffer(f"average_{level}_{axis}") for axis in (0, 1))
        return rows @ maps @ columns.T


def _morlet(sides: list[int], std: float, angle: float, frequency: float, slant: float) -> _Array:
    """The Fourier transform, which is real, of a Morlet wavelet: a Gabor function less so much of
    its envelope that its mean is 0.
    """
    wave = _gabor(sides, std, angle, frequency, slant)
    envelope = _gabor(sides, std, angle, 0.0, slant)
    found: _Array = np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real
    return found


def _gabor(sides: list[int], std: float, angle: float, frequency: float, slant: float) -> _Array:
    """A wave under a Gaussian whose axis across the wave is 1/slant times as long, periodic."""
    rows, columns = (
        np.arange(-_REACH * side, (_REACH + 1) * side, dtype=np.float64) for side in sides
    )
    row, column = np.meshgrid(rows, columns, indexing="ij")
    along = row * math.cos(angle) + column * math.sin(angle)
    across = column * math.cos(angle) - row * math.sin(angle)
    exponent = -(along**2 + (slant * across) ** 2) / (2 * std**2) + 1j * frequency * along
    periods = 2 * _REACH + 1
    summed = np.exp(exponent).reshape(periods, sides[0], periods, sides[1]).sum((0, 2))
    return summed * slant / (2 * math.pi * std**2)


def _at_level(spectra: _Array, level: int) -> _Array:
    """Filters for maps of every 2^level-th pixel: only the frequencies that these have."""
    fold = 2**level
    rows, columns = spectra.shape[-2:]
    kept = spectra * _kept(rows, level)[:, None] * _kept(columns, level)
    folded = kept.reshape(*spectra.shape[:-2], fold, rows // fold, fold, columns // fold)
    return folded.sum((-4, -2))


def _kept(side: int, level: int) -> _Array:
    kept = np.ones(side)
    start = int(side * 2.0 ** (-level - 1))
    kept[start : start + int(side * (1 - 2.0**-level))] = 0.0
    return kept


def _averaging(side: int, scales: int, level: int) -> _Array:
    """The matrix of one axis of φ, from every 2^level-th pixel of a padded image to every 2^J-th
    of the image: the first and the last of the padded one are dropped.
    """
    std = 0.8 * 2 ** (scales - 1)
    distance = np.arange(-_REACH * side, (_REACH + 1) * side)
    bell = np.exp(-(distance**2) / (2 * std**2)) / (math.sqrt(2 * math.pi) * std)
    spectrum = np.fft.fft(bell.reshape(-1, side).sum(0)).real * _kept(side, level)
    spectrum = spectrum.reshape(2**level, -1).sum(0)
    circulant = np.fft.ifft(spectrum[:, None] * np.fft.fft(np.eye(len(spectrum)), axis=0), axis=0)
    rows: _Array = circulant.real[:: 2 ** (scales - level)]
    return rows[1:-1]
