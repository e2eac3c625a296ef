# SPDX-License-Identifier: Apache-2.0
"""Answers that begin with the token that the prefill engine has sampled.

A prefill engine computes the logits of a prompt's last token and samples one token. Its answer is
thrown away, and the decode engine computes that token again. Both sample from one distribution, so
that one draw is as good as the other, and the decode engine can take the token over:

    prefill   samples as the client, not the router, asked; sends the token with its offer, and a
              digest of what it has sampled with
    decode    has received all of the prompt, and would sample with the same: answers with the token
              at once, and computes the next

Whether a token is taken over must not depend on which one it is, as the answers' distribution would
be another one. So a token that ends the answer is taken over as well: vLLM's own step ends it,
in which no other token is allowed. A grammar, which both ends have, is advanced by the token.

Each checks its own request. Log-probabilities travel with the token. What changes it in ways that a
digest does not tell keeps it from being sent or used; so do parameters that this module does not
know.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from ...errors import one_line, quote
from ...protocol.ids import RequestId
from ...protocol.params import (
    MAX_LOGPROBS,
    FirstToken,
    Params,
    SampledLogprobs,
    first_token,
    of_first_token,
    offered_tokens,
)
from ..compat import CONNECTORS_GIVE_FIRST_OUTPUTS, asks_more_of_forwards, last_logprobs

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig, VllmConfig
    from vllm.v1.request import Request

    from ..settings import Settings

logger = init_logger(__name__)

_SAMPLES_WITH = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "_bad_words_token_ids"),
)
"""Fields of `SamplingParams` that decide how the first token is drawn, equal at both engines."""

_LOOKED_AT = frozenset(
    {
        *("seed", "max_tokens", "min_tokens", "stop_token_ids", "_eos_token_id", "extra_args"),
        *("structured_outputs", "logprobs"),
    }
)
"""Other fields that this module reads by name."""

_INDIFFERENT = frozenset(
    {
        # Inputs from which other fields are derived.
        "ignore_eos",
        "_all_stop_token_ids",
        "bad_words",
        "skip_clone",
        # Each answer has a request of its own.
        "n",
        # A single token cannot repeat.
        "repetition_detection",
        # Without effect on an engine without watermarks that returns no experts.
        "watermarking",
        "_watermarking_skipped",
        "routed_experts_prompt_start",
        # How front ends present tokens.
        "stop",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "stream_interval",
        "flat_logprobs",
        "skip_reading_prefix_cache",
    }
)
"""Fields that change neither the first token nor what is sent with it."""

_DEFAULTS = {
    field.name: field.default
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _LOOKED_AT.union(_INDIFFERENT, _SAMPLES_WITH)
}
"""All other fields, which must have their defaults; unexamined fields of later releases are
included."""

_OF_CONNECTORS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Extra arguments of sampling parameters that logits processors do not read."""


def obstacle(config: VllmConfig, *, prefills_all: bool) -> str | None:
    """Return why an engine neither sends nor takes over first tokens; None where it may.

    Args:
        config: The engine's configuration.
        prefills_all: Whether prefill engines compute all of a prompt, its last tokens included.
    """
    if not CONNECTORS_GIVE_FIRST_OUTPUTS:
        return "vLLM lacks the hook for it, which this project's fork has since 0.32.0"
    if not prefills_all:
        return (
            "decode engines compute the last token of each prompt, as models with windows or "
            "recurrent state and some drafts need it"
        )
    if config.speculative_config is not None:
        return "--speculative-config drafts from what the forward of a prompt's last token leaves"
    if config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return "logits processors, of an option or installed, may keep state of a request's tokens"
    if asks_more_of_forwards(config):
        return "watermarks, sampling masks or routed experts come with the forward of each token"
    return None


def open_first_tokens(
    config: VllmConfig, settings: Settings, record: Callable[[], None], *, prefills_all: bool
) -> FirstTokens:
    """Return this engine's handling of first tokens, for its options and its model.

    Args:
        config: The engine's configuration.
        settings: Its options; if they enable what cannot be done, a line of the log says why.
        record: See `FirstTokens`.
        prefills_all: See `obstacle`.
    """
    if settings.seed_first_token is False:
        return FirstTokens(0, 0, record, is_on=False)
    why_not = obstacle(config, prefills_all=prefills_all)
    if why_not is None:
        logger.info(
            "Answers begin with the prefill engine's token where it was sampled as they are: "
            "seed_first_token false on either engine turns that off."
        )
    elif settings.seed_first_token:
        logger.warning("seed_first_token does nothing here: %s.", one_line(why_not))
    model_config = config.model_config
    return FirstTokens(
        model_config.get_vocab_size(),
        model_config.max_model_len,
        record,
        is_on=why_not is None,
        grammar_rules=_grammar_rules(config.structured_outputs_config),
        # Of processed ones, those of an answer's end would be of the only token allowed there.
        has_logprobs=model_config.logprobs_mode == "raw_logprobs",
    )


