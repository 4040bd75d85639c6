"""Samplers that draw the batches, and the loader that delivers them."""
