"""Results, errors and conversions shared by client and gateway."""
