"""The gRPC protocol: services, receiving and connections."""
