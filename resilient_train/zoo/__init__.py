"""Small models, data sets and objectives to start from; nothing in the engine depends on them."""
