"""What every process of worth.py is forked from: the library with its decisions named, and what programs import."""

import worth_names

worth_names.install()

import accelerate  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401
import worth_programs  # noqa: E402, F401

import resilient_train.adapters.guard  # noqa: E402, F401
