#include "engine.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace sekv_llama {

namespace {

void log_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

}  // namespace

loaded_model::loaded_model(const std::string & gguf_path) : path_(gguf_path) {
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    model_ = llama_model_load_from_file(gguf_path.c_str(), llama_model_default_params());
    if (model_ == nullptr) {
        throw std::runtime_error("llama.cpp could not load the model " + gguf_path);
    }
    vocab_ = llama_model_get_vocab(model_);
    n_vocab_ = llama_vocab_n_tokens(vocab_);
}

loaded_model::~loaded_model() {
    llama_model_free(model_);
    llama_backend_free();
}

std::vector<llama_token> loaded_model::tokenize(const std::string & text, bool special, bool begins) const {
    std::vector<llama_token> tokens(text.size() + 8);
    const int32_t n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                     static_cast<int32_t>(tokens.size()), begins, special);
    if (n < 0) {
        throw std::runtime_error("the text could not be tokenised");
    }
    tokens.resize(n);
    return tokens;
}

std::string loaded_model::piece(llama_token token) const {
    char text[256];
    const int32_t length = llama_token_to_piece(vocab_, token, text, sizeof text, 0, /*special*/ false);
    return std::string(text, std::max(0, length));
}

std::string loaded_model::chat_prompt(const std::string & user_text) const {
    return llama_model_chat_template(model_, nullptr) == nullptr ? user_text : chat_text({{"user", user_text}}, true);
}

std::string loaded_model::chat_text(const std::vector<chat_message> & messages, bool opens_answer) const {
    const char * chat_template = llama_model_chat_template(model_, nullptr);
    if (chat_template == nullptr) {
        throw std::runtime_error("the model " + path_ + " has no chat template; one was expected");
    }
    std::vector<llama_chat_message> parts;
    size_t n_bytes = 1024;
    for (const chat_message & message : messages) {
        parts.push_back({message.role.c_str(), message.content.c_str()});
        n_bytes += message.content.size() + 256;
    }
    std::string text(n_bytes, '\0');
    const auto apply = [&] {
        return llama_chat_apply_template(chat_template, parts.data(), parts.size(), opens_answer, text.data(),
                                         static_cast<int32_t>(text.size()));
    };
    int32_t length = apply();
    if (length > static_cast<int32_t>(text.size())) {
        text.resize(length);
        length = apply();
    }
    if (length < 0) {
        throw std::runtime_error("llama.cpp does not know the chat template of this model; --raw reads a text without one");
    }
    text.resize(length);
    return text;
}

engine::engine(const loaded_model & model, const engine_options & options) : model_(model), options_(options) {}

std::unique_ptr<engine> engine::with_full_cache(const loaded_model & model, const engine_options & options) {
    std::unique_ptr<engine> made(new engine(model, options));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = options.n_ctx;
    // With flash attention llama.cpp rounds an F32 cache to F16 on every read (0.3 in a logit at
    // 1,600 tokens), without it an F32 cache is exact. A listener needs flash attention's node.
    const bool exact = options.cache_type == GGML_TYPE_F32 && options.listener == nullptr;
    params.flash_attn_type = exact ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.kv_unified = true;
    if (options.listener != nullptr) {
        params.cb_eval = graph_tap::callback;
        params.cb_eval_user_data = options.listener;
    }
    made->start(params);
    return made;
}

std::unique_ptr<engine> engine::with_sekv(const loaded_model & model, const engine_options & options,
                                          const sekv_params & params, const std::string & sidecar_path) {
    std::unique_ptr<engine> made(new engine(model, options));
    std::string why;
    sekv_params sized = params;
    sized.n_batch_max = std::max(params.n_batch_max, options.chunk);
    made->cache_ = cache::create(model.model(), model.path(), sized, why, sidecar_path);
    if (!made->cache_) {
        throw std::runtime_error(why);
    }
    made->cache_->feed_surprisal(options.feed_surprisal);
    llama_context_params context_params = llama_context_default_params();
    made->start(context_params);
    return made;
}

void engine::start(llama_context_params params) {
    params.n_batch = options_.chunk;
    params.n_ubatch = options_.chunk;
    params.n_seq_max = 1;
    params.n_threads = options_.n_threads;
    params.n_threads_batch = options_.n_threads;
    params.type_k = options_.cache_type;
    params.type_v = options_.cache_type;
    if (cache_ && cache_->configure(params) != SEKV_OK) {
        throw std::runtime_error(cache_->error());
    }
    context_ = llama_init_from_model(model_.model(), params);
    if (context_ == nullptr) {
        throw std::runtime_error("llama.cpp could not make a context");
    }
    if (options_.quiet && !threads_.attach(context_, options_.n_threads)) {
        throw std::runtime_error("llama.cpp could not make a threadpool");
    }
    batch_ = llama_batch_init(options_.chunk, 0, 1);
}

engine::~engine() {
    if (context_ != nullptr) {
        llama_batch_free(batch_);
        llama_free(context_);
    }
}

void engine::decode(const llama_token * tokens, int32_t n_tok, int32_t first_pos, bool all_logits) {
    batch_.n_tokens = n_tok;
    for (int32_t i = 0; i < n_tok; i++) {
        batch_.token[i] = tokens[i];
        batch_.pos[i] = first_pos + i;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = 0;
        batch_.logits[i] = all_logits || i == n_tok - 1;
    }
    if (cache_) {
        if (cache_->decode(context_, batch_) != SEKV_OK) {
            throw std::runtime_error(cache_->error());
        }
        return;
    }
    const int32_t returned = llama_decode(context_, batch_);
    llama_synchronize(context_);
    if (returned != 0) {
        throw std::runtime_error("llama_decode returned " + std::to_string(returned));
    }
}

const float * engine::logits(int32_t i) const { return llama_get_logits_ith(context_, i); }

void engine::prefill(const std::vector<llama_token> & tokens, int32_t first_pos, bool all_logits, const chunk_done & done) {
    const int32_t n = static_cast<int32_t>(tokens.size());
    for (int32_t first = 0; first < n; first += options_.chunk) {
        const int32_t n_tok = std::min(options_.chunk, n - first);
        decode(tokens.data() + first, n_tok, first_pos + first, all_logits);
        if (done) {
            done(first, n_tok);
        }
    }
}

void engine::truncate(int32_t first_pos) {
    if (cache_) {
        if (cache_->seq_rm(context_, 0, first_pos, -1) != SEKV_OK) {
            throw std::runtime_error(cache_->error());
        }
        return;
    }
    llama_memory_seq_rm(llama_get_memory(context_), 0, first_pos, -1);
}

void engine::save_state(const state_writer & write) {
    if (cache_->save_state(0, write) != SEKV_OK) {
        throw std::runtime_error(cache_->error());
    }
}

void engine::load_state(const state_reader & read, const float * last_logits) {
    if (cache_->load_state(context_, 0, read, last_logits) != SEKV_OK) {
        throw std::runtime_error(cache_->error());
    }
}

}  // namespace sekv_llama
