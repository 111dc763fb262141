"""Replicas as processes of this host, without Ray."""
