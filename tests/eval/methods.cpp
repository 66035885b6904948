#include "methods.h"

#include "parallel.h"
#include "sekv_llama.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <stdexcept>

namespace sekv_eval {

namespace {

constexpr char bias_suffix[] = "+bias";
// A probe: a share threshold that holds at any length, as in "ladder@1e-4".
constexpr char fixed_threshold[] = "ladder@";

std::vector<method> make_methods(bool probes) {
    std::vector<method> methods;
    const auto add = [&](const std::string & name, const std::function<void(sekv_params &)> & change) {
        method made;
        made.name = name;
        made.params = sekv_llama::default_params();
        // Each method is one thread's work; see start_methods.
        made.params.n_threads = 1;
        made.params.n_seq_max = 1;
        change(made.params);
        methods.push_back(made);
    };
    // For heads of 64, AUTO is the standard sketch: `ladder` and `ladder-keys` are that profile's rows.
    const auto ladder = [&](const std::string & name, int32_t sketch, int32_t value_sketch) {
        add(name, [=](sekv_params & params) {
            params.sketch = sketch;
            params.value_sketch = value_sketch;
        });
    };
    if (probes) {
        // One part at a time without its rounding: where does the distance come from?
        add("ladder-eps-0", [](sekv_params & params) { params.share_threshold = 0.0f; });
        add("ladder-resident-f16", [](sekv_params & params) { params.codec_resident = SEKV_CODEC_F16; });
        add("ladder-basis-f16", [](sekv_params & params) { params.codec_basis = SEKV_CODEC_F16; });
        add("ladder-mean-f16", [](sekv_params & params) { params.codec_mean = SEKV_CODEC_F16; });
        add("ladder-f16", [](sekv_params & params) {
            params.codec_resident = params.codec_basis = params.codec_mean = SEKV_CODEC_F16;
        });
        add("ladder-f16-eps-0", [](sekv_params & params) {
            params.codec_resident = params.codec_basis = params.codec_mean = SEKV_CODEC_F16;
            params.share_threshold = 0.0f;
        });
        add("ladder-no-dense", [](sekv_params & params) { params.dense = SEKV_DENSE_NONE; });
        return methods;
    }
    // Everything resident in int8: the window is larger than any document.
    add("int8", [](sekv_params & params) { params.window = 1 << 20; });
    ladder("ladder", SEKV_SKETCH_AUTO, 1);
    ladder("ladder-keys", SEKV_SKETCH_AUTO, 0);
    ladder("ladder-compact", SEKV_SKETCH_COMPACT, 1);
    ladder("ladder-compact-keys", SEKV_SKETCH_COMPACT, 0);
    ladder("ladder-high", SEKV_SKETCH_HIGH, 1);
    ladder("ladder-high-keys", SEKV_SKETCH_HIGH, 0);
    add("ladder-eps-1e-4", [](sekv_params & params) { params.share_threshold = 1e-4f; });
    add("ladder-eps-3e-4", [](sekv_params & params) { params.share_threshold = 3e-4f; });
    add("paper", [](sekv_params & params) { params.routing = SEKV_ROUTING_PAPER; });

    // Centred keys must not notice a constant: each profile, and the default without value sketches.
    for (const char * name : {"ladder", "ladder-keys", "ladder-compact", "ladder-high"}) {
        const auto plain = std::find_if(methods.begin(), methods.end(), [&](const method & m) { return m.name == name; });
        method biased = *plain;
        biased.name += bias_suffix;
        biased.key_bias = true;
        methods.push_back(biased);
    }
    return methods;
}

}  // namespace

std::vector<method> all_methods() { return make_methods(false); }

std::vector<method> named_methods(const std::string & names) {
    std::vector<method> chosen;
    if (names == "none") {
        return chosen;
    }
    std::vector<method> known = all_methods();
    const std::vector<method> probes = make_methods(true);
    known.insert(known.end(), probes.begin(), probes.end());
    std::istringstream rest(names);
    std::string name;
    while (std::getline(rest, name, ',')) {
        bool found = name.rfind(fixed_threshold, 0) == 0;
        if (found) {
            method fixed = named_methods("ladder").front();
            fixed.name = name;
            fixed.params.share_threshold = std::stof(name.substr(sizeof fixed_threshold - 1));
            fixed.params.share_reference = 0;
            chosen.push_back(fixed);
        }
        for (const method & candidate : known) {
            if (candidate.name == name) {
                chosen.push_back(candidate);
                found = true;
            }
        }
        if (!found) {
            throw std::runtime_error("unknown method " + name);
        }
    }
    return chosen;
}

std::vector<float> constant_key_bias(int32_t n_head_kv, int32_t head_dim_k) {
    std::vector<float> bias(static_cast<size_t>(n_head_kv) * head_dim_k, 0.0f);
    for (int32_t head = 0; head < n_head_kv; head++) {
        for (const int32_t channel : {1, head_dim_k / 3, head_dim_k / 2 + 3}) {
            bias[static_cast<size_t>(head) * head_dim_k + channel] = 300.0f;
        }
    }
    return bias;
}

void round_for_bias(float * keys, size_t n_rows, const std::vector<float> & bias) {
    for (size_t row = 0; row < n_rows; row++) {
        for (size_t j = 0; j < bias.size(); j++) {
            // Both operations round; the compiler must keep them, so no fast-math here.
            const volatile float shifted = keys[row * bias.size() + j] + bias[j];
            keys[row * bias.size() + j] = shifted - bias[j];
        }
    }
}

model_pointer open_model(const std::string & gguf_path) {
    sekv_model * model = nullptr;
    if (sekv_model_from_gguf(gguf_path.c_str(), nullptr, &model) != SEKV_OK) {
        throw std::runtime_error(std::string("libsekv: ") + sekv_last_error());
    }
    return model_pointer(model);
}

sekv_statistics running_method::statistics() const {
    sekv_statistics statistics = {};
    statistics.struct_size = sizeof statistics;
    statistics.memory.struct_size = sizeof statistics.memory;
    if (sekv_stats(context.get(), &statistics) != SEKV_OK) {
        throw std::runtime_error(method.name + ": " + sekv_context_last_error(context.get()));
    }
    return statistics;
}

std::vector<running_method> start_methods(const sekv_model * model, const std::vector<method> & methods,
                                          const recording & recorded, int32_t n_threads) {
    std::vector<running_method> running(methods.size());
    parallel_for(static_cast<int32_t>(methods.size()), n_threads, [&](int32_t i) {
        running_method & one = running[i];
        one.method = methods[i];
        sekv_context * context = nullptr;
        if (sekv_init(model, &one.method.params, &context) != SEKV_OK) {
            throw std::runtime_error(one.method.name + ": " + sekv_last_error());
        }
        one.context.reset(context);
        if (one.method.key_bias) {
            one.key_bias = constant_key_bias(recorded.layers[0].n_head_kv, recorded.layers[0].head_dim_k);
        }
        try {
            ingest(context, recorded, one.key_bias);
        } catch (const std::exception & problem) {
            throw std::runtime_error(one.method.name + ": " + problem.what());
        }
    });
    return running;
}

}  // namespace sekv_eval
