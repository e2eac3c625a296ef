# SPDX-License-Identifier: Apache-2.0
"""The kv_transfer_params of a request, which a router passes on from one engine to the next.

They come from outside, through a client, so nothing in them is used before it has been checked.
Upstream's scheduler trusts them; `sanitize_params` checks them before it sees them.

    from a prefill engine, do_remote_prefill   where a prompt's blocks are, which must be read
    from a decode engine, do_remote_decode     where the last turn's blocks are, which may be read
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import one_line
from .bounds import TrustedPeers
from .fingerprint import OfferSecret
from .messages import RemoteEngineAddress

Params = dict[str, Any]

_FAULT = "_fault"
_ASKED = "_remote_blocks_processed"
"""Upstream's mark that workers have been asked to read, or that there is nothing to read."""
_ADAPTER = "_adapter"
"""Digest of the files of the request's adapter at this engine."""
_OURS = frozenset({_FAULT, _ASKED, _ADAPTER, "_p_side_truncated"})
"""Names that only schedulers may set, and no client."""
_REMOTE_PREFIX = "remote_"

Text = Annotated[
    str, msgspec.Meta(min_length=1, max_length=1 << 10, pattern=r"\A[^\ud800-\udfff]*\Z")
]
"""Text without surrogates: JSON may hold half a pair, which cannot be sent on or looked up."""
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Secret = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""64 bits in hexadecimal: of a number's 64 bits, a router in JavaScript would keep 53."""


_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Float32 = Annotated[float, msgspec.Meta(ge=-3.4e38, le=3.4e38)]
"""A number that stays finite as a float32."""

MAX_LOGPROBS = 128
"""Most of the likeliest tokens whose log-probabilities come with a first token. vLLM's
`max_logprobs` is 20."""


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a sampled token and of the likeliest tokens in its place.

    Attributes:
        tokens: The sampled token, then the likeliest ones.
        logprobs: Their log-probabilities, in the same order.
        rank: Rank of the sampled token among all of them, from 1.
    """

    tokens: Annotated[list[_Token], msgspec.Meta(max_length=MAX_LOGPROBS + 1)]
    logprobs: Annotated[list[_Float32], msgspec.Meta(max_length=MAX_LOGPROBS + 1)]
    rank: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class FirstToken(NamedTuple):
    """The token that a prefill engine has sampled.

    Attributes:
        token: The token.
        sampling: Digest of the parameters that it was sampled with.
        logprobs: Log-probabilities in its place; None if the client did not ask for them.
    """

    token: int
    sampling: str
    logprobs: SampledLogprobs | None = None


class RemoteBlocks(msgspec.Struct, frozen=True):
    """Where another engine holds blocks of a request.

    Attributes:
        remote_engine_id: The engine.
        remote_request_id: The request's id there.
        remote_host: Host of its side channel.
        remote_port: TCP port of its side channel.
        remote_block_ids: The request's last blocks, for each KV-cache group.
        remote_num_tokens: Number of the request's tokens up to the last one in these blocks; None
            or 0 if they end with the prompt.
        remote_sampled_token: Token that was sampled after these; None if it was not sent.
        remote_sampled_with: Digest of the parameters that it was sampled with; None likewise.
        remote_sampled_logprobs: Log-probabilities in its place; None if they were not sent.
        remote_adapter: Digest of the files of the LoRA adapter that computed them; None without an
            adapter, or if an engine of another build holds them.
        remote_secret: Secret that gives the blocks up; None if an engine of another build holds
            them, or a router has dropped it.
    """

    remote_engine_id: Text
    remote_request_id: Text
    remote_host: Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[list[_BlockId]], msgspec.Meta(min_length=1)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    remote_sampled_token: _Token | None = None
    remote_sampled_with: Text | None = None
    remote_sampled_logprobs: SampledLogprobs | None = None
    remote_adapter: Text | None = None
    remote_secret: _Secret | None = None

    @property
    def secret(self) -> OfferSecret | None:
        """The secret as a number, as workers send it to each other."""
        return None if self.remote_secret is None else int(self.remote_secret, 16)


def sanitize_params(
    params: Any, *, reads_back: bool, trusted: TrustedPeers | None = None
) -> tuple[Params | None, str | None]:
    """Make parameters safe for a scheduler that trusts them.

    Args:
        params: The request's parameters; None without any.
        reads_back: Whether this engine reads blocks of the last turn from a decode engine.
        trusted: Hosts where other engines may be; None for any.

    Returns:
        The parameters, without names that only schedulers may set. If they are malformed, or name
        no trusted source for a prompt's blocks, others for which `remote_blocks` returns the fault,
        so that the request fails or is computed here, as `kv_load_failure_policy` says. If the last
        turn's blocks need not or cannot be read, the same without them.
        Also, why blocks that should be read back cannot be; None otherwise.
    """
    if params is None:
        return None, None
    # Some of vLLM's options take any value, so the front end lets these through.
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        return faulty(malformed(f"they are no object, but {type(params).__name__}")), None
    if _OURS & params.keys():
        params = {name: value for name, value in params.items() if name not in _OURS}
    if params.get("do_remote_prefill"):
        fault = _fault(params, trusted)
        return (params if fault is None else faulty(fault)), None
    if not params.get("remote_block_ids"):
        return params, None
    fault = _fault(params, trusted) if reads_back else None
    if reads_back and fault is None:
        return params, None
    return without_source(params), fault


def without_source(params: Params) -> Params:
    """Return the parameters with nothing to read, so that the prompt is computed here.

    A prefill engine still holds what it computes for the next engine.
    """
    return {
        name: value
        for name, value in params.items()
        if name != "do_remote_prefill" and not name.startswith(_REMOTE_PREFIX)
    }


def already_requested(params: Params | None) -> bool:
    """Return whether workers have already received a request's remote blocks."""
    params = params or {}
    return bool(params.get(_ASKED)) and not params.get("do_remote_prefill")


