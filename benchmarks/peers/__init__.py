"""Compares engines prompt by prompt: each in a separate process, interleaved."""
