# SPDX-License-Identifier: Apache-2.0
"""The product's metadata: this project's own, with the base wheel's requirements, rewritten."""

from __future__ import annotations

import email.message
import email.policy
from collections.abc import Iterable, Iterator, Mapping
from email.parser import BytesParser
from typing import Any

from packaging.metadata import ExceptionGroup, Metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name

from .archive import BaseWheel
from .base import Rewrites, Target, WheelPin
from .errors import ConfigError, MetadataError
from .project import Project

METADATA_VERSION = "2.4"
GENERATOR = "reshard_build"

# Where the base's own licence files go, beside this project's.
_UPSTREAM_LICENSES = "vllm"
# What is taken from the base's metadata directory as it is.
_KEPT = ("entry_points.txt", "top_level.txt")
_TAKEN_FROM_BASE = ("Requires-Python", "Requires-Dist", "Provides-Extra")
_CONTENT_TYPES = {".md": "text/markdown", ".rst": "text/x-rst", ".txt": "text/plain"}


def dist_info(project: Project, target: Target, pin: WheelPin, base: BaseWheel) -> dict[str, bytes]:
    """Return the files of the product's metadata directory, but for RECORD.

    Args:
        project: Source tree.
        target: What is built.
        pin: Names the tags of the product.
        base: The open base wheel.

    Returns:
        Content by path relative to the metadata directory.

    Raises:
        MetadataError: The base's metadata is not of the expected form.
        ConfigError: `pyproject.toml` names a file that does not exist.
    """
    files = {
        "METADATA": product_metadata(project, target, base),
        "WHEEL": wheel_file(pin.tags, pure=False),
    }
    for name in _KEPT:
        if name in base.dist_info_names:
            files[name] = base.read_dist_info(name)
    for name, content in own_licenses(project, project.table()):
        files[f"licenses/{name}"] = content
    for name in base.dist_info_names:
        if name.startswith("licenses/"):
            kept = f"licenses/{_UPSTREAM_LICENSES}/{name.removeprefix('licenses/')}"
            files[kept] = base.read_dist_info(name)
    return files


def product_metadata(project: Project, target: Target, base: BaseWheel) -> bytes:
    """Return the METADATA file of the product.

    Args:
        project: Whose name, summary, README and licence the product bears.
        target: Version and rewrites of requirements.
        base: What needs which Python and which other distributions.

    Raises:
        MetadataError: The base's metadata is invalid, or a rewrite of its requirements is stale.
        ConfigError: `pyproject.toml` names a file that does not exist.
    """
    upstream = BytesParser(policy=email.policy.compat32).parsebytes(base.read_dist_info("METADATA"))
    table = project.table()
    fields = list(own_fields(project, table, target.version))
    fields += [
        ("License-File", f"{_UPSTREAM_LICENSES}/{name.removeprefix('licenses/')}")
        for name in base.dist_info_names
        if name.startswith("licenses/")
    ]
    fields += [("Requires-Python", str(value)) for value in upstream.get_all("Requires-Python", [])]
    fields += [("Provides-Extra", str(value)) for value in upstream.get_all("Provides-Extra", [])]
    try:
        requirements = [Requirement(str(v)) for v in upstream.get_all("Requires-Dist", [])]
    except InvalidRequirement as error:
        raise MetadataError(
            f"base wheel {base.path.name} has an invalid requirement: {error}", "pin another one"
        ) from None
    rewritten = rewrite_requirements(requirements, target.rewrites, base.path.name)
    fields += [("Requires-Dist", str(requirement)) for requirement in rewritten]
    return render(project, table, fields)


def sdist_metadata(project: Project, version: str) -> bytes:
    """Return the PKG-INFO file of a source distribution.

    What depends on the target is known only when a wheel is built, and marked as dynamic.

    Args:
        project: Source tree.
        version: Version of the fork without a target's suffix.

    Raises:
        ConfigError: `pyproject.toml` names a file that does not exist.
    """
    table = project.table()
    fields = list(own_fields(project, table, version))
    fields += [("Dynamic", name) for name in (*_TAKEN_FROM_BASE, "License-File")]
    return render(project, table, fields)


