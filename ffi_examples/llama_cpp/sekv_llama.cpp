#include "sekv_llama.h"

#include "distribution.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace sekv_llama {

namespace {

// llama.cpp pads its cache to this many cells anyway.
constexpr uint32_t cell_granularity = 256;

void write_zeros(const sekv_view & out) {
    for (int32_t token = 0; token < out.n_tok; token++) {
        for (int32_t head = 0; head < out.n_head; head++) {
            char * row = static_cast<char *>(out.data) + token * out.stride_tok + head * out.stride_head;
            std::memset(row, 0, out.n_elem * sizeof(float));
        }
    }
}

}  // namespace

sekv_params default_params() {
    sekv_params params;
    sekv_params_init(&params, sizeof params);
    return params;
}

std::unique_ptr<cache> cache::create(const llama_model * model, const std::string & gguf_path,
                                     const sekv_params & params, std::string & why, const std::string & sidecar_path) {
    why = unsupported_model(model, gguf_path);
    if (!why.empty()) {
        return nullptr;
    }
    std::unique_ptr<cache> made(new cache());
    const char * sidecar = sidecar_path.empty() ? nullptr : sidecar_path.c_str();
    if (sekv_model_from_gguf(gguf_path.c_str(), sidecar, &made->model_) != SEKV_OK ||
        sekv_init(made->model_, &params, &made->context_) != SEKV_OK) {
        why = sekv_last_error();
        return nullptr;
    }
    made->llama_model_ = model;
    made->params_ = params;
    // Its text is the host's, for sekv_init alone.
    made->params_.basis_folder = nullptr;
    made->n_layer_ = llama_model_n_layer(model);
    made->metadata_scale_ = metadata_attention_scale(model);
    return made;
}

cache::~cache() {
    sekv_context_free(context_);
    sekv_model_free(model_);
}

sekv_status cache::configure(llama_context_params & params) {
    error_.clear();
    for (ggml_type type : {params.type_k, params.type_v}) {
        if (type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16) {
            error_ = std::string("llama.cpp's own cache was asked to be ") + ggml_type_name(type) +
                     "; F32, F16 or BF16 was expected (libsekv does the quantising)";
            return SEKV_ERR_UNSUPPORTED;
        }
    }
    if (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        error_ = "flash attention was switched off; the hook needs it";
        return SEKV_ERR_UNSUPPORTED;
    }
    if (params.embeddings || params.attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL) {
        error_ = "embeddings or non-causal attention were asked for; causal text generation was expected";
        return SEKV_ERR_UNSUPPORTED;
    }
    const uint32_t n_seq_max = std::max<uint32_t>(1, params.n_seq_max);
    if (n_seq_max > static_cast<uint32_t>(params_.n_seq_max)) {
        error_ = "the llama.cpp context has n_seq_max = " + std::to_string(n_seq_max) + "; at most libsekv's " +
                 std::to_string(params_.n_seq_max) + " was expected";
        return SEKV_ERR_ARGUMENT;
    }
    params.n_ubatch = std::min<uint32_t>(std::max<uint32_t>(1, params.n_ubatch), params_.n_batch_max);
    // The batch in flight needs cells, and so does the newest token of each sequence. Nothing else does.
    const uint32_t n_cells = params.n_ubatch + n_seq_max;
    params.n_ctx = (n_cells + cell_granularity - 1) / cell_granularity * cell_granularity;
    params.n_batch = params.n_ubatch;
    params.n_seq_max = n_seq_max;
    params.kv_unified = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.cb_eval = graph_tap::callback;
    params.cb_eval_user_data = static_cast<graph_tap *>(this);
    return SEKV_OK;
}

int32_t cache::last_pos(int32_t seq) const {
    int32_t last = -1;
    sekv_seq_pos_max(context_, seq, &last);
    return last;
}

sekv_statistics cache::statistics() const {
    sekv_statistics statistics = {};
    statistics.struct_size = sizeof statistics;
    statistics.memory.struct_size = sizeof statistics.memory;
    sekv_stats(context_, &statistics);
    return statistics;
}

int32_t cache::n_vocab() const { return llama_vocab_n_tokens(llama_model_get_vocab(llama_model_)); }

void cache::forget_status() {
    status_ = SEKV_OK;
    error_.clear();
}

