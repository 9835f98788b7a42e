"""Further checks of the losses and of the learning rate."""
