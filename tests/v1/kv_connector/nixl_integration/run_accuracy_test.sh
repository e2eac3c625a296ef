#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start prefill and decode engines of one pair of layouts with the router in front, and compare their
# answers with those of a single engine: greedy tokens and log-probabilities.
#
#   PREFILLER_TP_SIZE=2 DECODER_TP_SIZE=1 MODEL_NAMES=/models/llama run_accuracy_test.sh
#
# Variables, all of which may be left out:
#   MODEL_NAMES                                model directories, separated by spaces (SmolLM2-135M)
#   PREFILLER_TP_SIZE, DECODER_TP_SIZE         tensor-parallel size of each engine (1)
#   PREFILLER_PP_SIZE, DECODER_PP_SIZE         pipeline stages of each engine (1)
#   NUM_PREFILL_INSTANCES, NUM_DECODE_INSTANCES  engines of each role (1)
#   PREFILL_BLOCK_SIZE, DECODE_BLOCK_SIZE      tokens in a block (vLLM's default)
#   GPU_MEMORY_UTILIZATION                     share of a GPU's memory for each engine
#   VLLM_SERVE_EXTRA_ARGS                      more for `vllm serve`, separated by commas or spaces
#   NUM_REQUESTS                               prompts of 8 to 900 tokens (64)
#   GSM8K_EXPECTED                             then score gsm8k through the router with lm_eval: share
#                                              of exact answers, to be met within 0.03; needs
#                                              `pip install 'lm-eval[api]'` and the data set, from the
#                                              Hugging Face hub or its cache (not run)
#   GSM8K_LIMIT                                questions of gsm8k (all)
set -euo pipefail

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
  sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}

shared=${VLLM_SERVE_EXTRA_ARGS:-}
shared=${shared//,/ }
if [[ -n "${GPU_MEMORY_UTILIZATION:-}" ]]; then
  shared+=" --gpu-memory-utilization $GPU_MEMORY_UTILIZATION"
fi
prefill_args="$shared${PREFILL_BLOCK_SIZE:+ --block-size $PREFILL_BLOCK_SIZE}"
decode_args="$shared${DECODE_BLOCK_SIZE:+ --block-size $DECODE_BLOCK_SIZE}"

cd "$root"
status=0
for model in ${MODEL_NAMES:-default}; do
  arguments=(
    accuracy
    --prefill "tp${PREFILLER_TP_SIZE:-1}pp${PREFILLER_PP_SIZE:-1}"
    --decode "tp${DECODER_TP_SIZE:-1}pp${DECODER_PP_SIZE:-1}"
    --num-prefill "${NUM_PREFILL_INSTANCES:-1}"
    --num-decode "${NUM_DECODE_INSTANCES:-1}"
    --prefill-args="$prefill_args"
    --decode-args="$decode_args"
    --requests "${NUM_REQUESTS:-64}"
  )
  if [[ "$model" != default ]]; then
    arguments+=(--model "$model")
  fi
  if [[ -n "${GSM8K_EXPECTED:-}" ]]; then
    arguments+=(--gsm8k "$GSM8K_EXPECTED")
  fi
  if [[ -n "${GSM8K_LIMIT:-}" ]]; then
    arguments+=(--gsm8k-limit "$GSM8K_LIMIT")
  fi
  "$python" -m tools.pdstack "${arguments[@]}" || status=$?
done
exit "$status"
