"""batch -> Σ clipped per-record gradients."""
