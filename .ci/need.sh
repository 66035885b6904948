# Sourced: installs the Debian packages of the commands that a step needs, where they are missing.

# need COMMAND PACKAGE: COMMAND is there afterwards, or the script ends and says what to install.
need() {
    command -v "$1" >/dev/null 2>&1 && return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        printf 'error: %s is missing (in Debian it comes with the package %s)\n' "$1" "$2" >&2
        exit 1
    fi
    if [ "$(id -u)" != 0 ]; then
        printf 'error: %s is missing; as root: apt-get install %s\n' "$1" "$2" >&2
        exit 1
    fi
    # The lists of a fresh machine are empty, and those of an image may name packages that are gone.
    if [ -z "${apt_is_fresh:-}" ]; then
        printf 'apt-get update\n' >&2
        apt-get update >/dev/null </dev/null
        apt_is_fresh=1
    fi
    printf 'apt-get install %s\n' "$2" >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$2" >/dev/null </dev/null
}

# need_component SUBCOMMAND COMPONENT: `cargo SUBCOMMAND` works afterwards.
need_component() {
    cargo "$1" --version >/dev/null 2>&1 && return 0
    if ! command -v rustup >/dev/null 2>&1 || ! rustup component add "$2"; then
        printf 'error: cargo %s is missing; rustup component add %s\n' "$1" "$2" >&2
        exit 1
    fi
}
