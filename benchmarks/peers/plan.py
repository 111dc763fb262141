"""The settings of a comparison, its variants, and the start of their engines."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outrider.benchmarks.peers.measure import PeerVariant
from outrider.benchmarks.peers.process import PeerProcess
from outrider.benchmarks.peers.protocol import Mode, Options, PeerError
from outrider.checkpoints.resolve import BUNDLED_TARGET, resolve_source
from outrider.errors import ConfigError, ModelError
from outrider.loadtest.peers.export import export_gguf
from outrider.workers.weights.checkpoint import whole_folder

OUTRIDER, TRANSFORMERS, VLLM, VLLM_DRAFT = "outrider", "transformers", "vllm", "vllm draft"
LLAMA, OUTRIDER_FLOAT32 = "llama.cpp", "outrider float32"
ENGINES = (OUTRIDER, TRANSFORMERS, VLLM, LLAMA)
_ENGINE_OF = {
    VLLM_DRAFT: VLLM,
    OUTRIDER_FLOAT32: OUTRIDER,
}  # peers whose name is not their engine's
GGUF = ".gguf"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The command's options; written to the result file."""

    target: str
    draft: str
    engines: tuple[str, ...]
    groups: tuple[str, ...]
    per_group: int
    chat: bool
    max_tokens: int
    depths: tuple[int, ...]
    ngram_depth: int
    vllm_python: str | None
    vllm_depth: int
    batch: int
    repeats: int
    threads: int
    max_model_len: int
    llama_python: str | None = None
    llama_server: str | None = None
    llama_depth: int = 2
    llama_search: bool = True

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in ENGINES:
                raise ConfigError(f"engine {name!r} is unknown; choose from {', '.join(ENGINES)}.")
        for name in ("max_tokens", "batch", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")


def plan_variants(settings: ComparisonSettings) -> list[PeerVariant]:
    """All variants to compare; plain decoding comes first, as the reference."""
    draft, plain = [Mode("draft", depth) for depth in settings.depths], Mode()
    vllm_draft, llama_draft = (
        Mode("draft", depth) for depth in (settings.vllm_depth, settings.llama_depth)
    )
    table: dict[str, list[PeerVariant]] = {
        OUTRIDER: [
            PeerVariant("outrider plain", OUTRIDER, plain),
            PeerVariant("outrider n-gram", OUTRIDER, Mode("ngram", settings.ngram_depth)),
            *(PeerVariant(f"outrider draft {mode.depth}", OUTRIDER, mode) for mode in draft),
            PeerVariant("outrider draft, as far as it pays", OUTRIDER, Mode("draft")),
            PeerVariant("outrider float32 plain", OUTRIDER_FLOAT32, plain),
        ],
        TRANSFORMERS: [
            PeerVariant("transformers plain", TRANSFORMERS, plain),
            PeerVariant("transformers assisted", TRANSFORMERS, Mode("draft")),
            PeerVariant("transformers lookup", TRANSFORMERS, Mode("ngram")),
        ],
        VLLM: [
            PeerVariant("vllm plain", VLLM, plain),
            PeerVariant(f"vllm draft {vllm_draft.depth}", VLLM_DRAFT, vllm_draft),
        ],
        LLAMA: [
            PeerVariant("llama.cpp plain", LLAMA, plain),
            PeerVariant(f"llama.cpp draft {llama_draft.depth}", LLAMA, llama_draft),
        ],
    }
    return [variant for name in ENGINES if name in settings.engines for variant in table[name]]


def start_peers(
    settings: ComparisonSettings, variants: Sequence[PeerVariant], stack: ExitStack, say: Say
) -> dict[str, PeerProcess]:
    """Start a process for each available engine; the others are reported and skipped."""
    source = resolve_source(settings.target)
    folder = whole_folder(settings.target)
    draft = str(resolve_source(settings.draft))
    tokenizer = draft if settings.target == BUNDLED_TARGET else str(folder)
    options = Options(str(folder), draft, tokenizer, settings.threads, settings.max_model_len)
    peers: dict[str, PeerProcess] = {}
    missing: set[str] = set()
    for variant in variants:
        if variant.peer in peers or variant.peer in missing:
            continue
        engine = _ENGINE_OF.get(variant.peer, variant.peer)
        try:
            python = interpreter(settings, engine)
            own = dataclasses.replace(options, mode=variant.mode)
            if engine == OUTRIDER:  # resolves the bundled names, tokenizer included
                own = dataclasses.replace(own, target=settings.target, draft=settings.draft)
                if variant.peer == OUTRIDER_FLOAT32:
                    own = dataclasses.replace(own, dtype="float32")
            elif engine == LLAMA:
                own = _llama_options(settings, own, source, stack)
            say(f"starting {variant.peer}")
            peer = PeerProcess(engine, own, python=python)
        except (PeerError, ModelError) as error:
            say(f"{variant.peer}: skipped; {error}")
            missing.add(variant.peer)
            continue
        peers[variant.peer] = stack.enter_context(peer)
        if peer.info.settings:
            chosen = ", ".join(f"{name} {value}" for name, value in peer.info.settings.items())
            say(f"{variant.peer}: {chosen}")
    return peers


def interpreter(settings: ComparisonSettings, engine: str) -> str:
    """The Python interpreter that has the engine; `PeerError` names the missing option."""
    if engine == LLAMA and settings.llama_server is not None:
        if shutil.which(settings.llama_server) is None:
            raise PeerError(f"--llama-server is {settings.llama_server!r}, which is not a program.")
        return sys.executable
    options = {
        VLLM: ("--vllm-python", settings.vllm_python),
        LLAMA: ("--llama-python", settings.llama_python),
    }
    option, python = options.get(engine, ("", sys.executable))
    if python is None or shutil.which(python) is None:
        raise PeerError(f"{option} names no interpreter.")
    return python


def _llama_options(
    settings: ComparisonSettings, options: Options, source: Path, stack: ExitStack
) -> Options:
    """llama.cpp reads GGUF: the target's file, and the draft exported as one."""
    if source.suffix != GGUF:
        raise ModelError(f"target is {source}, and llama.cpp reads GGUF files; name one.")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    export_gguf(Path(options.draft), source, folder / "draft.gguf")
    return dataclasses.replace(
        options,
        target=str(source),
        draft=str(folder / "draft.gguf"),
        executable=settings.llama_server,
        search=settings.llama_search,
    )
