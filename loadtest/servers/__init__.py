"""Servers under test: start, monitor, pause, and inject faults."""
