# SPDX-License-Identifier: Apache-2.0
"""Command line: `PYTHONPATH=build_backend python -m reshard_build COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .assemble import write_wheel
from .bases import VARIABLE as BASE_VARIABLE
from .bases import default_release, releases, select_base
from .check import run_checks
from .editable import read_stamp, refresh
from .errors import EditableError, readable_exit
from .export import export_series
from .messages import show_progress
from .metadata import dist_info
from .newbase import STEPS_FOR_A_PERSON, begin
from .operators import report_operators
from .overlay import base_overlay
from .pinned import open_pinned
from .product import Choice, choose, open_product
from .project import Project
from .scratch import write_import, write_tree
from .series import load_series
from .target import VARIABLE, select_wheel, wanted_target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = _parser().parse_args(arguments)
    project = Project(options.root.resolve())
    with show_progress(), readable_exit():
        status: int = options.run(project, options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reshard_build",
        description="Build the fork, and carry its patches to and from git.",
        epilog=f"The base is taken from {BASE_VARIABLE}, the target from {VARIABLE} (cpu or cuda).",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).parents[2],
        help="root of the source tree (default: the one of this file)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    wheel = commands.add_parser("wheel", help="build the wheel")
    wheel.add_argument("directory", nargs="?", type=Path, help="where to (default: dist)")
    wheel.set_defaults(run=_wheel)
    tree = commands.add_parser("tree", help="write the patched vLLM as a git repository to read")
    tree.set_defaults(run=_tree)
    importer = commands.add_parser("import", help="write the same, ready for editing the patches")
    importer.set_defaults(run=_import)
    exporter = commands.add_parser(
        "export", help="write the commits of branch `patches` as patches"
    )
    exporter.set_defaults(run=_export)
    for command in (tree, importer, exporter):
        command.add_argument(
            "repository", nargs="?", type=Path, help="the repository (default: build/tree-BASE)"
        )
    check = commands.add_parser(
        "check", help="prove that patches and overlay fit all wheels of all bases"
    )
    check.add_argument("base", nargs="*", help="only these bases (default: all)")
    check.set_defaults(run=_check)
    beginner = commands.add_parser("base", help="begin a base, or say what is left of it")
    beginner.add_argument("release", help="the release of vLLM")
    beginner.add_argument(
        "--sources", type=Path, help="its unpacked sources, to read the declared operators from"
    )
    beginner.set_defaults(run=_base)
    rebuild = commands.add_parser(
        "rebuild", help="bring the tree of an editable installation up to date"
    )
    rebuild.set_defaults(run=_rebuild)
    return parser


def _wheel(project: Project, options: argparse.Namespace) -> int:
    directory = (options.directory or project.root / "dist").absolute()
    choice = choose(project, os.environ)
    with open_product(project, choice.target, choice.pin, os.environ) as product:
        report_operators(product.pin, product.base)
        metadata = dist_info(project, product.target, product.pin, product.base)
        print(directory / write_wheel(product, metadata, directory))
    return 0


def _tree(project: Project, options: argparse.Namespace) -> int:
    choice = choose(project, os.environ)
    release = choice.config.version
    repository = (options.repository or project.scratch_dir(release)).absolute()
    with open_product(project, choice.target, choice.pin, os.environ) as product:
        write_tree(product, load_series(project.patches_dir(release)), repository)
    print(f"{repository}: tag base, branches patches and fork (checked out)")
    return 0


def _import(project: Project, options: argparse.Namespace) -> int:
    pin = choose(project, os.environ).pin
    repository = (options.repository or project.scratch_dir(pin.version)).absolute()
    patches = load_series(project.patches_dir(pin.version))
    overlay = base_overlay(project, pin.version)
    with open_pinned(pin, os.environ) as base:
        write_import(base, patches, overlay, repository)
    print(f"{repository}: edit the commits of branch patches (checked out), then export")
    return 0


def _export(project: Project, options: argparse.Namespace) -> int:
    release = select_base(project, os.environ).version
    repository = (options.repository or project.scratch_dir(release)).absolute()
    overlay = base_overlay(project, release)
    exported = export_series(repository, project.patches_dir(release), overlay)
    for name in exported.written:
        print(f"wrote   bases/{release}/{name}")
    for name in exported.removed:
        print(f"removed bases/{release}/{name}")
    print(f"{len(exported.names)} patches in the series")
    return 0


def _check(project: Project, options: argparse.Namespace) -> int:
    ok = True
    for proof in run_checks(project, os.environ, options.base):
        print(proof, flush=True)
        ok = ok and proof.ok
    return 0 if ok else 1


def _base(project: Project, options: argparse.Namespace) -> int:
    for step in begin(project, options.release, os.environ, options.sources):
        print(step, flush=True)
    before = [each for each in releases(project) if each != options.release][-1]
    print("left to a person:")
    for number, text in enumerate(STEPS_FOR_A_PERSON, 1):
        print(f"  {number}. {text.format(release=options.release, before=before)}")
    return 0


def _rebuild(project: Project, options: argparse.Namespace) -> int:
    config = select_base(project, os.environ)
    release = config.version
    if os.environ.get(VARIABLE):
        choices = [choose(project, os.environ)]
    else:
        choices = [
            Choice(config, target, select_wheel(target))
            for target in config.targets.values()
            if project.editable_dir(release, target.name).is_dir()
        ]
    if not choices:
        raise EditableError(
            f"there is no editable installation of base {release} in {project.root / 'build'}",
            f"make one with `{_install_command(project, release)}`",
        )
    for choice in choices:
        tree = project.editable_dir(release, choice.target.name)
        before = read_stamp(tree)
        with open_product(project, choice.target, choice.pin, os.environ) as product:
            whole = refresh(product, tree)
        print(f"{tree} is {'written anew' if whole else 'up to date'}: {choice.target.version}")
        if before is not None and before.version != choice.target.version:
            print(
                f"its metadata still says {before.version}: run "
                f"`{_install_command(project, release)}` once more",
                file=sys.stderr,
            )
    return 0


def _install_command(project: Project, release: str) -> str:
    default = default_release(project, wanted_target(os.environ))
    chosen = "" if release == default else f"{BASE_VARIABLE}={release} "
    return f"{chosen}pip install -e ."


if __name__ == "__main__":
    sys.exit(main())
