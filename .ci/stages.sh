# Sourced: runs stages, takes their minutes (by the clock, and of processor time, which a busy
# machine leaves alone), and adds up what passed and failed.
#
# Every stage is one check. A stage that runs tests counts each of them instead: those that cargo
# test, nextest, or a last line `N passed, N failed` report.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=target/logs
mkdir -p "$logs"
passed=0
failed=0
table=

# stage NAME COMMAND...
stage() { run_stage check "$@"; }

# tests NAME COMMAND...
tests() { run_stage tests "$@"; }

run_stage() {
    local kind=$1 name=$2 log status good=0 bad=0 start=$SECONDS start_busy
    start_busy=$(processor_seconds)
    shift 2
    log=$logs/${name// /-}.log
    printf '\n== %s\n' "$name"
    "$@" </dev/null 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    if [ "$kind" = tests ]; then
        read -r good bad < <(count_tests "$log")
    elif [ "$status" = 0 ]; then
        good=1
    fi
    # What failed before it could count, a build say, has failed once.
    if [ "$status" != 0 ] && [ "$bad" = 0 ]; then
        bad=1
    fi
    if [ "$status" = 0 ] && [ $((good + bad)) = 0 ]; then
        printf 'error: %s ran no test\n' "$name"
        bad=1
    fi
    passed=$((passed + good))
    failed=$((failed + bad))
    table+=$(printf '%-28s %6s min %6s busy %6d passed %4d failed' "$name" "$(minutes $((SECONDS - start)))" \
        "$(minutes $(($(processor_seconds) - start_busy)))" "$good" "$bad")$'\n'
}

minutes() { printf '%d.%d' $(($1 / 60)) $(($1 % 60 / 6)); }

# Of all that this shell has started and that has ended.
processor_seconds() { awk '{ print int(($16 + $17) / ticks) }' ticks="$(getconf CLK_TCK)" "/proc/$$/stat"; }

# count_tests LOG: prints the numbers of tests that passed and that failed.
count_tests() {
    sed 's/\x1b\[[0-9;]*m//g' "$1" | awk '
        /^[0-9]+ passed, [0-9]+ failed$/ { sum = 1; sum_good = $1; sum_bad = $3 }
        /^test result: /                 { good += $4; bad += $6 }
        /^ +Summary .* tests? run: /     { sub(/.*\] +/, ""); run = $1; sub(/.* run: /, ""); good += $1; bad += run - $1 }
        END                              { print sum ? sum_good " " sum_bad : good + 0 " " bad + 0 }'
}

# The table of stages, and the last line. The status says whether anything failed.
finish() {
    printf '\n%s\n%d passed, %d failed\n' "$table" "$passed" "$failed"
    [ "$failed" = 0 ]
}
