#include "graph_tap.h"

#include "ggml-backend.h"

#include <cstdlib>
#include <cstring>

namespace sekv_llama {

namespace {

constexpr char cache_k_name[] = "cache_k_l";
constexpr char cache_v_name[] = "cache_v_l";
constexpr size_t cache_name_length = sizeof(cache_k_name) - 1;

ggml_tensor * view_root(ggml_tensor * tensor) {
    while (tensor->view_src != nullptr) {
        tensor = tensor->view_src;
    }
    return tensor;
}

const ggml_tensor * view_root(const ggml_tensor * tensor) {
    return view_root(const_cast<ggml_tensor *>(tensor));
}

bool in_host_memory(const ggml_tensor * tensor) {
    return ggml_backend_buffer_is_host(view_root(tensor)->buffer);
}

// -1: a type that libsekv doesn't read.
int32_t view_dtype(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return SEKV_F32;
        case GGML_TYPE_F16:  return SEKV_F16;
        case GGML_TYPE_BF16: return SEKV_BF16;
        default:             return -1;
    }
}

}  // namespace

bool graph_tap::callback(ggml_tensor * node, bool ask, void * user) {
    graph_tap & tap = *static_cast<graph_tap *>(user);
    if (tap.paused_) {
        return false;
    }
    if (ask) {
        tap.watch(node);
        return node->op == GGML_OP_FLASH_ATTN_EXT;
    }
    tap.attend(node);
    // False would end the graph here; a failure is reported by the subclass instead.
    return true;
}

void graph_tap::forget_graph() {
    layer_ = -1;
    positions_ = cache_k_ = cache_v_ = rows_k_ = rows_v_ = nullptr;
}

void graph_tap::watch(ggml_tensor * node) {
    if (node->op == GGML_OP_ROPE) {
        positions_ = node->src[1];
    } else if (node->op == GGML_OP_SET_ROWS) {
        ggml_tensor * cache = view_root(node);
        if (std::strncmp(cache->name, cache_k_name, cache_name_length) == 0) {
            layer_ = std::atoi(cache->name + cache_name_length);
            cache_k_ = cache;
            rows_k_ = node->src[1];
        } else if (std::strncmp(cache->name, cache_v_name, cache_name_length) == 0) {
            cache_v_ = cache;
            rows_v_ = node->src[1];
        }
    }
}

// Empty: the node can be served.
std::string graph_tap::unsupported(const ggml_tensor * node) const {
    float params[3];  // scale, max_bias, softcap
    std::memcpy(params, node->op_params, sizeof params);
    const ggml_tensor * q = node->src[0];
    if (params[1] != 0.0f) {
        return "attention with ALiBi is not supported";
    }
    if (params[2] != 0.0f) {
        return "attention with a logit softcap is not supported";
    }
    if (node->src[4] != nullptr) {
        return "attention with sinks is not supported";
    }
    if (cache_k_ == nullptr || cache_v_ == nullptr) {
        return "this attention wrote no K and V of its own into llama.cpp's cache; shared or missing caches are not supported";
    }
    if (view_dtype(cache_k_->type) < 0 || view_dtype(cache_v_->type) < 0) {
        return std::string("llama.cpp's own cache has the type ") + ggml_type_name(cache_k_->type) + " / " +
               ggml_type_name(cache_v_->type) + "; F32, F16 or BF16 was expected (a quantised one is rotated)";
    }
    if (q->ne[3] != 1) {
        return "the graph has several cache streams; llama_context_params.kv_unified = true was expected";
    }
    if (q->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32) {
        return "Q or the attention's output is not F32";
    }
    if (cache_k_->ne[0] % q->ne[0] != 0 || cache_v_->ne[0] % node->ne[0] != 0) {
        return "the rows of llama.cpp's cache are not whole heads";
    }
    if (rows_k_->ne[0] != q->ne[1] || rows_v_->ne[0] != q->ne[1]) {
        return "the graph writes V transposed or other rows than Q has; flash attention was expected to be enabled";
    }
    return "";
}

