# SPDX-License-Identifier: Apache-2.0
"""Requests that a router sends to both engines at once: their names and their parameters.

Such a router knows the producer's address, but neither the producer's id for the request nor its
blocks. So both engines derive the same name for it:

    transfer_id, or kv_request_id   if the router sends one to both
    the request's id without vLLM's random suffix   otherwise

Where the ids have nothing in common, the request has no name, and is known by its prompt alone: see
`subscriptions`.

A prompt may have several answers (`n`), and a request several prompts. The ids of these children
differ in the same way on both engines. They share the router's name, so their positions are
appended to it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from .bounds import TrustedPeers
from .ids import RequestId
from .messages import RemoteEngineAddress
from .params import Params, Text, check_host, malformed

_NOT_UNDERSTOOD = (msgspec.ValidationError, RecursionError, UnicodeError)
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHILD = re.compile(r"\A(\d+)_")
_PROMPT = re.compile(r"\A(?:\d+_)?cmpl-.*-(\d+)\Z", re.DOTALL)

_Port = Annotated[int, Meta(ge=1, le=65535)]
_Name = Annotated[str, Meta(min_length=1, max_length=1 << 9, pattern=r"\A[^\ud800-\udfff]*\Z")]


class EarlySource(msgspec.Struct, frozen=True):
    """The engine that prefills a request.

    Attributes:
        remote_host: Host of the engine's side channel.
        remote_port: TCP port of its side channel.
        remote_engine_id: Engine id that the router expects there; another engine may answer. None
            if the router gave none.
        remote_request_id: The router's id for the request, contained in both engines' ids; None if
            the router gave none.
        transfer_id: Name that the router gave the request; None if it gave none.
    """

    remote_host: Text
    remote_port: _Port
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    transfer_id: _Name | None = None


class EarlyRequest(NamedTuple):
    """A request whose prompt another engine computes.

    Attributes:
        place: That engine, as the router knows it; another one may answer there.
        name: The request's name at both engines; empty if they have none in common.
    """

    place: RemoteEngineAddress
    name: str


class _RemotePrefiller(msgspec.Struct, frozen=True):
    """The same in the format of llm-d's routers for transfers between peers."""

    kv_request_id: _Name
    remote_host: Text
    remote_port: _Port


class _RemoteDecoder(msgspec.Struct, frozen=True):
    """The parameters that llm-d's routers send to the producer."""

    kv_request_id: _Name


def shared_name(request_id: RequestId, given: str | None) -> str:
    """Return the name that both engines derive for a request.

    Args:
        request_id: This engine's id for it.
        given: Name that the router sent to both engines; None if it sent none.
    """
    base = _RANDOM_SUFFIX.sub("", request_id)
    if given is None:
        return base
    child, prompt = _CHILD.match(base), _PROMPT.match(base)
    return "/".join((given, *(each[1] if each else "0" for each in (child, prompt))))


def prefill_params(params: Any) -> Any:
    """Translate a producer's request parameters to those that schedulers understand."""
    if not isinstance(params, dict) or "remote_decoder" not in params:
        return params
    try:
        decoder = msgspec.convert(params["remote_decoder"], _RemoteDecoder)
    except _NOT_UNDERSTOOD:
        return params
    rest = {name: value for name, value in params.items() if name != "remote_decoder"}
    return {**rest, "do_remote_decode": True, "transfer_id": decoder.kv_request_id}


def prefill_name(request_id: RequestId, params: Params) -> str:
    """Return the shared name of a request at its producer."""
    try:
        given = msgspec.convert(params.get("transfer_id"), _Name | None)
    except _NOT_UNDERSTOOD:
        given = None
    return shared_name(request_id, given)


def early_request(
    params: Any, request_id: RequestId, trusted: TrustedPeers | None
) -> EarlyRequest | str | None:
    """Read from a decode engine's request parameters where its prompt is computed.

    Args:
        params: Parameters that came with the request.
        request_id: This engine's id for it.
        trusted: Networks that other engines may be in; None for any.

    Returns:
        Where, and under which name; a text that says what is wrong with the parameters; or None if
        they are not an early request's.
    """
    if not isinstance(params, dict) or "remote_block_ids" in params:
        return None
    if not (params.get("do_remote_prefill") or "remote_prefiller" in params):
        return None
    try:
        source = _source(params)
    except _NOT_UNDERSTOOD as error:
        return malformed(str(error))
    if (fault := check_host(source.remote_host, trusted)) is not None:
        return fault
    try:
        name = msgspec.convert(shared_name(request_id, source.transfer_id), Text)
    except _NOT_UNDERSTOOD:
        return malformed(f"the request's id, of {len(request_id)} characters, is none")
    router_id = source.remote_request_id
    if source.transfer_id is None and router_id is not None and router_id not in name:
        # Some APIs give requests ids of their own, at either engine another one.
        name = ""
    engine_id = source.remote_engine_id or "unknown"
    return EarlyRequest(
        RemoteEngineAddress(engine_id, source.remote_host, source.remote_port), name
    )


def _source(params: Params) -> EarlySource:
    """Read from a request's parameters which engine prefills it.

    Raises:
        ValidationError: The parameters do not say so.
    """
    if "remote_prefiller" not in params:
        return msgspec.convert(params, EarlySource)
    prefiller = msgspec.convert(params["remote_prefiller"], _RemotePrefiller)
    return EarlySource(
        prefiller.remote_host, prefiller.remote_port, transfer_id=prefiller.kv_request_id
    )
