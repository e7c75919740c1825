"""Training: recipes, and the parts that they are made of. Each part works in a loop of your own too.

This module imports no other part, because the command line reads the options of recipes without torch.
"""

from ligerzoo.exports import renamed

__getattr__ = renamed(__name__)
