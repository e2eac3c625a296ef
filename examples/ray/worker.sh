#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Another node of a prefill engine on Ray. In the foreground: Ctrl-C takes the node away.
#
#   HOST_IP=10.0.0.3 HEAD_IP=10.0.0.1 ./worker.sh [OPTIONS OF ray start...]
#
# Taken from the environment: HOST_IP, this node's address; HEAD_IP, that of head.sh; RAY_PORT, 6379.
# Ray's token has to be here as on the head (see head.sh).
# The fork has to be installed here as on the head, and MODEL has to be found under the same name.
set -euo pipefail

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

: "${HOST_IP:?set it to the address of this node that the other nodes can reach}"
: "${HEAD_IP:?set it to the address of the node that runs head.sh}"

export VLLM_HOST_IP=$HOST_IP

exec ray start --address "$HEAD_IP:${RAY_PORT:-6379}" --node-ip-address "$HOST_IP" \
  --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 \
  --min-worker-port 10002 --max-worker-port 10999 --disable-usage-stats --block "$@"
