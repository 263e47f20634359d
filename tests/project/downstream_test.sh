#!/usr/bin/env bash
# Installs the build tree given as $1 into a fresh prefix, builds
# examples/downstream (in the source tree $2) against it, and runs it.
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -G Ninja -S "$source/examples/downstream" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/build"
"$work/build/downstream" "$work/store"
