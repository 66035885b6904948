// Two caches behind the same model, fed the same tokens: how far apart are they?
#pragma once

#include "engine.h"

#include <cstdint>
#include <string>
#include <vector>

namespace sekv_llama {

// Seconds spent in one engine.
struct speed {
    int32_t n_prompt = 0;
    int32_t n_decoded = 0;
    double prompt_seconds = 0.0;
    double decode_seconds = 0.0;
    double prompt_rate() const { return prompt_seconds > 0 ? n_prompt / prompt_seconds : 0.0; }
    double decode_rate() const { return decode_seconds > 0 ? n_decoded / decode_seconds : 0.0; }
};

// Sums over teacher-forced positions; the reference is the full cache.
struct fidelity {
    int32_t n_tokens = 0;
    double kl_sum = 0.0;
    double kl_max = 0.0;
    int32_t n_agree = 0;             // same most likely token
    double reference_nll = 0.0;
    double other_nll = 0.0;
    double max_logit_difference = 0.0;

    void add(const float * reference, const float * other, int32_t n_vocab, llama_token next);
    double kl_mean() const { return n_tokens > 0 ? kl_sum / n_tokens : 0.0; }
    double top1() const { return n_tokens > 0 ? static_cast<double>(n_agree) / n_tokens : 0.0; }
    double reference_perplexity() const;
    double other_perplexity() const;
};

struct comparison {
    fidelity result;
    speed full;
    speed sekv;
    sekv_statistics statistics = {};
    double seal_seconds = 0.0;        // of the prompt's, by their median and number
    std::vector<llama_token> tokens;  // what both were fed
};

// Shows how far the reading of the prompt is, on standard error: `label 1024 / 4096`.
void show_progress(const std::string & label, int32_t done, int32_t total);

// Reads the prompt, timed and with progress.
void read_prompt(engine & engine, const std::vector<llama_token> & prompt, const std::string & label, speed & speed);

// `forced` empty: n_predict tokens that the full cache generates greedily, up to an end of text.
comparison compare_caches(const loaded_model & model, engine & full, engine & sekv, const std::vector<llama_token> & prompt,
                          const std::vector<llama_token> & forced, int32_t n_predict);

}  // namespace sekv_llama
