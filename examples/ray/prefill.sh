#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A prefill engine whose pipeline stages lie on several nodes, on the node that runs head.sh. In the
# foreground: Ctrl-C ends it.
#
#   HOST_IP=10.0.0.1 TP=8 PP=2 ./prefill.sh [OPTIONS OF vllm serve...]
#
# Taken from the environment, with what is used otherwise:
#   HOST_IP           this node's address; has to be given
#   MODEL             Qwen/Qwen3-8B
#   PORT              8100, HTTP
#   SIDE_CHANNEL_PORT 5600
#   TP, PP            1 and 2. With TP as large as a node, every stage is a node of its own.
#   RAY_PORT          6379
#
# There is one side channel for all stages, here: the engine's core, which runs on this node, tells
# what the workers on all nodes hold. Bytes are read from each worker's own node, so what UCX uses
# has to be open between every prefill node and the decode nodes (see ../two_nodes/prefill.sh).
# The decode engine and the router are those of ../two_nodes.
set -euo pipefail

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

: "${HOST_IP:?set it to the address of this node that all other nodes can reach}"

export RAY_ADDRESS=$HOST_IP:${RAY_PORT:-6379}
export VLLM_HOST_IP=$HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_PORT=${SIDE_CHANNEL_PORT:-5600}

exec vllm serve "${MODEL:-Qwen/Qwen3-8B}" --host "$HOST_IP" --port "${PORT:-8100}" \
  --tensor-parallel-size "${TP:-1}" --pipeline-parallel-size "${PP:-2}" \
  --distributed-executor-backend ray \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' "$@"
