// Which models libsekv can serve, decided from the model's metadata before the first token.
// What only the graph shows (an ALiBi slope, a softcap, sinks) is refused by graph_tap as well.
#include "sekv_llama.h"

#include "gguf.h"

#include <cstdlib>
#include <cstring>

namespace sekv_llama {

namespace {

std::string metadata(const llama_model * model, const std::string & key) {
    char value[256];
    const int32_t length = llama_model_meta_val_str(model, key.c_str(), value, sizeof value);
    return length < 0 ? std::string() : std::string(value);
}

bool is_positive(const std::string & value) { return !value.empty() && std::atof(value.c_str()) > 0; }

// Empty, or the name of the first tensor whose name contains `part`.
std::string tensor_named(const std::string & gguf_path, const char * part) {
    gguf_init_params params = {/*no_alloc*/ true, /*ctx*/ nullptr};
    gguf_context * file = gguf_init_from_file(gguf_path.c_str(), params);
    if (file == nullptr) {
        return "";
    }
    std::string found;
    for (int64_t i = 0; i < gguf_get_n_tensors(file) && found.empty(); i++) {
        const char * name = gguf_get_tensor_name(file, i);
        if (std::strstr(name, part) != nullptr) {
            found = name;
        }
    }
    gguf_free(file);
    return found;
}

}  // namespace

float metadata_attention_scale(const llama_model * model) {
    return static_cast<float>(std::atof(metadata(model, metadata(model, "general.architecture") + ".attention.scale").c_str()));
}

std::string unsupported_model(const llama_model * model, const std::string & gguf_path) {
    const std::string architecture = metadata(model, "general.architecture");
    const std::string attention = architecture + ".attention.";
    const std::string model_name = "the model (architecture " + architecture + ") ";

    if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
        return model_name + "has an encoder; a decoder-only model was expected";
    }
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return model_name + "keeps recurrent state instead of K and V; a transformer was expected";
    }
    if (llama_model_is_diffusion(model)) {
        return model_name + "is a diffusion model; causal attention was expected";
    }
    if (llama_model_n_swa(model) > 0 || is_positive(metadata(model, attention + "sliding_window"))) {
        return model_name + "has sliding-window attention, which is not supported";
    }
    const llama_rope_type rope = llama_model_rope_type(model);
    if (rope != LLAMA_ROPE_TYPE_NONE && rope != LLAMA_ROPE_TYPE_NORM && rope != LLAMA_ROPE_TYPE_NEOX) {
        return model_name + "has several rotary positions a token (M-RoPE), which is not supported";
    }
    if (is_positive(metadata(model, attention + "max_alibi_bias"))) {
        return model_name + "has ALiBi, which is not supported";
    }
    if (is_positive(metadata(model, architecture + ".attn_logit_softcapping"))) {
        return model_name + "has an attention softcap, which is not supported";
    }
    if (!metadata(model, attention + "kv_lora_rank").empty() || !metadata(model, attention + "key_length_mla").empty()) {
        return model_name + "has multi-head latent attention (MLA), which is not supported";
    }
    // LongRoPE picks its factors from n_ctx, which is a few hundred cells here. The scaling type is
    // missing from some files, the factors never are.
    if (metadata(model, architecture + ".rope.scaling.type") == "longrope" ||
        !tensor_named(gguf_path, "rope_factors_long").empty()) {
        return model_name + "has LongRoPE, which is not supported";
    }
    if (!tensor_named(gguf_path, "attn_sinks").empty()) {
        return model_name + "has attention sinks, which is not supported";
    }
    return "";
}

}  // namespace sekv_llama
