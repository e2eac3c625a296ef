# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls when it loads its general plugins, in each of its processes.

The API server does so while it defines its options, the engine core and every worker before they
construct a connector; so wherever the name of a connector is looked up, it means the same. Both
functions may be called any number of times. Nothing of the connector is imported before it is
looked up.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import multiprocessing
from functools import cache
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from .installed import (
    DISTRIBUTION,
    InstalledVllm,
    UnsuitableVllmError,
    Verdict,
    checked_releases,
    find_vllm,
)
from .logs import join_host

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBaseType

#: Always ours, whatever `NixlConnector` means.
OWN_NAME = "ReshardConnector"
NIXL_NAME = "NixlConnector"

_MODULE = f"{__package__}.stock"
# Hooks that only the fork calls, on its older base or by a patch; no release that the plugin is for
# has them.
_FORKS_HOOKS = frozenset(
    {
        "drop_held",
        "hold_back",
        "prefer_cross_layer_blocks",
        "register_cross_layers_kv_cache",
        "take_first_outputs",
    }
)
# How vLLM calls the processes that one node has several of.
_WORKER_PREFIX = "VllmWorker"

logger = init_logger(__name__)


def register() -> None:
    """Make the connector known as `ReshardConnector`, and say which vLLM was found.

    Raises:
        UnsuitableVllmError: It is the fork, is too old, or keeps its connectors in another way.
    """
    join_host()
    _report()
    _set(OWN_NAME)


def take_nixl_name() -> None:
    """Make the name `NixlConnector` mean ours, and say which vLLM was found.

    A loader of its own in `vllm.general_plugins`, so that `VLLM_PLUGINS` can leave it out.

    Raises:
        UnsuitableVllmError: vLLM is the fork, is too old, or keeps its connectors in another way.
    """
    join_host()
    # The other function need not be called: `VLLM_PLUGINS` may name this one alone.
    _report()
    _set(NIXL_NAME)
    logger.debug("%s is that of %s.", NIXL_NAME, DISTRIBUTION)


def load_connector() -> type[KVConnectorBaseType]:
    """Import the connector; what the factory calls when it looks up one of the names.

    Raises:
        UnsuitableVllmError: vLLM lacks something that the connector needs.
    """
    vllm, verdict = _vllm()
    try:
        connector: type[KVConnectorBaseType] = importlib.import_module(_MODULE).NixlConnector
    except (ImportError, AttributeError) as error:
        raise _unlike(vllm, str(error)) from error
    if verdict is Verdict.UNCHECKED and (uncalled := _uncalled(connector)):
        raise _unlike(vllm, f"nothing calls {', '.join(uncalled)} of a connector")
    return connector


@cache
def _vllm() -> tuple[InstalledVllm, Verdict]:
    vllm = find_vllm()
    return vllm, vllm.verdict()


@cache
def _report() -> None:
    """Say once a process what was found.

    The API server's line is lost in releases that configure their logs only after they have read
    their options; the engine core's is not. Workers of one node need not repeat it.
    """
    vllm, verdict = _vllm()
    ours = f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
    if verdict is Verdict.UNCHECKED:
        logger.warning(
            "%s found %s, which it is not checked with: those are %s.",
            *(ours, vllm, checked_releases()),
        )
    else:
        is_worker = multiprocessing.current_process().name.startswith(_WORKER_PREFIX)
        level = logging.DEBUG if is_worker else logging.INFO
        logger.log(level, "%s found %s, which it is checked with.", ours, vllm)
    if len(vllm.distributions) > 1:
        logger.warning(
            "%s lie over each other in one directory: uninstall all, and install one anew.",
            " and ".join(vllm.distributions),
        )


def _set(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # `register_connector` refuses a name that is there already, as vLLM's own and ours the second
    # time.
    registry = getattr(KVConnectorFactory, "_registry", None)
    if not isinstance(registry, dict):
        raise _unlike(_vllm()[0], "KVConnectorFactory has no dict _registry")
    registry[name] = load_connector


def _uncalled(connector: type[KVConnectorBaseType]) -> list[str]:
    """Return the public methods of the connector that vLLM's base classes no longer have.

    The engine calls what its base classes define: an override of something else is never heard of.
    """
    own = [part for part in connector.__mro__ if part.__module__.startswith(f"{__package__}.")]
    theirs = [part for part in connector.__mro__ if part not in own]
    names = {name for part in own for name in vars(part) if name[0] != "_"} - _FORKS_HOOKS
    return sorted(name for name in names if not any(name in vars(part) for part in theirs))


def _unlike(vllm: InstalledVllm, what: str) -> UnsuitableVllmError:
    return UnsuitableVllmError(
        f"{vllm} is unlike those that {DISTRIBUTION} is checked with ({what}): install vLLM "
        f"{checked_releases()}, or a newer {DISTRIBUTION}"
    )
