"""Which arguments of a model are data."""

import numpy as np
import pytest
from support.pyro_models import (
    gaussian_rows,
)

from torch_dpbayes.mcmc import RecordDensity

pytestmark = pytest.mark.usefixtures("double")


def test_data_have_to_be_tensors():
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        RecordDensity(gaussian_rows, (np.zeros((4, 2)),))
