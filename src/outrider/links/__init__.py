"""Persistent sockets between the engine, its ranks and its gateways."""
