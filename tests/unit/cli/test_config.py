"""The command's frame (help, exit codes, errors) and `outrider config`."""

import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer

import outrider
from outrider import cli
from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.config import settings
from outrider.errors import ModelError
from outrider.text.tokenizer import PROBES, load_tokenizer

# What a command gives: its exit code, what it printed, and what it complained of.
Run = Callable[..., tuple[str | int, str, str]]
Command = Callable[..., None]
AddCommand = Callable[[Command], None]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for setting in settings().values():
        for name in setting.env_names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: str) -> tuple[str | int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return run_command


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> AddCommand:
    """Registers a command the way the real ones are: by module name."""

    def add(function: Command) -> None:
        app = typer.Typer(add_completion=False)
        app.command()(function)
        module = types.ModuleType("outrider.cli.made_up")
        vars(module)["app"] = app
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entry = cli._Lazy(module.__name__, "Made up.")
        monkeypatch.setitem(cli.COMMANDS, "made-up", entry)

    return add


def raising(error: BaseException) -> Command:
    def command() -> None:
        raise error

    return command


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys\n"
        "from outrider.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'}\n"
        "heavy |= {'outrider.cli.generate', 'outrider.cli.config'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_help_of_config_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from outrider.cli import main\n"
        "try: main(['config', 'show', '--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, f"outrider {outrider.__version__}\n", "")


def test_an_unknown_command_exits_2_and_is_named(run: Run) -> None:
    code, out, err = run("confg")
    assert (code, out) == (2, "")
    assert "No such command 'confg'" in err


def test_an_unknown_option_exits_2(run: Run) -> None:
    assert run("config", "show", "--nope")[0] == 2


def test_a_failure_exits_1_with_one_line_and_no_traceback(
    run: Run, add_command: AddCommand
) -> None:
    add_command(raising(ModelError("model.gguf is damaged; fetch it again.")))
    assert run("made-up") == (1, "", "error: model.gguf is damaged; fetch it again.\n")


def test_wrong_usage_exits_2_with_one_line_and_no_traceback(run: Run) -> None:
    assert run("config", "show", "--set", "seed=x") == (
        2,
        "",
        "error: --set: seed is 'x'; it must be a 64-bit whole number, or unset.\n",
    )


def test_debug_shows_the_traceback_and_keeps_the_exit_code(run: Run) -> None:
    code, _, err = run("--debug", "config", "show", "--set", "seed=x")
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: --set: seed is 'x'; it must be a 64-bit whole number, or unset.\n")


def test_an_unexpected_error_exits_1_with_one_line_and_no_traceback(
    run: Run, add_command: AddCommand
) -> None:
    add_command(raising(ZeroDivisionError("division by zero")))
    assert run("made-up") == (
        1,
        "",
        "error: unexpected ZeroDivisionError: division by zero "
        "(run 'outrider --debug ...' to see where)\n",
    )


def test_an_interrupt_exits_130_quietly(run: Run, add_command: AddCommand) -> None:
    add_command(raising(KeyboardInterrupt()))
    assert run("made-up") == (130, "", "")


def test_an_unknown_log_level_is_refused(run: Run) -> None:
    code, _, err = run("--log-level", "loud", "config", "show")
    assert code == 2
    assert err == "error: log_level is 'loud'; it must be one of debug, info, warning, error.\n"


def test_the_global_log_level_goes_before_the_configs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_LOG_LEVEL", "debug")
    _, out, _ = run("--log-level", "error", "config", "show", "--json")
    assert json.loads(out)["log_level"] == {"value": "error", "origin": "--log-level"}
    assert logging.getLogger("outrider").level == logging.ERROR


def test_logging_follows_the_configuration(run: Run) -> None:
    run("config", "show", "--set", "log_level=debug")
    assert logging.getLogger("outrider").level == logging.DEBUG


@pytest.mark.parametrize(
    ("before", "after", "origin"),
    [(("--log-json",), (), "--log-json"), ((), ("--set", "log_format=json"), "--set")],
)
def test_the_format_of_logs_follows_the_configuration_and_its_flag(
    run: Run, before: tuple[str, ...], after: tuple[str, ...], origin: str
) -> None:
    _, out, _ = run(*before, "config", "show", "--json", *after)
    assert json.loads(out)["log_format"] == {"value": "json", "origin": origin}
    (handler,) = logging.getLogger("outrider").handlers
    record = logging.LogRecord("outrider.x", logging.INFO, "", 0, "a line", (), None)
    handler.filter(record)
    assert json.loads(handler.format(record))["message"] == "a line"


def test_init_writes_an_example_that_check_accepts(run: Run, tmp_path: Path) -> None:
    code, out, err = run("config", "init")
    assert (code, err) == (0, "")
    assert "outrider config check outrider.yaml" in out
    num_settings = len(settings())
    assert run("config", "check", "outrider.yaml") == (
        0,
        f"outrider.yaml is valid; it sets 0 of {num_settings} settings.\n",
        "",
    )


def test_init_refuses_to_overwrite(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    assert run("config", "init", "mine.yaml") == (
        2,
        "",
        "error: mine.yaml exists; choose another name or add --force.\n",
    )
    assert (tmp_path / "mine.yaml").read_text() == "seed: 1\n"


def test_init_overwrites_when_forced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    assert run("config", "init", "mine.yaml", "--force")[0] == 0
    assert "#seed: null\n" in (tmp_path / "mine.yaml").read_text()


def test_init_says_why_it_cannot_write(run: Run) -> None:
    code, _, err = run("config", "init", "absent/mine.yaml")
    assert code == 2
    assert err == "error: absent/mine.yaml cannot be written: No such file or directory.\n"


def test_check_lists_every_mistake_with_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("seed: x\ncache:\n  block_size: 3\n")
    assert run("config", "check", "bad.yaml") == (
        2,
        "",
        "error: bad.yaml:1: seed is 'x'; it must be a 64-bit whole number, or unset.\n"
        "error: bad.yaml:3: cache.block_size is 3; it must be a power of two from 1 to 256.\n",
    )


def test_check_looks_at_the_file_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_SEED", "x")
    (tmp_path / "good.yaml").write_text("seed: 1\n")
    assert run("config", "check", "good.yaml")[0] == 0


def test_show_tells_every_value_and_its_origin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.yaml").write_text("seed: 1\ntarget:\n  dtype: float32\n")
    monkeypatch.setenv("OUTRIDER_TARGET_MODEL", "big")
    code, out, _ = run("config", "show", "-c", "my.yaml", "--set", "seed=2", "--json")
    shown = json.loads(out)
    assert code == 0
    assert list(shown) == list(settings())
    assert shown["seed"] == {"value": 2, "origin": "--set"}
    assert shown["target.model"] == {"value": "big", "origin": "OUTRIDER_TARGET_MODEL"}
    assert shown["target.dtype"] == {"value": "float32", "origin": "my.yaml:3"}
    assert shown["cache.block_size"] == {"value": 16, "origin": "default"}


def test_show_prints_a_table_for_people(run: Run) -> None:
    _, out, _ = run("config", "show", "--set", "target.model=big")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["setting", "value", "from"]
    assert ["target.model", "big", "--set"] in rows
    assert ["draft.model", "none", "default"] in rows
    assert ["target.revision", "unset", "default"] in rows
    assert ["cache.prefix_caching", "true", "default"] in rows


def test_show_names_the_draft_that_goes_without_saying(run: Run) -> None:
    _, out, _ = run("config", "show", "--json")
    found = {"value": "smollm2-135m-draft", "origin": "default"}
    assert json.loads(out)["draft.model"] == found


def test_show_tells_what_was_set_to_none_from_what_was_never_set(run: Run) -> None:
    _, out, _ = run("config", "show", "--set", "seed=none", "--set", "draft.model=none")
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "none", "--set"] in rows
    assert ["draft.model", "none", "--set"] in rows
    assert ["num_threads", "unset", "default"] in rows


def test_a_commands_own_flags_go_before_a_file_and_never_against_set(
    run: Run, add_command: AddCommand, tmp_path: Path
) -> None:
    (tmp_path / "my.yaml").write_text("target:\n  model: from-file\n")
    seen = []

    def command(
        ctx: typer.Context,
        model: Annotated[str | None, typer.Option(help=setting_help("model"))] = None,
        config: ConfigOption = None,
        assignments: SetOption = None,
    ) -> None:
        seen.append(load_config(ctx, config, assignments, {"model": model}))

    add_command(command)
    run("made-up", "-c", "my.yaml")
    run("made-up", "-c", "my.yaml", "--set", "target.model=from-set")
    run("made-up", "-c", "my.yaml", "--model", "from-flag")
    assert run("made-up", "--set", "target.model=from-set", "--model", "from-flag") == (
        2,
        "",
        "error: --model sets target.model to 'from-flag' and --set to 'from-set'; give only one "
        "of them.\n",
    )
    found = [(r.config.target.model, r.origins["target.model"]) for r in seen]
    assert found == [
        ("from-file", "my.yaml:2"),
        ("from-set", "--set"),
        ("from-flag", "--model"),
    ]


def test_help_of_a_flag_is_the_settings_own_with_its_default() -> None:
    assert setting_help("block_size") == "Tokens in one KV block. Default: 16."
    assert setting_help("revision") == settings()["target.revision"].doc


def test_the_log_level_may_not_contradict_set(run: Run) -> None:
    code, _, err = run("--log-level", "debug", "config", "show", "--set", "log_level=info")
    assert (code, err) == (
        2,
        "error: --log-level sets log_level to 'debug' and --set to 'info'; give only one of "
        "them.\n",
    )


@pytest.mark.parametrize(
    ("flag", "value"), [("some/draft", "none"), ("none", "some/draft")], ids=["set", "flag"]
)
def test_serve_refuses_a_draft_and_none(run: Run, flag: str, value: str) -> None:
    code, _, err = run("serve", "--draft-model", flag, "--set", f"draft.model={value}")
    assert code == 2
    assert err.startswith("error: --draft-model sets draft.model to ")


def test_show_hides_a_key_that_is_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "nobody-may-read-this")
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        code, out, err = run(*arguments)
        assert code == 0 and "nobody-may-read-this" not in out + err
        assert "not shown" in out


def test_other_tools_load_the_same_tokenizer_from_the_folder_that_is_printed(run: Run) -> None:
    """As AIPerf, guidellm and `vllm bench` load theirs."""
    from transformers import AutoTokenizer

    code, out, _ = run("config", "tokenizer")
    assert code == 0 and out.count("\n") == 1
    theirs = AutoTokenizer.from_pretrained(out.strip())
    ours = load_tokenizer("smollm2-135m-instruct")
    for text in PROBES:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(
            text, add_special_tokens=False
        )
    page = Path(__file__).resolve().parents[3] / "docs" / "benchmarking.md"
    assert '--tokenizer "$(outrider config tokenizer)"' in page.read_text()


def test_the_tokenizer_of_another_model_is_its_own_or_the_one_that_is_set(
    run: Run, tmp_path: Path
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    assert run("config", "tokenizer", "./own")[:2] == (0, f"{own}\n")
    given = ("--set", f"target.tokenizer={other}")
    assert run("config", "tokenizer", "./own", *given)[:2] == (0, f"{other}\n")
    (own / "tokenizer.json").unlink()
    code, out, told = run("config", "tokenizer", "./own")
    assert (code, out) == (1, "") and "has no tokenizer files beside it" in told
