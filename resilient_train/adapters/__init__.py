"""What fits the engine into somebody's training loop: their arguments, their directory, their report."""
