"""The step loop, the engines built on it, and the offline `LLM` API."""
