"""From a batch to the sum of clipped per-record gradients."""
