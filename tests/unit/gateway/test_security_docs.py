"""docs/security.md says what is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outrider.config import settings
from outrider.config.rules import Setting
from outrider.config.schema import MAX_WAITING_OF_SERVERS
from outrider.gateway import (
    body_parser,
    bounds,
    connection_slots,
    preparation,
    session,
    upload_budget,
)
from outrider.gateway.auth.keys_file import read_keys
from outrider.gateway.grpc import connections as grpc_connections
from outrider.gateway.grpc import proto_scan, server
from outrider.gateway.http import connections
from outrider.gateway.http.body import MAX_INLINE_BYTES
from outrider.scheduler import params
from outrider.text.messages import MAX_MESSAGE_FIELDS, MAX_MESSAGES

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()
SETTINGS = [each for path, each in settings().items() if f"| `{path}` |" in TEXT]


def _shown(setting: Setting) -> str:
    match setting.default:
        case None:
            return "unset"
        case ():
            return "none"
        case bool() as flag:
            return str(flag).lower()
        case float() as number:
            return f"{number:g}"
    return str(setting.default)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.path)
def test_the_table_has_the_defaults_and_sentences_of_the_settings(setting: Setting) -> None:
    assert f"| `{setting.path}` | {_shown(setting)} | {setting.doc} |\n" in TEXT


def test_the_table_has_every_limit_of_the_server() -> None:
    limits = {path for path in settings() if path.startswith(("server.max_", "server.tls_"))}
    assert limits <= {each.path for each in SETTINGS}


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("headers of a request", [connections.MAX_HEADER_BYTES, connections.MAX_HEADERS]),
        ("metadata of a call", [server.MAX_METADATA_BYTES]),
        ("slowest body", [connections.MIN_BODY_BYTES_PER_S]),
        ("until they are prepared", [upload_budget.MAX_UPLOAD_BYTES, upload_budget.SMALL_BYTES]),
        ("large JSON", [MAX_INLINE_BYTES, int(body_parser.TIMEOUT_S), body_parser.NUM_CHILDREN]),
        ("fields of a gRPC", [proto_scan.MAX_FIELDS]),
        ("fields of a message", [MAX_MESSAGES, MAX_MESSAGE_FIELDS]),
        ("reads nothing", [int(connections.WRITE_TIMEOUT_S)]),
        ("idle connection |", [connections.KEEP_ALIVE_S, server.MAX_IDLE_MS // 1000]),
        (
            "idle connection without a valid key",
            [connection_slots.UNKNOWN_IDLE_S, int(grpc_connections.UNKNOWN_IDLE_S)],
        ),
        ("log-probabilities of a request", [bounds.MAX_LOGPROBS_OF_REQUEST]),
        ("wait for a slow reader", [session.MAX_UNREAD]),
        (
            "stop strings",
            [params.MAX_STOPS, params.MAX_LOGIT_BIASES, params.MAX_STOP_TOKEN_IDS],
        ),
        ("being prepared", [preparation.MAX_PREPARING, preparation.MAX_TEMPLATES]),
        ("max_waiting` lets", [MAX_WAITING_OF_SERVERS]),
    ],
)
def test_bounds_that_are_no_settings_are_told_as_they_are(line: str, numbers: list[int]) -> None:
    (found,) = [each for each in TEXT.splitlines() if line in each]
    for number in numbers:
        assert str(number) in found


def test_the_example_file_is_one(tmp_path: Path) -> None:
    block = TEXT.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block)
    file = tmp_path / "keys.yaml"
    file.write_text(block)
    (key,) = read_keys(file)
    assert key.caller.name == "alice" and key.caller.limits.max_concurrent == 8
