"""Replicas as Ray actors: placement, controller, and what the server does in a Ray cluster."""
