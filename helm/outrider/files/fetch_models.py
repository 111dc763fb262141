"""Downloads what a configuration names into the hub's cache: fetch_models.py CONFIG"""

import sys

from outrider.checkpoints.resolve import resolve_source
from outrider.config.sources import resolve
from outrider.errors import OutriderError


def main(file: str) -> None:
    config = resolve(file).config
    sources = [(config.target.model, config.target.revision), config.target.tokenizer_source]
    if config.draft.model is not None:
        sources.append((config.draft.model, config.draft.revision))
    for model, revision in dict.fromkeys(sources):
        print(f"{model}: {resolve_source(model, revision)}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OutriderError as error:
        sys.exit(f"error: {error}")
