#!/usr/bin/env bash
# Runs the C example given as $1 on a fresh store; it compares trainer and engine
# itself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" "$work/store"
# It can fail: the store is there already.
if "$1" "$work/store" >/dev/null 2>&1; then
  echo "a second trainer created the same store" >&2
  exit 1
fi
