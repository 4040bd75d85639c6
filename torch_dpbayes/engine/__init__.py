"""The front door: a model, an optimizer and a loader in, their private versions out."""
