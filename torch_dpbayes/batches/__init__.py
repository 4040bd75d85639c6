"""Poisson draws of the records, and the loader that delivers them."""
