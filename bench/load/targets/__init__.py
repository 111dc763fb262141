"""The servers that can be measured, by the scheme of their address."""