class FirstTokens:
    """The first tokens that this engine sends, and those that it has received.

    Belongs to the scheduler's thread.

    Args:
        vocab_size: Number of the model's tokens.
        max_model_len: Maximum number of tokens of a request.
        record: Called for each answer that begins with a received token.
        is_on: Whether first tokens are sent and taken over.
        grammar_rules: This engine's settings for grammars, which decide what they allow; None to
            send and take over no token of an answer with a grammar.
        has_logprobs: Whether tokens come with log-probabilities, where clients ask for them.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        record: Callable[[], None],
        *,
        is_on: bool = True,
        grammar_rules: tuple[bool, ...] | None = None,
        has_logprobs: bool = True,
    ) -> None:
        self._record = record
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._is_on = is_on
        self._grammar_rules = grammar_rules
        self._has_logprobs = has_logprobs
        self._reading: dict[RequestId, Request] = {}
        self._received: list[Request] = []
        self._told: dict[RequestId, FirstToken] = {}

    def ask(self, request: Request) -> None:
        """Sample a request that is prefilled for another engine as its client has asked.

        Routers set `max_tokens` and `min_tokens` to 1 at the prefill engine. With that minimum, it
        would sample the next best token where the best one ends the answer.
        """
        sampling = request.sampling_params
        if self._is_on and sampling is not None and sampling.max_tokens == 1:
            sampling.min_tokens = 0

    def of_offer(self, request: Request) -> Params:
        """Return what a request's offer says of its token; nothing if none can be taken over."""
        tokens, params = request.output_token_ids, request.kv_transfer_params or {}
        sampling = request.sampling_params
        if (
            not self._is_on
            or len(tokens) != 1
            or not params.get("do_remote_decode")
            or sampling is None
            or not self._is_plain(request, sampling)
        ):
            return {}
        digest = _digest(sampling, self._grammar_rules)
        first = FirstToken(tokens[0], digest, _sampled_logprobs(request, sampling))
        return of_first_token(first) if self._has_wanted_logprobs(first, sampling) else {}

    def begin(self, request: Request) -> None:
        """Track a new request whose prompt another engine computes."""
        params = request.kv_transfer_params
        if not self._is_on or offered_tokens(params) not in (None, request.num_prompt_tokens):
            return
        self._reading[request.request_id] = request
        if (token := first_token(params)) is not None:
            self._told[request.request_id] = token

    def finish(self, request_id: RequestId) -> None:
        """Forget a request that has ended."""
        self._reading.pop(request_id, None)
        self._told.pop(request_id, None)

    def receive(self, request_ids: Iterable[RequestId]) -> None:
        """Queue requests whose reads have ended, well or not, before vLLM is notified."""
        for request_id in request_ids:
            if (request := self._reading.pop(request_id, None)) is not None:
                self._received.append(request)

    def take_outputs(self) -> list[tuple[int, EngineCoreOutput]]:
        """Answer received requests whose first tokens are known.

        Each has its token appended, so that vLLM schedules it for the next one. Where the token
        ends the answer, vLLM schedules it for this one, and may sample no other.

        Returns:
            For each answered request, its client's index and the output for that client.
        """
        received, self._received = self._received, []
        outputs = []
        for request in received:
            first, sampling = self._told.pop(request.request_id, None), request.sampling_params
            if first is None or sampling is None or not self._may_begin(request, sampling, first):
                continue
            token = first.token
            if token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()):
                # Workers have not seen these parameters yet; other requests may share them.
                request.sampling_params = copy.copy(sampling)
                request.sampling_params.allowed_token_ids = [token]
                continue
            if _fits_grammar(request, token):
                told = None if sampling.logprobs is None else first.logprobs
                outputs.append((request.client_index, _begin(request, token, told)))
                self._record()
        return outputs

    def _may_begin(self, request: Request, sampling: SamplingParams, first: FirstToken) -> bool:
        """Return whether a received request may begin with a token of this model's."""
        return (
            # It was read well, was not aborted, and its whole prompt is computed.
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.num_computed_tokens == request.num_prompt_tokens == request.num_tokens
            and self._is_plain(request, sampling)
            and first.token < self._vocab_size
            and first.sampling == _digest(sampling, self._grammar_rules)
            and self._has_wanted_logprobs(first, sampling)
            and request.max_tokens > 1
            and request.num_tokens + 1 < self._max_model_len
        )

    def _has_wanted_logprobs(self, first: FirstToken, sampling: SamplingParams) -> bool:
        """Return whether a token has the log-probabilities that its client has asked for."""
        if (wanted := sampling.logprobs) is None:
            return True
        return (
            (told := first.logprobs) is not None
            and len(told.tokens) == len(told.logprobs) == wanted + 1
            and told.tokens[0] == first.token
            and max(told.tokens) < self._vocab_size
            # The model, or a client, may exclude tokens.
            and all(map(math.isfinite, told.logprobs))
        )

    def _is_plain(self, request: Request, sampling: SamplingParams) -> bool:
        """Return whether a request's first token is as good as any other draw, and can be sent."""
        return (
            # Its generator would stand elsewhere for the second token.
            sampling.sampling_type is not SamplingType.RANDOM_SEED
            # Drawn without a minimum, a token may end the answer.
            and sampling.min_tokens == 0
            and (sampling.structured_outputs is None or self._grammar_rules is not None)
            and (
                sampling.logprobs is None
                or (self._has_logprobs and 0 <= sampling.logprobs <= MAX_LOGPROBS)
            )
            and (sampling.extra_args or {}).keys() <= _OF_CONNECTORS
            and all(_is_default(sampling, name) for name in _DEFAULTS)
            and not request.resumable
        )