// Negative: of all sequences.
void cache::forget_logits(int32_t seq) {
    if (seq < 0) {
        last_logits_.clear();
    } else {
        last_logits_.erase(seq);
    }
}

void cache::fail(sekv_status status, const std::string & message) {
    if (status_ == SEKV_OK) {
        status_ = status;
        error_ = message;
    }
}

void cache::take_status(sekv_status status) {
    if (status != SEKV_OK) {
        fail(status, sekv_context_last_error(context_));
    }
}

// Positions that the host left out continue each sequence, as in llama_decode.
void cache::read_batch(const llama_batch & batch) {
    running_ = running_batch();
    std::map<int32_t, int32_t> next_pos;
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        std::vector<int32_t> seq_ids = {0};
        if (batch.seq_id != nullptr) {
            seq_ids.assign(batch.seq_id[i], batch.seq_id[i] + (batch.n_seq_id != nullptr ? batch.n_seq_id[i] : 1));
        }
        for (int32_t seq : seq_ids) {
            next_pos.emplace(seq, last_pos(seq) + 1);
        }
        const int32_t pos = batch.pos != nullptr ? batch.pos[i] : next_pos[seq_ids[0]];
        for (int32_t seq : seq_ids) {
            running_.first_pos.emplace(seq, pos);
            running_.last_pos[seq] = pos;
            next_pos[seq] = pos + 1;
        }
        running_.positions.push_back(pos);
        running_.n_seq_ids.push_back(static_cast<int32_t>(seq_ids.size()));
        running_.seq_ids.push_back(std::move(seq_ids));
    }
    for (const std::vector<int32_t> & seq_ids : running_.seq_ids) {
        running_.seq_id_pointers.push_back(seq_ids.data());
    }
}

sekv_status cache::decode(llama_context * context, const llama_batch & batch) {
    forget_status();
    pass_open_ = false;
    forget_graph();
    read_batch(batch);
    // Rolling back removes from a sequence's first position of this batch on: what is there already
    // must not be among it.
    for (const auto & [seq, first] : running_.first_pos) {
        if (first <= last_pos(seq)) {
            fail(SEKV_ERR_POSITION, "sequence " + std::to_string(seq) + " starts this batch at position " +
                 std::to_string(first) + "; a position above its last, " + std::to_string(last_pos(seq)) + ", was expected");
            return status_;
        }
    }

    // llama.cpp would count on from its own few cells, of which there may be none.
    llama_batch placed = batch;
    placed.pos = running_.positions.data();
    decoding_ = true;
    const int32_t returned = llama_decode(context, placed);
    llama_synchronize(context);
    decoding_ = false;
    if (returned != 0) {
        fail(SEKV_ERR_ARGUMENT, "llama_decode returned " + std::to_string(returned) +
             " (1: no cell free, 2: aborted, below 0: an invalid batch)");
    } else if (running_.n_done != batch.n_tokens) {
        fail(SEKV_ERR_UNSUPPORTED, "the model computed " + std::to_string(running_.n_done) + " of " +
             std::to_string(batch.n_tokens) + " tokens through flash attention; was the llama.cpp context configured by this cache?");
    }
    if (status_ != SEKV_OK) {
        roll_back(context);
        return status_;
    }
    if (feed_surprisal_) {
        hand_over_surprisal(context, batch);
    }
    free_cells(context);
    return status_;
}

// As if this batch had never been decoded: earlier micro-batches of it are committed already.
void cache::roll_back(llama_context * context) {
    if (pass_open_) {
        sekv_abort(context_);
        pass_open_ = false;
    }
    for (const auto & [seq, first] : running_.first_pos) {
        sekv_seq_rm(context_, seq, first, -1);
        llama_memory_seq_rm(llama_get_memory(context), seq, first, -1);
    }
}

// llama.cpp keeps the newest cell of each sequence, so that its own checks of positions go on
// working; all that attention needs is in libsekv. Where it has none of a sequence, it accepts any
// position to go on from.
void cache::free_cells(llama_context * context) {
    for (const auto & [seq, last] : running_.last_pos) {
        llama_memory_seq_rm(llama_get_memory(context), seq, -1, last);
    }
}

sekv_status cache::seq_rm(llama_context * context, int32_t seq, int32_t first_pos, int32_t end_pos) {
    forget_status();
    take_status(sekv_seq_rm(context_, seq, first_pos, end_pos));
    if (status_ == SEKV_OK) {
        llama_memory_seq_rm(llama_get_memory(context), std::max(seq, -1), first_pos, end_pos);
        forget_logits(seq);
    }
    return status_;
}

