"""Ranks as processes: their start, what each role does with plans, how proposals travel."""
