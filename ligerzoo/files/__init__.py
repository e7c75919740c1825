"""Checkpoint directories: finding, reading and atomically writing their files. Knows no model."""
