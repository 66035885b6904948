// Reading and comparing next-token distributions given as logits.
#pragma once

#include <cstdint>

namespace sekv_llama {

// log sum exp of n logits; good to about 1e-6.
double log_sum_exp(const float * logits, int32_t n);

int32_t argmax(const float * logits, int32_t n);

// -log p(token), in nats.
double surprisal(const float * logits, int32_t n, int32_t token);

// KL(reference || other) in nats, never below 0.
double kl_divergence(const float * reference, const float * other, int32_t n);

}  // namespace sekv_llama
