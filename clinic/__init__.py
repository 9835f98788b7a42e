"""The clinic: small training programs with a fault in each, and a harness that says which tools cure them."""
