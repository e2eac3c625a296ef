#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The decode engine of two nodes. In the foreground: Ctrl-C ends it.
#
#   HOST_IP=10.0.0.2 ./decode.sh [OPTIONS OF vllm serve...]
#
# Taken from the environment, with what is used otherwise:
#   HOST_IP           address of this node that the prefill node and the router can reach; has to be
#                     given
#   MODEL             Qwen/Qwen3-8B; the same weights on both nodes
#   PORT              8100, HTTP
#   SIDE_CHANNEL_PORT 5600
#   TP, PP            2 and 1. Decode is bound by memory: tensor parallelism reads weights and KV
#                     cache with several GPUs at once, where a stage would wait for the one before.
#
# Ports, firewalls and UCX: as prefill.sh says. The side channel is listened on here, too; prefill
# engines ask it only with "bidirectional_kv_xfer".
set -euo pipefail

: "${HOST_IP:?set it to the address of this node that the prefill node and the router can reach}"

export VLLM_HOST_IP=$HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_PORT=${SIDE_CHANNEL_PORT:-5600}

exec vllm serve "${MODEL:-Qwen/Qwen3-8B}" --host "$HOST_IP" --port "${PORT:-8100}" \
  --tensor-parallel-size "${TP:-2}" --pipeline-parallel-size "${PP:-1}" \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' "$@"
