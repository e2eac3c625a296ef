# SPDX-License-Identifier: Apache-2.0
"""Takes what pages link to outside of `docs/` into the site, so that their links work in both.

Pages link to tests, to modules and to the README by relative path, as somebody needs who reads them
in the repository. The site has no repository beside it, so a copy of each target becomes part of
it: Markdown as a page, other files as text, directories as lists of what is in them. A copied
page's links into `docs/` lead to the site's own pages, so that each is there once, and is found
once. MkDocs searches pages only, neither text nor lists. It checks all these links like others,
and a target that does not exist is a broken link.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_TARGET = re.compile(r"(\]\(|^\[[^]]+\]:\s+)([^)\s#]+)", re.MULTILINE)
_COPIES = "repository"
"""Where the copies are within the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the targets of links that leave `docs/`, and the targets of links on those."""
    docs = Path(config.docs_dir).resolve()
    root = Path(config.config_file_path).parent.resolve()
    nav = {source for source in _strings(config.nav) if source.startswith("../")}
    pending = [*sorted(nav), *_targets(files)]
    while pending:
        source = pending.pop()
        path = (docs / source).resolve()
        if files.get_file_from_path(source) or not path.exists() or root not in path.parents:
            continue
        if docs in path.parents and path.is_file():
            continue
        added = _copy(source, path, path.relative_to(root), config)
        files.append(added)
        if added.is_documentation_page():
            pending += _targets([added])
    return files


def _targets(files: Files | list[File]) -> list[str]:
    """What pages link to outside of `docs/`, relative to it."""
    found = []
    for file in files:
        if not file.is_documentation_page():
            continue
        for _, target in _TARGET.findall(file.content_string):
            if "://" in target or target.startswith("/"):
                continue
            source = normpath(PurePosixPath(file.src_uri).parent / target)
            if source.startswith("../"):
                found.append(source)
    return found


def _copy(source: str, path: Path, name: Path, config: MkDocsConfig) -> File:
    """The file of the site that stands for one in the repository."""
    # What the navigation does not name is reached by the links that asked for it.
    listed = InclusionLevel.NOT_IN_NAV
    if path.suffix == ".md":
        content = _TARGET.sub(
            lambda found: found[1] + _from_copy(found[2], path, Path(config.docs_dir).resolve()),
            path.read_text(encoding="utf-8"),
        )
        file = File.generated(config, source, content=content, inclusion=listed)
        file.dest_uri = f"{_COPIES}/{name.with_suffix('').as_posix()}/index.html"
        return file
    if path.is_dir():
        names = sorted(f"{each.name}{'/' * each.is_dir()}" for each in path.iterdir())
        lines = [each for each in names if not each.startswith(("__", "."))]
        content = "\n".join([f"{name.as_posix()}/", "", *lines, ""])
        file = File.generated(config, source, content=content, inclusion=listed)
    else:
        file = File.generated(config, source, abs_src_path=str(path), inclusion=listed)
    file.dest_uri = f"{_COPIES}/{name.as_posix()}.txt"
    return file


def _from_copy(target: str, page: Path, docs: Path) -> str:
    """What a link on a copied page has to say: into `docs/`, the path from there.

    From outside of `docs/`, no relative path of MkDocs's leads into it.
    """
    path = (page.parent / target).resolve()
    if docs in path.parents and path.is_file():
        return f"/{path.relative_to(docs).as_posix()}"
    return target


def _strings(nav: object) -> list[str]:
    """All pages that the navigation names."""
    if isinstance(nav, str):
        return [nav]
    if isinstance(nav, dict):
        nav = list(nav.values())
    return [each for item in nav for each in _strings(item)] if isinstance(nav, list) else []
