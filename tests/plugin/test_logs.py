# SPDX-License-Identifier: Apache-2.0
"""What the plugin logs appears where vLLM's lines do."""

from __future__ import annotations

import logging

import pytest


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        """Keep one."""
        self.messages.append((record.name, record.getMessage()))


@pytest.fixture
def own():
    """The package's logger, as it is before anything is loaded."""
    logger = logging.getLogger("vllm_kv_reshard")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture
def host(monkeypatch):
    """The logger of vLLM with a handler of our own."""
    logger = logging.getLogger("vllm")
    handler = Kept()
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield logger, handler
    logger.setLevel(level)


def test_records_reach_the_hosts_handlers(own, host):
    """Once each, however often the plugin is loaded; what is below the level is dropped."""
    from vllm_kv_reshard.logs import join_host

    join_host()
    join_host()
    module = logging.getLogger("vllm_kv_reshard.engine.worker")
    module.info("read %d blocks", 3)
    module.debug("too much")
    assert host[1].messages == [("vllm_kv_reshard.engine.worker", "read 3 blocks")]


def test_handlers_of_later(own, host, monkeypatch):
    """Logging is configured again once vLLM has read its options."""
    from vllm_kv_reshard.logs import join_host

    join_host()
    later = Kept()
    monkeypatch.setattr(host[0], "handlers", [later])
    host[0].setLevel(logging.DEBUG)
    logging.getLogger("vllm_kv_reshard.entry").debug("seen")
    assert later.messages == [("vllm_kv_reshard.entry", "seen")]
    assert host[1].messages == []


def test_configuration_of_the_user(own, host):
    """Who gave the package a handler of its own keeps it."""
    from vllm_kv_reshard.logs import join_host

    handler = Kept()
    own.addHandler(handler)
    join_host()
    logging.getLogger("vllm_kv_reshard.entry").warning("mine")
    assert handler.messages == [("vllm_kv_reshard.entry", "mine")]
    assert host[1].messages == []
