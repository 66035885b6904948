#include "compare.h"

#include "clock.h"
#include "distribution.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace sekv_llama {

namespace {

// One decoded token, timed.
const float * step(engine & engine, llama_token token, int32_t pos, speed & speed) {
    const double start = seconds_now();
    engine.decode(&token, 1, pos, false);
    speed.decode_seconds += seconds_now() - start;
    speed.n_decoded++;
    return engine.logits(0);
}

}  // namespace

void fidelity::add(const float * reference, const float * other, int32_t n_vocab, llama_token next) {
    const double kl = kl_divergence(reference, other, n_vocab);
    n_tokens++;
    kl_sum += kl;
    kl_max = std::max(kl_max, kl);
    n_agree += argmax(reference, n_vocab) == argmax(other, n_vocab);
    reference_nll += surprisal(reference, n_vocab, next);
    other_nll += surprisal(other, n_vocab, next);
    for (int32_t i = 0; i < n_vocab; i++) {
        max_logit_difference = std::max(max_logit_difference, static_cast<double>(std::fabs(reference[i] - other[i])));
    }
}

double fidelity::reference_perplexity() const { return n_tokens > 0 ? std::exp(reference_nll / n_tokens) : 0.0; }
double fidelity::other_perplexity() const { return n_tokens > 0 ? std::exp(other_nll / n_tokens) : 0.0; }

void show_progress(const std::string & label, int32_t done, int32_t total) {
    // A line that rewrites itself is for people; a log gets its end only.
    if (isatty(STDERR_FILENO)) {
        std::fprintf(stderr, "\r%s %d / %d%s", label.c_str(), done, total, done == total ? "\n" : "");
    } else if (done == total) {
        std::fprintf(stderr, "%s %d tokens\n", label.c_str(), total);
    }
    std::fflush(stderr);
}

void read_prompt(engine & engine, const std::vector<llama_token> & prompt, const std::string & label, speed & speed) {
    const int32_t total = static_cast<int32_t>(prompt.size());
    // Surprisal of the prompt needs all its logits.
    const bool all_logits = engine.feeds_surprisal();
    const double start = seconds_now();
    engine.prefill(prompt, 0, all_logits, [&](int32_t first, int32_t n_tok) { show_progress(label, first + n_tok, total); });
    speed.prompt_seconds = seconds_now() - start;
    speed.n_prompt = total;
}

comparison compare_caches(const loaded_model & model, engine & full, engine & sekv, const std::vector<llama_token> & prompt,
                          const std::vector<llama_token> & forced, int32_t n_predict) {
    comparison compared;
    read_prompt(full, prompt, "prompt, full cache:", compared.full);
    read_prompt(sekv, prompt, "prompt, libsekv:   ", compared.sekv);
    const sekv_times seal = sekv.sekv()->statistics().seal;
    compared.seal_seconds = static_cast<double>(seal.count) * seal.p50;

    const int32_t n_prompt = static_cast<int32_t>(prompt.size());
    const int32_t n_steps = forced.empty() ? n_predict : static_cast<int32_t>(forced.size());
    const int32_t last = (n_prompt - 1) % full.chunk();
    const float * reference = full.logits(last);
    const float * other = sekv.logits(last);
    for (int32_t i = 0; i < n_steps; i++) {
        const llama_token next = forced.empty() ? argmax(reference, model.n_vocab()) : forced[i];
        compared.result.add(reference, other, model.n_vocab(), next);
        if (forced.empty() && llama_vocab_is_eog(model.vocab(), next)) {
            break;
        }
        compared.tokens.push_back(next);
        reference = step(full, next, n_prompt + i, compared.full);
        other = step(sekv, next, n_prompt + i, compared.sekv);
    }
    compared.statistics = sekv.sekv()->statistics();
    return compared;
}

}  // namespace sekv_llama
