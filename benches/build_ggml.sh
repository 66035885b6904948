#!/usr/bin/env bash
# Builds benches/ggml_attention.cpp against the llama.cpp in build/llama.cpp/inst and prints the
# library's path. Fails with a message where llama.cpp isn't there: the bench then leaves out its
# rows.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
inst=$root/build/llama.cpp/inst
source=$root/benches/ggml_attention.cpp
target=$root/build/llama.cpp/libggml_attention.so
[ -f "$inst/include/ggml.h" ] || {
    echo "no llama.cpp in build/llama.cpp: ffi_examples/llama_cpp/fetch.sh llama builds it" >&2
    exit 1
}
if [ ! -f "$target" ] || [ "$source" -nt "$target" ] || [ "$inst/lib/libggml-cpu.so" -nt "$target" ]; then
    g++ -O2 -std=c++17 -Wall -Wextra -shared -fPIC -I"$inst/include" "$source" -o "$target.part" \
        -L"$inst/lib" '-Wl,-rpath,$ORIGIN/inst/lib' -lggml -lggml-cpu -lggml-base >&2
    mv "$target.part" "$target"
fi
echo "$target"
