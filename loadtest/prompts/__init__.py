"""Datasets by name, and prompts for the rows of a trace."""

from outrider.loadtest.prompts.for_traces import TracePrompts, prompts_for_trace
from outrider.loadtest.prompts.reading import SPECS, read_prompts

__all__ = ["SPECS", "TracePrompts", "prompts_for_trace", "read_prompts"]
