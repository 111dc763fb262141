"""API keys, tenants and TLS."""
