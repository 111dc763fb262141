"""Passes recorded once and replayed, on any device."""
