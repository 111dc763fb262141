"""Names that settings, servers and workers share: proposers, heads, model families. No tensors."""
