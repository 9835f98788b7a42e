"""Hydra's side of the house: what may be configured, whether it makes sense, and the objects it names."""
