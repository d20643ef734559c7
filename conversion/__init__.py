"""Conversion between Falcon checkpoints and the checkpoints of related models."""
