#include "recording.h"

#include "methods.h"

#include "distribution.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace sekv_eval {

namespace {

constexpr int32_t chunk_tokens = 512;

void append_rows(const sekv_view & view, std::vector<float> & rows) {
    for (int32_t token = 0; token < view.n_tok; token++) {
        for (int32_t head = 0; head < view.n_head; head++) {
            const char * at = static_cast<const char *>(view.data) + token * view.stride_tok + head * view.stride_head;
            const float * row = reinterpret_cast<const float *>(at);
            rows.insert(rows.end(), row, row + view.n_elem);
        }
    }
}

sekv_view rows_view(float * rows, int32_t n_elem, int32_t n_head, int32_t n_tok) {
    sekv_view view = {};
    view.data = rows;
    view.dtype = SEKV_F32;
    view.memory = SEKV_MEMORY_HOST;
    view.n_elem = n_elem;
    view.n_head = n_head;
    view.n_tok = n_tok;
    view.stride_head = n_elem * sizeof(float);
    view.stride_tok = view.stride_head * n_head;
    return view;
}

void check_call(sekv_context * context, sekv_status status) {
    if (status != SEKV_OK) {
        throw std::runtime_error(std::string(sekv_status_name(status)) + ": " + sekv_context_last_error(context));
    }
}

}  // namespace

void recorder::on_attention(const sekv_llama::attention_call & call) {
    if (call.k.dtype != SEKV_F32 || call.v.dtype != SEKV_F32) {
        problem_ = "recording needs llama.cpp's own cache in F32";
        return;
    }
    recorded_layer & layer = layers_[call.layer];
    layer.n_head = call.q.n_head;
    layer.n_head_kv = call.k.n_head;
    layer.head_dim_k = call.k.n_elem;
    layer.head_dim_v = call.v.n_elem;
    append_rows(call.k, layer.k);
    append_rows(call.v, layer.v);
    append_rows(call.q, layer.q);
}

void recorder::on_unsupported(int32_t, const std::string & reason) { problem_ = reason; }

void recorder::check() const {
    if (!problem_.empty()) {
        throw std::runtime_error(problem_);
    }
}

std::vector<recorded_layer> recorder::take() { return std::move(layers_); }

recording record(const sekv_llama::loaded_model & model, const std::vector<llama_token> & tokens, int32_t n_prompt,
                 int32_t n_reference, int32_t n_threads, int32_t n_spare_cells, full_reader * keep) {
    full_reader reader;
    reader.listener = std::make_unique<recorder>(llama_model_n_layer(model.model()));
    sekv_llama::engine_options options;
    options.n_ctx = n_prompt + n_reference + n_spare_cells;
    options.chunk = chunk_tokens;
    options.n_threads = n_threads;
    options.cache_type = GGML_TYPE_F32;
    options.listener = reader.listener.get();
    reader.engine = sekv_llama::engine::with_full_cache(model, options);

    recording recorded;
    recorded.n_prompt = n_prompt;
    recorded.n_vocab = model.n_vocab();
    recorded.surprisal.assign(n_prompt, 0.0f);
    const std::vector<llama_token> prompt(tokens.begin(), tokens.begin() + n_prompt);
    reader.engine->prefill(prompt, 0, true, [&](int32_t first, int32_t n_tok) {
        for (int32_t i = 0; i < n_tok && first + i + 1 < n_prompt; i++) {
            recorded.surprisal[first + i + 1] = static_cast<float>(
                sekv_llama::surprisal(reader.engine->logits(i), recorded.n_vocab, prompt[first + i + 1]));
        }
    });
    reader.listener->check();
    recorded.layers = reader.listener->take();
    for (recorded_layer & layer : recorded.layers) {
        const std::vector<float> bias = constant_key_bias(layer.n_head_kv, layer.head_dim_k);
        round_for_bias(layer.k.data(), layer.k.size() / bias.size(), bias);
    }

    // What comes after the prompt serves the reference only.
    reader.listener->pause(true);
    recorded.reference.reserve(static_cast<size_t>(n_reference) * recorded.n_vocab);
    const std::vector<llama_token> forced(tokens.begin() + n_prompt, tokens.begin() + n_prompt + n_reference);
    reader.engine->prefill(forced, n_prompt, true, [&](int32_t, int32_t n_tok) {
        for (int32_t i = 0; i < n_tok; i++) {
            const float * logits = reader.engine->logits(i);
            recorded.reference.insert(recorded.reference.end(), logits, logits + recorded.n_vocab);
        }
    });
    if (keep != nullptr) {
        *keep = std::move(reader);
    }
    return recorded;
}

void ingest(sekv_context * context, const recording & recorded, const std::vector<float> & key_bias) {
    std::vector<int32_t> positions(chunk_tokens);
    std::vector<float> biased;
    for (int32_t first = 0; first < recorded.n_prompt; first += chunk_tokens) {
        const int32_t n_tok = std::min(chunk_tokens, recorded.n_prompt - first);
        std::iota(positions.begin(), positions.end(), first);
        sekv_batch batch = {};
        batch.struct_size = sizeof batch;
        batch.n_tok = n_tok;
        batch.pos = positions.data();
        check_call(context, sekv_begin(context, &batch));
        for (size_t index = 0; index < recorded.layers.size(); index++) {
            const recorded_layer & layer = recorded.layers[index];
            const size_t row_k = static_cast<size_t>(layer.n_head_kv) * layer.head_dim_k;
            const size_t row_v = static_cast<size_t>(layer.n_head_kv) * layer.head_dim_v;
            const size_t row_q = static_cast<size_t>(layer.n_head) * layer.head_dim_k;
            float * rows_k = const_cast<float *>(layer.k.data()) + first * row_k;
            if (!key_bias.empty()) {
                biased.assign(rows_k, rows_k + n_tok * row_k);
                for (size_t i = 0; i < biased.size(); i++) {
                    biased[i] += key_bias[i % row_k];
                }
                rows_k = biased.data();
            }
            const sekv_view k = rows_view(rows_k, layer.head_dim_k, layer.n_head_kv, n_tok);
            const sekv_view v = rows_view(const_cast<float *>(layer.v.data()) + first * row_v, layer.head_dim_v,
                                          layer.n_head_kv, n_tok);
            const sekv_view q = rows_view(const_cast<float *>(layer.q.data()) + first * row_q, layer.head_dim_k,
                                          layer.n_head, n_tok);
            check_call(context, sekv_prefill_ingest(context, static_cast<int32_t>(index), &k, &v));
            check_call(context, sekv_observe(context, static_cast<int32_t>(index), &q));
        }
        check_call(context, sekv_commit(context, recorded.surprisal.data() + first));
    }
}

}  // namespace sekv_eval
