#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The router in front of both nodes, on either of them or elsewhere. In the foreground.
#
#   PREFILL_URLS=http://10.0.0.1:8100 DECODE_URLS=http://10.0.0.2:8100 ./router.sh [OPTIONS...]
#
# It needs the engines' HTTP addresses only: it hands the decode engine what the prefill engine has
# answered, and in there is the side channel's address. Several engines of a role are separated by
# spaces; they need not have equal layouts.
#
# Taken from the environment: PREFILL_URLS, DECODE_URLS; HOST, 0.0.0.0; PORT, 8000; METRICS_PORT,
# 29000, on the loopback. It waits until all engines are up.
set -euo pipefail

: "${PREFILL_URLS:?set it to the prefill engines\' HTTP addresses, separated by spaces}"
: "${DECODE_URLS:?set it to the decode engines\' HTTP addresses, separated by spaces}"

engines=()
read -ra urls <<<"$PREFILL_URLS"
for url in "${urls[@]}"; do engines+=(--prefill "$url"); done
read -ra urls <<<"$DECODE_URLS"
for url in "${urls[@]}"; do engines+=(--decode "$url"); done

exec vllm-router --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" \
  --vllm-pd-disaggregation --kv-connector nixl --policy round_robin "${engines[@]}" "$@"
