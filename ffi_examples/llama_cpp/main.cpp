// sekv-llama: a real model in stock llama.cpp, with libsekv as its KV cache.
#include "chat.h"
#include "clock.h"
#include "compare.h"
#include "generation.h"
#include "options.h"
#include "report.h"
#include "transcript.h"

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

std::unique_ptr<engine> engine_with_sekv(const loaded_model & model, const program_options & options) {
    return engine::with_sekv(model, engine_options_from(options, 0), options.sekv, options.sidecar_path);
}

double load_timed(transcript & held, const std::string & path) {
    const double start = seconds_now();
    held.load(path);
    return seconds_now() - start;
}

void save_timed(const transcript & held, const std::string & path) {
    const double start = seconds_now();
    const uint64_t n_bytes = held.save(path);
    print_saved(path, held.tokens().size(), n_bytes, seconds_now() - start);
}

// An empty prompt: the session's own tokens are the prompt.
void generate(const loaded_model & model, const program_options & options, std::vector<llama_token> prompt) {
    const int32_t n_ctx = static_cast<int32_t>(prompt.size()) + options.n_predict + 1;
    const std::unique_ptr<engine> running = options.full ? engine::with_full_cache(model, engine_options_from(options, n_ctx))
                                                         : engine_with_sekv(model, options);
    transcript held(*running);
    resumption resumed;
    if (!options.load_session.empty()) {
        resumed.load_seconds = load_timed(held, options.load_session);
        resumed.n_session = static_cast<int32_t>(held.tokens().size());
        if (prompt.empty()) {
            prompt = held.tokens();
        }
    }
    if (prompt.empty()) {
        throw std::runtime_error("the prompt has no tokens");
    }
    const transcript::reading reading = held.read(prompt, "prompt:");
    speed speed;
    speed.n_prompt = reading.n_read;
    speed.prompt_seconds = reading.seconds;
    resumed.n_kept = reading.n_kept;
    if (!options.save_session.empty()) {
        save_timed(held, options.save_session);
    }
    token_chooser chooser(options, model.n_vocab());
    const std::string text = generate_text(model, held, chooser, options.n_predict, !options.json, speed);

    sekv_statistics statistics = {};
    if (running->sekv() != nullptr) {
        statistics = running->sekv()->statistics();
    }
    const resumption * from_session = options.load_session.empty() ? nullptr : &resumed;
    if (options.json) {
        std::puts(run_json(text, speed, options.full ? nullptr : &statistics, from_session).c_str());
        return;
    }
    std::fputs("\n", stdout);
    std::fflush(stdout);
    if (from_session != nullptr) {
        print_resumption(resumed, speed);
    }
    print_run(speed);
    if (!options.full) {
        print_memory(statistics);
    }
}

void converse(const loaded_model & model, const program_options & options) {
    const std::unique_ptr<engine> running = engine_with_sekv(model, options);
    transcript held(*running);
    if (!options.load_session.empty()) {
        const double seconds = load_timed(held, options.load_session);
        print_loaded(options.load_session, held.tokens().size(), seconds);
    }
    chat(model, options, held, prompt_text(options));
    if (!options.save_session.empty()) {
        save_timed(held, options.save_session);
    }
    print_memory(running->sekv()->statistics());
}

// The prompt's tokens; none where no prompt was given.
std::vector<llama_token> prompt_tokens(const loaded_model & model, const program_options & options) {
    if (options.prompt.empty() && options.prompt_file.empty()) {
        return {};
    }
    const std::string text = prompt_text(options);
    std::vector<llama_token> prompt = model.tokenize(options.raw ? text : model.chat_prompt(text), !options.raw);
    if (options.n_prompt_max > 0 && static_cast<int32_t>(prompt.size()) > options.n_prompt_max) {
        prompt.resize(options.n_prompt_max);
    }
    return prompt;
}

void compare(const loaded_model & model, const program_options & options, std::vector<llama_token> prompt) {
    if (prompt.empty()) {
        throw std::runtime_error("the prompt has no tokens");
    }
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
        if (options.chat) {
            converse(model, options);
        } else if (options.compare) {
            compare(model, options, prompt_tokens(model, options));
        } else {
            generate(model, options, prompt_tokens(model, options));
        }
    } catch (const std::exception & problem) {
        std::fprintf(stderr, "sekv-llama: error: %s\n", problem.what());
        return 1;
    }
    return 0;
}
