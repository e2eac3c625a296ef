# SPDX-License-Identifier: Apache-2.0
"""What one patch file says: its subject, its description and which files it changes, from what.

A patch file is an exported commit::

    From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
    From: Name <address>
    Date: ...
    Subject: [PATCH] area: what changes

    What: one sentence or more;
     a line that goes on is indented.
    Why: ...
    No-subclass: why neither a subclass nor a registration hook would do.
    Forwarded: no | not-needed | URL
    Drop-when: ...

    diff --git a/vllm/file.py b/vllm/file.py
    index <40 digits>..<40 digits> 100644
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.header import decode_header, make_header
from email.parser import BytesHeaderParser

from .errors import PatchFormatError

FIELDS = ("What", "Why", "No-subclass", "Forwarded", "Drop-when")
NO_BLOB = "0" * 40

_FIELD = re.compile(r"([A-Z][A-Za-z-]*):(?:\s+(.*))?")
_FORWARDED = re.compile(r"no|not-needed|https?://\S+")
_GIT_LINE = re.compile(r"diff --git a/(?P<old>.+) b/(?P<new>.+)")
_INDEX_LINE = re.compile(r"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40})(?: [0-7]{6})?")
_HUNK_LINE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SUBJECT_TAG = re.compile(r"^\[PATCH[^\]]*\]\s*")
_SLUG_LENGTH = 64


@dataclass(frozen=True)
class Hunk:
    """One hunk.

    Attributes:
        header: The line that starts with `@@`.
        old_start: Number of its first line in the old file, from 1.
    """

    header: str
    old_start: int


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file.

    Attributes:
        path: Relative to the root of the product, e.g. `vllm/envs.py`.
        old_blob: Git's name for the content before; `NO_BLOB` where the file is new.
        new_blob: Git's name for the content after; `NO_BLOB` where the file is deleted.
        hunks: In the order of the file.
    """

    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One parsed patch.

    Attributes:
        name: File name.
        content: The bytes of the file.
        subject: Subject of the commit.
        description: Body of the commit message.
        changes: One for each file.
    """

    name: str
    content: bytes
    subject: str
    description: str
    changes: tuple[FileChange, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Files that the patch touches."""
        return tuple(change.path for change in self.changes)


def slug(subject: str) -> str:
    """Return the file name of a patch without its suffix: short, lower case, no numbers in front.

    Args:
        subject: Subject of the commit.

    Returns:
        Words of `[a-z0-9]` joined by `-`, at most 64 characters, cut between words where possible;
        empty where the subject has no such word.
    """
    words = re.findall(r"[a-z0-9]+", subject.lower())
    name = "-".join(words)
    if len(name) <= _SLUG_LENGTH:
        return name
    cut = name[: _SLUG_LENGTH + 1]
    return cut.rpartition("-")[0] or cut[:_SLUG_LENGTH]


