"""Honest streams beside hostile clients: what the attacks cost the honest ones."""
