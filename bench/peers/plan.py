"""What a comparison was asked for, the variants that follow from it, and their engines started."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.load.peers.export import export_gguf
from outrider.bench.peers.measure import Variant
from outrider.bench.peers.process import PeerProcess
from outrider.bench.peers.protocol import Mode, Options, PeerError
from outrider.errors import ConfigError, ModelError
from outrider.workers.weights.checkpoint import whole_folder
from outrider.workers.weights.resolve import BUNDLED_TARGET, resolve_source

OUTRIDER, TRANSFORMERS, VLLM, VLLM_DRAFT = "outrider", "transformers", "vllm", "vllm draft"
LLAMA, OUTRIDER_FLOAT32 = "llama.cpp", "outrider float32"
ENGINES = (OUTRIDER, TRANSFORMERS, VLLM, LLAMA)
_ENGINE_OF = {VLLM_DRAFT: VLLM, OUTRIDER_FLOAT32: OUTRIDER}  # peers that are not called as theirs
GGUF = ".gguf"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for; goes into the result file as it is."""

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


def plan_variants(settings: Settings) -> list[Variant]:
    """Everything that will be compared; plain comes first, as the reference."""
    draft, plain = [Mode("draft", depth) for depth in settings.depths], Mode()
    vllm_draft, llama_draft = (
        Mode("draft", depth) for depth in (settings.vllm_depth, settings.llama_depth)
    )
    table: dict[str, list[Variant]] = {
        OUTRIDER: [
            Variant("outrider plain", OUTRIDER, plain),
            Variant("outrider n-gram", OUTRIDER, Mode("ngram", settings.ngram_depth)),
            *(Variant(f"outrider draft {mode.depth}", OUTRIDER, mode) for mode in draft),
            Variant("outrider draft, as far as it pays", OUTRIDER, Mode("draft")),
            Variant("outrider float32 plain", OUTRIDER_FLOAT32, plain),
        ],
        TRANSFORMERS: [
            Variant("transformers plain", TRANSFORMERS, plain),
            Variant("transformers assisted", TRANSFORMERS, Mode("draft")),
            Variant("transformers lookup", TRANSFORMERS, Mode("ngram")),
        ],
        VLLM: [
            Variant("vllm plain", VLLM, plain),
            Variant(f"vllm draft {vllm_draft.depth}", VLLM_DRAFT, vllm_draft),
        ],
        LLAMA: [
            Variant("llama.cpp plain", LLAMA, plain),
            Variant(f"llama.cpp draft {llama_draft.depth}", LLAMA, llama_draft),
        ],
    }
    return [variant for name in ENGINES if name in settings.engines for variant in table[name]]


def start_peers(
    settings: Settings, variants: Sequence[Variant], stack: ExitStack, say: Say
) -> dict[str, PeerProcess]:
    """A process for each engine that can be had; the others are named and left out."""
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
            if engine == OUTRIDER:  # it knows the bundled names, tokenizer included
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
        if peer.hello.settings:
            chosen = ", ".join(f"{name} {value}" for name, value in peer.hello.settings.items())
            say(f"{variant.peer}: {chosen}")
    return peers


def interpreter(settings: Settings, engine: str) -> str:
    """The Python that has the engine; `PeerError` names the option if there is none."""
    if engine == LLAMA and settings.llama_server is not None:
        if shutil.which(settings.llama_server) is None:
            raise PeerError(f"--llama-server is {settings.llama_server!r}, which is no program.")
        return sys.executable
    options = {
        VLLM: ("--vllm-python", settings.vllm_python),
        LLAMA: ("--llama-python", settings.llama_python),
    }
    option, python = options.get(engine, ("", sys.executable))
    if python is None or shutil.which(python) is None:
        raise PeerError(f"{option} names no interpreter.")
    return python


def _llama_options(settings: Settings, options: Options, source: Path, stack: ExitStack) -> Options:
    """llama.cpp reads GGUF: the target's own file, and the draft written as one."""
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
