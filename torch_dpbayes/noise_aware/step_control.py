r"""How far a step of a private Newton run may go, from released numbers alone.

A curvature holds near the point where it was released. Where the log likelihood is not quadratic, a
step to the maximum that it promises can land farther off than it began, and a run of such steps
swings for ever. So steps have a longest length, in standard deviations of the prior, and start from
the best point so far. With ĝ the released gradients of the negative log posterior there and at the
end of a step s, the trapezoidal rule tells how it changed,

.. math::
    \Delta \approx \tfrac12 (\hat g_{\text{start}} + \hat g_{\text{end}})^\top s \pm
    \tfrac12 \|s\| \sqrt{\sigma_{\text{start}}^2 + \sigma_{\text{end}}^2},

and where it rose by more than noise explains, the run stays at the start and tries less: where a
straight line through the two slopes is zero. Both gradients also tell the curvature along the step,
y = ĝ_end − ĝ_start = Hs, and as far as this stands out of the noise it corrects the curvature of
the next step (Broyden, Fletcher, Goldfarb and Shanno's formula):

.. math:: H' = H - \frac{H s s^\top H}{s^\top H s} + \frac{y y^\top}{y^\top s}

Under noise that is as large as the gradients nothing of this stands out, and steps are those of the
surrogate.

Every release counts at the point where it was made. Why it was made there is no part of the
transcript's likelihood, as the rule looks at earlier releases alone, so that posteriors need no
correction for it. Left out of the average are releases that the quadratic around the best point
contradicts: where it is right, one of them in ten thousand. Curvatures learnt on the way choose
points, too, and no more: posteriors have the released ones.

Sources: Nocedal and Wright (2006), "Numerical Optimization", chapters 4 and 6; that noise has to be
left alone is of this project.

**Privacy.** Post-processing of released gradients and of the prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.stats import chi2
from torch import Tensor

from .modes import mode
from .priors import GaussianPrior
from .surrogate import HARMLESS, AnySurrogate
from .transcript import GradientRelease

_FIRST_LENGTH = 1.0  # standard deviations of the prior, in the root mean square over coordinates
_LONGER = 2.0
_LEAST_SHORTENING, _MOST_SHORTENING = 0.5, 0.1
_STANDS_OUT = 3.0  # standard deviations of the noise: a rise, and
_SURELY = 5.0  # a curvature
_CONTRADICTS = 1e-4  # tail probability of a release beside that at the best point
_BISECTIONS = 50


class StepControl:
    """The best point so far, the longest step from it, and the curvature for it.

    Args:
        prior: whose standard deviations are the unit of lengths.
    """

    def __init__(self, prior: GaussianPrior) -> None:
        self._prior = prior
        self._length = _FIRST_LENGTH * math.sqrt(prior.dimension)
        self._was_cut = False
        self.best: GradientRelease | None = None
        self.curvature = torch.zeros(prior.dimension, prior.dimension, dtype=torch.float64)

    def note(self, release: GradientRelease) -> GradientRelease:
        """Compares a new gradient with that of the best point so far, and returns which of the two
        is the best now.
        """
        if self.best is None:
            self.best = release
            return release
        start, step = self.best, release.theta - self.best.theta
        noise = float(step.norm()) * math.hypot(start.noise_std, release.noise_std)
        change = self._of_posterior(release) - self._of_posterior(start)
        before = float(self._of_posterior(start) @ step)
        after = before + float(change @ step)
        self._learn(step, release.value - start.value, noise)
        if before + after > _STANDS_OUT * noise:
            share = before / (before - after) if before < 0 else _MOST_SHORTENING
            share = min(max(share, _MOST_SHORTENING), _LEAST_SHORTENING)
            self._length = share * self._deviations(step)
            return start
        if self._was_cut and after < 0:
            self._length *= _LONGER
        self.best = release
        return release

    def released(self, curvature: Tensor) -> None:
        """A new curvature takes the place of what was learnt on the way."""
        self.curvature = curvature

    def next_point(self, surrogates: Sequence[AnySurrogate]) -> Tensor:
        """The mode of the posterior if it is near enough and no step uphill. Otherwise where the
        quadratic of the best point's own gradient is least, no farther off than is allowed.

        Args:
            surrogates: of which that with the farthest mode counts. One that takes a curvature for
                too large stops short, which nothing undoes, as it does a step that is too long.
        """
        assert self.best is not None
        here, slope = self.best.theta, self._of_posterior(self.best)
        steps = (mode(surrogate, self._prior) - here for surrogate in surrogates)
        step = max(steps, key=self._deviations)
        self._was_cut = self._deviations(step) > self._length
        noise = float(step.norm()) * self.best.noise_std
        if not self._was_cut and float(slope @ step) < _STANDS_OUT * noise:
            return here + step
        root = self._prior.root
        values, vectors = torch.linalg.eigh(root.T @ self.curvature @ root)
        values, slopes = values.clamp_min(0.0) + 1, vectors.T @ (root.T @ slope)
        # with a multiple of its length² added, which is none if the least is near enough
        added, most = 0.0, float(slopes.norm()) / self._length
        self._was_cut = float((slopes / values).norm()) > self._length
        for _ in range(_BISECTIONS if self._was_cut else 0):
            middle = (added + most) / 2
            is_long = float((slopes / (values + middle)).norm()) > self._length
            added, most = (middle, most) if is_long else (added, middle)
        return here - root @ (vectors @ (slopes / (values + added)))

    def agreeing(self, gradients: Sequence[GradientRelease], curvature_std: float) -> Tensor:
        """Which releases do not contradict that at the best point under the curvature,
        ``[releases]``: the others are from where the log likelihood has another shape.
        """
        best = self.best
        assert best is not None
        size = len(best.theta)
        away = torch.stack([g.theta for g in gradients]) - best.theta
        apart = torch.stack([g.value for g in gradients]) - best.value - away @ self.curvature
        noise = torch.tensor([g.noise_std**2 for g in gradients], dtype=away.dtype)
        variances = noise + best.noise_std**2 + HARMLESS * self.curvature.trace() / size
        variances += 0.5 * (1 + 1 / size) * curvature_std**2 * away.square().sum(-1)
        return apart.square().sum(-1) / variances < float(chi2.isf(_CONTRADICTS, size))

    def _deviations(self, step: Tensor) -> float:
        return float((step @ self._prior.matrix @ step).sqrt())

    def _of_posterior(self, release: GradientRelease) -> Tensor:
        return release.value + self._prior.matrix @ (release.theta - self._prior.mean)

    def _learn(self, step: Tensor, change: Tensor, noise: float) -> None:
        along = float(step @ change)
        if along <= _SURELY * noise or along <= 0:
            return
        moved = self.curvature @ step
        self.curvature = (
            self.curvature
            - torch.outer(moved, moved) / float(step @ moved)
            + torch.outer(change, change) / along
        )
