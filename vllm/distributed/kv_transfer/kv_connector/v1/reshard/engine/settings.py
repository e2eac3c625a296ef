# SPDX-License-Identifier: Apache-2.0
"""The options in an engine's `--kv-transfer-config`, read and checked once when the engine starts.

Options that upstream's connector also has keep its names, units and defaults; two options that
upstream reads as text may be text here, too. Nothing else reads `kv_connector_extra_config`, except
upstream's scheduler, which then finds values that were checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import LocalLayoutError, one_line, quote
from ..memory.staging import StagingPolicy
from ..protocol.bounds import TrustedPeers, is_own
from ..transport.agent import THREAD_REST_US, can_be_polled
from ..transport.authentication import ChannelKey, read_channel_key
from ..transport.cpu import PROGRESS_REST_US

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_MAX_S = 1e9
"""Longer than any engine runs, and far below the range limit of clocks."""

DEFAULT_LEASE_S = 30
"""The default of vLLM's own connector."""

_Seconds = Annotated[float, Meta(gt=0, le=_MAX_S)]
_Ttl = Annotated[float, Meta(ge=-_MAX_S, le=_MAX_S)]
_Bytes = Annotated[int, Meta(ge=0, lt=1 << 36)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Settings(
    msgspec.Struct,
    frozen=True,
    rename={"lease_s": "kv_lease_duration", "engine_ttl_s": "engine_ttl"},
):
    """The options of `kv_connector_extra_config`.

    The page of layouts shows this text, with `None` as `null` (`python -m tools.docs`).

    Attributes:
        lease_s: Seconds that blocks are held for a reader that does not renew its lease. A reader
            renews every sixth of its own value, and every 5 s at least.
        kv_read_timeout_s: Seconds that a request may take until it is read; then it fails, under
            `kv_load_failure_policy`. One sent to both engines at once has them from when it is
            offered and has blocks.
        kv_hung_peer_timeout_s: Seconds for which memory is kept for reads that have neither ended
            nor failed after that. Then their connection is cut, which may end the prefill engine's
            worker if it is still alive.
        side_channel_key_file: File with the key shared by all engines, on each machine; None to
            answer any host that reaches the side channel.
        trusted_peers: Networks that other engines may be in, such as `["10.0.0.0/8"]`; None for
            any.
        engine_ttl_s: Seconds without a request after which another engine is forgotten; 0 or less
            for never.
        enforce_handshake_compat: Whether engines that differ in what must be equal are refused.
        allow_other_weights: Whether an engine with other weights may be read from, such as a
            quantized checkpoint's; adapters must be the same in any case.
        missing_draft_layers: What to do with a draft's layers that the engine read from lacks:
            `refuse` the engine, or let the draft start cold and `compute` them.
        early_dispatch: On prefill engines: whether they tell routers to send a request to both
            engines at once. The decode engine asks the prefill engine for it.
        seed_first_token: On both engines: whether an answer begins with the token that the prefill
            engine has sampled, if the decode engine would sample alike; None for where it can.
        bidirectional_kv_xfer: On both engines: whether a prefill engine reads the last turn's
            blocks from the decode engine that has them.
        kv_recompute_threshold: With `bidirectional_kv_xfer`: fewer tokens than this are computed
            instead of read back.
        decoder_kv_blocks_ttl: With `bidirectional_kv_xfer`: seconds that a decode engine offers the
            blocks of a turn.
        transfer_strategy: `direct` reads into blocks; `staged` reads by way of an arena; `packed`
            has the holder gather what is read before, where it does; `auto` chooses for each read.
        staging_arena_bytes: Size of the arena on each worker that reads; None for a sixteenth of
            the free memory, at most 256 MiB; 0 for no arena, with all reads direct.
        packing_arena_bytes: Size of the arena on each worker that is read from, in which it
            gathers small pieces for its readers; None for a sixteenth of what is free then, at
            most 64 MiB; below 8 MiB nothing is gathered.
        verify_reads: First requests of each connection that are read once more, another way, and
            compared: they fail if that still differs when they are read anew; 0 to compare none.
        backends: NIXL backends, in order of preference.
        num_threads: Threads of NIXL's UCX backend.
        nixl_progress_delay_us: Microseconds that NIXL's progress thread rests when no data arrives;
            None with UCX for 10,000 on CPU and elsewhere 0, which takes a core, and with other
            backends for 100.
        enable_cross_layers_blocks: Makes nothing faster. On 0.22.1 the caches of all layers lie in
            one tensor; later it does nothing.
    """

    #: deadline lease: the offer ends and its blocks are freed, as no reader has renewed it. Time in
    #: which the holder's connector thread stood still does not count.
    lease_s: _Seconds = DEFAULT_LEASE_S
    num_threads: _Count = 4
    backends: Annotated[tuple[str, ...], Meta(min_length=1)] = ("UCX",)
    nixl_progress_delay_us: _Count | None = None
    enforce_handshake_compat: bool = True
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: _Count = 64
    #: limit turn: a decode engine's offer of a turn's blocks to the prefill engine ends.
    decoder_kv_blocks_ttl: _Seconds = 480
    enable_cross_layers_blocks: bool = False
    #: interval idle engine: the connection of an engine that nothing was wanted of is closed.
    engine_ttl_s: _Ttl = 3600
    #: deadline read: the request fails; its blocks stay its own until they are drained. Counted
    #: from when the connector's thread takes it up; of a request sent to both engines, from when it
    #: is offered and has blocks.
    kv_read_timeout_s: _Seconds = 120
    #: deadline hung peer: the agent of a retired lane is closed in any case: its reads neither end
    #: nor fail.
    kv_hung_peer_timeout_s: _Seconds = 600
    transfer_strategy: Literal["auto", "direct", "staged", "packed"] = "auto"
    staging_arena_bytes: _Bytes | None = None
    packing_arena_bytes: _Bytes | None = None
    verify_reads: _Count = 1
    missing_draft_layers: Literal["refuse", "compute"] = "refuse"
    allow_other_weights: bool = False
    side_channel_key_file: Annotated[str, Meta(min_length=1)] | None = None
    trusted_peers: tuple[str, ...] | None = None
    early_dispatch: bool = False
    seed_first_token: bool | None = None

    def channel_key(self) -> ChannelKey | None:
        """Return the key in `side_channel_key_file`; None without that option.

        Raises:
            LocalChannelError: The file holds no key, or is readable by everyone.
        """
        path = self.side_channel_key_file
        return None if path is None else read_channel_key(path)

    def trusted(self) -> TrustedPeers | None:
        """Return the networks of `trusted_peers`; None without that option."""
        return None if self.trusted_peers is None else TrustedPeers.parse(self.trusted_peers)

    def staging_policy(self) -> StagingPolicy | None:
        """Return the policy that selects staged and packed reads; None to stage all."""
        if self.transfer_strategy == "staged":
            return None
        return StagingPolicy(packs_all=self.transfer_strategy == "packed")

    def progress_delay_us(self, *, on_cpu: bool) -> int:
        """Return the rest of NIXL's progress thread, chosen by backends and device if not set."""
        if self.nixl_progress_delay_us is not None:
            return self.nixl_progress_delay_us
        if not can_be_polled(self.backends):
            return THREAD_REST_US
        return PROGRESS_REST_US if on_cpu else 0


_UPSTREAMS_OPTIONS = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enable_cross_layers_blocks",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_lease_duration",
        "kv_recompute_threshold",
        "num_threads",
    }
)

