// The model's own words: which token comes next, and how long.
#pragma once

#include "compare.h"
#include "options.h"
#include "transcript.h"

#include <string>
#include <vector>

namespace sekv_llama {

// Greedy, or sampled where the options have a temperature.
class token_chooser {
public:
    token_chooser(const program_options & options, int32_t n_vocab);
    ~token_chooser();
    token_chooser(const token_chooser &) = delete;
    token_chooser & operator=(const token_chooser &) = delete;

    llama_token choose(const float * logits);

private:
    int32_t n_vocab_;
    llama_sampler * chain_ = nullptr;
    std::vector<llama_token_data> candidates_;
};

// Goes on from a transcript that isn't empty, to an end of generation, which isn't decoded, or for
// n_predict tokens. `shown`: on standard output too, as it comes.
std::string generate_text(const loaded_model & model, transcript & held, token_chooser & chooser, int32_t n_predict,
                          bool shown, speed & speed);

}  // namespace sekv_llama
