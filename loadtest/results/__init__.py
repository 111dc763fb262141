"""Computes figures, intervals, verdicts and sentences from the files of a run."""
