"""Prints a gateway's dependencies: the project's without torch, Ray and weights.

python docker/gateway_requirements.py > docker/gateway-requirements.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# Of engines and ranks only. Any other dependency is the gateway's too.
NOT_OF_GATEWAYS = ("torch", "safetensors", "numpy", "gguf", "ray")


def main() -> None:
    print("# Made by docker/gateway_requirements.py; `make docker-requirements` makes it anew.")
    for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        if re.split(r"[\[<>=!;~ ]", line)[0] not in NOT_OF_GATEWAYS:
            print(line)


if __name__ == "__main__":
    main()
