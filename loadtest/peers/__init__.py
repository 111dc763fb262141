"""The same models behind other servers."""
