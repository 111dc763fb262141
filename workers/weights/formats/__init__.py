"""Quantized checkpoints: what their configurations say of each layer, and their weights."""
