"""Engines side by side: each in a process of its own, asked in turn, compared prompt by prompt."""
