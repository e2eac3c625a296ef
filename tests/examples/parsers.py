# SPDX-License-Identifier: Apache-2.0
"""What the examples start, parsed by the parsers of the programs themselves."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from tests.bases import RELEASE


def parse_vllm_serve(args: Sequence[str]) -> argparse.Namespace:
    """Parse what follows `vllm serve`, with options by their full names only.

    Raises:
        AssertionError: an option is abbreviated, unknown, or has a value that it cannot have.
    """
    # Where it stands in 0.22.1, and since.
    places = "vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args"
    make_arg_parser = importlib.import_module(places[RELEASE != "0.22.1"]).make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return _parse(make_arg_parser(FlexibleArgumentParser()), args)


def parse_vllm_router(args: Sequence[str]) -> Any:
    """Parse the options of `vllm-router`, as it does when it starts.

    Raises:
        AssertionError: an option is abbreviated, unknown, or has a value that it cannot have.
    """
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return RouterArgs.from_cli_args(_parse(parser, args), use_router_prefix=False)


def parse_ray_start(args: Sequence[str]) -> dict[str, Any]:
    """Parse what follows `ray start`, without starting anything.

    Raises:
        click.ClickException: an option is unknown or has a value that it cannot have.
    """
    with warnings.catch_warnings():
        # Ray's own, about its own use of Pydantic.
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import start

    return dict(start.make_context("start", list(args)).params)


def _parse(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
    for word in args:
        name = word.partition("=")[0]
        # A value may begin so, too, but none in the examples does.
        if name.startswith("--"):
            assert name in parser._option_string_actions, f"there is no {name}"
    try:
        return parser.parse_args(list(args))
    except SystemExit as refusal:
        raise AssertionError(f"refused: {args}") from refusal
