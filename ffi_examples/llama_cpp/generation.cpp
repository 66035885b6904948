#include "generation.h"

#include "clock.h"
#include "distribution.h"

#include <cstdio>

namespace sekv_llama {

token_chooser::token_chooser(const program_options & options, int32_t n_vocab) : n_vocab_(n_vocab) {
    if (options.temperature > 0.0f) {
        chain_ = llama_sampler_chain_init(llama_sampler_chain_default_params());
        llama_sampler_chain_add(chain_, llama_sampler_init_temp(options.temperature));
        llama_sampler_chain_add(chain_, llama_sampler_init_dist(options.seed));
    }
}

token_chooser::~token_chooser() {
    if (chain_ != nullptr) {
        llama_sampler_free(chain_);
    }
}

llama_token token_chooser::choose(const float * logits) {
    if (chain_ == nullptr) {
        return argmax(logits, n_vocab_);
    }
    candidates_.resize(n_vocab_);
    for (int32_t i = 0; i < n_vocab_; i++) {
        candidates_[i] = {i, logits[i], 0.0f};
    }
    llama_token_data_array array = {candidates_.data(), candidates_.size(), -1, false};
    llama_sampler_apply(chain_, &array);
    return array.data[array.selected].id;
}

std::string generate_text(const loaded_model & model, transcript & held, token_chooser & chooser, int32_t n_predict,
                          bool shown, speed & speed) {
    std::string text;
    for (int32_t i = 0; i < n_predict; i++) {
        const llama_token token = chooser.choose(held.logits());
        if (llama_vocab_is_eog(model.vocab(), token)) {
            break;
        }
        const std::string piece = model.piece(token);
        text += piece;
        if (shown) {
            std::fputs(piece.c_str(), stdout);
            std::fflush(stdout);
        }
        const double start = seconds_now();
        held.append(token);
        speed.decode_seconds += seconds_now() - start;
        speed.n_decoded++;
    }
    return text;
}

}  // namespace sekv_llama
