"""Compute the sum of clipped per-record gradients of a batch."""
