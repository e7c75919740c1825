"""Recipes: complete, readable training scripts. `ligerzoo train` runs one, and `--print-recipe` prints it to edit."""
