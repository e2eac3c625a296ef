# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-plan`: the command `kv-plan` as a subcommand of vLLM's command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

NAME = "kv-plan"

_PROG = f"vllm {NAME}"


def reserve_stdout(arguments: Sequence[str]) -> None:
    """Send warnings to standard error, and log nothing less, when `kv-plan` is asked for.

    Its standard output is one JSON object, or one table, for another program to read. vLLM logs to
    standard output by default, and begins to do so while the other subcommands are imported.

    Args:
        arguments: The process's arguments, its own name first.
    """
    if arguments[1:2] == [NAME]:
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
                handler.setLevel(logging.WARNING)


class KVPlanSubcommand(CLISubcommand):
    """The `kv-plan` subcommand of the vLLM CLI."""

    name = NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Print the plan; exit with 2 and one line for a layout that vLLM could not run."""
        from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.command import run

        if status := run(args, _PROG):
            sys.exit(status)

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        """Add the arguments of this subcommand."""
        # Only here: what this imports of vLLM logs, and `reserve_stdout` comes before that.
        from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.command import prepare

        parser = subparsers.add_parser(
            self.name, prog=_PROG, help="Plan KV-cache transfer between two parallel layouts."
        )
        prepare(parser)
        # vLLM's own parser lists groups of options, for commands with hundreds of them.
        parser.format_help = MethodType(argparse.ArgumentParser.format_help, parser)
        return parser


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [KVPlanSubcommand()]
