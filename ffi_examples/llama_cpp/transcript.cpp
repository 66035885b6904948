#include "transcript.h"

#include "clock.h"
#include "compare.h"
#include "session.h"

#include <algorithm>

namespace sekv_llama {

transcript::reading transcript::read(const std::vector<llama_token> & tokens, const std::string & label) {
    const double start = seconds_now();
    size_t n_kept = std::mismatch(tokens.begin(), tokens.end(), tokens_.begin(), tokens_.end()).first - tokens.begin();
    // The logits in the middle of a text are gone: its last token is read again.
    if (n_kept == tokens.size() && n_kept < tokens_.size()) {
        n_kept--;
    }
    if (n_kept < tokens_.size()) {
        engine_.truncate(static_cast<int32_t>(n_kept));
        tokens_.resize(n_kept);
    }
    const std::vector<llama_token> rest(tokens.begin() + n_kept, tokens.end());
    reading done;
    done.n_kept = static_cast<int32_t>(n_kept);
    done.n_read = static_cast<int32_t>(rest.size());
    engine_.prefill(rest, done.n_kept, engine_.feeds_surprisal(), [&](int32_t first, int32_t n_tok) {
        tokens_.insert(tokens_.end(), rest.begin() + first, rest.begin() + first + n_tok);
        logits_ = engine_.logits(n_tok - 1);
        if (!label.empty()) {
            show_progress(label, first + n_tok, done.n_read);
        }
    });
    done.seconds = seconds_now() - start;
    return done;
}

void transcript::append(llama_token token) {
    engine_.decode(&token, 1, static_cast<int32_t>(tokens_.size()), false);
    tokens_.push_back(token);
    logits_ = engine_.logits(0);
}

uint64_t transcript::save(const std::string & path) const { return save_session(path, tokens_, logits_, engine_); }

void transcript::load(const std::string & path) {
    session loaded = load_session(path, engine_);
    tokens_ = std::move(loaded.tokens);
    session_logits_ = std::move(loaded.logits);
    logits_ = session_logits_.data();
}

}  // namespace sekv_llama
