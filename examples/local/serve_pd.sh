#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A prefill engine, a decode engine and a router on one machine, until Ctrl-C.
#
#   serve_pd.sh MODEL [PREFILL_LAYOUT [DECODE_LAYOUT]] [-- OPTIONS OF BOTH ENGINES...]
#   serve_pd.sh Qwen/Qwen3-0.6B tp1pp2 tp2pp1 -- --enforce-eager
#
# A layout is tp<N>pp<M>: N tensor-parallel ranks in each of M pipeline stages. The two need not have
# anything in common; `kv-plan` shows what any pair costs. N has to suit the model: it divides
# the attention heads, and it divides the KV heads or is a multiple of them.
#
# On GPUs the engines take as many as they have ranks, the prefill engine first, from
# CUDA_VISIBLE_DEVICES where it is set. Without GPUs workers share the CPU's cores.
#
# Taken from the environment:
#   DEVICE            cuda or cpu; by default what this machine has
#   PREFILL_DEVICES   GPUs ("0,1"), or the cores of each worker on CPU ("0-3|4-7"); by default all
#   DECODE_DEVICES    are shared out
#   PREFILL_ARGS      more options of one engine, separated by spaces
#   DECODE_ARGS
#   PORT              of the router, 8000
#   PREFILL_PORT      of the engine's HTTP server, 8100; its side channel is 500 above
#   DECODE_PORT       8200
#   METRICS_PORT      of the router's own metrics, 29000
#   LOG_DIR           a new directory by default
#   STARTUP_TIMEOUT_S how long a server may take to become ready, 900
#   GRACE_S           how long it may take to end, 30
set -euo pipefail

usage() {
  echo "usage: ${0##*/} MODEL [PREFILL_LAYOUT [DECODE_LAYOUT]] [-- VLLM_OPTION...]" >&2
  exit 2
}

