// Runs through the hook as a host would, with only libsekv behind llama.cpp.
#pragma once

#include "documents.h"

#include "sekv.h"

#include <string>

namespace sekv_eval {

// True: the bound holds. All print their numbers.

// One document of 4,096 + 128 tokens, streamed in chunks of 512: KL <= 0.006.
bool run_quick(const sekv_llama::loaded_model & model, const document & document, int32_t n_threads);

// Streaming prefill in chunks of 512 against a full prefill: KL <= 0.003.
bool run_stream(const sekv_llama::loaded_model & model, const document & document, int32_t n_threads);

// Every codec raw f32, everything resident and then everything sealed: a 2,048-token prompt and 64
// generated tokens must be llama.cpp's own, to 5e-4 in a logit.
bool run_exact(const sekv_llama::loaded_model & model, const std::vector<llama_token> & prompt, int32_t n_threads);

}  // namespace sekv_eval