// The rows that this micro-batch wrote into the cache tensor.
sekv_view graph_tap::written_rows(const ggml_tensor * cache, const ggml_tensor * row_ids, int32_t n_elem,
                                  std::vector<char> & copy) {
    const int64_t n_rows = row_ids->ne[0];
    row_values_.resize(n_rows);
    ggml_backend_tensor_get(row_ids, row_values_.data(), 0, n_rows * sizeof(int64_t));
    bool neighbours = true;
    for (int64_t i = 1; i < n_rows && neighbours; i++) {
        neighbours = row_values_[i] == row_values_[0] + i;
    }

    sekv_view view = {};
    view.dtype = view_dtype(cache->type);
    view.memory = SEKV_MEMORY_HOST;
    view.n_elem = n_elem;
    view.n_head = static_cast<int32_t>(cache->ne[0] / n_elem);
    view.n_tok = static_cast<int32_t>(n_rows);
    view.stride_head = n_elem * ggml_type_size(cache->type);
    view.stride_tok = cache->nb[1];
    if (neighbours && in_host_memory(cache)) {
        view.data = static_cast<char *>(cache->data) + row_values_[0] * cache->nb[1];
        return view;
    }
    copy.resize(n_rows * cache->nb[1]);
    if (neighbours) {
        ggml_backend_tensor_get(cache, copy.data(), row_values_[0] * cache->nb[1], copy.size());
    } else {
        for (int64_t i = 0; i < n_rows; i++) {
            ggml_backend_tensor_get(cache, copy.data() + i * cache->nb[1], row_values_[i] * cache->nb[1], cache->nb[1]);
        }
    }
    view.data = copy.data();
    return view;
}

void graph_tap::attend(ggml_tensor * node) {
    const ggml_tensor * q = node->src[0];
    const bool direct = in_host_memory(node);
    const std::string reason = unsupported(node);
    if (!reason.empty()) {
        if (replaces_output()) {
            ggml_backend_tensor_memset(node, 0, 0, ggml_nbytes(node));
        }
        const int32_t layer = layer_;
        forget_graph();
        on_unsupported(layer, reason);
        return;
    }

    attention_call call = {};
    call.layer = layer_;
    call.n_tok = static_cast<int32_t>(q->ne[1]);
    std::memcpy(&call.scale, node->op_params, sizeof call.scale);
    if (positions_ != nullptr) {
        position_values_.resize(call.n_tok);
        ggml_backend_tensor_get(positions_, position_values_.data(), 0, call.n_tok * sizeof(int32_t));
        call.positions = position_values_.data();
    }
    call.k = written_rows(cache_k_, rows_k_, static_cast<int32_t>(q->ne[0]), copy_k_);
    call.v = written_rows(cache_v_, rows_v_, static_cast<int32_t>(node->ne[0]), copy_v_);

    call.q.dtype = SEKV_F32;
    call.q.memory = SEKV_MEMORY_HOST;
    call.q.n_elem = static_cast<int32_t>(q->ne[0]);
    call.q.n_head = static_cast<int32_t>(q->ne[2]);
    call.q.n_tok = call.n_tok;
    call.q.stride_head = q->nb[2];
    call.q.stride_tok = q->nb[1];
    if (in_host_memory(q)) {
        call.q.data = q->data;
    } else {
        const ggml_tensor * root = view_root(q);
        copy_q_.resize(ggml_nbytes(root));
        ggml_backend_tensor_get(root, copy_q_.data(), 0, copy_q_.size());
        call.q.data = copy_q_.data() + (q == root ? 0 : q->view_offs);
    }

    call.out.dtype = SEKV_F32;
    call.out.memory = SEKV_MEMORY_HOST;
    call.out.n_elem = static_cast<int32_t>(node->ne[0]);
    call.out.n_head = static_cast<int32_t>(node->ne[1]);
    call.out.n_tok = call.n_tok;
    call.out.stride_head = node->nb[1];
    call.out.stride_tok = node->nb[2];
    if (direct) {
        call.out.data = node->data;
    } else {
        copy_out_.resize(ggml_nbytes(node));
        call.out.data = copy_out_.data();
    }

    // A node of a later graph must not be taken for this layer's.
    forget_graph();
    on_attention(call);
    if (replaces_output() && !direct) {
        ggml_backend_tensor_set(node, copy_out_.data(), 0, copy_out_.size());
    }
}

}  // namespace sekv_llama
