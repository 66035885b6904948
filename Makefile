# The commands of this repository. `make help` lists them.
#
# Everything fetched or built lies in target/ (cargo) and build/ (all else); both can be deleted.
# Each command installs what it needs and finds missing: a Debian machine with Rust is enough.

host := build/examples
fetch := ffi_examples/llama_cpp/fetch.sh
cargo := cargo
# Warnings in the documentation are errors.
rustdoc := RUSTDOCFLAGS="-D warnings"
# Programs look for the library by its soname (build.rs).
soname := libsekv.so.$(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\)\..*/\1/p' Cargo.toml | head -n 1)

.DEFAULT_GOAL := help
.PHONY: help build host demo test eval bench growth tables lint lint-format lint-clippy lint-docs \
        lint-header header valgrind tsan loom fuzz seeds clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## llama.cpp answers a question on a long document: full cache beside libsekv
	@ffi_examples/llama_cpp/demo.sh

test: ## all tests, and one document end to end
	@.ci/test

eval: ## fidelity on ten documents, and needles (under 25 minutes); writes target/eval.json
	@.ci/tools.sh build host
	@$(MAKE) --no-print-directory host
	$(fetch) f32 texts
	$(host)/sekv-eval

bench: ## speed against llama.cpp's attention and the bytes that must be read; writes target/bench.json
	@.ci/tools.sh build host
	$(fetch) llama
	$(cargo) bench --locked --bench attention

growth: ## from 8K to a million tokens (25 GB of disk, 15 minutes); writes target/growth.json
	@.ci/tools.sh build
	$(cargo) bench --locked --bench growth

tables: ## fill the tables of README.md and docs/evaluation.md from what eval, bench and growth wrote to target/
	@python3 docs/tables.py

lint: lint-format lint-clippy lint-docs lint-header ## formatting, clippy, documentation, header

build: ## the library: target/release/libsekv.so and libsekv.a
	@.ci/tools.sh build
	$(cargo) build --release --locked
	@ln -sf libsekv.so target/release/$(soname)

host: build ## llama.cpp and the programs on it: build/examples/sekv-llama and sekv-eval
	@.ci/tools.sh host
	@$(fetch) llama model
	@cmake -G Ninja -S ffi_examples/llama_cpp -B $(host) --log-level=WARNING
	@cmake --build $(host)

header: ## write include/sekv.h from src/capi
	UPDATE_HEADER=1 $(cargo) test --locked --test header

valgrind: ## the C example under valgrind
	@.ci/tools.sh build valgrind
	@.ci/valgrind.sh

tsan: ## tests of several threads under the thread sanitizer
	@.ci/tools.sh build
	@.ci/tsan

loom: ## what two threads share, in every order of their steps
	@.ci/tools.sh build
	@RUSTFLAGS="--cfg loom" CARGO_PROFILE_TEST_OPT_LEVEL=0 CARGO_PROFILE_TEST_DEBUG=0 \
		$(cargo) test --locked --lib --target-dir target/loom cache::slot

fuzz: ## every fuzz target for FUZZ_SECONDS (default 600), two at a time on two cores
	@.ci/tools.sh build fuzz
	@.ci/fuzz

seeds: ## write the seeds of the fuzz targets, fuzz/seeds
	$(cargo) run --locked --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --example seeds

clean: ## delete what was built (not what was fetched)
	$(cargo) clean
	rm -rf $(host)

lint-format:
	$(cargo) fmt --check

lint-clippy:
	$(cargo) clippy --locked --all-targets -- -D warnings

lint-docs:
	$(rustdoc) $(cargo) doc --locked --no-deps

lint-header:
	$(cargo) test --locked --test header
