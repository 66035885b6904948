// What sekv-llama prints: for people, and as JSON.
#pragma once

#include "compare.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace sekv_llama {

// Bytes of a full cache of the same tokens in llama.cpp's own types.
struct full_cache_bytes {
    uint64_t f16 = 0;
    uint64_t q8_0 = 0;  // 34 bytes for 32 numbers
    uint64_t q4_0 = 0;  // 18 bytes for 32 numbers
    explicit full_cache_bytes(uint64_t f16_bytes);
};

// How a run began from a session; what it read of the prompt stands in its speed.
struct resumption {
    int32_t n_session = 0;  // tokens of the session
    int32_t n_kept = 0;     // of them, those that the prompt begins with
    double load_seconds = 0.0;
};

std::string json_string(const std::string & text);

// One line each, on standard error.
void print_run(const speed & speed);
void print_resumption(const resumption & resumed, const speed & speed);
void print_loaded(const std::string & path, size_t n_tokens, double seconds);
void print_saved(const std::string & path, size_t n_tokens, uint64_t n_bytes, double seconds);
void print_memory(const sekv_statistics & statistics);
void print_comparison(const comparison & compared);

// nullptr: of a run with the full cache, or from no session.
std::string run_json(const std::string & text, const speed & speed, const sekv_statistics * statistics,
                     const resumption * resumed);
std::string comparison_json(const std::string & text, const comparison & compared);

}  // namespace sekv_llama
