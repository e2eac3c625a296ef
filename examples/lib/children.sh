# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Servers as children of a script: each in a process group of its own with a log of its own, waited
# for with a deadline, and ended by its id when the script ends, for whatever reason but SIGKILL.
#
# To be sourced. Wants LOG_DIR; takes STARTUP_TIMEOUT_S and GRACE_S. A function after_children, where
# there is one, is called when all of them have ended.

STARTUP_TIMEOUT_S=${STARTUP_TIMEOUT_S:-900}
GRACE_S=${GRACE_S:-30}
END_FOLLOWS_S=5

# Process ids, each that of a process group, too, and what messages and logs call them. A script
# that sources another one that sources this keeps what it has started.
children=("${children[@]}")
child_names=("${child_names[@]}")

fail() {
  echo "error: $*" >&2
  exit 1
}

need() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || fail "$tool is not installed, or not on PATH"
  done
}

# Sets DEVICE, unless it is set, to what this machine has.
choose_device() {
  [[ -z ${DEVICE:-} ]] || return 0
  if nvidia-smi -L >/dev/null 2>&1; then DEVICE=cuda; else DEVICE=cpu; fi
}

# start NAME COMMAND...
start() {
  local name=$1
  shift
  # A process group of its own: Ctrl-C in the terminal reaches this script only, which then ends its
  # children in order, and all that a child leaves behind can be named by one id. No session of its
  # own: Linux shares cores among sessions, and 6.18 was seen to starve one for minutes.
  set -m
  "$@" >"$LOG_DIR/$name.log" 2>&1 </dev/null &
  children+=("$!")
  child_names+=("$name")
  set +m
  echo "$name is starting; log: $LOG_DIR/$name.log"
}

# Without a command substitution, as of `jobs`: a signal that comes in one makes bash 5.2 now and then
# wait for ever, or take its trap for a syntax error.
lives() { kill -0 "$1" 2>/dev/null; }

# Ends the script when a child has ended, with the last lines of its log.
check_children() {
  local number
  for number in "${!children[@]}"; do
    lives "${children[number]}" && continue
    local name=${child_names[number]} status=0
    wait "${children[number]}" || status=$?
    tail -n 20 "$LOG_DIR/$name.log" >&2
    fail "$name has ended with status $status; its log is $LOG_DIR/$name.log"
  done
}

# Until a child ends. Not with `wait -n`: it waits for the others where one has ended before it.
watch_children() {
  while :; do
    check_children
    sleep 0.5
  done
}

# check_start NAME: ends the script when an engine has said that it cannot start. With Ray imported,
# it may wait for ever at its end, where nothing but its log tells.
check_start() {
  local log=$LOG_DIR/$1.log
  grep -qs "EngineCore failed to start" "$log" || return 0
  # Most do end, and then their status is told.
  sleep "$END_FOLLOWS_S"
  check_children
  tail -n 40 "$log" >&2
  fail "$1 could not start and did not end by itself; its log is $log"
}

answers() { curl --noproxy '*' --silent --fail --max-time 5 --output /dev/null "$1"; }

# wait_until_ready NAME WHAT...: until the command WHAT succeeds.
wait_until_ready() {
  local name=$1 deadline=$((SECONDS + STARTUP_TIMEOUT_S))
  shift
  until "$@"; do
    check_children
    check_start "$name"
    ((SECONDS < deadline)) || fail "$name was not ready after $STARTUP_TIMEOUT_S s; its log is" \
      "$LOG_DIR/$name.log, and STARTUP_TIMEOUT_S gives it more time"
    sleep 0.5
  done
  echo "$name is ready"
}

stop_children() {
  local status=$? number
  # What follows takes GRACE_S at most; a second Ctrl-C would leave processes behind.
  trap '' INT TERM HUP
  # It may have been interrupted within start.
  set +m
  ((${#children[@]})) || return "$status"
  echo "Stopping. Logs stay in $LOG_DIR"
  # The last one first: the router stops sending before engines stop answering.
  for ((number = ${#children[@]} - 1; number >= 0; number--)); do
    kill -TERM "${children[number]}" 2>/dev/null || true
  done
  local deadline=$((SECONDS + GRACE_S))
  for number in "${!children[@]}"; do
    while lives "${children[number]}" && ((SECONDS < deadline)); do sleep 0.2; done
    # Workers that their engine has not ended; nothing where it has.
    kill -KILL -- "-${children[number]}" 2>/dev/null || true
  done
  if declare -F after_children >/dev/null; then after_children; fi
  return "$status"
}

trap stop_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
