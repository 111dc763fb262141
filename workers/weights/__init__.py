"""Loads models by name, folder or file."""
