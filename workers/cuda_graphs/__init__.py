"""Passes captured as CUDA graphs and replayed; called directly without a GPU."""
