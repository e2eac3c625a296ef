# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-plan`, through vLLM's parser and once through the real command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli import main
from vllm.entrypoints.cli.kv_plan import cmd_init, reserve_stdout

LAYOUTS = ("--prefill", "tp=2,pp=2", "--decode", "tp=1")
SIZES = ("--num-layers", "4", "--num-kv-heads", "6")


@pytest.fixture
def subcommand():
    """The subcommand, and its parser."""
    (command,) = cmd_init()
    subparsers = FlexibleArgumentParser().add_subparsers(parser_class=FlexibleArgumentParser)
    return command, command.subparser_init(subparsers)


@pytest.mark.parametrize(
    ("arguments", "stream"), [(["vllm", "kv-plan"], "stderr"), (["vllm", "serve"], "stdout")]
)
def test_logs_leave_standard_output_to_the_plan_only(monkeypatch, arguments, stream):
    """Other subcommands keep logging where they did."""
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    reserve_stdout(arguments)
    assert handler.stream is getattr(sys, stream)


def test_real_command_prints_nothing_but_json():
    """The installed CLI lists the subcommand, and its whole standard output is the object."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kv-plan"]
    result = subprocess.run(
        [*command, *LAYOUTS, *SIZES, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(result.stdout)["prefill"]["mesh"]["pp_size"] == 2


def test_subcommand_prints_what_the_command_prints(subcommand, capsys):
    """Both are one program."""
    command, parser = subcommand
    command.cmd(parser.parse_args([*LAYOUTS, *SIZES]))
    printed = capsys.readouterr()
    assert main([*LAYOUTS, *SIZES]) == 0
    assert capsys.readouterr() == printed


def test_error_names_the_subcommand_and_ends_with_status_2(subcommand, capsys):
    """The line begins with what was typed."""
    command, parser = subcommand
    with pytest.raises(SystemExit) as ended:
        command.cmd(parser.parse_args([*LAYOUTS, "--num-layers", "4"]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("vllm kv-plan: error: --num-kv-heads is missing")


def test_help_lists_every_option(subcommand):
    """`--help` says what each option is for, also with vLLM's parser, which would list groups."""
    text = subcommand[1].format_help()
    assert text.startswith("usage: vllm kv-plan --prefill")
    for option in ("--prefill", "--decode", "--model", "--svg", "--json"):
        assert f"{option} " in text
    assert "Config Groups" not in text
