"""Finds and downloads checkpoints and reads their small files, without tensors."""
