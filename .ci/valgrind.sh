#!/usr/bin/env bash
# The C example under valgrind: no invalid access, no leak, no uninitialised value, no descriptor
# left open. Needs `.ci/tools.sh build valgrind`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make --no-print-directory build
make --no-print-directory -C ffi_examples/c LINK=static
# Two threads of the library's, a prompt beyond the layout, some steps.
valgrind --error-exitcode=1 --leak-check=full --show-leak-kinds=all --errors-for-leak-kinds=definite,indirect,possible \
    --track-fds=no --quiet build/examples/c/minimal 1200 8