places=()
while (($#)) && [[ $1 != -- ]]; do
  [[ $1 != -* ]] || usage
  places+=("$1")
  shift
done
((${#places[@]} >= 1 && ${#places[@]} <= 3)) || usage
if (($#)); then shift; fi
model=${places[0]}
prefill_layout=${places[1]:-tp1pp2}
decode_layout=${places[2]:-tp1pp1}

# split LAYOUT: tp2pp1 as "2 1"
split() {
  [[ $1 =~ ^tp([1-9][0-9]*)pp([1-9][0-9]*)$ ]] || {
    echo "error: layout $1 is not understood; write tp<N>pp<M>, for example tp2pp1" >&2
    exit 2
  }
  echo "${BASH_REMATCH[1]} ${BASH_REMATCH[2]}"
}
prefill_sizes=$(split "$prefill_layout")
decode_sizes=$(split "$decode_layout")
read -r prefill_tp prefill_pp <<<"$prefill_sizes"
read -r decode_tp decode_pp <<<"$decode_sizes"
prefill_ranks=$((prefill_tp * prefill_pp))
ranks=$((prefill_ranks + decode_tp * decode_pp))

port=${PORT:-8000}
prefill_port=${PREFILL_PORT:-8100}
decode_port=${DECODE_PORT:-8200}
LOG_DIR=${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/serve-pd-XXXXXX")}

# shellcheck source-path=SCRIPTDIR source=../lib/children.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/children.sh"
need vllm vllm-router curl
choose_device

# Cores that this process may use, one a line.
cores() {
  local spans span
  IFS=, read -ra spans <<<"$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)"
  for span in "${spans[@]}"; do seq "${span%-*}" "${span#*-}"; done
}

# share FIRST COUNT ITEM...: ranks FIRST to FIRST + COUNT - 1 of all `ranks` get equal shares of the
# items, "a,b|c,d"; where there are too few, ranks take turns.
share() {
  local first=$1 count=$2 rank number shares=()
  shift 2
  local items=("$@") size=$(($# / ranks > 0 ? $# / ranks : 1))
  for ((rank = first; rank < first + count; rank++)); do
    local of_rank=()
    for ((number = rank * size; number < (rank + 1) * size; number++)); do
      of_rank+=("${items[number % ${#items[@]}]}")
    done
    shares+=("$(IFS=,; echo "${of_rank[*]}")")
  done
  (IFS='|'; echo "${shares[*]}")
}

case $DEVICE in
  cuda)
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
      IFS=, read -ra units <<<"$CUDA_VISIBLE_DEVICES"
    else
      mapfile -t units < <(nvidia-smi --query-gpu=index --format=csv,noheader)
    fi
    if [[ -z ${PREFILL_DEVICES:-} || -z ${DECODE_DEVICES:-} ]] && ((${#units[@]} < ranks)); then
      fail "$prefill_layout and $decode_layout need $ranks GPUs, and there are ${#units[@]}; choose" \
        "smaller layouts, or say with PREFILL_DEVICES and DECODE_DEVICES which ones are shared"
    fi
    PREFILL_DEVICES=${PREFILL_DEVICES:-$(IFS=,; echo "${units[*]:0:prefill_ranks}")}
    DECODE_DEVICES=${DECODE_DEVICES:-$(
      IFS=,; echo "${units[*]:prefill_ranks:ranks - prefill_ranks}"
    )}
    variable=CUDA_VISIBLE_DEVICES
    shared_options=()
    ;;
  cpu)
    mapfile -t units < <(cores)
    PREFILL_DEVICES=${PREFILL_DEVICES:-$(share 0 "$prefill_ranks" "${units[@]}")}
    DECODE_DEVICES=${DECODE_DEVICES:-$(
      share "$prefill_ranks" $((ranks - prefill_ranks)) "${units[@]}"
    )}
    # vLLM binds workers only where each has a list of cores of its own; without, engines would all
    # take the same ones.
    variable=VLLM_CPU_OMP_THREADS_BIND
    # Size of each worker's KV cache, in GiB; a model's longest context would seldom fit.
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
    shared_options=(--max-model-len 4096)
    ;;
  *) fail "DEVICE is cuda or cpu, not $DEVICE" ;;
esac

# The KV cache lies where the model computes. The lease bridges moments in which a machine with
# more workers than cores lets one of them wait.
transfer='"kv_connector": "NixlConnector", "kv_buffer_device": "'$DEVICE'",
  "kv_connector_extra_config": {"kv_lease_duration": 120}'

# engine NAME ROLE PORT TP PP DEVICES OPTION...
engine() {
  local name=$1 role=$2 engine_port=$3 tp=$4 pp=$5 devices=$6
  shift 6
  # The side channel must have a port of its own for every engine on a machine.
  start "$name" env "$variable=$devices" VLLM_HOST_IP=127.0.0.1 \
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$((engine_port + 500)) \
    vllm serve "$model" --host 127.0.0.1 --port "$engine_port" \
    --tensor-parallel-size "$tp" --pipeline-parallel-size "$pp" \
    --kv-transfer-config "{\"kv_role\": \"$role\", $transfer}" "${shared_options[@]}" "$@"
}

echo "On $DEVICE: prefill $prefill_layout on $PREFILL_DEVICES, decode $decode_layout on $DECODE_DEVICES"
# Options in PREFILL_ARGS and DECODE_ARGS are separated by spaces.
read -ra prefill_args <<<"${PREFILL_ARGS:-}"
read -ra decode_args <<<"${DECODE_ARGS:-}"
engine prefill kv_producer "$prefill_port" "$prefill_tp" "$prefill_pp" "$PREFILL_DEVICES" \
  "$@" "${prefill_args[@]}"
engine decode kv_consumer "$decode_port" "$decode_tp" "$decode_pp" "$DECODE_DEVICES" \
  "$@" "${decode_args[@]}"
wait_until_ready prefill answers "http://127.0.0.1:$prefill_port/health"
wait_until_ready decode answers "http://127.0.0.1:$decode_port/health"

start router vllm-router --host 127.0.0.1 --port "$port" \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" \
  --vllm-pd-disaggregation --kv-connector nixl --policy round_robin \
  --prefill "http://127.0.0.1:$prefill_port" --decode "http://127.0.0.1:$decode_port"
wait_until_ready router answers "http://127.0.0.1:$port/health"

cat <<EOF

Try it:

  curl http://127.0.0.1:$port/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "$model", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'

What was moved: curl -s http://127.0.0.1:$decode_port/metrics | grep ^vllm:nixl_bytes_transferred_sum

Ready. Ctrl-C stops everything.
EOF
watch_children