def _grammar_rules(config: StructuredOutputsConfig) -> tuple[bool, ...] | None:
    """Return the settings that decide what a grammar allows; None with a reasoning parser.

    That decides from which token on a grammar counts.
    """
    if config.reasoning_parser:
        return None
    return config.disable_any_whitespace, config.disable_additional_properties


def _digest(sampling: SamplingParams, grammar_rules: tuple[bool, ...] | None = None) -> str:
    """Return a digest of what the first token is drawn with, equal at both engines."""
    values = [getattr(sampling, name) for name in _SAMPLES_WITH]
    values = [sorted(each.items()) if isinstance(each, dict) else each for each in values]
    if sampling.structured_outputs is not None:
        # A grammar ends with one of the stop tokens.
        stops = sorted(sampling.all_stop_token_ids)
        values += [asdict(sampling.structured_outputs), stops, grammar_rules]
    return sha256(msgspec.json.encode(values)).hexdigest()[:16]


def _is_default(sampling: SamplingParams, name: str) -> bool:
    """Return whether a field has its default; arrays, which compare by element, default to None."""
    value, default = getattr(sampling, name), _DEFAULTS[name]
    return value is None if default is None else bool(value == default)


def _fits_grammar(request: Request, token: int) -> bool:
    """Advance a request's grammar by its first token; return False if it does not allow it.

    Not each can go on once it was told a token that it does not allow.
    """
    if (structured := request.structured_output_request) is None:
        return True
    grammar = structured.grammar
    if grammar is None or isinstance(grammar, Exception):
        # vLLM reads nothing before it is there.
        return False
    return bool(
        grammar.validate_tokens([token]) and grammar.accept_tokens(request.request_id, [token])
    )


def _sampled_logprobs(request: Request, sampling: SamplingParams) -> SampledLogprobs | None:
    """Return what the step of a request's only token says of its log-probabilities."""
    found = last_logprobs(request)
    if found is None or sampling.logprobs is None:
        return None
    # A row is as long as the longest that a request of the step asks for.
    tokens, logprobs = (row[0, : sampling.logprobs + 1].tolist() for row in found[:2])
    return SampledLogprobs(tokens, logprobs, int(found.sampled_token_ranks[0]))


def _logprobs_lists(told: SampledLogprobs) -> LogprobsLists:
    """Return log-probabilities of one token, as vLLM's model runners do."""
    rows = np.array([told.tokens], np.int32), np.array([told.logprobs], np.float32)
    return LogprobsLists(*rows, np.array([told.rank], np.int32))


def _begin(request: Request, token: int, logprobs: SampledLogprobs | None) -> EngineCoreOutput:
    """Append a request's first token; return the output for its client."""
    if request.events:
        # If events are kept: its prefill ends now, and would otherwise begin with the next step.
        request.record_event(EngineCoreEventType.SCHEDULED)
    request.append_output_token_ids(token)
    logger.debug("Request %s begins with the prefill engine's token", quote(request.request_id))
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        new_logprobs=None if logprobs is None else _logprobs_lists(logprobs),
        events=request.take_events(),
        prefill_stats=request.take_prefill_stats(),
        trace_headers=request.trace_headers,
    )
