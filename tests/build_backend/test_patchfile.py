# SPDX-License-Identifier: Apache-2.0
"""Parsing patch files."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_build.errors import PatchFormatError
from reshard_build.git import blob_id
from reshard_build.patchfile import NO_BLOB, Patch, describe, parse_patch, slug

CORE = "vllm/engine/core.py"


def _parse(path: Any) -> Patch:
    return parse_patch(path.name, path.read_bytes())


def test_parts_of_a_patch(source_tree: Any) -> None:
    """Subject, files, blobs and hunks are read from what git writes."""
    before = b"a\n" * 3 + b"-- \n" + b"b\n" * 20 + b"diff --git is just text\n"
    after = b"x\n" + before[2:-3] + b"z\n"
    path = source_tree.add_patch("area: change things", {CORE: before}, {CORE: after})
    patch = _parse(path)
    assert patch.subject == "area: change things"
    assert patch.paths == (CORE,)
    change = patch.changes[0]
    assert (change.old_blob, change.new_blob) == (blob_id(before), blob_id(after))
    assert [hunk.old_start for hunk in change.hunks] == [1, 24]


def test_new_and_deleted_files(source_tree: Any) -> None:
    """A file that appears has no blob before, one that goes has none after."""
    old, new = "vllm/old.py", "vllm/new.py"
    path = source_tree.add_patch("swap files", {old: b"old\n"}, {new: b"completely\nother\n"})
    by_path = {change.path: change for change in _parse(path).changes}
    assert by_path[new].old_blob == NO_BLOB
    assert by_path[old].new_blob == NO_BLOB


def test_missing_line_break_at_the_end(source_tree: Any) -> None:
    """Git's remark about the last line is not taken for a part of the file."""
    path = source_tree.add_patch("trim", {CORE: b"a\nb\n"}, {CORE: b"a\nb"})
    assert len(_parse(path).changes[0].hunks) == 1


def test_long_and_foreign_subjects_are_unfolded(source_tree: Any) -> None:
    """A subject that mail encodes and folds comes back as it was."""
    subject = "käse: " + "sehr lang " * 12 + "und zu Ende"
    path = source_tree.add_patch("plain", {CORE: b"a\n"}, {CORE: b"b\n"})
    text = path.read_text()
    path.unlink()
    path = source_tree.add_patch(subject, {CORE: b"a\n"}, {CORE: b"b\n"})
    assert "=?" in path.read_text() and path.read_text() != text
    assert _parse(path).subject == subject


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({CORE: b"a\n" * 9}, {"vllm/moved.py": b"a\n" * 9}, "renamed"),
        ({CORE: b"\0"}, {CORE: b"\0\1"}, "not of text"),
        ({"setup.py": b"a\n"}, {"setup.py": b"b\n"}, "which is not in vllm/"),
        ({"vllm/_version.py": b"a\n"}, {"vllm/_version.py": b"b\n"}, "which the build writes"),
    ],
)
def test_what_no_patch_may_hold(
    source_tree: Any, before: dict[str, bytes], after: dict[str, bytes], message: str
) -> None:
    """Renames, binary files and files outside of the package are refused."""
    with pytest.raises(PatchFormatError, match=message):
        _parse(source_tree.add_patch("odd", before, after))


def test_short_blob_names_are_refused(source_tree: Any) -> None:
    """Without full blob names exactness could not be proved."""
    path = source_tree.add_patch("short", {CORE: b"a\n"}, {CORE: b"b\n"})
    text = re.sub(r"index (\w{7})\w+\.\.(\w{7})\w+", r"index \1..\2", path.read_text())
    with pytest.raises(PatchFormatError, match="without full blob names"):
        parse_patch("short.patch", text.encode())


@pytest.mark.parametrize("content", [b"", b"just text\n\nand more\n", b"\xff\xfe\n\n"])
def test_what_is_no_commit_is_refused(content: bytes) -> None:
    """A file that git did not export is named."""
    with pytest.raises(PatchFormatError, match=r"other\.patch"):
        parse_patch("other.patch", content)


def test_description_fields_are_unfolded(source_tree: Any) -> None:
    """Continuation lines belong to their field."""
    patch = _parse(source_tree.add_patch("good", {CORE: b"a\n"}, {CORE: b"b\n"}))
    fields = describe(patch)
    assert fields["What"] == "one line changes, and this sentence goes on."
    assert fields["Forwarded"] == "no"


GOOD = {
    "What": "a",
    "Why": "b",
    "No-subclass": "c",
    "Forwarded": "https://example.org/pull/1",
    "Drop-when": "d",
}


def _described(text: str) -> Patch:
    return Patch("some.patch", b"", "subject", text, ())


@pytest.mark.parametrize("field", GOOD)
def test_each_field_is_required(field: str) -> None:
    """A description without one of the fields, or with an empty one, is refused by its name."""
    lines = [f"{name}: {value}" for name, value in GOOD.items()]
    describe(_described("\n".join(lines)))
    without = [line for line in lines if not line.startswith(f"{field}:")]
    for text in ("\n".join(without), "\n".join([*without, f"{field}:"])):
        with pytest.raises(PatchFormatError, match=rf"some\.patch lacks {field}:"):
            describe(_described(text))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("Why: again", "Why: twice"),
        ("free text", "neither a field nor indented"),
    ],
)
def test_other_lines_are_refused(extra: str, message: str) -> None:
    """A doubled field and loose text are refused."""
    text = "\n".join([*(f"{name}: {value}" for name, value in GOOD.items()), extra])
    with pytest.raises(PatchFormatError, match=message):
        describe(_described(text))


@pytest.mark.parametrize("value", ["yes", "No", "maybe later", "ftp://example.org"])
def test_forwarded_follows_dep3(value: str) -> None:
    """`Forwarded:` is `no`, `not-needed` or a URL."""
    text = "\n".join(f"{n}: {v}" for n, v in {**GOOD, "Forwarded": value}.items())
    with pytest.raises(PatchFormatError, match="Forwarded"):
        describe(_described(text))


@given(st.text(max_size=200))
@settings(derandomize=True)
def test_slug_is_a_file_name(subject: str) -> None:
    """A slug has only lower-case words, is short, and slugging it again changes nothing."""
    name = slug(subject)
    assert re.fullmatch(r"([a-z0-9]+(-[a-z0-9]+)*)?", name)
    assert len(name) <= 64
    assert slug(name) == name


def test_slug_cuts_between_words() -> None:
    """A long subject loses whole words only."""
    subject = "engine: " + " ".join(["twelveletter"] * 10)
    assert slug(subject) == "engine-" + "-".join(["twelveletter"] * 4)
