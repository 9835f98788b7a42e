"""The one place that changes weights: unscale, clip, derive the learning rate, step."""
