"""Honest streams beside hostile clients: what the attacks cost those who behave."""
