"""`outrider generate`: streams a text to stdout, then speculation statistics to stderr."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.colour import ColouredText
from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.cli.sampling import TemperatureOption, TopPOption, given_params
from outrider.cli.server_options import option
from outrider.cli.settings_command import LocalCommand
from outrider.cli.speculation_text import speculation_sentence
from outrider.cli.summary import GenerationRun, comparison, summary
from outrider.config import EngineConfig
from outrider.config.sources import SourcedValue
from outrider.errors import ConfigError, RequestError
from outrider.progress import ProgressSpinner
from outrider.requirements import need
from outrider.scheduler.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.engine.engine import Engine
    from outrider.text.input_processor import ProcessorInput
    from outrider.text.outputs import OutputDelta

_WARM_UP_TOKENS = 8

app = typer.Typer(add_completion=False)


class Method(StrEnum):
    AUTO = "auto"
    DRAFT = "draft"
    NGRAM = "ngram"
    OFF = "off"


@app.command(cls=LocalCommand)
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
    ] = None,
    model: Annotated[str | None, option("--model", "-m", help=setting_help("model"))] = None,
    draft_model: Annotated[
        str | None,
        option(
            "--draft-model",
            help=setting_help("draft_model"),
        ),
    ] = None,
    method: Annotated[
        Method | None,
        option(
            "--method",
            help="Proposer. Default: the draft if there is one, else as with `outrider serve`.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        option("--policy", "--speculation-policy", help=setting_help("speculation_policy")),
    ] = None,
    depth: Annotated[
        int | None,
        option(
            "--depth",
            "-k",
            "--num-speculative-tokens",
            help=setting_help("num_speculative_tokens"),
        ),
    ] = None,
    fix_depth: Annotated[
        bool, option("--fix-depth", help="Draft exactly --depth tokens, whatever the policy.")
    ] = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: Annotated[
        int | None, option("--top-k", help="Sample from this many tokens; 0 is all.")
    ] = None,
    min_p: Annotated[
        float | None,
        option("--min-p", help="Drop tokens less likely than this share of the likeliest."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = 256,
    seed: Annotated[
        int | None, option("--seed", help="Seed of the sample; drawn and shown if not given.")
    ] = None,
    stop: Annotated[
        list[str] | None, option("--stop", help="End before this text; may be repeated.")
    ] = None,
    raw: Annotated[
        bool, option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    system: Annotated[
        str | None, option("--system", help="System message of the chat template.")
    ] = None,
    deterministic: Annotated[
        bool, option("--deterministic", help=setting_help("deterministic"))
    ] = False,
    compare: Annotated[
        bool, option("--compare", help="Generate without speculation too, and compare.")
    ] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Generate text; accepted drafts in green, the target's own tokens in magenta."""
    params = given_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop,
    )
    flags = {
        "model": model,
        "draft_model": draft_model,
        "method": method and method.value,
        "speculation_policy": policy,
        "num_speculative_tokens": depth,
        "deterministic": deterministic or None,
    }
    implied = {}
    if compare:  # a prefix cache hit would favour the second run
        implied = {"cache.prefix_caching": SourcedValue(False, "--compare")}
    engine_config = load_config(ctx, config, assignments, flags, implied).config
    if fix_depth:
        fixed = engine_config.speculation.num_speculative_tokens
        if fixed is None:
            raise RequestError("--fix-depth needs a depth; give it with --depth.")
        params |= {"num_speculative_tokens": fixed, "fix_depth": True}
    if compare and engine_config.speculation.method is None:
        check_drafts(engine_config)
    if raw and system is not None:
        raise _without_template("--raw skips it")
    _Session(engine_config, _read_prompt(prompt), raw, system).run(params, compare)


def check_drafts(config: EngineConfig) -> None:
    if config.method is None:
        raise RequestError("--compare needs speculation to compare; choose a draft or --method.")


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise RequestError('there is no prompt; write it as in: outrider generate "Hello".')
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise RequestError("standard input is not text; give the prompt in UTF-8.") from None
    if not prompt:
        raise RequestError('the prompt is empty; write it as in: outrider generate "Hello".')
    return prompt


