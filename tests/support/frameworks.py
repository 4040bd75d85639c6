"""What Lightning warns of in small runs: its exact texts, nothing broader."""

import pytest

_POSSIBLE = "lightning.fabric.utilities.warnings.PossibleUserWarning"

LIGHTNING_WARNS = [
    pytest.mark.filterwarnings(f"ignore:{text}:{category}")
    for text, category in (
        # of its own use of torch
        (
            r"`isinstance\(treespec, LeafSpec\)` is deprecated, use"
            r" `isinstance\(treespec, TreeSpec\) and treespec\.is_leaf\(\)` instead\.$",
            "FutureWarning",
        ),
        # of the default logger, which the recipe takes
        (
            r"Starting from v1\.9\.0, `tensorboardX` has been removed as a dependency of the"
            r" `lightning\.pytorch` package, due to potential conflicts",
            "UserWarning",
        ),
        # of a data set of four batches
        (
            r"The number of training batches \(4\) is smaller than the logging interval"
            r" Trainer\(log_every_n_steps=50\)\.",
            _POSSIBLE,
        ),
        # most of the runs validate nothing
        (
            r"You defined a `validation_step` but have no `val_dataloader`\. Skipping val loop\.$",
            _POSSIBLE,
        ),
        # where a machine has more processors
        (
            r"The '(train|val)_dataloader' does not have many workers which may be a bottleneck\.",
            _POSSIBLE,
        ),
        # where it has a GPU, which the runs leave alone
        (r"GPU available but not used\.", _POSSIBLE),
    )
]
