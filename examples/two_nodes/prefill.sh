#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The prefill engine of two nodes. In the foreground: Ctrl-C ends it.
#
#   HOST_IP=10.0.0.1 ./prefill.sh [OPTIONS OF vllm serve...]
#
# Taken from the environment, with what is used otherwise:
#   HOST_IP           address of this node that the decode node can reach; has to be given
#   MODEL             Qwen/Qwen3-8B; the same weights on both nodes
#   PORT              8100, HTTP
#   SIDE_CHANNEL_PORT 5600
#   TP, PP            1 and 2. Prefill is bound by arithmetic: stages hand over activations once for
#                     a whole chunk of the prompt, where tensor parallelism would meet in every layer.
#
# What has to be open on this node's firewall:
#   PORT               for the router: requests
#   SIDE_CHANNEL_PORT  for the decode node: handshakes, over TCP. An engine of several data-parallel
#                      ranks listens on as many ports, this one plus the rank's number.
#   what UCX uses      between both nodes, in both directions: KV cache and notifications. Over
#                      InfiniBand or RoCE it needs no TCP port. Over TCP it takes any;
#                      UCX_TCP_PORT_RANGE=20000-20999 says which.
# Nothing of this is authenticated or encrypted, but for handshakes where engines have a key
# (docs/security.md): it belongs into a network of your own.
#
# UCX finds the fastest way by itself. Where it does not:
#   UCX_NET_DEVICES=mlx5_0:1           the device to use, as `ibv_devinfo` or `ip link` name it
#   UCX_TLS=rc,cuda_copy,cuda_ipc      RDMA, and nothing else: an error rather than a slow transfer
#   UCX_TLS=tcp,cuda_copy,cuda_ipc     Ethernet without RDMA
#   UCX_LOG_LEVEL=info                 which of them is taken
set -euo pipefail

: "${HOST_IP:?set it to the address of this node that the decode node can reach}"

export VLLM_HOST_IP=$HOST_IP
# Decode engines are told this address with every request, so it is never 0.0.0.0 or localhost.
export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_PORT=${SIDE_CHANNEL_PORT:-5600}

exec vllm serve "${MODEL:-Qwen/Qwen3-8B}" --host "$HOST_IP" --port "${PORT:-8100}" \
  --tensor-parallel-size "${TP:-1}" --pipeline-parallel-size "${PP:-2}" \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' "$@"
