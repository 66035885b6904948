#include "distribution.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sekv_llama {

namespace {

// Sums stay exact enough when only a chunk is added up in f32.
constexpr int32_t chunk_size = 1024;

// e^x for x <= 0 by the Cephes polynomial, to about 1e-7 relative. std::exp is a call for each
// element; this one the compiler turns into vector code, and a vocabulary has 49,152 elements.
inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

float largest(const float * logits, int32_t n) {
    float most = logits[0];
    for (int32_t i = 1; i < n; i++) {
        most = logits[i] > most ? logits[i] : most;
    }
    return most;
}

}  // namespace

double log_sum_exp(const float * logits, int32_t n) {
    const float most = largest(logits, n);
    double total = 0.0;
    for (int32_t start = 0; start < n; start += chunk_size) {
        const int32_t end = std::min(n, start + chunk_size);
        float sum = 0.0f;
        for (int32_t i = start; i < end; i++) {
            sum += fast_exp(logits[i] - most);
        }
        total += sum;
    }
    return most + std::log(total);
}

int32_t argmax(const float * logits, int32_t n) {
    return static_cast<int32_t>(std::max_element(logits, logits + n) - logits);
}

double surprisal(const float * logits, int32_t n, int32_t token) { return log_sum_exp(logits, n) - logits[token]; }

double kl_divergence(const float * reference, const float * other, int32_t n) {
    const double norm = log_sum_exp(reference, n);
    const double shift = log_sum_exp(other, n) - norm;
    const float norm_f32 = static_cast<float>(norm);
    const float shift_f32 = static_cast<float>(shift);
    // sum p (log p - log q), with log p - log q = a - b + shift; small differences are formed
    // before they are weighted, so that a KL of 1e-6 survives f32.
    double total = 0.0;
    for (int32_t start = 0; start < n; start += chunk_size) {
        const int32_t end = std::min(n, start + chunk_size);
        float sum = 0.0f;
        for (int32_t i = start; i < end; i++) {
            sum += fast_exp(std::min(0.0f, reference[i] - norm_f32)) * (reference[i] - other[i] + shift_f32);
        }
        total += sum;
    }
    return std::max(0.0, total);
}

}  // namespace sekv_llama
