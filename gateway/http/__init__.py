"""The HTTP protocol: OpenAI's shapes over the same gateway as gRPC's."""
