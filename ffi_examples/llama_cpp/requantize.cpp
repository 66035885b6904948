// Writes an F32 copy of a GGUF model: requantize IN OUT
//
// On quantised weights llama.cpp quantises activations too, which turns a difference of 1e-6 into
// 0.2 in a logit; comparing caches numerically needs F32 weights.
#include "llama.h"

#include <cstdint>
#include <cstdio>

static void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

int main(int argument_count, char ** arguments) {
    if (argument_count != 3) {
        std::fprintf(stderr, "usage: requantize IN.gguf OUT.gguf\n");
        return 2;
    }
    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    params.nthread = 0;
    const uint32_t failed = llama_model_quantize(arguments[1], arguments[2], &params);
    llama_backend_free();
    return failed == 0 ? 0 : 1;
}
