#!/usr/bin/env bash
# Sessions, chats and the hook's sequence operations, in stock llama.cpp with a real model: what one
# process saves another goes on from. Needs `make host`. Times are printed, never asserted.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
ffi_examples/llama_cpp/fetch.sh f32 texts
# F32 weights: quantised ones turn the rounding of a sum into other words.
model=build/models/SmolLM2-135M-Instruct.F32.gguf
text=build/texts/alice.txt
n_prompt=2000
n_answer=48
# One thread: two that wait for each other token by token take minutes on a busy machine.
threads=(-t 1)

folder=$(mktemp -d "${TMPDIR:-/tmp}/sekv-sessions.XXXXXX")
trap 'rm -rf "$folder"' EXIT
n_failed=0

# check WHAT COMMAND...: the command's status says whether it holds.
check() {
    local what=$1
    shift
    if "$@"; then
        printf 'ok: %s\n' "$what"
    else
        printf 'FAILED: %s\n' "$what"
        n_failed=$((n_failed + 1))
    fi
}

# run NAME OPTION...: one sekv-llama; what it prints goes to $folder/NAME.json and NAME.log.
run() {
    local name=$1
    shift
    build/examples/sekv-llama -m "$model" "${threads[@]}" --raw --json -n "$n_answer" "$@" > "$folder/$name.json" 2> "$folder/$name.log" || {
        cat "$folder/$name.log"
        return 1
    }
}

# value NAME KEY...: a value of the JSON that a run printed.
value() {
    python3 -c '
import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2:]:
    value = value[key]
print(value)' "$folder/$1.json" "${@:2}"
}

same_text() { [ "$(value "$1" text)" = "$(value "$2" text)" ]; }

# reads_only NAME KEPT READ: how many tokens a run kept of its session, and how many it read.
reads_only() { [ "$(value "$1" session kept_tokens) $(value "$1" session read_tokens)" = "$2 $3" ]; }

# is_refused FILE: one sentence that names the file, status 1.
is_refused() {
    local status=0
    build/examples/sekv-llama -m "$model" "${threads[@]}" -n 1 --load-session "$1" > "$folder/refused.out" 2> "$folder/refused.log" || status=$?
    sed 's/^/    /' "$folder/refused.log"
    [ "$status" = 1 ] && [ ! -s "$folder/refused.out" ] && [ "$(wc -l < "$folder/refused.log")" = 1 ] &&
        grep -q "^sekv-llama: error: the session file $1 " "$folder/refused.log"
}

# flip_byte FILE OFFSET
flip_byte() {
    python3 -c '
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(int(sys.argv[2]))
    byte = file.read(1)[0]
    file.seek(int(sys.argv[2]))
    file.write(bytes([byte ^ 16]))' "$@"
}

# flipped_byte_is_refused OFFSET
flipped_byte_is_refused() {
    cp "$folder/session" "$folder/damaged"
    flip_byte "$folder/damaged" "$1"
    is_refused "$folder/damaged"
}

# chat NAME OPTION...: turns from standard input; what it prints goes to $folder/NAME.out and NAME.log.
chat() {
    local name=$1
    shift
    build/examples/sekv-llama -m "$model" "${threads[@]}" --chat -n 24 "$@" > "$folder/$name.out" 2> "$folder/$name.log" || {
        cat "$folder/$name.log"
        return 1
    }
    sed -n 's/^turn/    turn/p' "$folder/$name.log"
}

# turn NAME NUMBER: the tokens that this turn kept and read.
turn() { sed -n "s/^turn $2: \([0-9]*\) tokens kept, \([0-9]*\) read\$/\1 \2/p" "$folder/$1.log"; }

# 1. A text that one process reads, and another goes on from.
run unbroken -f "$text" --prompt-tokens "$n_prompt" --save-session "$folder/session"
run loaded --load-session "$folder/session"
check "the loaded session says what the unbroken run said" same_text unbroken loaded
check "and reads nothing" reads_only loaded "$n_prompt" 0
python3 - "$(value unbroken speed prompt_seconds)" "$(value loaded session load_seconds)" <<'PYTHON'
import sys
read, load = map(float, sys.argv[1:])
print(f"    start: {read:.3f} s by reading, {load:.3f} s from the session, {read / load:.0f} times as fast")
PYTHON
sed -n 's/^session/    session/p' "$folder/unbroken.log"
stat -c '    session file: %s bytes' "$folder/session"

# 2. The same text and more.
run longer -n 8 -f "$text" --prompt-tokens $((n_prompt + 60)) --load-session "$folder/session"
check "of a longer prompt only what is new is read" reads_only longer "$n_prompt" 60
run shorter -n 8 -f "$text" --prompt-tokens $((n_prompt - 60)) --load-session "$folder/session"
check "of a shorter one the last token" reads_only shorter $((n_prompt - 61)) 1

# 3. Files that aren't whole.
head -c -1000 "$folder/session" > "$folder/short"
check "a file that is cut short is refused" is_refused "$folder/short"
check "so is one with another byte in its tokens" flipped_byte_is_refused 100
check "and one with another byte in its state" flipped_byte_is_refused $(($(stat -c %s "$folder/session") / 2))
check "and a file of another kind" is_refused "$text"

# 4. The slow tier in files.
mkdir "$folder/basis"
run filed --load-session "$folder/session" --basis-folder "$folder/basis" --save-session "$folder/from-files"
check "with its slow tier in files it says the same" same_text unbroken filed
check "and they hold bytes" [ "$(value filed memory slow_file_bytes)" -gt 0 ]
run read --load-session "$folder/from-files" --basis-folder "$folder/basis" --basis-io pread
check "saved from files, loaded and read by calls, it says the same" same_text unbroken read

# 5. The paper's routing, whose spans follow from surprisal.
paper=(--routing paper --layout-tokens 256 -n 16)
run paper "${paper[@]}" -f "$text" --prompt-tokens 500 --save-session "$folder/paper"
run paper-loaded "${paper[@]}" --load-session "$folder/paper"
check "a session of the paper's routing says what the unbroken run said" same_text paper paper-loaded
check "and needs that routing" is_refused "$folder/paper"

# 6. A chat.
first="Name three fruits."
second="Which of them is yellow?"
chat one-turn --save-session "$folder/chat" <<< "$first"
n_held=$(sed -n 's/^session \([0-9]*\) tokens saved.*/\1/p' "$folder/one-turn.log")
chat two-turns <<< "$first"$'\n'"$second"
read -r n_kept n_read <<< "$(turn two-turns 2)"
check "the second turn keeps what the first left, $n_held tokens, but a few" [ $((n_held - n_kept)) -le 4 ]
check "and reads what is new" [ "$n_read" -le 40 ]
chat resumed --load-session "$folder/chat" <<< "$second"
read -r n_kept n_read <<< "$(turn resumed 1)"
check "a chat that is gone on with keeps all of it" [ "$n_kept" = "$n_held" ]
check "and reads what is new" [ "$n_read" -le 40 ]

# 7. Several sequences.
check "the hook's sequence operations and states" build/examples/hook-test "$model" "$text"

[ "$n_failed" = 0 ]
