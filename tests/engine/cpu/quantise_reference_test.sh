#!/bin/sh
# Usage: quantise_reference_test.sh ENGINE_CPU_TEST PYTHON QUANTISE_REFERENCE
# Lets the test write what the quantiser gives, and compares it with the rule in
# Python. Then breaks one value: the comparison must see it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
KEDGE_FP8_DUMP=$folder "$1" --gtest_filter=QuantiseTest.BlocksOfEveryKindAndExtent >/dev/null
"$2" "$3" "$folder"

# The last value of the first matrix, 1 x 1: kind, rows, cols, a unit before it.
printf '\177' | dd of="$folder/0.fp8" bs=1 seek=26 conv=notrunc 2>/dev/null
if "$2" "$3" "$folder" >/dev/null; then
  echo "a wrong value was not seen" >&2
  exit 1
fi
