// Decodes one token for many methods at once.
//
// Every method is a row of one llama.cpp batch: the same token at the same position, as a sequence
// of its own. The hook gives row m of K, V and Q to method m's context and writes what that one
// answers into row m of the output. The weights are read once a step instead of once a method.
#pragma once

#include "methods.h"
#include "quiet_threads.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sekv_eval {

class fan_out : public sekv_llama::graph_tap {
public:
    // `methods` must stay where they are while this object lives.
    fan_out(const sekv_llama::loaded_model & model, std::vector<running_method> & methods, int32_t n_threads);
    ~fan_out() override;
    fan_out(const fan_out &) = delete;
    fan_out & operator=(const fan_out &) = delete;

    // Throws std::runtime_error when any method fails.
    void step(llama_token token, int32_t pos);
    const float * logits(int32_t method) const { return llama_get_logits_ith(context_, method); }

    // Takes the tail from `first_pos` on out of every method again.
    void truncate(int32_t first_pos);

protected:
    void on_attention(const sekv_llama::attention_call & call) override;
    void on_unsupported(int32_t layer, const std::string & reason) override;

private:
    void each_method(const char * what, const std::function<sekv_status(int32_t, sekv_context *)> & turn);

    std::vector<running_method> & methods_;
    int32_t n_threads_;
    std::vector<std::vector<float>> keys_;
    std::string problem_;
    sekv_llama::quiet_threads threads_;
    llama_context * context_ = nullptr;
    llama_batch batch_ = {};
};

}  // namespace sekv_eval
