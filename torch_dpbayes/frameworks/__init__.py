"""Callbacks for frameworks that run the training loop themselves; each file needs its framework."""
