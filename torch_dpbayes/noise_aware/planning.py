"""What a run would give, from the prior predictive: before anything is spent, and without reading
records.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..ops.models import using_pyro
from .budget import NUM_RELEASES, budget_of
from .covariates import Covariates, NoisyMoments
from .inference import Settings, Setup
from .run import Transcript, choose_scale

_DRAWS = 5  # of the prior
_EVALUATIONS = 60  # of scores of all simulated records that a run takes, about, for each release


@dataclass(frozen=True)
class Forecast:
    """Of a run that was not made.

    Attributes:
        stddev: expected posterior deviations in unconstrained space ``[d]`` of the coordinates that
            records read, for truths drawn from the prior.
        prior_stddev: of the prior, ``[d]``.
        clip_bound: of whitened scores near the truth.
        noise_multiplier: of all releases of scores together.
        seconds: on this machine, about; a hierarchical prior takes ten times as long.
    """

    stddev: Tensor
    prior_stddev: Tensor
    clip_bound: float
    noise_multiplier: float
    seconds: float


def plan(
    model: Any,
    *data: Any,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: PrivacyAccountant | None = None,
    num_data: int | None = None,
    public: Sequence[str | int] = (),
    covariates: Any = None,
    max_feature_norm: float = 1.0,
    constant_columns: Sequence[int] | Mapping[int, float] = (),
    num_releases: int = NUM_RELEASES,
    num_simulated: int | None = None,
    data_plate: str = "data",
) -> Forecast:
    """Widths, clip bound and time of a run, by simulation from the prior.

    Args: as for :func:`~torch_dpbayes.noise_aware.posterior`. Of private covariates nothing is
        known: rows of numbers are taken as spherical and of norm R, categories as equally frequent.

    **Privacy.** Nothing is charged or released; shapes and types of the data are read, and rows
    that are declared public.
    """
    settings = Settings(
        budget_of(accountant, epsilon, delta),
        epsilon,
        delta,
        num_data,
        public,
        covariates,
        max_feature_norm,
        constant_columns,
        num_releases,
        num_simulated,
        data_plate,
    )
    with using_pyro, torch.no_grad():
        setup = Setup(model, data, settings)
        split = setup.plan()
        simulator = setup.in_run(_assumed_law(setup))
        together = sum(z**-2 for z in split.scores) ** -0.5
        scales, seconds = [], []
        for theta in setup.latents.sample(_DRAWS):
            started = time.perf_counter()
            scales.append(choose_scale(simulator, setup.latents, theta, together, None))
            seconds.append(time.perf_counter() - started)
    variances = torch.stack([scale.variances for scale in scales]).mean(0)
    bounds = torch.tensor([scale.clip_bound for scale in scales])
    return Forecast(
        variances.sqrt(),
        setup.latents.stddev[setup.latents.read],
        float(bounds.median()),
        together,
        min(seconds) * _EVALUATIONS,
    )


def _assumed_law(setup: Setup) -> Covariates:
    moments = None
    if setup.shape is not None:
        size = len(setup.shape.free)
        products = setup.num_data / size * torch.eye(size, dtype=torch.float64)
        zeros = torch.zeros(size, dtype=torch.float64)
        moments = NoisyMoments(zeros, 1.0, 0.9 * products, 1e-3)
    histograms = {
        number: (torch.ones(count, dtype=torch.float64), 1e-3)
        for number, count in setup.categories.items()
    }
    return setup.laws(Transcript(moments, histograms))[0]