def note_requested(params: Params) -> None:
    """Note that workers have received a request's remote blocks, as upstream's scheduler does."""
    params["do_remote_prefill"], params[_ASKED] = False, True


def partly_computed(place: RemoteEngineAddress, request_id: str, num_tokens: int) -> Params:
    """Return parameters of a request that is not offered yet, of so many tokens."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": place.engine_id,
        "remote_request_id": request_id,
        "remote_host": place.host,
        "remote_port": place.port,
        # Upstream's scheduler requests a read only if blocks are named.
        "remote_block_ids": [[0]],
        "remote_num_tokens": num_tokens,
        # Upstream's scheduler wants it, and the true one comes with the offer.
        "tp_size": 1,
        "remote_adapter": None,
    }


def is_disaggregated(params: Params | None) -> bool:
    """Return whether a request's blocks came from another engine, or may go to one."""
    params = params or {}
    return any(params.get(name) for name in ("do_remote_prefill", "do_remote_decode", _ASKED))


def remote_request(params: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the engine and its request id for the blocks that sanitized parameters name."""
    if _FAULT in params or not params.get("remote_block_ids"):
        return None
    return params["remote_engine_id"], params["remote_request_id"]


def offered_tokens(params: Params | None) -> int | None:
    """Return how many tokens another engine offers, from sanitized parameters.

    None if they do not say, which means all of the prompt's.
    """
    count = (params or {}).get("remote_num_tokens")
    return count if isinstance(count, int) and count > 0 else None


def first_token(params: Params | None) -> FirstToken | None:
    """Return the token after the offered ones, from sanitized parameters; None without one.

    Builds of `reshard.1` call it `remote_first_token`, and do not say how it was sampled.
    """
    told = params or {}
    token, sampling = told.get("remote_sampled_token"), told.get("remote_sampled_with")
    if token is None or sampling is None:
        return None
    logprobs = told.get("remote_sampled_logprobs")
    return FirstToken(token, sampling, msgspec.convert(logprobs, SampledLogprobs | None))


def of_first_token(first: FirstToken) -> Params:
    """Return what an offer says of the token after the offered ones."""
    told: Params = {"remote_sampled_token": first.token, "remote_sampled_with": first.sampling}
    if first.logprobs is not None:
        told["remote_sampled_logprobs"] = msgspec.to_builtins(first.logprobs)
    return told


def bind_adapter(params: Params, digest: str) -> bool:
    """Note what a request's adapter is at this engine, and return whether blocks are bound to it.

    Builds that do not tell theirs bind blocks to its name.
    """
    is_bound = not remote_request(params) or "remote_adapter" in params
    if is_bound:
        params[_ADAPTER] = digest
    return is_bound


def own_adapter(params: Params | None) -> str | None:
    """Return what a request's adapter is at this engine; None if blocks are not bound to it."""
    return (params or {}).get(_ADAPTER)


def remote_blocks(params: Mapping[str, Any]) -> RemoteBlocks | str:
    """Return where to read from, from sanitized parameters, or why that is unknown."""
    fault = params.get(_FAULT)
    return fault if isinstance(fault, str) else msgspec.convert(params, RemoteBlocks)


def write_secret(secret: OfferSecret) -> str:
    """Return a secret in the form of `remote_secret`."""
    return f"{secret:016x}"


def _fault(params: Params, trusted: TrustedPeers | None) -> str | None:
    """Return what is wrong with parameters that must say where blocks are; None if nothing."""
    try:
        source = msgspec.convert(params, RemoteBlocks)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:
        if params.get("remote_host") == "":
            return (
                "its remote_host is empty: set VLLM_NIXL_SIDE_CHANNEL_HOST where it was prefilled"
            )
        # The last one: half a surrogate pair where something else is expected.
        return malformed(str(error))
    return check_host(source.remote_host, trusted)


def check_host(host: str, trusted: TrustedPeers | None) -> str | None:
    """Return why no request is sent to an engine at a host; None if it may be."""
    if trusted is not None and (fault := trusted.fault(host)) is not None:
        return f"its kv_transfer_params are not followed: {one_line(fault)}"
    return None


def malformed(why: str) -> str:
    """Return the message for malformed parameters."""
    return (
        f"its kv_transfer_params are malformed ({one_line(why)}): the router must pass on "
        "unchanged those that the other engine returned"
    )


def faulty(fault: str) -> Params:
    """Return parameters that make upstream's scheduler request a read, which is then refused."""
    address: Params = {"remote_engine_id": "", "remote_request_id": "", "remote_host": ""}
    return {
        "do_remote_prefill": True,
        "remote_port": 0,
        "remote_block_ids": [[0]],
        _FAULT: fault,
        **address,
    }
