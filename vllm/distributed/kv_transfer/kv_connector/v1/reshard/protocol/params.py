# SPDX-License-Identifier: Apache-2.0
"""The kv_transfer_params of a request: what a router passes on from one engine to the next.

They come from outside, by way of a client, so nothing of them is used before it has been checked.
Upstream's scheduler takes them as they are; `sanitize_params` checks them before it sees them.

    from a prefill engine, do_remote_prefill   where a prompt's blocks are, which have to be read
    from a decode engine, do_remote_decode     where blocks of the last turn are, if read at all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .fingerprint import OfferSecret
from .quoting import one_line
from .trust import TrustedPeers

Params = dict[str, Any]

_FAULT = "_fault"
_ASKED = "_remote_blocks_processed"
"""Upstream's: the workers have been told to read, or that there is nothing to read."""
MARK_EARLY = "_early"
"""The request is read once its prompt is computed: see `early`."""
_OURS = frozenset({_FAULT, _ASKED, MARK_EARLY, "_p_side_truncated"})
"""What the schedulers note down, and no client may."""
_REMOTE_PREFIX = "remote_"

Text = Annotated[
    str, msgspec.Meta(min_length=1, max_length=1 << 10, pattern=r"\A[^\ud800-\udfff]*\Z")
]
"""JSON may name half a character (a surrogate), which cannot be sent on or looked up."""
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Secret = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""In hexadecimal digits: of 64 bits as a number, a router in JavaScript would keep 53."""


class RemoteBlocks(msgspec.Struct, frozen=True):
    """Where another engine holds blocks of a request.

    Attributes:
        remote_engine_id: The engine.
        remote_request_id: What the request is called there.
        remote_host: Host of its side channel.
        remote_port: TCP port of its side channel.
        remote_block_ids: The blocks, for each KV-cache group, the last ones of the request's.
        remote_num_tokens: Tokens of the request up to the last one in these blocks; None or 0 where
            it is the prompt's.
        remote_first_token: The token that was sampled behind these; None where it is not told.
        remote_secret: What gives them up; None where an engine of another build holds them, or a
            router has dropped it.
    """

    remote_engine_id: Text
    remote_request_id: Text
    remote_host: Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[list[_BlockId]], msgspec.Meta(min_length=1)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    remote_first_token: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    remote_secret: _Secret | None = None

    @property
    def secret(self) -> OfferSecret | None:
        """The secret, as workers tell it each other."""
        return None if self.remote_secret is None else int(self.remote_secret, 16)


def sanitize_params(
    params: Any, *, reads_back: bool, trusted: TrustedPeers | None = None
) -> tuple[Params | None, str | None]:
    """Make parameters fit for a scheduler that believes them.

    Args:
        params: What came with a request; None for nothing.
        reads_back: Whether this engine reads blocks of the last turn from a decode engine.
        trusted: Where other engines may be; None for anywhere.

    Returns:
        The parameters as they are, but for names that only schedulers may use; or, where a prompt's
        blocks should be read and it is not known where from, some that lead to `remote_blocks`
        returning the fault, so that the request fails or is computed here, as
        `kv_load_failure_policy` has it; or, where blocks of the last turn need not or cannot be
        read, the same without them. And why blocks that should be read back cannot be, if so.
    """
    if params is None:
        return None, None
    # Options of vLLM's that take anything have brought them by the front end.
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
    """The same, but with nothing to read: the prompt is computed here.

    A prefill engine still holds what it computes for the next one.
    """
    return {
        name: value
        for name, value in params.items()
        if name != "do_remote_prefill" and not name.startswith(_REMOTE_PREFIX)
    }


def already_requested(params: Params | None) -> bool:
    """Whether the workers were told of a request's remote blocks already."""
    params = params or {}
    return bool(params.get(_ASKED)) and not params.get("do_remote_prefill")


def is_disaggregated(params: Params | None) -> bool:
    """Whether a request's blocks came from another engine, or may go to one."""
    params = params or {}
    return any(params.get(name) for name in ("do_remote_prefill", "do_remote_decode", _ASKED))


def remote_request(params: Mapping[str, Any]) -> tuple[str, str] | None:
    """The engine and the request, as it is called there, whose blocks sanitized parameters name."""
    if _FAULT in params or not params.get("remote_block_ids"):
        return None
    return params["remote_engine_id"], params["remote_request_id"]


def offered_tokens(params: Params | None) -> int | None:
    """How many tokens another engine offers, out of sanitized parameters; None if not said.

    Without a word, they are the prompt's.
    """
    count = (params or {}).get("remote_num_tokens")
    return count if isinstance(count, int) and count > 0 else None


def first_token(params: Params | None) -> int | None:
    """The token behind what is offered, out of sanitized parameters; None without one."""
    token = (params or {}).get("remote_first_token")
    return token if isinstance(token, int) and not isinstance(token, bool) else None


def is_early(params: Params | None) -> bool:
    """Whether sanitized parameters name a producer, and no blocks yet."""
    return bool((params or {}).get(MARK_EARLY))


def remote_blocks(params: Mapping[str, Any]) -> RemoteBlocks | str:
    """Where to read from, out of sanitized parameters, or why that is not known."""
    fault = params.get(_FAULT)
    return fault if isinstance(fault, str) else msgspec.convert(params, RemoteBlocks)


def write_secret(secret: OfferSecret) -> str:
    """A secret as `remote_secret` has it."""
    return f"{secret:016x}"


def _fault(params: Params, trusted: TrustedPeers | None) -> str | None:
    """What is wrong with parameters that should say where blocks are."""
    try:
        source = msgspec.convert(params, RemoteBlocks)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:
        # The last one for half a character in the place of something else.
        return malformed(str(error))
    return check_host(source.remote_host, trusted)


def check_host(host: str, trusted: TrustedPeers | None) -> str | None:
    """Why an engine at a host is not asked; None where it is."""
    if trusted is not None and (fault := trusted.fault(host)) is not None:
        return f"its kv_transfer_params are not followed: {one_line(fault)}"
    return None


def malformed(why: str) -> str:
    """What is wrong with parameters, in words."""
    return (
        f"its kv_transfer_params are malformed ({one_line(why)}): the router must pass on "
        "unchanged those that the other engine returned"
    )


def faulty(fault: str) -> Params:
    """Parameters that make upstream's scheduler ask for a read, which is then refused."""
    address: Params = {"remote_engine_id": "", "remote_request_id": "", "remote_host": ""}
    return {
        "do_remote_prefill": True,
        "remote_port": 0,
        "remote_block_ids": [[0]],
        _FAULT: fault,
        **address,
    }
