"""A training run that looks after itself.

Importing this package loads neither Hydra nor MLflow: the rooms below are imported by those who need them.
"""

__version__ = "0.1.0"
