// The methods that are measured: each is libsekv with certain params, named as in eval.json.
#pragma once

#include "recording.h"
#include "sekv.h"

#include <memory>
#include <string>
#include <vector>

namespace sekv_eval {

struct method {
    std::string name;
    sekv_params params = {};
    bool key_bias = false;   // a constant vector is added to every key
};

// All of them. `full` isn't among them: it is the reference itself.
std::vector<method> all_methods();

// Those named, in this order, among them probes that the table leaves out (see methods.cpp); `names` is separated by commas, `none` is nobody: the full cache
// alone, to try needles out. Throws on an unknown name.
std::vector<method> named_methods(const std::string & names);

// 300 in a few channels of every head: keys of real models carry such biases.
std::vector<float> constant_key_bias(int32_t n_head_kv, int32_t head_dim_k);

// Rounds keys ([n_rows][bias.size()]) so that adding the bias is exact in f32: both runs then see
// the same keys, and differ by nothing but the constant.
void round_for_bias(float * keys, size_t n_rows, const std::vector<float> & bias);

struct free_model {
    void operator()(sekv_model * model) const { sekv_model_free(model); }
};
struct free_context {
    void operator()(sekv_context * context) const { sekv_context_free(context); }
};
using model_pointer = std::unique_ptr<sekv_model, free_model>;
using context_pointer = std::unique_ptr<sekv_context, free_context>;

model_pointer open_model(const std::string & gguf_path);

// One method at work on one document.
struct running_method {
    sekv_eval::method method;
    context_pointer context;
    std::vector<float> key_bias;
    sekv_statistics statistics() const;
};

// A context for each method, each with the recorded prompt in it. Methods are worked on by
// n_threads threads, one method a thread, so that none of them waits for another.
std::vector<running_method> start_methods(const sekv_model * model, const std::vector<method> & methods,
                                          const recording & recorded, int32_t n_threads);

}  // namespace sekv_eval
