# SPDX-License-Identifier: Apache-2.0
"""What an engine's `--kv-transfer-config` sets, read and checked once when the engine starts.

Options that upstream's connector has, too, have the name, the unit and the default that they have
there; two that upstream reads as text are taken as text, too. Nothing else looks into
`kv_connector_extra_config`, but for upstream's scheduler, which then finds there what has been
checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import LocalLayoutError
from ..memory.strategy import StagingPolicy
from ..protocol.quoting import one_line
from ..protocol.trust import TrustedPeers
from ..transport.agent import THREAD_REST_US, can_be_polled
from ..transport.authentication import ChannelKey, read_channel_key
from ..transport.cpu import PROGRESS_REST_US

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_MAX_S = 1e9
"""Longer than any engine runs, and far from what clocks cannot count."""

DEFAULT_LEASE_S = 30
"""As vLLM's own connector has it."""

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

    Attributes:
        lease_s: How long blocks are held for a reader that is not heard of. `kv_lease_duration`.
        num_threads: Threads of NIXL's UCX backend.
        backends: NIXL backends, in the order of preference.
        num_lanes: NIXL agents to read with, which peers share; None for what suits the backends.
        nixl_progress_delay_us: How long NIXL's progress thread rests when nothing comes in;
            None for what suits backends and device.
        enforce_handshake_compat: Whether engines that name other values of what must be equal are
            refused.
        bidirectional_kv_xfer: Whether a prefill engine reads blocks of the last turn from a decode
            engine, and a decode engine offers them.
        kv_recompute_threshold: Fewer tokens than these are computed rather than read back.
        decoder_kv_blocks_ttl: How long a decode engine offers the blocks of a turn, in seconds.
        enable_cross_layers_blocks: Whether the caches of all layers should lie in one tensor, for
            which 0.22.1 asks and later releases do not.
        engine_ttl_s: After how long without a request for it another engine is forgotten; never, if
            this is not above 0. `engine_ttl`.
        kv_read_timeout_s: How long a request may wait until it has been read, from when its worker
            hears of it; then it fails, by `kv_load_failure_policy`.
        kv_hung_peer_timeout_s: How long memory is kept for reads that have neither ended nor failed
            after that. Then their connection is cut, which may end the prefill engine's worker if
            it is alive after all.
        transfer_strategy: Whether blocks are read direct, by way of a staging arena, or each as
            the next three say.
        staging_max_descriptor_bytes: As in `StagingPolicy`, as the next two.
        staging_min_merge_factor: How many direct descriptors staging must make one.
        staging_min_descriptors: Direct descriptors of the smallest read that is staged.
        staging_arena_bytes: Size of that arena on each worker; None for what suits its memory, 0
            for none.
        side_channel_key_file: The key that engines know one another by, on each of their machines;
            None where any host that reaches a side channel may ask there.
        trusted_peers: Networks that other engines are in; None for any.
        early_dispatch: Whether routers may send a request to both engines at once: a prefill engine
            says how far it is with each, and a decode engine waits for that.
        seed_first_token: Whether a prefill engine tells the token that it has sampled, and a decode
            engine begins the answer with it, where that is the one that it would compute.
        verify_plans: Whether each plan is checked by other means, which takes longer than planning.
        missing_draft_layers: What becomes of a draft's layers that this engine has and the one that
            it reads from has not: the engine is refused, or the draft computes what it needs from
            then on, and starts cold.
    """

    lease_s: _Seconds = DEFAULT_LEASE_S
    num_threads: _Count = 4
    backends: Annotated[tuple[str, ...], Meta(min_length=1)] = ("UCX",)
    nixl_progress_delay_us: _Count | None = None
    enforce_handshake_compat: bool = True
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: _Count = 64
    decoder_kv_blocks_ttl: _Seconds = 480
    enable_cross_layers_blocks: bool = False
    engine_ttl_s: _Ttl = 3600
    kv_read_timeout_s: _Seconds = 120
    kv_hung_peer_timeout_s: _Seconds = 600
    transfer_strategy: Literal["auto", "direct", "staged"] = "auto"
    staging_arena_bytes: _Bytes | None = None
    staging_max_descriptor_bytes: _Bytes = StagingPolicy().max_descriptor_bytes
    staging_min_merge_factor: _Count = StagingPolicy().min_merge_factor
    staging_min_descriptors: _Count = StagingPolicy().min_descriptors
    missing_draft_layers: Literal["refuse", "compute"] = "refuse"
    side_channel_key_file: Annotated[str, Meta(min_length=1)] | None = None
    trusted_peers: tuple[str, ...] | None = None
    num_lanes: Annotated[int, Meta(ge=1, le=64)] | None = None
    verify_plans: bool = False
    early_dispatch: bool = False
    seed_first_token: bool = False

    def channel_key(self) -> ChannelKey | None:
        """The key of `side_channel_key_file`; None without that.

        Raises:
            LocalChannelError: The file holds none, or is readable for all.
        """
        path = self.side_channel_key_file
        return None if path is None else read_channel_key(path)

    def trusted(self) -> TrustedPeers | None:
        """The networks of `trusted_peers`; None without that."""
        return None if self.trusted_peers is None else TrustedPeers.parse(self.trusted_peers)

    def staging_policy(self) -> StagingPolicy | None:
        """Which reads are staged; None for all of them."""
        if self.transfer_strategy != "auto":
            return None
        return StagingPolicy(
            self.staging_max_descriptor_bytes,
            self.staging_min_merge_factor,
            self.staging_min_descriptors,
        )

    def lanes(self) -> int:
        """How many agents to read with, with what suits the backends where the option is not set.

        One that needs a progress thread of NIXL's may cost a core while it is idle.
        """
        return self.num_lanes or (4 if can_be_polled(self.backends) else 1)

    def progress_delay_us(self, *, on_cpu: bool) -> int:
        """How long NIXL's progress thread rests, by default what suits backends and device."""
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
        LocalLayoutError: The value of an option is none that it can have.
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


def remarks(config: KVTransferConfig, settings: Settings) -> list[str]:
    """What is configured and does nothing, or not what it does with upstream's connector."""
    known = set(Settings.__struct_encode_fields__)
    found = [
        f"kv_connector_extra_config names {name!r}, which this connector does not know"
        for name in sorted(map(str, set(config.kv_connector_extra_config) - known))
    ]
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
    if settings.bidirectional_kv_xfer and config.kv_load_failure_policy != "recompute":
        found.append(
            "bidirectional_kv_xfer without kv_load_failure_policy recompute: a turn that does not "
            "go on from the very tokens of the last one fails"
        )
    return found


def _check_networks(settings: Settings) -> None:
    """See that networks are networks.

    Raises:
        ValidationError: One is not.
    """
    try:
        settings.trusted()
    except ValueError as error:
        raise msgspec.ValidationError(f"{one_line(error)} - at `$.trusted_peers`") from error


def _from_text(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Options that upstream takes as text, as what they mean."""
    values: dict[str, Any] = {}
    flag, threshold = (
        extra.get(name) for name in ("enable_cross_layers_blocks", "kv_recompute_threshold")
    )
    if isinstance(flag, str) and flag.lower() in ("true", "false"):
        values["enable_cross_layers_blocks"] = flag.lower() == "true"
    if isinstance(threshold, str) and threshold.isdecimal():
        values["kv_recompute_threshold"] = int(threshold)
    return values
