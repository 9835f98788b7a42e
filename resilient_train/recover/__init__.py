"""The policy as data: ladders by cause, rungs of remedies, strikes and budgets; what follows from it is pure."""
