#!/usr/bin/env bash
# Installs what a step needs and a bare Debian machine lacks. Rust and make are taken for granted.
#
#   tools.sh build           a linker for cargo
#   tools.sh host            what llama.cpp, the examples and the model need
#   tools.sh lint valgrind   ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/need.sh"

for step in "$@"; do
    case $step in
        build)
            need cc build-essential
            ;;
        host)
            need cc build-essential
            need g++ build-essential
            need cmake cmake
            need ninja ninja-build
            need python3 python3
            python3 -m pip --version >/dev/null 2>&1 || need pip3 python3-pip
            ;;
        lint)
            need_component fmt rustfmt
            need_component clippy clippy
            ;;
        valgrind)
            need valgrind valgrind
            ;;
        *)
            printf 'tools.sh: unknown step %s\n' "$step" >&2
            exit 1
            ;;
    esac
done
