"""Client processes: they send what is due and keep the books."""
