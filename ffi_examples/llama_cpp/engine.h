// One llama.cpp context with a KV cache behind it, either llama.cpp's own or libsekv: what
// sekv-llama and the evaluation drive. A host of its own needs only sekv_llama.h.
#pragma once

#include "quiet_threads.h"
#include "sekv_llama.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sekv_llama {

struct chat_message {
    std::string role;  // "user", "assistant"
    std::string content;
};

// The weights and the vocabulary, shared by all engines.
class loaded_model {
public:
    // Throws std::runtime_error with one sentence.
    explicit loaded_model(const std::string & gguf_path);
    ~loaded_model();
    loaded_model(const loaded_model &) = delete;
    loaded_model & operator=(const loaded_model &) = delete;

    // `special`: markup such as <|im_start|> becomes its own token. `begins`: with BOS where the model
    // wants one.
    std::vector<llama_token> tokenize(const std::string & text, bool special, bool begins = true) const;
    std::string piece(llama_token token) const;
    // The prompt as the model's chat template puts it; unchanged where the model has none.
    std::string chat_prompt(const std::string & user_text) const;
    // A whole conversation as the model's chat template puts it. `opens_answer`: up to where the
    // assistant's next words come. Throws where there is no template that llama.cpp knows.
    std::string chat_text(const std::vector<chat_message> & messages, bool opens_answer) const;

    llama_model * model() const { return model_; }
    const llama_vocab * vocab() const { return vocab_; }
    int32_t n_vocab() const { return n_vocab_; }
    const std::string & path() const { return path_; }

private:
    std::string path_;
    llama_model * model_ = nullptr;
    const llama_vocab * vocab_ = nullptr;
    int32_t n_vocab_ = 0;
};

struct engine_options {
    int32_t n_ctx = 0;             // tokens of llama.cpp's own cache; ignored with libsekv
    int32_t chunk = 512;           // prompt tokens a pass
    int32_t n_threads = 2;
    ggml_type cache_type = GGML_TYPE_F16;
    bool quiet = false;            // attach quiet_threads
    bool feed_surprisal = false;
    // Only listens to the graph; for engines with llama.cpp's own cache.
    graph_tap * listener = nullptr;
};

class engine {
public:
    // Both throw std::runtime_error with one sentence.
    static std::unique_ptr<engine> with_full_cache(const loaded_model & model, const engine_options & options);
    static std::unique_ptr<engine> with_sekv(const loaded_model & model, const engine_options & options,
                                             const sekv_params & params, const std::string & sidecar_path);
    ~engine();
    engine(const engine &) = delete;
    engine & operator=(const engine &) = delete;

    // Decodes up to `chunk` tokens of sequence 0 from `first_pos` on. Throws on failure.
    void decode(const llama_token * tokens, int32_t n_tok, int32_t first_pos, bool all_logits);
    // After decode: the logits after token i of the batch.
    const float * logits(int32_t i) const;

    // Called after each chunk, when its logits can be read.
    using chunk_done = std::function<void(int32_t first, int32_t n_tok)>;
    void prefill(const std::vector<llama_token> & tokens, int32_t first_pos, bool all_logits, const chunk_done & done);

    // Removes the tail from `first_pos` on.
    void truncate(int32_t first_pos);

    // Sequence 0 as a stream of bytes, with libsekv only; `last_logits` as of cache::load_state.
    void save_state(const state_writer & write);
    void load_state(const state_reader & read, const float * last_logits);

    cache * sekv() const { return cache_.get(); }
    int32_t chunk() const { return options_.chunk; }
    int32_t n_vocab() const { return model_.n_vocab(); }
    bool feeds_surprisal() const { return options_.feed_surprisal; }

private:
    engine(const loaded_model & model, const engine_options & options);
    void start(llama_context_params params);

    const loaded_model & model_;
    engine_options options_;
    // In this order: the context goes first, since its graph calls the cache and uses the threads.
    std::unique_ptr<cache> cache_;
    quiet_threads threads_;
    llama_context * context_ = nullptr;
    llama_batch batch_ = {};
};

}  // namespace sekv_llama
