#!/usr/bin/env bash
# The C example and the C tests that have one thread under valgrind: no invalid access, nothing
# read before it is written, no leak. Needs `.ci/tools.sh build valgrind`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=build/valgrind

check() {
    printf 'valgrind %s\n' "$*"
    valgrind --quiet --error-exitcode=1 --leak-check=full \
        --show-leak-kinds=definite,indirect,possible --errors-for-leak-kinds=definite,indirect,possible "$@"
}

make --no-print-directory build
make --no-print-directory -C ffi_examples/c
# A prompt beyond the layout, some steps.
check build/examples/c/minimal 1200 8

mkdir -p "$folder"
for name in arguments struct_sizes order batches models lifetimes sequences state; do
    cc -std=c11 -O1 -g -Iinclude "tests/c/$name.c" target/release/libsekv.so \
        -Wl,-rpath,"$PWD/target/release" -lm -lpthread -o "$folder/$name"
    check "$folder/$name"
done
