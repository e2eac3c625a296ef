# SPDX-License-Identifier: Apache-2.0
"""Errors of the launcher, each with the exit status that the command line turns it into."""

from __future__ import annotations


class PDStackError(Exception):
    """Something failed while the stack was prepared, started or used."""

    exit_status = 1


class UsageError(PDStackError):
    """What was asked for cannot work, whatever the machine does."""

    exit_status = 2


class ProcessDiedError(PDStackError):
    """A process of the stack ended although nobody asked it to.

    Attributes:
        name: which process, as the user knows it (``prefill``, ``decode``, ``router``).
        cause: the most telling line of its log, or an empty string.
        log_tail: the last lines of its log, oldest first.
    """

    def __init__(self, name: str, how: str, cause: str, log_tail: list[str]) -> None:
        super().__init__(f"{name} {how}" + (f": {cause}" if cause else ""))
        self.name = name
        self.cause = cause
        self.log_tail = log_tail


class StartFailedError(ProcessDiedError):
    """An engine said that it could not start, and had to be ended, as it did not end by itself."""


class StartupTimeoutError(ProcessDiedError):
    """A process lives, but did not become ready before its deadline."""


class NetworkError(PDStackError):
    """This machine cannot have the network that is asked for."""
