"""Proposers: one file each."""
