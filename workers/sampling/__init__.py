"""Sampling and verification: from the logits of a pass to the tokens it commits."""
