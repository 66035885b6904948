// The text that an engine holds, token by token, and the logits after the last of them: what a prompt, a
// session and the turns of a chat have in common.
#pragma once

#include "engine.h"

#include <cstdint>
#include <string>
#include <vector>

namespace sekv_llama {

class transcript {
public:
    // Of an engine that holds nothing yet, and outlives this.
    explicit transcript(engine & engine) : engine_(engine) {}
    transcript(const transcript &) = delete;
    transcript & operator=(const transcript &) = delete;

    struct reading {
        int32_t n_kept = 0;
        int32_t n_read = 0;
        double seconds = 0.0;
    };

    // Makes `tokens`, one at least, what the engine holds: what it has of their beginning is kept, all
    // behind that is removed, and only the rest is read. Where surprisal is fed back, the first token that is read
    // behind a removed tail has none. An empty label: no progress is shown.
    reading read(const std::vector<llama_token> & tokens, const std::string & label);

    void append(llama_token token);

    // After the last token. Valid until the next change.
    const float * logits() const { return logits_; }
    const std::vector<llama_token> & tokens() const { return tokens_; }

    // Session files, with libsekv only. Both throw with one sentence; save returns the file's bytes.
    uint64_t save(const std::string & path) const;
    void load(const std::string & path);

private:
    engine & engine_;
    std::vector<llama_token> tokens_;
    const float * logits_ = nullptr;  // the engine's, or those of the session
    std::vector<float> session_logits_;
};

}  // namespace sekv_llama
