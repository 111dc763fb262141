"""Sets of prompts by name, and prompts for the rows of a trace."""

from outrider.bench.load.prompts.for_traces import TracePrompts, prompts_for_trace
from outrider.bench.load.prompts.reading import SPECS, read_prompts

__all__ = ["SPECS", "TracePrompts", "prompts_for_trace", "read_prompts"]