sekv_status cache::seq_cp(llama_context * context, int32_t from, int32_t to, int32_t first_pos, int32_t end_pos) {
    forget_status();
    const bool fills_target = last_pos(to) < 0;
    take_status(sekv_seq_cp(context_, from, to, first_pos, end_pos));
    if (status_ != SEKV_OK || !fills_target) {
        return status_;
    }
    // The newest cell goes along where the range has it: llama.cpp decodes a token of two sequences
    // only where both end alike.
    llama_memory_seq_cp(llama_get_memory(context), from, to, first_pos, end_pos);
    const auto logits = last_logits_.find(from);
    if (logits != last_logits_.end() && last_pos(to) == last_pos(from)) {
        last_logits_[to] = logits->second;
    }
    return status_;
}

sekv_status cache::seq_keep(llama_context * context, int32_t seq) {
    forget_status();
    take_status(sekv_seq_keep(context_, seq));
    if (status_ == SEKV_OK) {
        llama_memory_seq_keep(llama_get_memory(context), seq);
        for (auto logits = last_logits_.begin(); logits != last_logits_.end();) {
            logits = logits->first == seq ? std::next(logits) : last_logits_.erase(logits);
        }
    }
    return status_;
}

// The newest token stays the newest, and what the model said after it stays said: last_logits_ too.
sekv_status cache::seq_add(llama_context * context, int32_t seq, int32_t first_pos, int32_t end_pos, int32_t delta) {
    forget_status();
    take_status(sekv_seq_add(context_, seq, first_pos, end_pos, delta));
    if (status_ == SEKV_OK) {
        // llama_memory_seq_add would turn the keys of llama.cpp's cells by a graph of its own, for
        // nothing: no cell's key is read.
        llama_memory_seq_rm(llama_get_memory(context), seq, -1, -1);
    }
    return status_;
}

sekv_status cache::clear(llama_context * context) {
    forget_status();
    take_status(sekv_clear(context_));
    llama_memory_clear(llama_get_memory(context), false);
    last_logits_.clear();
    return status_;
}

sekv_status cache::save_state(int32_t seq, const state_writer & write) {
    forget_status();
    const auto write_through = [](const void * data, size_t size, void * user) {
        return (*static_cast<const state_writer *>(user))(data, size) ? 0 : 1;
    };
    take_status(sekv_state_save_to(context_, seq, write_through, const_cast<state_writer *>(&write)));
    return status_;
}

sekv_status cache::load_state(llama_context * context, int32_t seq, const state_reader & read, const float * last_logits) {
    forget_status();
    const auto read_through = [](void * data, size_t size, void * user) {
        return (*static_cast<const state_reader *>(user))(data, size) ? 0 : 1;
    };
    take_status(sekv_state_load_from(context_, seq, read_through, const_cast<state_reader *>(&read)));
    if (status_ == SEKV_OK) {
        llama_memory_seq_rm(llama_get_memory(context), seq, -1, -1);
        forget_logits(seq);
        if (feed_surprisal_ && last_logits != nullptr && seq >= 0) {
            last_logits_[seq].assign(last_logits, last_logits + n_vocab());
        }
    }
    return status_;
}

// A pass is one micro-batch: llama.cpp takes them from the batch in order.
void cache::open_pass(const attention_call & call) {
    const int32_t first = running_.n_done;
    if (!decoding_ || first + call.n_tok > static_cast<int32_t>(running_.positions.size())) {
        fail(SEKV_ERR_ORDER, "llama_decode ran on this cache's context without the cache's own decode()");
        return;
    }
    const int32_t * positions = running_.positions.data() + first;
    if (call.positions != nullptr && !std::equal(positions, positions + call.n_tok, call.positions)) {
        fail(SEKV_ERR_INTERNAL, "the graph's positions are not those of the batch, in its order");
        return;
    }
    sekv_batch batch = {};
    batch.struct_size = sizeof batch;
    batch.n_tok = call.n_tok;
    batch.pos = positions;
    batch.n_seq_id = running_.n_seq_ids.data() + first;
    batch.seq_id = running_.seq_id_pointers.data() + first;
    take_status(sekv_begin(context_, &batch));
    pass_open_ = status_ == SEKV_OK;
    n_pass_tokens_ = call.n_tok;
}

