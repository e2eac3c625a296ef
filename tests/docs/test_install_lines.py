# SPDX-License-Identifier: Apache-2.0
"""No line of a page or an example installs this project by its name.

No package index has this project's wheels, so that a bare name would install whatever an index has
under it. A line names a file, or looks nowhere but in a directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.docs.snippets import code_in

ROOT = Path(__file__).parents[2]
PUBLISHED = {"lm-eval", "ray", "vllm", "vllm-router"}
"""Projects of others that pages tell to install by name."""

_COMMAND = re.compile(r"\bpip3?\s+(?:install|wheel|download)\s+(.*)")
_WITH_VALUE = {
    "-c", "--constraint", "--config-settings", "-f", "--find-links", "-i", "--index-url",
    "--extra-index-url", "-r", "--requirement", "-t", "--target", "-w", "--wheel-dir",
}  # fmt: skip


def pages() -> Iterator[Path]:
    """All that people copy lines from."""
    yield from sorted(ROOT.glob("*.md"))
    for directory in ("docs", "examples", "plugin"):
        for path in sorted((ROOT / directory).rglob("*")):
            if path.is_file() and path.suffix not in {".svg", ".py", ".pyc", ".json"}:
                yield path


def arguments(page: str, *, is_markdown: bool) -> Iterator[list[str]]:
    """What each command of pip on a page is given."""
    for text in code_in(page) if is_markdown else [page]:
        for line in text.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|\||[;|]", line):
                for given in _COMMAND.findall(command):
                    yield shlex.split(given, comments=True)


def by_name(given: list[str]) -> list[str]:
    """The projects that a command asks an index for, but for those that are published there."""
    words, names, only_here = iter(given), [], {"--no-index": False, "--find-links": False}
    for word in words:
        option, _, value = word.partition("=")
        if option in {"-f", "--find-links"}:
            only_here["--find-links"] = True
        elif option == "--no-index":
            only_here["--no-index"] = True
        if option in _WITH_VALUE:
            if not value:
                next(words, None)
        elif word in {"-e", "--editable"} or word.startswith("-"):
            continue
        elif not re.search(r"/|\.whl(\[|$)|^\.(\[|$)", word):
            names.append(canonicalize_name(re.split(r"[\[<>=!~;@ ]", word)[0]))
    return [] if all(only_here.values()) else [name for name in names if name not in PUBLISHED]


def test_no_page_installs_this_project_by_its_name():
    """Each line names a file, or has `--no-index` and `--find-links`."""
    found = {
        path.relative_to(ROOT).as_posix(): list(
            arguments(path.read_text(encoding="utf-8"), is_markdown=path.suffix == ".md")
        )
        for path in pages()
    }
    bad = [(name, given) for name, lines in found.items() for given in lines if by_name(given)]
    assert not bad
    for name in (
        "README.md",
        "docs/plugin.md",
        "docs/bases.md",
        "plugin/README.md",
        "examples/README.md",
        "examples/kubernetes/Dockerfile",
    ):
        assert found[name], f"{name} has no line that installs anything"


@pytest.mark.parametrize(
    "line",
    [
        "pip install vllm-kv-reshard",
        "pip install vllm_kv_reshard==1.0.0   # the wheel in dist/",
        "pip install --find-links dist vllm-kv-reshard",
        "pip install --find-links=dist 'vllm-kv-reshard[vllm]'",
        "pip install --no-index vllm-kv-reshard",
        "cd dist && python3 -m pip install -q ray \\\n  vllm-kv-reshard",
        "RUN uv pip install --upgrade vllm-kv-reshard",
        "pip download --no-deps -w dist vllm-kv-reshard",
        "pip install kv-plan",
    ],
)
@pytest.mark.parametrize("shape", ["```bash\n{}\n```\n", "1. Install:\n\n   ```\n   {}\n   ```\n"])
def test_line_that_asks_an_index_is_found(line, shape):
    """Whatever pip is called, and wherever on a page."""
    for page, is_markdown in ((shape.format(line), True), (line, False)):
        assert [by_name(given) for given in arguments(page, is_markdown=is_markdown)] not in (
            [],
            [[]],
        )


def test_name_within_a_sentence_is_found():
    """Also where the line is wrapped within it."""
    (given,) = arguments("Run `pip\n  install 'vllm-kv-reshard[vllm]'` now.", is_markdown=True)
    assert by_name(given) == ["vllm-kv-reshard"]


@pytest.mark.parametrize(
    "line",
    [
        "pip install dist/vllm_kv_reshard-*.whl   # vllm-kv-reshard, on every node",
        "pip install 'dist/vllm_kv_reshard-1.0.0-py3-none-any.whl[vllm]'",
        "pip install --no-index --find-links dist vllm-kv-reshard",
        "pip install --no-index --find-links=dist vllm-kv-reshard",
        "VLLM_TARGET_DEVICE=cpu pip wheel --no-deps --wheel-dir dist .",
        "pip install -r requirements/test.txt -e .",
        "pip install 'lm-eval[api]' vllm-router==0.1.17; echo vllm-kv-reshard",
    ],
)
def test_line_that_names_files_is_none(line):
    """Nor is one that installs what others have published."""
    (given,) = arguments(line, is_markdown=False)
    assert by_name(given) == []