def parse_patch(name: str, content: bytes) -> Patch:
    """Parse a patch file.

    Args:
        name: Its file name, for messages.
        content: Its bytes.

    Raises:
        PatchFormatError: It is not an exported commit with full blob names, or it renames, changes
            a mode or a binary file: a patch is a hook in a text file.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchFormatError(f"{name} is not UTF-8: {error}", "keep to text files") from None
    header, separator, rest = text.partition("\n\n")
    message = BytesHeaderParser().parsebytes(header.encode())
    raw_subject = message["Subject"]
    if not separator or raw_subject is None or not text.startswith("From "):
        raise PatchFormatError(
            f"{name} is not an exported commit", "import the series, commit, and export it"
        )
    subject = str(make_header(decode_header(re.sub(r"\n(?=[ \t])", "", raw_subject))))
    description, diff = _split_diff(rest)
    changes = _parse_diff(name, diff)
    if not changes:
        raise PatchFormatError(f"{name} changes no file", "drop it")
    return Patch(
        name=name,
        content=content,
        subject=_SUBJECT_TAG.sub("", subject),
        description=description.strip("\n"),
        changes=changes,
    )


def describe(patch: Patch) -> Mapping[str, str]:
    """Return the fields of a patch's description, each folded into one line.

    Raises:
        PatchFormatError: A field is missing, empty, doubled or malformed.
    """
    fields: dict[str, str] = {}
    current = ""
    for line in patch.description.splitlines():
        if not line.strip():
            continue
        if line[0] in " \t" and current:
            fields[current] = f"{fields[current]} {line.strip()}".strip()
        elif match := _FIELD.fullmatch(line):
            current = match[1]
            if current in fields:
                raise _undescribed(patch, f"has {current}: twice")
            fields[current] = (match[2] or "").strip()
        else:
            raise _undescribed(patch, f"has the line {line!r}, neither a field nor indented")
    for field in FIELDS:
        if not fields.get(field):
            raise _undescribed(patch, f"lacks {field}:")
    if not _FORWARDED.fullmatch(fields["Forwarded"]):
        raise _undescribed(
            patch, f"has Forwarded: {fields['Forwarded']!r}, not `no`, `not-needed` or a URL"
        )
    return fields


def _undescribed(patch: Patch, problem: str) -> PatchFormatError:
    return PatchFormatError(
        f"the description of {patch.name} {problem}",
        f"amend the commit's message: it needs {', '.join(f'{field}:' for field in FIELDS)}, "
        "continuation lines indented",
    )


def _split_diff(rest: str) -> tuple[str, str]:
    """Part the body of the message from the diff, which starts at the first `diff --git`."""
    start = re.search(r"^diff --git ", rest, re.MULTILINE)
    return (rest, "") if start is None else (rest[: start.start()], rest[start.start() :])


def _parse_diff(name: str, diff: str) -> tuple[FileChange, ...]:
    lines = diff.split("\n")
    changes: list[FileChange] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("diff --git "):
            # The line break at the end of the file, and nothing else.
            if lines[at]:
                raise _unsupported(name, f"the line {lines[at]!r} after its last hunk")
            at += 1
            continue
        change, at = _parse_file(name, lines, at)
        changes.append(change)
    return tuple(changes)


def _parse_file(name: str, lines: list[str], at: int) -> tuple[FileChange, int]:
    """Parse the change whose `diff --git` line is at `at`; return it and where the next begins."""
    match = _GIT_LINE.fullmatch(lines[at])
    if match is None or match["old"] != match["new"]:
        raise _unsupported(name, f"a renamed or oddly named file ({lines[at]})")
    path = match["new"]
    if not path.startswith("vllm/") or ".." in path.split("/"):
        raise _unsupported(name, f"{path}, which is not in vllm/")
    if path == "vllm/_version.py":
        raise _unsupported(name, f"{path}, which the build writes")
    at += 1
    blobs: tuple[str, str] | None = None
    while at < len(lines) and not lines[at].startswith(("@@ ", "diff --git ")):
        line = lines[at]
        if index := _INDEX_LINE.fullmatch(line):
            blobs = (index["old"], index["new"])
        elif line.startswith(("old mode", "rename ", "copy ", "GIT binary", "Binary files")):
            raise _unsupported(name, f"a change of {path} that is not of text: {line}")
        at += 1
    if blobs is None:
        raise _unsupported(name, f"a change of {path} without full blob names")
    hunks: list[Hunk] = []
    while at < len(lines) and (header := _HUNK_LINE.match(lines[at])):
        hunks.append(Hunk(header=lines[at], old_start=int(header[1])))
        old_left, new_left = int(header[2] or 1), int(header[4] or 1)
        at += 1
        while at < len(lines) and (old_left or new_left):
            kind = lines[at][:1]
            old_left -= kind in ("-", " ", "")
            new_left -= kind in ("+", " ", "")
            at += 1
        while at < len(lines) and lines[at].startswith("\\"):
            at += 1  # "\ No newline at end of file"
    return FileChange(path, blobs[0], blobs[1], tuple(hunks)), at


def _unsupported(name: str, what: str) -> PatchFormatError:
    return PatchFormatError(
        f"{name} holds {what}",
        "a patch is an exported commit (`make patches-export`) that edits text files in vllm/",
    )
