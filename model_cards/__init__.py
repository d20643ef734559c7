"""Checkpoints that travel with the package: one folder each, loadable by name with `falcon-hf --model`."""
