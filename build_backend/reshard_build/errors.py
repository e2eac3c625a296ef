# SPDX-License-Identifier: Apache-2.0
"""The errors that a user of the build can meet.

This module is imported before the Python version is known to be new enough, so it keeps to
syntax that Python 3.8 parses.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Iterator  # noqa: UP035 - see the module docstring


class BuildError(Exception):
    """Base of all errors that the build reports: one line, what is wrong and what to do.

    Args:
        problem: Names the thing, the values and the requirement.
        remedy: What the reader can do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(problem + ("; " + remedy if remedy else ""))


class PythonTooOldError(BuildError):
    """The running Python is older than the backend or the base needs."""


class ConfigError(BuildError):
    """A `base.toml`, `bases/default`, `pyproject.toml` or `plugin.toml` is incomplete or wrong."""


class UnknownBaseError(BuildError):
    """`VLLM_RESHARD_BASE` names no known base."""


class TargetError(BuildError):
    """`VLLM_TARGET_DEVICE` names no target of the base."""


class PlatformError(BuildError):
    """The pinned base wheels do not run on this machine or operating system."""


class FetchError(BuildError):
    """The base wheel could not be downloaded."""


class ChecksumError(BuildError):
    """A downloaded file is not the pinned one."""


class BaseWheelError(BuildError):
    """The base wheel is damaged or not of the expected shape."""


class OperatorError(BuildError):
    """Compiled files of another release lack operators, or have others, that a base calls."""


class ProductError(BuildError):
    """The wheel that was written is not valid."""


class MetadataError(BuildError):
    """The metadata of the product cannot be derived from that of the base wheel."""


class GitError(BuildError):
    """Git is missing, or failed where the input was sound."""


class SeriesError(BuildError):
    """The `series` of a base and its patch files disagree."""


class PatchFormatError(BuildError):
    """A patch file is not a described, exported commit."""


class PatchDriftError(BuildError):
    """A patch does not apply exactly to the base.

    Args:
        patch: File name of the patch.
        path: Path of the file that does not match, relative to the base.
        hunk: Header of the first hunk that fails.
        reason: Why it does not apply.
        remedy: What the reader can do about it.
    """

    def __init__(self, patch: str, path: str, hunk: str, reason: str, remedy: str) -> None:
        self.patch = patch
        self.path = path
        self.hunk = hunk
        self.reason = reason
        super().__init__(
            f"patch {patch} does not apply to {path} at hunk {hunk}: {reason}",
            remedy,
        )


class OverlayError(BuildError):
    """An overlay file stands where upstream has one."""


class EditableError(BuildError):
    """The tree of an editable installation is missing, or the distribution cannot have one."""


class ScratchError(BuildError):
    """The scratch git repository is not in a state to be exported or replaced."""


class DuplicateError(BuildError):
    """A patch defines what the base defines already."""


class TypeCheckError(BuildError):
    """The overlay uses something of the base that is not there, or is not used so."""


class SettingError(BuildError):
    """A config setting of the frontend, or `SOURCE_DATE_EPOCH`, has a value that cannot be used."""


class PluginError(BuildError):
    """The overlay cannot be shipped as a plugin."""


def require_python(version: tuple[int, ...], minimum: tuple[int, int] = (3, 10)) -> None:
    """Refuse a Python that can neither run the backend nor the product.

    Args:
        version: `sys.version_info` of the running interpreter.
        minimum: Oldest version that will do.

    Raises:
        PythonTooOldError: The version is older than the minimum.
    """
    if tuple(version[:2]) < minimum:
        found = ".".join(str(part) for part in version[:3])
        needed = ".".join(str(part) for part in minimum)
        raise PythonTooOldError(
            f"Python {found} ({sys.executable}) is too old: vllm needs Python {needed} or newer",
            f"install with a newer interpreter, e.g. python{needed} -m pip install .",
        )


@contextmanager
def readable_exit() -> Iterator[None]:
    """Turn a `BuildError`, or what the system says of a file, into a last line and exit status 1.

    Build frontends show the end of a backend's output. A traceback would bury the one line that
    tells the reader what to do.
    """
    try:
        yield
    except BuildError as error:
        sys.stdout.flush()
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        # Whatever file it is about, it is this machine's, and no fault of the build's.
        sys.stdout.flush()
        raise SystemExit(
            f"error: {error}; see that the file can be read, or written where the build writes it, "
            "and that there is space"
        ) from None
