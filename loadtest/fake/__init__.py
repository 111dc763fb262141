"""Servers without a model, to validate the harness: they follow a script of delays and faults.

They log what they did, so that a client's measurements can be compared with it.
`python -m outrider.loadtest.fake --help` runs them on their own.
"""

from outrider.loadtest.fake.script import Fault, Jitter, Script, ServedRequest

__all__ = ["Fault", "Jitter", "Script", "ServedRequest"]
