"""Training: optimizers, data, the loop, and the checkpoints of a run."""
