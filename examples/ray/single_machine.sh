#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A Ray node, a prefill engine of two stages on it, a decode engine without Ray and a router, all on
# one machine, until Ctrl-C: to see it work before there are nodes.
#
#   single_machine.sh MODEL [PREFILL_LAYOUT [DECODE_LAYOUT]] [-- OPTIONS OF BOTH ENGINES...]
#
# Arguments and environment are those of ../local/serve_pd.sh. RAY_PORT is 6379; the port above it
# is taken, too. On GPUs, PREFILL_DEVICES ("0,1") and DECODE_DEVICES ("2") have to be given: Ray hands
# out the former.
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
choose_device
if [[ $DEVICE == cuda ]]; then
  : "${PREFILL_DEVICES:?set it to the GPUs that Ray hands out to the prefill engine}"
  : "${DECODE_DEVICES:?set it to the GPUs of the decode engine}"
  gpus=$(tr -cd , <<<"$PREFILL_DEVICES" | wc -c)
  gpus=$((gpus + 1))
else
  # vLLM asks Ray for a GPU for each worker also where there is none; these are counts only.
  gpus=64
fi

# A directory of its own, because Ray's common one may be another user's; a short one, because paths
# of the sockets in it may have 107 characters.
ray_dir=$(mktemp -d /tmp/ray-XXXXXX)
after_children() {
  cp -RL "$ray_dir/session_latest/logs" "$LOG_DIR/ray-logs" 2>/dev/null || true
  rm -rf -- "$ray_dir"
}
# Ray listens on the machine's own address even where it is told another one, and who reaches it can
# run anything: only who knows this cluster's token.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(</proc/sys/kernel/random/uuid)
export RAY_AUTH_TOKEN
# vLLM's workers ask for no CPUs; Ray may start as many processes ahead as it has.
variables=(VLLM_HOST_IP=127.0.0.1)
if [[ $DEVICE == cuda ]]; then variables+=("CUDA_VISIBLE_DEVICES=$PREFILL_DEVICES"); fi
start ray env "${variables[@]}" \
  ray start --head --node-ip-address 127.0.0.1 --port "$ray_port" --temp-dir "$ray_dir" \
  --ray-client-server-port $((ray_port + 1)) --dashboard-agent-listen-port 0 \
  --min-worker-port 0 --max-worker-port 0 --num-cpus 2 --num-gpus "$gpus" \
  --object-store-memory 200000000 \
  --include-dashboard false --disable-usage-stats --block
echo "Ray's own logs: $ray_dir/session_latest/logs, at the end in $LOG_DIR/ray-logs"
ray_answers() { ray health-check --address "127.0.0.1:$ray_port" >/dev/null 2>&1; }
wait_until_ready ray ray_answers

export RAY_ADDRESS=127.0.0.1:$ray_port
export PREFILL_ARGS="--distributed-executor-backend ray ${PREFILL_ARGS:-}"
# In this shell, with its children: Ray was started first and is ended last.
# shellcheck source-path=SCRIPTDIR source=../local/serve_pd.sh
source "$here/../local/serve_pd.sh" "$@"
