"""The entry point that systemd units of earlier releases name."""

from __future__ import annotations

import sys

from outrider.cluster.deploy.head_keeper import main

if __name__ == "__main__":
    main(*sys.argv[1:])
