#include "fan_out.h"

#include <algorithm>

#include "parallel.h"

#include <stdexcept>

namespace sekv_eval {

namespace {

// Row `row` of a view of one token for each method.
sekv_view one_row(const sekv_view & view, int32_t row) {
    sekv_view one = view;
    one.n_tok = 1;
    one.data = static_cast<char *>(view.data) + row * view.stride_tok;
    return one;
}

}  // namespace

fan_out::fan_out(const sekv_llama::loaded_model & model, std::vector<running_method> & methods, int32_t n_threads)
    : methods_(methods), n_threads_(n_threads), keys_(methods.size()) {
    const uint32_t n_methods = static_cast<uint32_t>(methods.size());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = params.n_ubatch = n_methods;
    params.n_seq_max = n_methods;
    params.n_threads = params.n_threads_batch = n_threads;
    params.kv_unified = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.cb_eval = graph_tap::callback;
    params.cb_eval_user_data = static_cast<graph_tap *>(this);
    context_ = llama_init_from_model(model.model(), params);
    if (context_ == nullptr) {
        throw std::runtime_error("llama.cpp could not make a context of " + std::to_string(n_methods) + " sequences");
    }
    threads_.attach(context_, n_threads);
    batch_ = llama_batch_init(static_cast<int32_t>(n_methods), 0, 1);
}

fan_out::~fan_out() {
    llama_batch_free(batch_);
    llama_free(context_);
}

void fan_out::each_method(const char * what, const std::function<sekv_status(int32_t, sekv_context *)> & turn) {
    parallel_for(static_cast<int32_t>(methods_.size()), n_threads_, [&](int32_t i) {
        sekv_context * context = methods_[i].context.get();
        if (turn(i, context) != SEKV_OK) {
            throw std::runtime_error(methods_[i].method.name + ", " + what + ": " + sekv_context_last_error(context));
        }
    });
}

void fan_out::step(llama_token token, int32_t pos) {
    batch_.n_tokens = static_cast<int32_t>(methods_.size());
    for (int32_t i = 0; i < batch_.n_tokens; i++) {
        batch_.token[i] = token;
        batch_.pos[i] = pos;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = i;
        batch_.logits[i] = 1;
    }
    sekv_batch pass = {};
    pass.struct_size = sizeof pass;
    pass.n_tok = 1;
    pass.pos = &pos;
    each_method("begin", [&](int32_t, sekv_context * context) { return sekv_begin(context, &pass); });
    forget_graph();
    const int32_t returned = llama_decode(context_, batch_);
    llama_synchronize(context_);
    // The next step's cells start out empty, and an empty sequence accepts any position.
    llama_memory_clear(llama_get_memory(context_), false);
    if (!problem_.empty() || returned != 0) {
        throw std::runtime_error(problem_.empty() ? "llama_decode returned " + std::to_string(returned) : problem_);
    }
    each_method("commit", [](int32_t, sekv_context * context) { return sekv_commit(context, nullptr); });
}

void fan_out::truncate(int32_t first_pos) {
    each_method("seq_rm", [&](int32_t, sekv_context * context) { return sekv_seq_rm(context, 0, first_pos, -1); });
}

void fan_out::on_attention(const sekv_llama::attention_call & call) {
    if (!problem_.empty()) {
        return;
    }
    try {
        each_method("attend", [&](int32_t i, sekv_context * context) {
            sekv_view k = one_row(call.k, i);
            const sekv_view v = one_row(call.v, i);
            const sekv_view q = one_row(call.q, i);
            const sekv_view out = one_row(call.out, i);
            std::vector<float> & keys = keys_[i];
            keys.resize(static_cast<size_t>(k.n_head) * k.n_elem);
            for (int32_t head = 0; head < k.n_head; head++) {
                const float * row = reinterpret_cast<const float *>(static_cast<char *>(k.data) + head * k.stride_head);
                std::copy(row, row + k.n_elem, keys.begin() + head * k.n_elem);
            }
            round_for_bias(keys.data(), 1, constant_key_bias(k.n_head, k.n_elem));
            const std::vector<float> & bias = methods_[i].key_bias;
            for (size_t j = 0; j < bias.size(); j++) {
                keys[j] += bias[j];
            }
            k.data = keys.data();
            k.stride_head = k.n_elem * sizeof(float);
            k.stride_tok = k.stride_head * k.n_head;
            const sekv_status status = sekv_prefill_ingest(context, call.layer, &k, &v);
            return status != SEKV_OK ? status : sekv_attend(context, call.layer, &q, nullptr, &out);
        });
    } catch (const std::exception & problem) {
        // llama.cpp's graph can't be unwound by an exception; step() throws it on.
        problem_ = problem.what();
    }
}

void fan_out::on_unsupported(int32_t, const std::string & reason) { problem_ = reason; }

}  // namespace sekv_eval
