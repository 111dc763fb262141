"""How the ranks of a model sum and share tensors."""
