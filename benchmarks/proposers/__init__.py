"""Compares proposers over one list of prompts: `python -m outrider.benchmarks.proposers`."""
