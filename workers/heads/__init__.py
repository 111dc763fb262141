"""Heads: proposers that read the target's hidden states and run where the target does."""