// libsekv takes the scale of scores from the model's metadata and architecture, as llama.cpp does.
// Where the graph has another than those rules can give, the two would answer differently.
void cache::check_scale(const attention_call & call) {
    const float root = 1.0f / std::sqrt(static_cast<float>(call.q.n_elem));
    const std::vector<float> known = metadata_scale_ > 0.0f ? std::vector<float>{metadata_scale_} : std::vector<float>{root, 1.0f};
    const bool expected = std::any_of(known.begin(), known.end(), [&](float scale) { return std::fabs(call.scale / scale - 1.0f) < 1e-5f; });
    if (!expected) {
        fail(SEKV_ERR_UNSUPPORTED, "the graph multiplies scores by " + std::to_string(call.scale) + "; " +
             std::to_string(known[0]) + " was expected");
    }
}

void cache::on_attention(const attention_call & call) {
    if (status_ == SEKV_OK && !pass_open_) {
        check_scale(call);
        if (status_ == SEKV_OK) {
            open_pass(call);
        }
    }
    if (status_ == SEKV_OK) {
        take_status(sekv_prefill_ingest(context_, call.layer, &call.k, &call.v));
    }
    if (status_ == SEKV_OK) {
        take_status(sekv_attend(context_, call.layer, &call.q, nullptr, &call.out));
    }
    end_of_layer(call.layer, status_ == SEKV_OK ? nullptr : &call.out);
}

void cache::on_unsupported(int32_t layer, const std::string & reason) {
    fail(SEKV_ERR_UNSUPPORTED, reason);
    end_of_layer(layer, nullptr);
}

// After an error the graph runs on over zeros, and the pass ends with the micro-batch.
void cache::end_of_layer(int32_t layer, const sekv_view * zero_out) {
    if (zero_out != nullptr) {
        write_zeros(*zero_out);
    }
    if (layer != n_layer_ - 1 || !pass_open_) {
        return;
    }
    pass_open_ = false;
    if (status_ != SEKV_OK) {
        sekv_abort(context_);
        return;
    }
    take_status(sekv_commit(context_, nullptr));
    if (status_ != SEKV_OK) {
        sekv_abort(context_);
        return;
    }
    running_.n_done += n_pass_tokens_;
}

// Surprisal of a token needs the logits after the one before it: of this batch, or the newest of
// the batch before. Tokens without it are NaN, which libsekv reads as unknown.
void cache::hand_over_surprisal(llama_context * context, const llama_batch & batch) {
    const int32_t n_vocab = this->n_vocab();
    if (batch.token == nullptr) {
        return;
    }
    for (const auto & [seq, first] : running_.first_pos) {
        std::vector<float> values;
        int32_t run_start = first;
        int32_t run_end = first;
        const auto hand_over = [&]() {
            if (std::any_of(values.begin(), values.end(), [](float value) { return !std::isnan(value); })) {
                take_status(sekv_surprisal(context_, seq, run_start, values.data(), static_cast<int32_t>(values.size())));
            }
            values.clear();
        };
        std::vector<float> & before = last_logits_[seq];
        const float * logits = before.empty() ? nullptr : before.data();
        for (int32_t i = 0; i < batch.n_tokens; i++) {
            const std::vector<int32_t> & seq_ids = running_.seq_ids[i];
            if (std::find(seq_ids.begin(), seq_ids.end(), seq) == seq_ids.end()) {
                continue;
            }
            const int32_t pos = running_.positions[i];
            if (!values.empty() && pos != run_end) {
                hand_over();
            }
            if (values.empty()) {
                run_start = pos;
            }
            // The first token of all has no surprisal to speak of; the method sets it to 0.
            values.push_back(logits != nullptr ? static_cast<float>(surprisal(logits, n_vocab, batch.token[i]))
                             : pos == 0        ? 0.0f
                                               : NAN);
            run_end = pos + 1;
            const bool has_logits = batch.logits != nullptr ? batch.logits[i] != 0 : i == batch.n_tokens - 1;
            logits = has_logits ? llama_get_logits_ith(context, i) : nullptr;
        }
        hand_over();
        if (logits == nullptr) {
            before.clear();
        } else if (logits != before.data()) {
            before.assign(logits, logits + n_vocab);
        }
    }
}

}  // namespace sekv_llama
