"""One private release: a clipped sum, its event, and its noise, drawn after the charge."""
