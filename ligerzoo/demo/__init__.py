"""The two demos, with the small models and the drawings they use."""
