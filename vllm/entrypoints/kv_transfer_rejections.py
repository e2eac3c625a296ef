# SPDX-License-Identifier: Apache-2.0
"""What the API's bodies ask for and nobody reads: KV for those that are refused, and answers.

vLLM tells the connector of requests that it rejects once their body has been parsed. A body that
does not pass validation, such as `stream_options` without `stream`, tells nothing: routers change
both for prefill, which computes, and holds the blocks until their lease has run out.

Nor does vLLM tell of beam search, whose requests are made without the body's parameters.

Of several answers (`n`) and prompts that a prefill engine is asked for, its own answer names the
blocks of one, and routers pass `n` on. The others would be computed and held for nobody.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from fastapi import Request
    from vllm.engine.protocol import EngineClient

logger = init_logger(__name__)


async def tell_connector(request: Request) -> None:
    """Have the connector release what a refused body was to read, where it was to read something.

    For handlers of exceptions. Some are of requests that went further, and were told of: being told
    twice gives up nothing more.

    The body is a client's. Its parameters may be anything: the connector checks them as those of
    any request, and whatever fails here leaves the client with the answer that the body deserves.

    Args:
        request: What was refused. The server's state has the client of the engine, or `None` where
            it only renders.
    """
    engine = request.app.state.engine_client
    if engine is None or engine.vllm_config.kv_transfer_config is None:
        return
    try:
        # The route has read it, so that nothing is waited for. Where there was no route there is no
        # body either, and that is one of the things that are wrong with what was sent.
        body = await request.json()
    except Exception:
        return
    if isinstance(body, dict):
        await _give_up(engine, body.get("kv_transfer_params"))


async def prepare(engine: EngineClient, request: Any) -> None:
    """Have the connector release what beam search was to read; leave prefill one answer to make.

    Args:
        engine: Client of the engine.
        request: A request of any of the server's protocols, with kv_transfer_params.
    """
    # Not all protocols have each of these.
    asked = vars(request)
    if asked.get("use_beam_search"):
        await _give_up(engine, request.kv_transfer_params)
    elif request.kv_transfer_params.get("do_remote_decode") and not _dispatches_early(engine):
        if asked.get("n"):
            request.n = 1
        prompts, embeds = asked.get("prompt"), asked.get("prompt_embeds")
        if embeds:
            # They come before other prompts.
            request.prompt_embeds = embeds[:1] if isinstance(embeds, list) else embeds
            request.prompt = None
        elif prompts and isinstance(prompts, list) and not isinstance(prompts[0], int):
            request.prompt = prompts[:1]


def _dispatches_early(engine: EngineClient) -> bool:
    """Return whether answers are found by their place among the others: see `early`."""
    config = engine.vllm_config.kv_transfer_config
    assert config is not None
    extra = config.kv_connector_extra_config
    children = [each.get("kv_connector_extra_config", {}) for each in extra.get("connectors", ())]
    return any(each.get("early_dispatch") for each in (extra, *children))


async def _give_up(engine: EngineClient, params: Any) -> None:
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return
    # The body's own name may be that of a request which is served right now.
    request_id = f"refused-{uuid.uuid4().hex}"
    try:
        await engine.notify_kv_transfer_request_rejected(request_id, params)
    except Exception as error:
        logger.warning(
            "The connector was not told of a request that reads nothing (%s): the KV that it was "
            "to read is held until its lease has run out",
            type(error).__name__,
        )
