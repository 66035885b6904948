// One document, read once by llama.cpp with its own F32 cache: the full-cache reference, and the
// K, V and Q that every method is given instead of reading the document again.
#pragma once

#include "engine.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sekv_eval {

// Rows of one layer, tokens one after another.
struct recorded_layer {
    int32_t n_head = 0, n_head_kv = 0, head_dim_k = 0, head_dim_v = 0;
    std::vector<float> k, v, q;
};

// Listens to the graph and keeps copies. Needs an F32 cache.
class recorder : public sekv_llama::graph_tap {
public:
    explicit recorder(int32_t n_layer) : layers_(n_layer) {}
    std::vector<recorded_layer> take();
    // Throws when the graph had something that can't be recorded.
    void check() const;

protected:
    void on_attention(const sekv_llama::attention_call & call) override;
    void on_unsupported(int32_t layer, const std::string & reason) override;
    bool replaces_output() const override { return false; }

private:
    std::vector<recorded_layer> layers_;
    std::string problem_;
};

struct recording {
    int32_t n_prompt = 0;
    std::vector<recorded_layer> layers;
    std::vector<float> surprisal;              // [n_prompt], nats; 0 for the first token
    int32_t n_vocab = 0;
    std::vector<float> reference;              // logits after each token from n_prompt on
    const float * reference_logits(int32_t i) const { return reference.data() + static_cast<size_t>(i) * n_vocab; }
};

// The engine that read a document; its graph calls the recorder as long as it lives.
struct full_reader {
    std::unique_ptr<recorder> listener;
    std::unique_ptr<sekv_llama::engine> engine;
};

// Reads tokens[0 .. n_prompt + n_reference) in chunks of 512 and keeps the logits of the last
// n_reference. With `keep` the engine, its cache filled with these tokens, is handed on.
recording record(const sekv_llama::loaded_model & model, const std::vector<llama_token> & tokens, int32_t n_prompt,
                 int32_t n_reference, int32_t n_threads, int32_t n_spare_cells = 0,
                 full_reader * keep = nullptr);

// Gives the recorded prompt to a libsekv context as chunks of 512, sequence 0, with every key
// shifted by `key_bias` (n_head_kv x head_dim_k floats, or empty). Throws on failure.
void ingest(sekv_context * context, const recording & recorded, const std::vector<float> & key_bias);

}  // namespace sekv_eval
