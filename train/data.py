"""The data phase: the engine writes the missing shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError
from outrider.scheduler.params import SamplingParams
from outrider.train.dialogues import Template
from outrider.train.progress import ProgressReporter
from outrider.train.settings import SHARE_OF_GPU, DataSettings
from outrider.train.shards import HELD_OUT, Manifest, TrainingRecord, write_shard
from outrider.train.sources import read_documents, read_prompts
from outrider.train.writing import Writer

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

# May change when a data folder is resumed.
_MAY_DIFFER = ("conversations",)


class LlmCompleter:
    """A `Completer` on an `LLM`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        inputs: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self._llm.generate(inputs, list(params), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def open_llm(target: str, context: int, device: str, share_of_gpu: float, **options: Any) -> LLM:
    """The target in this process, limited to the training context."""
    from outrider.engine.llm import LLM

    return LLM(
        target,
        device=device,
        max_model_len=context,
        gpu_memory_utilization=share_of_gpu,
        log_level="warning",
        **options,
    )


def make_data(
    folder: Path,
    target: str,
    settings: DataSettings,
    device: str,
    reporter: ProgressReporter,
    share_of_gpu: float = SHARE_OF_GPU,
) -> Manifest:
    """Resume the folder's data; a complete manifest is returned unchanged."""
    manifest = Manifest.load(folder)
    if manifest is not None:
        _check_same(folder, manifest, target, settings)
        if manifest.is_complete and manifest.num_records >= settings.conversations:
            reporter.log(
                f"data: {manifest.num_records} conversations, {manifest.num_tokens} tokens are "
                f"in {folder}"
            )
            return manifest
    prompts, documents = read_prompts(settings.prompts), read_documents(settings.documents)
    with reporter.task(f"loading {target}"):
        llm = open_llm(target, settings.context, device, share_of_gpu, method="off")
    try:
        facts = llm.engine.built.facts
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{target!r} has no tokenizer; put its tokenizer.json beside it.")
        template = Template.of(tokenizer, facts.eos_ids)
        writer = Writer(
            LlmCompleter(llm), tokenizer, template, settings, facts.eos_ids, prompts, documents
        )
        if manifest is None:
            manifest = Manifest(target, facts.vocab_size, settings.as_json(), writer.kinds)
        return _DatasetWriter(folder, manifest, writer, settings, reporter).run()
    finally:
        llm.close()


class _DatasetWriter:
    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        writer: Writer,
        settings: DataSettings,
        reporter: ProgressReporter,
    ) -> None:
        self._folder, self._manifest, self._writer = folder, manifest, writer
        self._settings, self._reporter = settings, reporter

    def run(self) -> Manifest:
        manifest, settings = self._manifest, self._settings
        manifest.is_complete = False
        if settings.held_out and not manifest.has_held_out:
            records = self._writer.write(0, settings.held_out, held_out=True)
            self._write(HELD_OUT, records)
            manifest.has_held_out = True
            manifest.save(self._folder)
        with self._reporter.bar("writing", settings.conversations) as bar:
            bar.update(manifest.num_records)
            num_empty = 0
            while manifest.num_records < settings.conversations:
                before = manifest.num_records
                self._next_shard(lambda done, before=before: bar.update(before + done))
                num_empty = 0 if manifest.num_records > before else num_empty + 1
                if num_empty == 3:
                    raise ConfigError(
                        f"{manifest.target!r} wrote no text in three shards in a row; give "
                        "--prompts or --documents that it can answer."
                    )
                bar.update(manifest.num_records, f"{manifest.num_tokens} tokens")
        manifest.is_complete = True
        manifest.save(self._folder)
        return manifest

    def _next_shard(self, on_progress: Any) -> None:
        manifest, settings = self._manifest, self._settings
        number = len(manifest.shards)
        left = settings.conversations - manifest.num_records
        records = self._writer.write(number, min(left, settings.shard_size), False, on_progress)
        name = f"shard-{number:05d}.bin"
        self._write(name, records)
        tokens = sum(len(record.ids) for record in records)
        manifest.shards.append({"file": name, "records": len(records), "tokens": tokens})
        manifest.save(self._folder)

    def _write(self, name: str, records: Sequence[TrainingRecord]) -> None:
        write_shard(self._folder / name, records, self._manifest.vocab_size)


def _check_same(folder: Path, manifest: Manifest, target: str, settings: DataSettings) -> None:
    if manifest.target != target:
        raise ConfigError(
            f"--data is {str(folder)!r}, which {manifest.target!r} wrote, and --target is "
            f"{target!r}; name another folder."
        )
    if manifest.is_complete and manifest.num_records >= settings.conversations:
        return
    for name, value in settings.as_json().items():
        if name not in _MAY_DIFFER and manifest.settings.get(name) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value!r}, and {folder} was begun with "
                f"{manifest.settings.get(name)!r}; give the same, or another --data."
            )