class _Session:
    """One call of the command: an engine, a prompt, and its consoles."""

    def __init__(self, config: EngineConfig, prompt: str, raw: bool, system: str | None) -> None:
        from outrider.cli.visible import SafeConsole

        need("torch", "transformers", "safetensors", "numpy")
        self._stdout, self._stderr = SafeConsole(), SafeConsole(stderr=True)
        models = filter(None, (config.target.model, config.draft.model))
        with ProgressSpinner(self._stderr, f"loading {' and '.join(models)}"):
            from outrider.engine.build import build_engine
            from outrider.engine.engine import Engine

            self._engine = Engine(build_engine(config))
        self._config = self._engine.built.config
        self._prompt = _encode(self._engine, prompt, raw, system)

    def run(self, given: dict[str, Any], compare: bool) -> None:
        if compare:
            check_drafts(self._config)
        params = self._engine.params(given)
        plain_params = dataclasses.replace(params, speculation="off")
        if compare:
            short = min(params.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
            with ProgressSpinner(self._stderr, "warming up"):
                for each in (params, plain_params):
                    self._generate(dataclasses.replace(each, max_tokens=short))
        run = self._stream(params)
        plain = None
        if compare:
            with ProgressSpinner(self._stderr, "generating without speculation"):
                plain = self._generate(dataclasses.replace(plain_params, seed=run.text.seed))
        self._stderr.print(summary(run, plain, self._engine.built))
        self._stderr.print(self._speculation(), markup=False, highlight=False)
        if plain is not None:
            self._stderr.print(comparison(run, plain, self._config), highlight=False)

    def _speculation(self) -> str:
        from outrider.engine.speculation import SpeculationService

        built = self._engine.built
        found = SpeculationService(built.loop.scheduler, built.facts.depth).status()
        return speculation_sentence(found, self._config)

    def _stream(self, params: SamplingParams) -> GenerationRun:
        """Generate, streaming the text to stdout."""
        writer = _writer(self._stdout, self._engine, self._prompt)
        waiting = ProgressSpinner(self._stderr, "reading the prompt")
        waiting.start()

        def show(delta: OutputDelta) -> None:
            waiting.stop()
            writer(delta)
            self._stdout.file.flush()

        try:
            run = self._generate(params, show)
        finally:
            waiting.stop()
        self._stdout.file.write("\n")
        self._stdout.file.flush()
        return run

    def _generate(
        self, params: SamplingParams, show: Callable[[OutputDelta], None] | None = None
    ) -> GenerationRun:
        engine, loop = self._engine, self._engine.built.loop
        draft_s, verify_s = loop.draft_s, loop.verify_s
        request = engine.add("generate", self._prompt, params)
        while engine.has_work:
            for delta in engine.step():
                if show is not None:
                    show(delta)
        request.raise_if_failed()
        return GenerationRun(request, loop.draft_s - draft_s, loop.verify_s - verify_s)


def _encode(engine: Engine, prompt: str, raw: bool, system: str | None) -> ProcessorInput:
    """Apply the chat template if there is one, unless `raw`."""
    from outrider.text.messages import Conversation

    has_template = engine.input_processor.has_chat_template
    if raw or not has_template:
        if system is not None:
            raise _without_template("the model has none")
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"prompt_token_ids": engine.input_processor.tokenize(Conversation(messages))}


def _without_template(reason: str) -> ConfigError:
    return ConfigError(f"--system needs a chat template but {reason}; leave it out.")


def _writer(
    stdout: Console, engine: Engine, prompt: ProcessorInput
) -> Callable[[OutputDelta], Any]:
    from outrider.cli.visible import visible_on

    if stdout.color_system is None or stdout.no_color:
        return lambda delta: stdout.file.write(visible_on(stdout.file, delta.text))
    from outrider.text.detokenize import Detokenizer

    prompt_ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else ()
    return ColouredText(stdout.file, Detokenizer(engine.built.tokenizer, prompt_ids)).write
