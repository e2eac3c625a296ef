#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Two prefill and two decode engines behind a router, each replaced in turn by one of another
# installation of vLLM while eight clients go on asking. It ends with a table: requests that failed,
# answers that differ from one engine's, and times to the first token before, during and after.
#
#   make setup && make setup BASE=0.33.0
#   examples/local/roll.sh .venv-0.33.0
#   examples/local/roll.sh .venv-0.33.0 --address other --prefill tp1pp2 --prefill tp2pp1
#
# NEXT is the virtual environment of the engines that follow. Further arguments are those of
# `python -m tools.pdstack roll`, which it runs: --help lists them. What is done to an engine:
#
#   1. The router is told no more of it, and sends it nothing new after 5 s at most.
#   2. Time passes in which requests come to it that were on their way.
#   3. SIGTERM. With --shutdown-timeout it answers what it has, keeps blocks until they are read, and
#      ends by itself.
#   4. The next one starts at the same address, and the router is told of it when it is ready. With
#      `--address other` that comes first, at another address, so that there is never one less.
#
# The status is 0 only if no request failed and no answer differs. Ctrl-C stops everything.
#
# Taken from the environment:
#   PYTHON   of the engines that are there at first; by default .venv/bin/python of the repository
set -euo pipefail

if (($# < 1)) || [[ $1 == -* ]]; then
  echo "usage: ${0##*/} NEXT [OPTION...]" >&2
  exit 2
fi
next=$(cd "$1" && pwd)/bin
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-.venv/bin/python}" -m tools.pdstack roll --next "$next" "$@"
