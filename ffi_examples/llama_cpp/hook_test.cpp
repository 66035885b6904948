// What cache's sequence operations and saved states must do for a host with several sequences.
//
//     hook-test MODEL.gguf TEXT
//
// with F32 weights: quantised ones turn the rounding of a sum into tenths of a logit. The last line is
// `N passed, N failed`.
#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace sekv_llama;

namespace {

constexpr int32_t n_chunk = 256;
constexpr int32_t n_text = 640;
// Much earlier than by default, so that a short text is compressed already.
constexpr int32_t n_layout = 256;
constexpr int32_t n_sequences = 3;
const int32_t n_threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
// Logits of the same tokens, by sums in another order. Those of other tokens are some units apart.
constexpr float same_logit = 0.01f;
// The same where a sequence has been shifted. Its queries are turned back and rounded anew, and a
// token whose share lies at a threshold may be read at another resolution: 0.016 at the most for a
// dozen shifts. One position too many or too few makes 1.4.
constexpr float shifted_logit = 0.1f;

int n_passed = 0;
int n_failed = 0;

void check(bool holds, const std::string & what) {
    (holds ? n_passed : n_failed)++;
    std::printf("%s: %s\n", holds ? "ok" : "FAILED", what.c_str());
}

void require(bool done, const std::string & why) {
    if (!done) {
        throw std::runtime_error(why);
    }
}

std::string read_text(const char * path) {
    std::ifstream file(path, std::ios::binary);
    require(static_cast<bool>(file), std::string("the file ") + path + " could not be read");
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

// A host of its own, with several sequences.
class host {
public:
    explicit host(const loaded_model & model) : n_vocab_(model.n_vocab()) {
        sekv_params params = default_params();
        params.n_seq_max = n_sequences;
        params.n_batch_max = n_chunk;
        params.n_threads = n_threads;
        params.layout_tokens = n_layout;
        std::string why;
        cache_ = cache::create(model.model(), model.path(), params, why);
        require(cache_ != nullptr, why);
        llama_context_params context_params = llama_context_default_params();
        context_params.n_ubatch = n_chunk;
        context_params.n_seq_max = n_sequences;
        context_params.n_threads = n_threads;
        context_params.n_threads_batch = n_threads;
        require(cache_->configure(context_params) == SEKV_OK, cache_->error());
        context_ = llama_init_from_model(model.model(), context_params);
        require(context_ != nullptr, "llama.cpp could not make a context");
        require(threads_.attach(context_, n_threads), "llama.cpp could not make a threadpool");
        batch_ = llama_batch_init(n_chunk, 0, n_sequences);
    }
    ~host() {
        llama_batch_free(batch_);
        llama_free(context_);
    }
    host(const host &) = delete;
    host & operator=(const host &) = delete;

    // Decodes tokens, each of all those sequences, from first_pos on. The logits after the last.
    std::vector<float> decode(const std::vector<llama_token> & tokens, int32_t first_pos, const std::vector<int32_t> & sequences) {
        const int32_t n = static_cast<int32_t>(tokens.size());
        for (int32_t first = 0; first < n; first += n_chunk) {
            batch_.n_tokens = std::min(n_chunk, n - first);
            for (int32_t i = 0; i < batch_.n_tokens; i++) {
                batch_.token[i] = tokens[first + i];
                batch_.pos[i] = first_pos + first + i;
                batch_.n_seq_id[i] = static_cast<int32_t>(sequences.size());
                std::copy(sequences.begin(), sequences.end(), batch_.seq_id[i]);
                batch_.logits[i] = first + i == n - 1;
            }
            done(cache_->decode(context_, batch_));
        }
        const float * logits = llama_get_logits_ith(context_, -1);
        return std::vector<float>(logits, logits + n_vocab_);
    }

    // One token of sequence 0 whose position the host leaves to llama_decode's rule.
    std::vector<float> decode_next(llama_token token) {
        done(cache_->decode(context_, llama_batch_get_one(&token, 1)));
        const float * logits = llama_get_logits_ith(context_, -1);
        return std::vector<float>(logits, logits + n_vocab_);
    }

    void done(sekv_status status) const { require(status == SEKV_OK, cache_->error()); }
    sekv_llama::cache & cache() { return *cache_; }
    llama_context * context() { return context_; }

private:
    int32_t n_vocab_;
    std::unique_ptr<sekv_llama::cache> cache_;
    quiet_threads threads_;
    llama_context * context_ = nullptr;
    llama_batch batch_ = {};
};

float difference(const std::vector<float> & a, const std::vector<float> & b) {
    float most = 0.0f;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::max(most, std::fabs(a[i] - b[i]));
    }
    return most;
}

void check_same(const std::vector<float> & a, const std::vector<float> & b, const std::string & what, float bound = same_logit) {
    char text[64];
    std::snprintf(text, sizeof text, " (largest logit change %.2g)", difference(a, b));
    check(difference(a, b) <= bound, what + text);
}

std::vector<char> saved(host & host, int32_t seq) {
    std::vector<char> bytes;
    host.done(host.cache().save_state(seq, [&](const void * data, size_t size) {
        bytes.insert(bytes.end(), static_cast<const char *>(data), static_cast<const char *>(data) + size);
        return true;
    }));
    return bytes;
}

sekv_status load(host & host, int32_t seq, const std::vector<char> & bytes) {
    size_t at = 0;
    return host.cache().load_state(host.context(), seq, [&](void * data, size_t size) {
        if (size > bytes.size() - at) {
            return false;
        }
        std::memcpy(data, bytes.data() + at, size);
        at += size;
        return true;
    }, nullptr);
}

void run(const char * model_path, const char * text_path) {
    const loaded_model model(model_path);
    std::vector<llama_token> text = model.tokenize(read_text(text_path).substr(0, 8 * n_text), false);
    require(static_cast<int32_t>(text.size()) > n_text + 8, "the text is too short");
    const llama_token next = text[n_text];
    text.resize(n_text);
    host host(model);
    cache & cache = host.cache();
    llama_context * context = host.context();

    host.decode(text, 0, {0});
    host.done(cache.seq_cp(context, 0, 1, -1, -1));
    host.done(cache.seq_cp(context, 0, 2, -1, 500));
    check(cache.last_pos(1) == n_text - 1 && cache.last_pos(2) == 499, "a copy has the positions that were asked for");
    const std::vector<char> state = saved(host, 0);

    const std::vector<float> both = host.decode({next}, n_text, {0, 1});
    check(cache.last_pos(0) == n_text && cache.last_pos(1) == n_text, "a token is decoded for a sequence and its copy at once");

    host.done(cache.seq_rm(context, 1, n_text, -1));
    const std::vector<float> again = host.decode_next(text[0]);
    check(cache.last_pos(0) == n_text + 1, "a position that the host leaves out follows the last");
    host.done(load(host, 0, state));
    check(cache.last_pos(0) == n_text - 1, "a state takes a sequence back");
    check_same(both, host.decode_next(next), "a sequence goes on from a state as it went on before it");
    check_same(again, host.decode_next(text[0]), "and so does the next token");
    check_same(both, host.decode({next}, n_text, {1}), "a copy is not changed by what its source does");

    std::vector<char> damaged = state;
    damaged[damaged.size() / 2] ^= 1;
    const std::vector<char> cut_short(state.begin(), state.end() - 64);
    for (const std::vector<char> & bytes : {damaged, cut_short}) {
        const bool refused = load(host, 1, bytes) != SEKV_OK;
        check(refused && cache.last_pos(1) == n_text, "a damaged state changes nothing: " + cache.error());
    }

    for (const int32_t shift : {1, 13, 100}) {
        host.done(load(host, 1, state));
        host.done(cache.seq_add(context, 1, -1, -1, shift));
        check(cache.last_pos(1) == n_text - 1 + shift, "a shift moves positions");
        check_same(both, host.decode({next}, n_text + shift, {1}), "a sequence that is shifted as a whole says the same", shifted_logit);
    }

    // What a host does when its context is full: drop some old tokens, close the gap.
    host.done(load(host, 1, state));
    host.done(cache.seq_rm(context, 1, 8, 264));
    host.done(cache.seq_add(context, 1, 264, -1, -256));
    const std::vector<float> shifted = host.decode({next}, n_text - 256, {1});
    check(cache.last_pos(1) == n_text - 256, "a sequence goes on behind a gap that was closed");
    check(std::all_of(shifted.begin(), shifted.end(), [](float logit) { return std::isfinite(logit); }), "with finite logits");

    host.done(cache.seq_keep(context, 1));
    check(cache.last_pos(0) == -1 && cache.last_pos(2) == -1 && cache.last_pos(1) == n_text - 256, "the others are removed, and only they");
    host.decode({text[0]}, 0, {0});
    check(cache.last_pos(0) == 0, "a sequence that was removed begins anew");
}

}  // namespace

int main(int argument_count, char ** arguments) {
    if (argument_count != 3) {
        std::fputs("hook-test: error: two arguments were expected, MODEL.gguf and TEXT\n", stderr);
        return 1;
    }
    try {
        run(arguments[1], arguments[2]);
    } catch (const std::exception & problem) {
        check(false, problem.what());
    }
    std::printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}
