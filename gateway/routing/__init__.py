"""The engines behind a gateway: links to them, and which one a request goes to."""
