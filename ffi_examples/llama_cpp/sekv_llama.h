// libsekv as the KV cache of a stock, unpatched llama.cpp. A host adds these lines:
//
//     std::string why;
//     auto cache = sekv_llama::cache::create(model, "model.gguf", sekv_llama::default_params(), why);
//     if (!cache) { /* `why` says what can't be served */ }
//     llama_context_params params = llama_context_default_params();
//     params.n_ubatch = 512;                          // prompt tokens a pass, as always
//     cache->configure(params);                       // hook, flash attention, a few hundred cells
//     llama_context * context = llama_init_from_model(model, params);
//     ...
//     if (cache->decode(context, batch) != SEKV_OK) { /* cache->error() */ }
//
// and sends sequence operations and saved states through the cache (seq_rm, seq_cp, save_state, ...)
// instead of llama_memory_* and llama_state_*.
//
// Threads: one cache serves one llama_context; both belong to one thread at a time.
// Ownership: the cache must outlive the llama_context that it configured, since that context's
// graph calls it. The model must outlive the cache.
#pragma once

#include "graph_tap.h"
#include "llama.h"
#include "sekv.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace sekv_llama {

// libsekv's own defaults.
sekv_params default_params();

// Empty, or the one sentence that says why libsekv can't serve this model.
std::string unsupported_model(const llama_model * model, const std::string & gguf_path);

// What the model's metadata says that scores are multiplied by; 0 where it leaves that to the architecture.
float metadata_attention_scale(const llama_model * model);

// Take or fill `size` bytes, the next of a state, all of them. False ends the call; none may throw.
using state_writer = std::function<bool(const void * data, size_t size)>;
using state_reader = std::function<bool(void * data, size_t size)>;

class cache : public graph_tap {
public:
    // nullptr when the model can't be served or libsekv refuses the params; `why` is then one sentence.
    static std::unique_ptr<cache> create(const llama_model * model, const std::string & gguf_path,
                                         const sekv_params & params, std::string & why,
                                         const std::string & sidecar_path = "");
    ~cache() override;
    cache(const cache &) = delete;
    cache & operator=(const cache &) = delete;

    // Prepares the params of the llama_context that is to use this cache. Reads n_ubatch,
    // n_seq_max and the cache's types; sets n_ctx, n_batch, kv_unified, flash attention and the
    // callback. SEKV_ERR_UNSUPPORTED where the host asked for what can't be served.
    sekv_status configure(llama_context_params & params);

    // llama_decode with this cache behind it. On an error the whole batch counts as never decoded;
    // error() has the first message. Logits and embeddings are read as after llama_decode.
    sekv_status decode(llama_context * context, const llama_batch & batch);

    // Instead of the llama_memory_* of the same names; negative positions as there. seq_cp wants an
    // empty target.
    sekv_status seq_rm(llama_context * context, int32_t seq, int32_t first_pos, int32_t end_pos);
    sekv_status seq_cp(llama_context * context, int32_t from, int32_t to, int32_t first_pos, int32_t end_pos);
    sekv_status seq_keep(llama_context * context, int32_t seq);
    sekv_status seq_add(llama_context * context, int32_t seq, int32_t first_pos, int32_t end_pos, int32_t delta);
    sekv_status clear(llama_context * context);

    // A sequence's state as a stream of bytes (seq -1: all sequences'), instead of llama_state_*:
    // all that decoding needs, but for the tokens. A state that can't be loaded changes nothing.
    // `last_logits`, those after the one sequence's newest token, or nullptr: the next token's
    // surprisal follows from them.
    sekv_status save_state(int32_t seq, const state_writer & write);
    sekv_status load_state(llama_context * context, int32_t seq, const state_reader & read, const float * last_logits);

    // -1: empty.
    int32_t last_pos(int32_t seq) const;

    // With true, decode() computes each token's surprisal where the batch asked for the logits
    // before it, and hands it to libsekv (the `paper` routing cuts its spans by it).
    void feed_surprisal(bool on) { feed_surprisal_ = on; }

    const std::string & error() const { return error_; }
    sekv_context * context() { return context_; }
    sekv_statistics statistics() const;

protected:
    void on_attention(const attention_call & call) override;
    void on_unsupported(int32_t layer, const std::string & reason) override;

private:
    cache() = default;

    // What the running llama_decode works on, kept by value: llama.cpp may outlive the host's arrays.
    struct running_batch {
        std::vector<int32_t> positions;
        std::vector<int32_t> n_seq_ids;
        std::vector<std::vector<int32_t>> seq_ids;
        std::vector<const int32_t *> seq_id_pointers;
        int32_t n_done = 0;                    // tokens that earlier micro-batches took
        std::map<int32_t, int32_t> first_pos;  // by sequence
        std::map<int32_t, int32_t> last_pos;
    };

    void read_batch(const llama_batch & batch);
    void check_scale(const attention_call & call);
    void open_pass(const attention_call & call);
    void end_of_layer(int32_t layer, const sekv_view * out);
    void roll_back(llama_context * context);
    void free_cells(llama_context * context);
    int32_t n_vocab() const;
    void forget_status();
    void forget_logits(int32_t seq);
    void hand_over_surprisal(llama_context * context, const llama_batch & batch);
    void take_status(sekv_status status);
    void fail(sekv_status status, const std::string & message);

    const llama_model * llama_model_ = nullptr;
    sekv_model * model_ = nullptr;
    sekv_context * context_ = nullptr;
    sekv_params params_ = {};
    int32_t n_layer_ = 0;
    float metadata_scale_ = 0.0f;

    running_batch running_;
    bool pass_open_ = false;
    int32_t n_pass_tokens_ = 0;
    bool decoding_ = false;
    sekv_status status_ = SEKV_OK;             // of the running decode: the first error
    std::string error_;

    bool feed_surprisal_ = false;
    std::map<int32_t, std::vector<float>> last_logits_;  // by sequence: the logits after its newest token
};

}  // namespace sekv_llama
