#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A Ray node, a prefill engine of two stages on it, a decode engine without Ray and a router, all on
# one machine, until Ctrl-C: to see it work before there are nodes.
#
#   single_machine.sh MODEL [PREFILL_LAYOUT [DECODE_LAYOUT]] [-- OPTIONS OF BOTH ENGINES...]
#
# Arguments and environment are those of ../local/serve_pd.sh. RAY_PORT is 6379. On GPUs,
# PREFILL_DEVICES ("0,1") and DECODE_DEVICES ("2") have to be given: Ray hands out the former.
set -euo pipefail

(($#)) || {
  echo "usage: ${0##*/} MODEL [PREFILL_LAYOUT [DECODE_LAYOUT]] [-- VLLM_OPTION...]" >&2
  exit 2
}

here=$(dirname "${BASH_SOURCE[0]}")
ray_port=${RAY_PORT:-6379}
LOG_DIR=${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/ray-pd-XXXXXX")}
export LOG_DIR

# shellcheck source-path=SCRIPTDIR source=../lib/children.sh
source "$here/../lib/children.sh"
need ray

# A directory of its own, because Ray's common one may be another user's; a short one, because paths
# of the sockets in it may have 107 characters. CPUs are counts to Ray: enough for a worker each.
ray_dir=$(mktemp -d /tmp/ray-XXXXXX)
start ray env ${PREFILL_DEVICES:+CUDA_VISIBLE_DEVICES="$PREFILL_DEVICES"} VLLM_HOST_IP=127.0.0.1 \
  ray start --head --node-ip-address 127.0.0.1 --port "$ray_port" --temp-dir "$ray_dir" \
  --num-cpus 64 --object-store-memory 200000000 \
  --include-dashboard false --disable-usage-stats --block
ray_answers() { ray health-check --address "127.0.0.1:$ray_port" >/dev/null 2>&1; }
wait_until_ready ray ray_answers

export RAY_ADDRESS=127.0.0.1:$ray_port
export PREFILL_ARGS="--distributed-executor-backend ray ${PREFILL_ARGS:-}"
# In this shell, with its children: Ray was started first and is ended last.
# shellcheck source-path=SCRIPTDIR source=../local/serve_pd.sh
source "$here/../local/serve_pd.sh" "$@"
