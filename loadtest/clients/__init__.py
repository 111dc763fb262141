"""Client processes: they send requests on schedule and record every outcome."""
