#!/usr/bin/env bash
# Installs nothing but the C ABI of the build tree given as $1, then builds the C
# example of the source tree $2 with it: with flags from pkg-config, and with
# find_package(kedge COMPONENTS capi) in a project that knows no C++.
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --component capi --prefix "$work/prefix" >/dev/null
library=$(find "$work/prefix" -name libkedge.so)
[ -n "$library" ]
lib=$(dirname "$library")
[ "$(find "$work/prefix" -name '*.a' | wc -l)" = 0 ]

if command -v pkg-config >/dev/null; then
  flags=$(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --cflags --libs kedge)
else
  flags="-I$work/prefix/include -L$lib -lkedge"
fi
# shellcheck disable=SC2086
cc -std=c11 -Wall -Wextra -pedantic -Werror "$source/examples/c/main.c" $flags -Wl,-rpath,"$lib" -o "$work/by_cc"
"$work/by_cc" "$work/store1"

mkdir "$work/project"
cp "$source/examples/c/main.c" "$work/project/"
cat >"$work/project/CMakeLists.txt" <<'PROJECT'
cmake_minimum_required(VERSION 3.25)
project(c_program LANGUAGES C)
find_package(kedge REQUIRED COMPONENTS capi)
add_executable(c_program main.c)
target_link_libraries(c_program PRIVATE kedge::capi)
PROJECT
cmake -G Ninja -S "$work/project" -B "$work/project/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/project/build"
"$work/project/build/c_program" "$work/store2"
