"""Commands that also accept the options of `vllm serve`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from outrider.cli.vllm_options import keep_translation, translate
from outrider.cli.vllm_scan import KNOWN, OwnOptions, scan
from outrider.config.rules import did_you_mean
from outrider.errors import ConfigError


class SettingsCommand(TyperCommand):
    """A command with a configuration, which also accepts the options of `vllm serve`."""

    starts_server = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = OwnOptions.of(self)
        scanned = scan(args, own)
        found = translate(scanned.found, starts_server=self.starts_server)
        # The parser reports a single unknown option, unless there are more problems.
        if len(scanned.unknown) + len(found.problems) > len(scanned.unknown[:1]):
            known = [name.replace("_", "-") for name in sorted(KNOWN)]
            known += [option[2:] for option in own.takes_value if option.startswith("--")]
            for option in scanned.unknown:
                hint = did_you_mean(option[2:], known).replace("'", "'--", 1)
                found.problems.append(f"there is no option {option}.{hint}")
            if scanned.unknown:  # the parser would take their values for arguments
                raise ConfigError("\n".join(found.problems))
        keep_translation(ctx, found)
        try:
            return super().parse_args(ctx, scanned.args)
        except Exception as error:
            if not found.problems or not hasattr(error, "format_message"):
                raise
            raise ConfigError("\n".join([*found.problems, error.format_message()])) from None


class LocalCommand(SettingsCommand):
    """A command that generates in its own process: server options have no effect."""

    starts_server = False
