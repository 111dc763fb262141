"""Fakes that implement the engine's protocols, for tests and benchmarks of engines and servers.

They ship with the package, so projects built on Outrider can test without a model. Nothing that
serves imports them.
"""
