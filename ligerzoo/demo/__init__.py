"""The two demos, with their small models and the drawings for the vision model."""
