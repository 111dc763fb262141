"""File, environment and flags: who wins, where a value came from, where a mistake is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.config import SECTIONS, EngineConfig, settings
from outrider.config.sources import (
    SourcedValue,
    example_text,
    merge_given,
    read_assignments,
    read_kwargs,
    resolve,
)
from outrider.errors import ConfigError

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "outrider.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def message_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


def test_without_sources_everything_is_default() -> None:
    resolved = resolve()
    assert resolved.config == EngineConfig()
    assert set(resolved.origins.values()) == {"default"}


@pytest.mark.parametrize("highest", range(4))
def test_flags_go_before_environment_before_file_before_default(write: Write, highest: int) -> None:
    file = write("cache:\n  block_size: 32\n") if highest >= 1 else None
    env = {"OUTRIDER_CACHE_BLOCK_SIZE": "64"} if highest >= 2 else {}
    flags = read_assignments(["cache.block_size=128"]) if highest >= 3 else {}
    resolved = resolve(file, env, flags)
    assert resolved.config.cache.block_size == [16, 32, 64, 128][highest]
    origins = ["default", f"{file}:2", "OUTRIDER_CACHE_BLOCK_SIZE", "--set"]
    assert resolved.origins["cache.block_size"] == origins[highest]


def test_sources_are_merged_setting_by_setting(write: Write) -> None:
    file = write("target:\n  model: big\n  dtype: float16\nseed: 1\n")
    resolved = resolve(
        file, {"OUTRIDER_TARGET_DTYPE": "float32"}, {"seed": SourcedValue(2, "--seed")}
    )
    assert resolved.config.target.model == "big"
    assert resolved.config.target.dtype == "float32"
    assert resolved.config.seed == 2
    named = {path: origin for path, origin in resolved.origins.items() if origin != "default"}
    assert named == {
        "target.model": f"{file}:2",
        "target.dtype": "OUTRIDER_TARGET_DTYPE",
        "seed": "--seed",
    }


def test_a_higher_source_can_unset_an_optional_value(write: Write) -> None:
    file = write("draft:\n  model: small\n")
    resolved = resolve(file, {"OUTRIDER_DRAFT_MODEL": "none"})
    assert resolved.config.draft.model is None
    assert resolved.origins["draft.model"] == "OUTRIDER_DRAFT_MODEL"


@pytest.mark.parametrize("path", settings())
def test_every_setting_can_come_from_the_environment(path: str) -> None:
    setting = settings()[path]
    text = "" if setting.default in (None, ()) else str(setting.default)
    resolved = resolve(env={setting.env_name: text})
    assert resolved.origins[path] == setting.env_name
    assert resolved.config == EngineConfig()


def test_environment_text_takes_the_type_of_its_setting() -> None:
    env = {
        "OUTRIDER_SPECULATION_NUM_SPECULATIVE_TOKENS": "3",
        "OUTRIDER_DETERMINISTIC": "on",
        "OUTRIDER_CACHE_KV_CACHE_GB": "0.5",
    }
    config = resolve(env=env).config
    assert config.speculation.num_speculative_tokens == 3
    assert config.deterministic is True
    assert config.cache.kv_cache_gb == 0.5


def test_other_programs_variables_and_our_reserved_ones_are_left_alone() -> None:
    env = {"HOME": "/home/me", "OUTRIDERS": "x", "OUTRIDER_CACHE": "/tmp/cache"}
    assert resolve(env=env).config == EngineConfig()


def test_a_variable_may_name_the_file(write: Write) -> None:
    file = write("seed: 5\n")
    assert resolve(env={"OUTRIDER_CONFIG": str(file)}).config.seed == 5


def test_a_file_given_goes_before_the_file_a_variable_names(write: Write) -> None:
    assert resolve(write("seed: 5\n"), {"OUTRIDER_CONFIG": "absent.yaml"}).config.seed == 5


def test_flags_that_contradict_each_other_are_named_as_flags() -> None:
    with pytest.raises(ConfigError, match=r"^--draft-model is 'x' and --method is 'off', but both"):
        read_kwargs({"draft_model": "x", "method": "off"}, as_flags=True)


def test_names_of_llm_as_flags_carry_the_flag_as_origin() -> None:
    given = read_kwargs({"num_speculative_tokens": 3, "model": None}, as_flags=True)
    assert given == {
        "speculation.num_speculative_tokens": SourcedValue(3, "--num-speculative-tokens"),
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "target:\ncache:\n"])
def test_a_file_without_values_changes_nothing(write: Write, text: str) -> None:
    assert resolve(write(text)).config == EngineConfig()


def test_an_anchor_may_be_used_for_a_value(write: Write) -> None:
    config = resolve(write("target: {dtype: &t float16}\ndraft: {dtype: *t}\n")).config
    assert config.draft.dtype == "float16"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("target:\n\n  modle: x\n", 3, "target.modle is no setting. Did you mean 'target.model'?"),
        ("trget:\n  model: x\n", 1, "trget is no setting. Did you mean 'target'?"),
        ("seed: 1\nmodel: x\n", 2, "model is no setting. Did you mean 'target.model'?"),
        ("seed: x\n", 1, "seed is 'x'; it must be a 64-bit whole number, or unset."),
        (
            "target:\n  model:\n",
            2,
            "target.model is None; it must be a bundled model's name, a checkpoint folder, "
            "a .gguf file or a hub id.",
        ),
        ("target:\n  dtype: 2024-13-45\n", 2, "target.dtype is '2024-13-45'; it must be 'auto', "
         "'float32', 'bfloat16' or 'float16'."),
        ("cache: 5\n", 1, "cache is 5; it must be a section, with its settings indented below."),
        ("seed: 1\nseed: 2\n", 2, "seed is already set on line 1."),
        ("? [a, b]\n: 1\n", 1, "a key must be the name of a setting."),
        ("- target\n", 1, "the file must hold sections such as 'target:'."),
        ("seed: 1\ntarget: [\n", 3, "this is not valid YAML: expected the node content, "
         "but found '<stream end>'."),
        ("seed: !!python/name:os.system x\n", 1, "this is not valid YAML: could not determine a "
         "constructor for the tag 'tag:yaml.org,2002:python/name:os.system'."),
        (
            "target:\n  model: big\nspeculation:\n  method: draft\n",
            4,
            "speculation.method is 'draft' but there is no draft; set draft.model "
            "(draft_model in LLM) or choose 'ngram'.",
        ),
        (
            "scheduler:\n  max_num_seqs: 600\n  max_num_batched_tokens: 512\n",
            3,
            "scheduler.max_num_batched_tokens is 512, below scheduler.max_num_seqs (600); "
            "raise the first or lower the second.",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_told_with_its_line(
    write: Write, text: str, line: int, problem: str
) -> None:
    file = write(text)
    assert message_of(file) == f"{file}:{line}: {problem}"


def test_all_mistakes_are_told_at_once(write: Write) -> None:
    file = write("seed: x\ncache:\n  block_size: 3\n")
    lines = message_of(file, {"OUTRIDER_NUM_THREADS": "many"}).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"{file}:1",
        f"{file}:3",
        "OUTRIDER_NUM_THREADS",
    ]


def test_a_mistake_is_told_even_where_a_higher_source_hides_it(write: Write) -> None:
    file = write("seed: x\n")
    assert message_of(file, {"OUTRIDER_SEED": "3"}).startswith(f"{file}:1: seed is 'x'")


def test_a_missing_file_is_told_with_the_command_that_writes_one(tmp_path: Path) -> None:
    file = tmp_path / "absent.yaml"
    assert message_of(file) == (
        f"{file}: there is no such file; write one with 'outrider config init {file}'."
    )


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"{tmp_path}: it cannot be read: Is a directory."


def test_a_file_that_is_not_text_is_refused(write: Write) -> None:
    file = write(b"\xff\xfe\x00")
    assert message_of(file) == f"{file}: it is not text; a configuration is YAML in UTF-8."


def test_a_file_with_control_characters_is_refused(write: Write) -> None:
    file = write(b"seed: \x07\n")
    assert message_of(file) == (
        f"{file}: this is not valid YAML: it holds characters YAML does not allow."
    )


def test_an_unknown_variable_is_refused_with_a_hint() -> None:
    assert message_of(env={"OUTRIDER_TARGT_MODEL": "x"}) == (
        "OUTRIDER_TARGT_MODEL is no setting; unset or rename it. "
        "Did you mean 'OUTRIDER_TARGET_MODEL'?"
    )


KUBERNETES = {
    "OUTRIDER_SERVICE_HOST": "10.96.0.17",
    "OUTRIDER_SERVICE_PORT": "50051",
    "OUTRIDER_SERVICE_PORT_GRPC": "50051",
    "OUTRIDER_PORT": "tcp://10.96.0.17:50051",
    "OUTRIDER_PORT_50051_TCP": "tcp://10.96.0.17:50051",
    "OUTRIDER_PORT_50051_TCP_PROTO": "tcp",
    "OUTRIDER_PORT_50051_TCP_PORT": "50051",
    "OUTRIDER_PORT_50051_TCP_ADDR": "10.96.0.17",
    "OUTRIDER_SERVER_SERVICE_HOST": "fd00::17",
    "OUTRIDER_SERVER_PORT": "tcp://[fd00::17]:50051",
}


def test_variables_of_a_kubernetes_service_are_no_settings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG", "outrider.config.sources"):
        assert resolve(env=KUBERNETES) == resolve()
    told = [record.args for record in caplog.records]
    assert [args[0] for args in told if isinstance(args, tuple)] == sorted(KUBERNETES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTRIDER_PORT", "50051"),
        ("OUTRIDER_SERVICE_HOST", "somewhere"),
        ("OUTRIDER_PORT_50051", "tcp://10.96.0.17:50051"),
        ("OUTRIDER_SERVICE", "10.96.0.17"),
    ],
)
def test_a_variable_that_only_resembles_one_of_a_service_is_refused(name: str, value: str) -> None:
    assert message_of(env={name: value}).startswith(f"{name} is no setting")


def test_a_port_in_a_variable_is_still_a_setting() -> None:
    assert resolve(env={"OUTRIDER_SERVER_PORT": "7000"}).config.server.port == 7000


def test_a_wrong_variable_is_named() -> None:
    assert message_of(env={"OUTRIDER_SCHEDULER_LAG": "soon"}) == (
        "OUTRIDER_SCHEDULER_LAG: scheduler.lag is 'soon'; "
        "it must be a whole number from 0 to 1, or unset."
    )


def test_a_wrong_flag_is_named() -> None:
    assert message_of(flags=read_assignments(["cache.block_size=big"])) == (
        "--set: cache.block_size is 'big'; it must be a power of two from 1 to 256."
    )


def test_a_flag_of_an_unknown_path_is_refused() -> None:
    assert message_of(flags={"zzz": SourcedValue(1, "--zzz")}) == "--zzz: zzz is no setting."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache.block_size", "--set got 'cache.block_size'; write it as section.field=value."),
        (
            "cache.blck_size=3",
            "--set: cache.blck_size is no setting. Did you mean 'cache.block_size'?",
        ),
    ],
)
def test_a_malformed_assignment_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_assignments([text])
    assert str(caught.value) == message


def test_an_assignment_may_hold_further_equal_signs_and_the_last_one_holds() -> None:
    given = read_assignments(["target.model=a", " target.model = b=c "])
    assert given["target.model"].value == "b=c"


def test_the_example_changes_nothing(write: Write) -> None:
    resolved = resolve(write(example_text()))
    assert resolved.config == EngineConfig()
    assert set(resolved.origins.values()) == {"default"}


def test_the_example_with_every_line_enabled_sets_every_setting_to_its_default(
    write: Write,
) -> None:
    lines = example_text().splitlines()
    enabled = [line.replace("#", "", 1) if "# " not in line else line for line in lines]
    resolved = resolve(write("\n".join(enabled)))
    assert resolved.config == EngineConfig()
    assert "default" not in resolved.origins.values()


def test_the_example_explains_every_setting() -> None:
    text = example_text()
    assert all(f"# {setting.doc}\n" in text for setting in settings().values())
    assert set(yaml.safe_load(text)) == set(SECTIONS)


# -- secrets ----------------------------------------------------------------------------------

KEY = "a-key-nobody-may-read"


def test_the_key_has_a_short_variable() -> None:
    resolved = resolve(env={"OUTRIDER_API_KEY": KEY})
    assert resolved.config.server.api_key == KEY
    assert resolved.origins["server.api_key"] == "OUTRIDER_API_KEY"


def test_two_variables_of_one_setting_must_agree() -> None:
    both = {"OUTRIDER_API_KEY": KEY, "OUTRIDER_SERVER_API_KEY": KEY}
    assert resolve(env=both).config.server.api_key == KEY
    with pytest.raises(ConfigError, match="both set server.api_key; unset one") as caught:
        resolve(env=both | {"OUTRIDER_API_KEY": "another"})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("wrong", ["a key nobody may read", KEY + "é", [KEY], 12345])
def test_no_error_quotes_a_secret(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_settings({"server.api_key": wrong})
    assert "nobody" not in str(caught.value) and "12345" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve(flags={"server.api_key": SourcedValue(wrong, "--api-key")})
    assert "nobody" not in str(caught.value) and "12345" not in str(caught.value)


def test_two_flags_that_differ_do_not_quote_a_secret() -> None:
    with pytest.raises(ConfigError, match="give only one") as caught:
        merge_given(
            {"server.api_key": SourcedValue(KEY, "--api-key")},
            {"server.api_key": SourcedValue(KEY + "2", "--set")},
        )
    assert KEY not in str(caught.value)


def test_a_config_never_prints_its_secrets_and_can_leave_them_out() -> None:
    config = EngineConfig.from_settings({"server.api_key": KEY, "server.port": 1234})
    assert KEY not in repr(config)
    public = config.without_secrets()
    assert KEY not in repr(public.to_settings())
    assert public.server.port == 1234 and public.server.api_key is None
