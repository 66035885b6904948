// What sekv-llama prints: for people, and as JSON.
#pragma once

#include "compare.h"

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

std::string json_string(const std::string & text);

// One line each, on standard error.
void print_run(const speed & speed);
void print_memory(const sekv_statistics & statistics);
void print_comparison(const comparison & compared);

std::string run_json(const std::string & text, const speed & speed, const sekv_statistics * statistics);
std::string comparison_json(const std::string & text, const comparison & compared);

}  // namespace sekv_llama
