#include "report.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

namespace sekv_llama {

namespace {

constexpr double mebibyte = 1024.0 * 1024.0;

__attribute__((format(printf, 1, 2))) std::string format(const char * pattern, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

double percent(uint64_t part, uint64_t whole) { return whole > 0 ? 100.0 * part / whole : 0.0; }

std::string speed_json(const speed & speed) {
    return format("{\"prompt_tokens\": %d, \"prompt_seconds\": %.4f, \"prompt_tokens_per_second\": %.2f, "
                  "\"decoded_tokens\": %d, \"decode_seconds\": %.4f, \"decode_tokens_per_second\": %.2f}",
                  speed.n_prompt, speed.prompt_seconds, speed.prompt_rate(), speed.n_decoded, speed.decode_seconds,
                  speed.decode_rate());
}

std::string memory_json(const sekv_statistics & statistics) {
    const sekv_memory & memory = statistics.memory;
    const full_cache_bytes full(memory.full_f16_bytes);
    return format("{\"tokens\": %" PRId64 ", \"fast_bytes\": %" PRIu64 ", \"slow_bytes\": %" PRIu64
                  ", \"slow_file_bytes\": %" PRIu64 ", \"full_f16_bytes\": %" PRIu64 ", \"full_q8_0_bytes\": %" PRIu64 ", \"full_q4_0_bytes\": %" PRIu64
                  ", \"fetched_mean\": %.3f, \"fetched_p99\": %.3f}",
                  static_cast<int64_t>(statistics.n_tokens), static_cast<uint64_t>(memory.fast_bytes),
                  static_cast<uint64_t>(memory.slow_bytes),
                  static_cast<uint64_t>(memory.slow_file_bytes), full.f16, full.q8_0, full.q4_0, statistics.fetched_mean,
                  statistics.fetched_p99);
}

}  // namespace

full_cache_bytes::full_cache_bytes(uint64_t f16_bytes) : f16(f16_bytes), q8_0(f16_bytes / 64 * 34), q4_0(f16_bytes / 64 * 18) {}

std::string json_string(const std::string & text) {
    std::string quoted = "\"";
    for (const char c : text) {
        const unsigned char byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            quoted += '\\';
            quoted += c;
        } else if (byte < 0x20) {
            quoted += format("\\u%04x", byte);
        } else {
            quoted += c;
        }
    }
    return quoted + "\"";
}

void print_run(const speed & speed) {
    std::fprintf(stderr, "prompt  %d tokens, %.1f tokens/s; generated %d tokens, %.1f tokens/s\n", speed.n_prompt,
                 speed.prompt_rate(), speed.n_decoded, speed.decode_rate());
}

void print_resumption(const resumption & resumed, const speed & speed) {
    std::fprintf(stderr, "session %d of its %d tokens kept, %d read; loaded in %.3f s, prompt read in %.3f s\n", resumed.n_kept,
                 resumed.n_session, speed.n_prompt, resumed.load_seconds, speed.prompt_seconds);
}

void print_loaded(const std::string & path, size_t n_tokens, double seconds) {
    std::fprintf(stderr, "session %zu tokens loaded from %s in %.3f s\n", n_tokens, path.c_str(), seconds);
}

void print_saved(const std::string & path, size_t n_tokens, uint64_t n_bytes, double seconds) {
    std::fprintf(stderr, "session %zu tokens saved to %s, %.2f MiB in %.3f s\n", n_tokens, path.c_str(), n_bytes / mebibyte, seconds);
}

void print_memory(const sekv_statistics & statistics) {
    const sekv_memory & memory = statistics.memory;
    const full_cache_bytes full(memory.full_f16_bytes);
    const uint64_t total = memory.fast_bytes + memory.slow_bytes;
    std::fprintf(stderr, "memory of %" PRId64 " tokens        MiB    %% of f16\n", static_cast<int64_t>(statistics.n_tokens));
    const auto line = [&](const char * name, uint64_t bytes) {
        std::fprintf(stderr, "  %-22s %8.2f %10.1f\n", name, bytes / mebibyte, percent(bytes, full.f16));
    };
    line("libsekv, fast tier", memory.fast_bytes);
    line("libsekv, slow tier", memory.slow_bytes);
    if (memory.slow_file_bytes > 0) {
        line("  of it in basis files", memory.slow_file_bytes);
    }
    line("libsekv, both", total);
    line("full cache, f16", full.f16);
    line("full cache, q8_0", full.q8_0);
    line("full cache, q4_0", full.q4_0);
    std::fprintf(stderr, "fetched from the slow tier: %.0f tokens a step and KV head (99th percentile %.0f)\n",
                 statistics.fetched_mean, statistics.fetched_p99);
}

void print_comparison(const comparison & compared) {
    const fidelity & result = compared.result;
    std::fprintf(stderr, "fidelity over %d teacher-forced tokens\n", result.n_tokens);
    std::fprintf(stderr, "  KL(full || libsekv)    mean %.5f, max %.5f nats\n", result.kl_mean(), result.kl_max);
    std::fprintf(stderr, "  top-1 agreement        %.2f %%\n", 100.0 * result.top1());
    std::fprintf(stderr, "  perplexity             full %.4f, libsekv %.4f\n", result.reference_perplexity(),
                 result.other_perplexity());
    std::fprintf(stderr, "  largest logit change   %.2g\n", result.max_logit_difference);
    print_memory(compared.statistics);
    std::fprintf(stderr, "speed, tokens/s            full    libsekv\n");
    std::fprintf(stderr, "  prompt             %10.1f %10.1f\n", compared.full.prompt_rate(), compared.sekv.prompt_rate());
    std::fprintf(stderr, "  decode             %10.1f %10.1f\n", compared.full.decode_rate(), compared.sekv.decode_rate());
}

std::string run_json(const std::string & text, const speed & speed, const sekv_statistics * statistics,
                     const resumption * resumed) {
    std::string json = "{\"text\": " + json_string(text) + ", \"speed\": " + speed_json(speed);
    if (statistics != nullptr) {
        json += ", \"memory\": " + memory_json(*statistics);
    }
    if (resumed != nullptr) {
        json += format(", \"session\": {\"tokens\": %d, \"kept_tokens\": %d, \"read_tokens\": %d, "
                       "\"load_seconds\": %.4f, \"read_seconds\": %.4f}",
                       resumed->n_session, resumed->n_kept, speed.n_prompt, resumed->load_seconds, speed.prompt_seconds);
    }
    return json + "}";
}

std::string comparison_json(const std::string & text, const comparison & compared) {
    const fidelity & result = compared.result;
    return "{\"text\": " + json_string(text) +
           format(", \"fidelity\": {\"tokens\": %d, \"kl_mean\": %.8f, \"kl_max\": %.8f, \"top1\": %.6f, "
                  "\"perplexity_full\": %.6f, \"perplexity_sekv\": %.6f, \"max_logit_difference\": %.8f}",
                  result.n_tokens, result.kl_mean(), result.kl_max, result.top1(), result.reference_perplexity(),
                  result.other_perplexity(), result.max_logit_difference) +
           ", \"memory\": " + memory_json(compared.statistics) + ", \"speed_full\": " + speed_json(compared.full) +
           ", \"speed_sekv\": " + speed_json(compared.sekv) + "}";
}

}  // namespace sekv_llama
