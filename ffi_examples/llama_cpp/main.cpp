// sekv-llama: a real model in stock llama.cpp, with libsekv as its KV cache.
#include "compare.h"
#include "distribution.h"
#include "options.h"
#include "report.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>

using namespace sekv_llama;

namespace {

std::string read_file(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("the file " + path + " could not be read");
    }
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

// Document first, question last: so the question is asked of what the cache has compressed.
std::string prompt_text(const program_options & options) {
    std::string text;
    if (!options.prompt_file.empty()) {
        text = read_file(options.prompt_file);
    }
    if (!options.prompt.empty()) {
        text += (text.empty() ? "" : "\n\n") + options.prompt;
    }
    return text;
}

engine_options engine_options_from(const program_options & options, int32_t n_tokens) {
    engine_options engine;
    engine.n_ctx = n_tokens;
    engine.chunk = options.chunk;
    engine.n_threads = options.n_threads;
    engine.cache_type = options.cache_type;
    engine.quiet = options.quiet_threads;
    engine.feed_surprisal = options.feed_surprisal;
    return engine;
}

class token_chooser {
public:
    token_chooser(const program_options & options, int32_t n_vocab) : n_vocab_(n_vocab) {
        if (options.temperature > 0.0f) {
            chain_ = llama_sampler_chain_init(llama_sampler_chain_default_params());
            llama_sampler_chain_add(chain_, llama_sampler_init_temp(options.temperature));
            llama_sampler_chain_add(chain_, llama_sampler_init_dist(options.seed));
        }
    }
    ~token_chooser() {
        if (chain_ != nullptr) {
            llama_sampler_free(chain_);
        }
    }
    token_chooser(const token_chooser &) = delete;
    token_chooser & operator=(const token_chooser &) = delete;

    llama_token choose(const float * logits) {
        if (chain_ == nullptr) {
            return argmax(logits, n_vocab_);
        }
        candidates_.resize(n_vocab_);
        for (int32_t i = 0; i < n_vocab_; i++) {
            candidates_[i] = {i, logits[i], 0.0f};
        }
        llama_token_data_array array = {candidates_.data(), candidates_.size(), -1, false};
        llama_sampler_apply(chain_, &array);
        return array.data[array.selected].id;
    }

private:
    int32_t n_vocab_;
    llama_sampler * chain_ = nullptr;
    std::vector<llama_token_data> candidates_;
};

void generate(const loaded_model & model, const program_options & options, const std::vector<llama_token> & prompt) {
    const int32_t n_prompt = static_cast<int32_t>(prompt.size());
    const engine_options engine_settings = engine_options_from(options, n_prompt + options.n_predict + 1);
    const std::unique_ptr<engine> running =
        options.full ? engine::with_full_cache(model, engine_settings)
                     : engine::with_sekv(model, engine_settings, options.sekv, options.sidecar_path);
    token_chooser chooser(options, model.n_vocab());
    speed speed;
    read_prompt(*running, prompt, "prompt:", speed);

    std::string text;
    const float * logits = running->logits((n_prompt - 1) % options.chunk);
    for (int32_t i = 0; i < options.n_predict; i++) {
        const llama_token token = chooser.choose(logits);
        if (llama_vocab_is_eog(model.vocab(), token)) {
            break;
        }
        const std::string piece = model.piece(token);
        text += piece;
        if (!options.json) {
            std::fputs(piece.c_str(), stdout);
            std::fflush(stdout);
        }
        const auto start = std::chrono::steady_clock::now();
        running->decode(&token, 1, n_prompt + i, false);
        speed.decode_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        speed.n_decoded++;
        logits = running->logits(0);
    }

    sekv_statistics statistics = {};
    if (running->sekv() != nullptr) {
        statistics = running->sekv()->statistics();
    }
    if (options.json) {
        std::puts(run_json(text, speed, options.full ? nullptr : &statistics).c_str());
        return;
    }
    std::fputs("\n", stdout);
    std::fflush(stdout);
    print_run(speed);
    if (!options.full) {
        print_memory(statistics);
    }
}

void compare(const loaded_model & model, const program_options & options, std::vector<llama_token> prompt) {
    std::vector<llama_token> forced;
    if (options.n_forced > 0) {
        if (options.n_forced >= static_cast<int32_t>(prompt.size())) {
            throw std::runtime_error("--forced " + std::to_string(options.n_forced) + " leaves nothing of a prompt of " +
                                     std::to_string(prompt.size()) + " tokens");
        }
        forced.assign(prompt.end() - options.n_forced, prompt.end());
        prompt.resize(prompt.size() - options.n_forced);
    } else if (!options.continuation_file.empty()) {
        forced = model.tokenize(read_file(options.continuation_file), false);
    }
    const int32_t n_steps = forced.empty() ? options.n_predict : static_cast<int32_t>(forced.size());
    const int32_t n_tokens = static_cast<int32_t>(prompt.size()) + n_steps + 1;
    const engine_options engine_settings = engine_options_from(options, n_tokens);
    const std::unique_ptr<engine> sekv = engine::with_sekv(model, engine_settings, options.sekv, options.sidecar_path);
    engine_options full_settings = engine_settings;
    full_settings.feed_surprisal = false;
    const std::unique_ptr<engine> full = engine::with_full_cache(model, full_settings);

    const comparison compared = compare_caches(model, *full, *sekv, prompt, forced, options.n_predict);
    std::string text;
    for (const llama_token token : compared.tokens) {
        text += model.piece(token);
    }
    if (options.json) {
        std::puts(comparison_json(text, compared).c_str());
        return;
    }
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
    print_comparison(compared);
}

}  // namespace

int main(int argument_count, char ** arguments) {
    try {
        program_options options;
        if (!parse_options(argument_count, arguments, options)) {
            return 0;
        }
        const loaded_model model(options.model_path);
        const std::string text = prompt_text(options);
        std::vector<llama_token> prompt = model.tokenize(options.raw ? text : model.chat_prompt(text), !options.raw);
        if (options.n_prompt_max > 0 && static_cast<int32_t>(prompt.size()) > options.n_prompt_max) {
            prompt.resize(options.n_prompt_max);
        }
        if (prompt.empty()) {
            throw std::runtime_error("the prompt has no tokens");
        }
        if (options.compare) {
            compare(model, options, prompt);
        } else {
            generate(model, options, prompt);
        }
    } catch (const std::exception & problem) {
        std::fprintf(stderr, "sekv-llama: error: %s\n", problem.what());
        return 1;
    }
    return 0;
}
