"""The public Guard, and what fits it to a training loop: arguments, run directory, report."""
