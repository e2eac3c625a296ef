#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The first node of a prefill engine on Ray. In the foreground: Ctrl-C takes the node away.
#
#   HOST_IP=10.0.0.1 ./head.sh [OPTIONS OF ray start...]
#
# Taken from the environment: HOST_IP, this node's address; RAY_PORT, 6379.
#
# Whatever UCX or NCCL is to be told about this node's devices (UCX_NET_DEVICES, NCCL_SOCKET_IFNAME)
# is set where the engine is started, in prefill.sh: vLLM carries UCX_*, NCCL_* and VLLM_* over to
# its workers on all nodes.
#
# Who reaches a Ray cluster can run anything on it, so all three scripts ask for Ray's token, which
# `ray get-auth-token --generate` makes on one node; ~/.ray/auth_token is then copied to the others.
# RAY_AUTH_MODE=disabled does without, as in a network that nobody else reaches.
#
# Ray's nodes talk over RAY_PORT and over the ports below, which are fixed so that a firewall can
# know them; those of the workers are a range.
set -euo pipefail

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

: "${HOST_IP:?set it to the address of this node that the other nodes can reach}"

# vLLM looks for each of its workers under the node's own address.
export VLLM_HOST_IP=$HOST_IP

exec ray start --head --node-ip-address "$HOST_IP" --port "${RAY_PORT:-6379}" \
  --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 \
  --min-worker-port 10002 --max-worker-port 10999 \
  --include-dashboard false --disable-usage-stats --block "$@"
