#!/usr/bin/env bash
# `make demo`: stock llama.cpp reads a long document and answers a question about it, once with its
# own cache and once with libsekv in its place, and the two are compared token by token.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
text=build/texts/django-tutorial.txt
document=build/demo/document.txt
n_bytes=16000
# A model this small completes better than it converses: hence --raw, and a sentence to finish.
question="Question: Which command creates the project?
Answer: The command is"

step() { printf '\n\033[1m%s\033[0m\n' "$*" | sed "$([ -t 1 ] || echo 's/\x1b\[[0-9;]*m//g')"; }

step "1. The library, llama.cpp and the program on both"
make --no-print-directory host

step "2. The document"
ffi_examples/llama_cpp/fetch.sh texts
mkdir -p "$(dirname "$document")"
head -c "$n_bytes" "$text" > "$document"
printf 'The first %d bytes of %s, which begins:\n\n' "$n_bytes" "$text"
head -n 8 "$document" | sed 's/^/    /'

step "3. The question, asked when the document has been read and compressed"
sed 's/^/    /' <<< "$question"

step "4. Read by llama.cpp with its own f16 cache, and with libsekv instead; one answer, both caches"
build/examples/sekv-llama -m "$model" -f "$document" -p "$question" --raw -n 48 --compare

cat <<'TEXT'

What you see: the answer is what the full cache says; libsekv was fed the same tokens. KL is the
distance between the two predictions of each next token (0: the same), top-1 agreement how often
they name the same token. The weights are 4-bit here, and rounding them moves a prediction by about
as much; `make eval` measures with F32 weights on ten documents.

Ask your own:
    build/examples/sekv-llama -m MODEL.gguf -f DOCUMENT -p QUESTION --compare
TEXT
