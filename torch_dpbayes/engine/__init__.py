"""``make_private``: makes a model, an optimizer and a loader private."""
