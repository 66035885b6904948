// Reads attention out of llama.cpp's graph through its public evaluation callback.
//
// `llama_context_params.cb_eval` is asked about every node before it is computed. The tap watches
// by operation, never by tensor name of the model's own (those repeat and differ between
// architectures), and stops the graph once a layer, at FLASH_ATTN_EXT:
//
//   ROPE.src[1]            positions of the micro-batch, I32
//   SET_ROWS               where this micro-batch's K and V went: rows src[1] of llama.cpp's own
//                          cache tensors, whose names `cache_k_l<layer>` / `cache_v_l<layer>` are
//                          given by the cache itself, for every architecture
//   FLASH_ATTN_EXT         src[0] is Q, its own data is the output; op_params hold the scale,
//                          ALiBi's max_bias and the softcap; src[4] the sinks
//
// Whatever a subclass writes into the output, the model goes on with.
#pragma once

#include "ggml.h"
#include "sekv.h"

#include <cstdint>
#include <string>
#include <vector>

namespace sekv_llama {

// One layer's attention over one micro-batch. The views are valid during the call only.
struct attention_call {
    int32_t layer;
    int32_t n_tok;
    float scale;                         // what the graph multiplies q.k with
    const int32_t * positions;           // [n_tok], or nullptr where the layer has no RoPE
    sekv_view q;                         // head_dim_k x n_head x n_tok, f32
    sekv_view k;                         // head_dim_k x n_head_kv x n_tok, the cache's type
    sekv_view v;                         // head_dim_v x n_head_kv x n_tok, the cache's type
    sekv_view out;                       // head_dim_v x n_head x n_tok, f32
};

class graph_tap {
public:
    virtual ~graph_tap() = default;

    // For llama_context_params: cb_eval = graph_tap::callback, cb_eval_user_data = (the tap).
    static bool callback(ggml_tensor * node, bool ask, void * tap);

    // While paused the graph runs as if there were no tap.
    void pause(bool paused) { paused_ = paused; }

protected:
    // Called on the thread that called llama_decode, layer by layer, in order.
    virtual void on_attention(const attention_call & call) = 0;

    // This graph can't be served; `reason` is one sentence. Called instead of on_attention, with
    // the output already zeroed, so that no wrong number travels on.
    virtual void on_unsupported(int32_t layer, const std::string & reason) = 0;

    // False for a tap that only listens: llama.cpp's own output stays.
    virtual bool replaces_output() const { return true; }

    // Forgets what an unfinished graph left behind.
    void forget_graph();

private:
    void watch(ggml_tensor * node);
    void attend(ggml_tensor * node);
    std::string unsupported(const ggml_tensor * node) const;
    sekv_view written_rows(const ggml_tensor * cache, const ggml_tensor * row_ids, int32_t n_elem, std::vector<char> & copy);

    bool paused_ = false;
    int32_t layer_ = -1;
    ggml_tensor * positions_ = nullptr;
    ggml_tensor * cache_k_ = nullptr;
    ggml_tensor * cache_v_ = nullptr;
    ggml_tensor * rows_k_ = nullptr;
    ggml_tensor * rows_v_ = nullptr;

    // Copies, only where a tensor isn't in host memory or its rows aren't neighbours.
    std::vector<char> copy_q_, copy_k_, copy_v_, copy_out_;
    std::vector<int32_t> position_values_;
    std::vector<int64_t> row_values_;
};

}  // namespace sekv_llama
