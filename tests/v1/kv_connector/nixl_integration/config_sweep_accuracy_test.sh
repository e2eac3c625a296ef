#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compare many pairs of layouts with a single engine, on tiny models; ends with a table.
#
#   config_sweep_accuracy_test.sh                     all families
#   config_sweep_accuracy_test.sh --list              what there is
#   config_sweep_accuracy_test.sh --only "PP on P"    one of them
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
cd "$root"
exec "${PYTHON:-$root/.venv/bin/python}" -m tools.pdstack sweep "$@"
