"""Servers without a model, for proofs of the instrument: they do what a script says, when it says.

They also keep their own books, so that what a client has measured can be held against what was
done. `python -m outrider.bench.load.fake --help` runs them by themselves.
"""

from outrider.bench.load.fake.script import Fault, Jitter, Script, Served

__all__ = ["Fault", "Jitter", "Script", "Served"]
