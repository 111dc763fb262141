"""From the files of a run to figures, intervals, verdicts and sentences."""
