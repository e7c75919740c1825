"""Training: data, optimizers, and the recipes that use them."""
