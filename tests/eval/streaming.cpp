#include "streaming.h"

#include "compare.h"
#include "distribution.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace sekv_eval {

namespace {

constexpr int32_t chunk_tokens = 512;

sekv_llama::engine_options engine_options(int32_t n_threads, int32_t n_ctx) {
    sekv_llama::engine_options options;
    options.n_ctx = n_ctx;
    options.chunk = chunk_tokens;
    options.n_threads = n_threads;
    options.cache_type = GGML_TYPE_F32;
    options.quiet = true;
    return options;
}

bool run_document(const sekv_llama::loaded_model & model, const document & document, int32_t n_threads, const char * name,
                  double most_kl) {
    const int32_t n_ctx = document.n_prompt + document.n_forced + 1;
    const auto full = sekv_llama::engine::with_full_cache(model, engine_options(n_threads, n_ctx));
    sekv_params params = sekv_llama::default_params();
    params.n_threads = n_threads;
    const auto sekv = sekv_llama::engine::with_sekv(model, engine_options(n_threads, n_ctx), params, "");
    const std::vector<llama_token> forced(document.tokens.begin() + document.n_prompt,
                                          document.tokens.begin() + document.n_prompt + document.n_forced);
    const sekv_llama::comparison compared = sekv_llama::compare_caches(model, *full, *sekv, document.prompt(), forced, 0);
    const sekv_memory & memory = compared.statistics.memory;
    const bool holds = compared.result.n_tokens == document.n_forced && compared.result.kl_mean() <= most_kl;
    std::printf("%s %s: %d + %d tokens, KL mean %.6f (at most %.4f), max %.4f, top-1 %.2f %%, perplexity %.4f against %.4f, "
                "fast tier %.2f %% of f16, fetched %.0f; tokens/s: prompt %.0f against %.0f (sealing %.1f %% of it), decode %.1f against %.1f: %s\n",
                name, document.name.c_str(), document.n_prompt, document.n_forced, compared.result.kl_mean(), most_kl,
                compared.result.kl_max, 100.0 * compared.result.top1(), compared.result.other_perplexity(),
                compared.result.reference_perplexity(),
                memory.full_f16_bytes > 0 ? 100.0 * memory.fast_bytes / memory.full_f16_bytes : 0.0,
                compared.statistics.fetched_mean, compared.sekv.prompt_rate(), compared.full.prompt_rate(),
                100.0 * compared.seal_seconds / compared.sekv.prompt_seconds,
                compared.sekv.decode_rate(), compared.full.decode_rate(), holds ? "holds" : "MISSED");
    std::fflush(stdout);
    return holds;
}

// Nothing approximated: whatever libsekv keeps, it keeps as it came.
sekv_params raw_params() {
    sekv_params params = sekv_llama::default_params();
    params.codec_resident = params.codec_basis = params.codec_mean = SEKV_CODEC_F32;
    params.sketch = SEKV_SKETCH_RAW;
    params.value_sketch = 0;
    params.prefill = SEKV_PREFILL_EXACT;
    params.dense = SEKV_DENSE_NONE;
    // Every sealed token is fetched.
    params.share_threshold = 0.0f;
    params.share_reference = 0;
    return params;
}

struct exactness {
    int32_t n_prompt_agree = 0;
    int32_t n_greedy_agree = 0;
    double max_difference = 0.0;
};

double largest_difference(const float * a, const float * b, int32_t n) {
    double most = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const double difference = std::fabs(static_cast<double>(a[i]) - b[i]);
        // A NaN must not pass for agreement.
        most = difference <= most ? most : difference;
    }
    return most;
}

exactness compare_exactly(const sekv_llama::loaded_model & model, sekv_llama::engine & full, sekv_llama::engine & sekv,
                          const std::vector<llama_token> & prompt, int32_t n_generate) {
    exactness result;
    const int32_t n_vocab = model.n_vocab();
    const int32_t n_prompt = static_cast<int32_t>(prompt.size());
    llama_token full_next = 0;
    llama_token sekv_next = 0;
    for (int32_t first = 0; first < n_prompt; first += chunk_tokens) {
        const int32_t n_tok = std::min(chunk_tokens, n_prompt - first);
        full.decode(prompt.data() + first, n_tok, first, true);
        sekv.decode(prompt.data() + first, n_tok, first, true);
        for (int32_t i = 0; i < n_tok; i++) {
            full_next = sekv_llama::argmax(full.logits(i), n_vocab);
            sekv_next = sekv_llama::argmax(sekv.logits(i), n_vocab);
            result.n_prompt_agree += full_next == sekv_next;
            result.max_difference = std::max(result.max_difference, largest_difference(full.logits(i), sekv.logits(i), n_vocab));
        }
    }
    // Each goes on with its own word; logits are comparable as long as all words were the same.
    for (int32_t i = 0; i < n_generate; i++) {
        result.n_greedy_agree += full_next == sekv_next && result.n_greedy_agree == i;
        full.decode(&full_next, 1, n_prompt + i, false);
        sekv.decode(&sekv_next, 1, n_prompt + i, false);
        if (result.n_greedy_agree == i + 1) {
            result.max_difference = std::max(result.max_difference, largest_difference(full.logits(0), sekv.logits(0), n_vocab));
        }
        full_next = sekv_llama::argmax(full.logits(0), n_vocab);
        sekv_next = sekv_llama::argmax(sekv.logits(0), n_vocab);
    }
    return result;
}

}  // namespace

bool run_quick(const sekv_llama::loaded_model & model, const document & document, int32_t n_threads) {
    sekv_eval::document shorter = document;
    shorter.n_forced = 128;
    return run_document(model, shorter, n_threads, "quick", 0.006);
}

bool run_stream(const sekv_llama::loaded_model & model, const document & document, int32_t n_threads) {
    return run_document(model, document, n_threads, "stream", 0.003);
}

bool run_exact(const sekv_llama::loaded_model & model, const std::vector<llama_token> & prompt, int32_t n_threads) {
    constexpr int32_t n_generate = 64;
    constexpr double most_difference = 5e-4;
    bool all_hold = true;
    const int32_t n_prompt = static_cast<int32_t>(prompt.size());
    for (const bool sealed : {false, true}) {
        sekv_params params = raw_params();
        params.n_threads = n_threads;
        if (sealed) {
            // Only an incomplete block stays open.
            params.n_sinks = 0;
            params.window = 0;
            params.layout_tokens = params.block_tokens;
        } else {
            params.window = 1 << 20;
        }
        const auto full = sekv_llama::engine::with_full_cache(model, engine_options(n_threads, n_prompt + n_generate));
        const auto sekv = sekv_llama::engine::with_sekv(model, engine_options(n_threads, 0), params, "");
        const exactness result = compare_exactly(model, *full, *sekv, prompt, n_generate);
        const sekv_statistics statistics = sekv->sekv()->statistics();
        const bool holds = result.n_prompt_agree == n_prompt && result.n_greedy_agree == n_generate &&
                           result.max_difference <= most_difference;
        std::printf("exact, everything %s: argmax %d / %d, greedy %d / %d, largest logit difference %.2e (at most %.0e); "
                    "%lld tokens resident, %lld sealed: %s\n",
                    sealed ? "sealed" : "resident", result.n_prompt_agree, n_prompt, result.n_greedy_agree, n_generate,
                    result.max_difference, most_difference, static_cast<long long>(statistics.n_resident_tokens),
                    static_cast<long long>(statistics.n_sealed_tokens), holds ? "holds" : "MISSED");
        std::fflush(stdout);
        all_hold = all_hold && holds;
    }
    return all_hold;
}

}  // namespace sekv_eval