def rewrite_requirements(
    requirements: Iterable[Requirement], rewrites: Rewrites, source: str
) -> list[Requirement]:
    """Apply the rewrites of a target to the requirements of its base wheel.

    Requirements that belong to an extra are left alone.

    Args:
        requirements: Those of the base.
        rewrites: What to replace, drop and add.
        source: Whose requirements they are, for messages.

    Returns:
        The requirements of the product, in the order of the base.

    Raises:
        MetadataError: A rewrite has nothing to do, so it would hide what the base now says.
    """
    replacements = {canonicalize_name(r.name): r for r in rewrites.replace}
    drops = {_drop_key(r): r for r in rewrites.drop}
    replaced: set[str] = set()
    dropped: set[str] = set()
    result: list[Requirement] = []
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if _of_extra(requirement):
            result.append(requirement)
        elif drop := {str(requirement), name} & drops.keys():
            dropped |= drop
        elif name in replacements:
            if name not in replaced:
                result.append(replacements[name])
            replaced.add(name)
        else:
            result.append(requirement)
    stale = [r for n, r in replacements.items() if n not in replaced]
    stale += [r for key, r in drops.items() if key not in dropped]
    present = {canonicalize_name(r.name) for r in result if not _of_extra(r)}
    stale += [r for r in rewrites.add if canonicalize_name(r.name) in present]
    if stale:
        raise MetadataError(
            f"base.toml rewrites the requirement {stale[0]}, which does not fit those of {source}",
            "adapt the lists replace, drop and add of the target",
        )
    return [*result, *rewrites.add]


def _drop_key(drop: Requirement) -> str:
    """Return the name of a project, or the text of one requirement on it."""
    return canonicalize_name(drop.name) if str(drop) == drop.name else str(drop)


def _of_extra(requirement: Requirement) -> bool:
    return requirement.marker is not None and "extra" in str(requirement.marker)


def own_fields(
    project: Project, table: Mapping[str, Any], version: str
) -> Iterator[tuple[str, str]]:
    """Yield the fields that a `[project]` table tells, but for what it requires.

    Args:
        project: Source tree.
        table: That of the distribution.
        version: Of the distribution.

    Raises:
        ConfigError: The table names a file that does not exist.
    """
    yield "Metadata-Version", METADATA_VERSION
    yield "Name", table["name"]
    yield "Version", version
    yield "Summary", table["description"]
    if keywords := table.get("keywords"):
        yield "Keywords", ",".join(keywords)
    if authors := [author["name"] for author in table.get("authors", ()) if "name" in author]:
        yield "Author", ", ".join(authors)
    for label, url in table.get("urls", {}).items():
        yield "Project-URL", f"{label}, {url}"
    yield "License-Expression", table["license"]
    for name, _ in own_licenses(project, table):
        yield "License-File", name
    for classifier in table.get("classifiers", ()):
        yield "Classifier", classifier
    readme = project.root / table["readme"]
    yield "Description-Content-Type", _CONTENT_TYPES.get(readme.suffix, "text/plain")


def own_licenses(project: Project, table: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the licence files that a `[project]` table names, with their content.

    Raises:
        ConfigError: One does not exist.
    """
    for name in table.get("license-files", ()):
        yield name, _read(project, name)


def _read(project: Project, name: str) -> bytes:
    try:
        return (project.root / name).read_bytes()
    except OSError:
        raise ConfigError(
            f"a [project] table names {name}, which cannot be read in {project.root}",
            "build from a complete source tree",
        ) from None


def render(project: Project, table: Mapping[str, Any], fields: Iterable[tuple[str, str]]) -> bytes:
    """Write a core-metadata file with the README as its body, and validate it.

    Args:
        project: Source tree.
        table: Names the README.
        fields: All of them, in order.

    Raises:
        MetadataError: The fields are not valid.
        ConfigError: The README does not exist.
    """
    message = email.message.EmailMessage(
        policy=email.policy.EmailPolicy(utf8=True, max_line_length=0)
    )
    for name, value in fields:
        message.add_header(name, value)
    head = message.as_bytes()
    content = head.rstrip(b"\n") + b"\n\n" + _read(project, table["readme"])
    try:
        Metadata.from_email(content)
    except ExceptionGroup as group:
        raise MetadataError(
            f"the metadata of {table['name']} would be invalid: {group.exceptions[0]}",
            "correct its [project] table",
        ) from None
    return content


def wheel_file(tags: Iterable[Tag], *, pure: bool) -> bytes:
    """Return the WHEEL file.

    Args:
        tags: Those of the file name, which decides: the base's own WHEEL file may name others.
        pure: Whether there is nothing compiled in it.
    """
    lines = ["Wheel-Version: 1.0", f"Generator: {GENERATOR}"]
    lines += [f"Root-Is-Purelib: {str(pure).lower()}"]
    lines += sorted(f"Tag: {tag}" for tag in tags)
    return ("\n".join(lines) + "\n").encode()
