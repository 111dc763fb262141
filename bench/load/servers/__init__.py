"""Servers under test: started, watched, put to rest, disturbed on purpose."""