OWN_OPTIONS = frozenset(Settings.__struct_encode_fields__) - _UPSTREAMS_OPTIONS
"""Options that upstream's connector does not have."""


def read_settings(config: KVTransferConfig) -> Settings:
    """Read and check the options.

    Raises:
        LocalLayoutError: An option has an invalid value.
    """
    extra: Mapping[str, Any] = config.kv_connector_extra_config
    try:
        settings = msgspec.convert({**extra, **_from_text(extra)}, Settings)
        _check_networks(settings)
    except msgspec.ValidationError as error:
        raise LocalLayoutError(
            f"kv_connector_extra_config of --kv-transfer-config has a value that cannot be "
            f"({one_line(error)}): correct it, or leave it out"
        ) from error
    return settings


def remarks(config: KVTransferConfig, settings: Settings, host: str) -> list[str]:
    """Return remarks on options that do not do what one may expect.

    Args:
        config: The engine's configuration.
        settings: Its options.
        host: Its `VLLM_NIXL_SIDE_CHANNEL_HOST`.
    """
    known = set(Settings.__struct_encode_fields__)
    found = [
        f"kv_connector_extra_config names {name!r}, which this connector does not know"
        for name in sorted(map(str, set(config.kv_connector_extra_config) - known))
    ]
    if is_own(host) and (config.is_kv_producer or settings.bidirectional_kv_xfer):
        found.append(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {quote(host)!r}, by which other machines reach "
            "themselves: set it to this machine's address, unless all engines run here"
        )
    if config.enable_permute_local_kv:
        found.append(
            "enable_permute_local_kv is not needed: blocks are read from and into both orders of "
            "heads and tokens"
        )
    if settings.enable_cross_layers_blocks:
        found.append(
            "enable_cross_layers_blocks makes nothing faster: layers are read one by one, so that "
            "other pipeline stages can be"
        )
    if not settings.enforce_handshake_compat:
        found.append(
            "enforce_handshake_compat is off: engines that run other models, versions or cache "
            "formats are not refused"
        )
    if settings.allow_other_weights:
        found.append(
            "allow_other_weights is on: KV caches that were computed with other weights are read"
        )
    if settings.bidirectional_kv_xfer and config.kv_load_failure_policy != "recompute":
        found.append(
            "bidirectional_kv_xfer without kv_load_failure_policy recompute: a turn that does not "
            "go on from the very tokens of the last one fails"
        )
    return found


def _check_networks(settings: Settings) -> None:
    """Check that `trusted_peers` are networks.

    Raises:
        ValidationError: One is not a network.
    """
    try:
        settings.trusted()
    except ValueError as error:
        raise msgspec.ValidationError(f"{one_line(error)} - at `$.trusted_peers`") from error


def _from_text(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that upstream takes as text, converted to their types."""
    values: dict[str, Any] = {}
    flag, threshold = (
        extra.get(name) for name in ("enable_cross_layers_blocks", "kv_recompute_threshold")
    )
    if isinstance(flag, str) and flag.lower() in ("true", "false"):
        values["enable_cross_layers_blocks"] = flag.lower() == "true"
    if isinstance(threshold, str) and threshold.isdecimal():
        values["kv_recompute_threshold"] = int(threshold)
    return values
