"""Training: recipes, and the parts that they are made of. Each part works in a loop of your own too.

This module imports nothing, because the command line reads the options of recipes without torch.
"""
