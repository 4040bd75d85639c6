r"""A Pyro model and its data as a vector of record terms, their gradients, and the prior.

For a model whose observations lie in one data plate, log p(θ, x) = log p(θ) + Σ_i log p(x_i | θ).
All terms are functions of one flat vector θ of all latents in *unconstrained* space, with the sites
in sorted order. The Jacobians of the transforms belong to the prior. Discrete latents inside the
plate are summed out.

The model's own code never sees the data. It runs on one synthetic row at a time
(``torch.func.vmap``), and its computation is recorded as a fixed graph of tensor operations. The
graph is then replayed on the data in chunks of rows. So a record can neither raise an exception,
nor choose a branch, nor change the term of another record. Whether a model is refused depends only
on the model and on shapes.

Each file imports only files above it:

* ``pyro_runs``: how the user's model is run;
  ``recording``: functions as graphs of operations;
* ``prior``: the latents as one vector θ, and its density;
* ``arguments``: which arguments are data, and their rows;
* ``structure``: from shapes, which sites belong to the records;
* ``record_terms``: the terms of any rows, as Pyro computes them;
* ``locality``: synthetic rows, and the check on them that no record's term depends on others;
* ``program``: terms and gradients, recorded on synthetic rows; ``pieces``: gradients without
  their zeros;
* ``record_density``: the programs run on the data, clipped and summed, likewise the statistics of
  an exponential family. Only this file and ``arguments`` read data.
"""

from .prior import Prior
from .pyro_runs import InvalidPoint, Model, UnfitModel, without_value_checks
from .record_density import RecordDensity, RecordStatistics, clipped_ratio_sum
from .structure import prior_without_data

__all__ = [
    "InvalidPoint",
    "Model",
    "Prior",
    "RecordDensity",
    "RecordStatistics",
    "UnfitModel",
    "clipped_ratio_sum",
    "prior_without_data",
    "without_value_checks",
]
