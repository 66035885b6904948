#include "bounds.h"

#include "parallel.h"
#include "recording.h"
#include "sekv.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>

namespace sekv_eval {

namespace {

constexpr int32_t n_queries = 16, block_tokens = 64;

struct block_counts {
    int64_t blocks = 0, below = 0, by_channels = 0, by_radius = 0;
    void add(const block_counts & other) {
        blocks += other.blocks;
        below += other.below;
        by_channels += other.by_channels;
        by_radius += other.by_radius;
    }
};

float dot(const float * a, const float * b, int32_t n) {
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// What bounds a block's keys.
struct block_bounds {
    std::vector<float> low, high, mean;
    float radius = 0.0f;                       // largest distance from the mean
};

block_bounds bound_block(const std::vector<const float *> & keys, int32_t dim) {
    block_bounds bounds{std::vector<float>(dim, INFINITY), std::vector<float>(dim, -INFINITY), std::vector<float>(dim, 0.0f)};
    for (const float * key : keys) {
        for (int32_t c = 0; c < dim; c++) {
            bounds.low[c] = std::min(bounds.low[c], key[c]);
            bounds.high[c] = std::max(bounds.high[c], key[c]);
            bounds.mean[c] += key[c] / static_cast<float>(keys.size());
        }
    }
    for (const float * key : keys) {
        float square = 0.0f;
        for (int32_t c = 0; c < dim; c++) {
            square += (key[c] - bounds.mean[c]) * (key[c] - bounds.mean[c]);
        }
        bounds.radius = std::max(bounds.radius, std::sqrt(square));
    }
    return bounds;
}

// One KV head's blocks against the group of heads that share it, for the prompt's last queries.
block_counts count_blocks(const recorded_layer & layer, int32_t head_kv, int32_t n_tokens, const sekv_params & params) {
    const int32_t dim = layer.head_dim_k, n_group = layer.n_head / layer.n_head_kv;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const auto key = [&](int32_t t) { return layer.k.data() + (static_cast<size_t>(t) * layer.n_head_kv + head_kv) * dim; };
    const float epsilon = params.share_threshold * std::sqrt(static_cast<float>(params.share_reference) / n_tokens);
    const int32_t first = params.n_sinks;
    const int32_t n_blocks = (n_tokens - params.window - first) / block_tokens;
    std::vector<block_bounds> bounds;
    for (int32_t b = 0; b < n_blocks; b++) {
        std::vector<const float *> keys;
        for (int32_t t = 0; t < block_tokens; t++) {
            keys.push_back(key(first + b * block_tokens + t));
        }
        bounds.push_back(bound_block(keys, dim));
    }
    block_counts counts;
    for (int32_t query = n_tokens - n_queries; query < n_tokens; query++) {
        std::vector<float> largest(n_blocks, 0.0f), channels(n_blocks, 0.0f), radius(n_blocks, 0.0f);
        for (int32_t g = 0; g < n_group; g++) {
            const float * q = layer.q.data() + (static_cast<size_t>(query) * layer.n_head + head_kv * n_group + g) * dim;
            std::vector<float> scores(query + 1);
            for (int32_t t = 0; t <= query; t++) {
                scores[t] = scale * dot(q, key(t), dim);
            }
            const float top = *std::max_element(scores.begin(), scores.end());
            double sum = 0.0;
            for (const float score : scores) {
                sum += std::exp(static_cast<double>(score - top));
            }
            const float log_sum = top + static_cast<float>(std::log(sum));
            // A share is a mean over the heads, none more than 1.
            const auto share = [&](float score) { return std::exp(std::min(0.0f, score - log_sum)) / n_group; };
            const float length = std::sqrt(dot(q, q, dim));
            for (int32_t b = 0; b < n_blocks; b++) {
                const auto begin = scores.begin() + first + b * block_tokens;
                largest[b] += share(*std::max_element(begin, begin + block_tokens));
                float bound = 0.0f;
                for (int32_t c = 0; c < dim; c++) {
                    bound += std::max(q[c] * bounds[b].low[c], q[c] * bounds[b].high[c]);
                }
                channels[b] += share(scale * bound);
                radius[b] += share(scale * (dot(q, bounds[b].mean.data(), dim) + length * bounds[b].radius));
            }
        }
        for (int32_t b = 0; b < n_blocks; b++) {
            counts.blocks++;
            counts.below += largest[b] < epsilon;
            counts.by_channels += channels[b] < epsilon;
            counts.by_radius += radius[b] < epsilon;
        }
    }
    return counts;
}

}  // namespace

void print_bounds(const sekv_llama::loaded_model & model, const std::vector<document> & documents, int32_t n_threads) {
    std::printf("| document | tokens | blocks with no token above epsilon | told by channels' ranges | told by the radius |\n");
    std::printf("| --- | --: | --: | --: | --: |\n");
    const sekv_params params = sekv_llama::default_params();
    for (const document & document : documents) {
        const recording recorded = record(model, document.tokens, document.n_prompt, 1, n_threads);
        block_counts all;
        std::mutex lock;
        parallel_for(static_cast<int32_t>(recorded.layers.size()), n_threads, [&](int32_t i) {
            for (int32_t head = 0; head < recorded.layers[i].n_head_kv; head++) {
                const block_counts counts = count_blocks(recorded.layers[i], head, document.n_prompt, params);
                const std::lock_guard<std::mutex> guard(lock);
                all.add(counts);
            }
        });
        const auto percent = [&](int64_t n) { return 100.0 * static_cast<double>(n) / static_cast<double>(all.blocks); };
        std::printf("| %s | %d | %.1f %% | %.2f %% | %.2f %% |\n", document.name.c_str(), document.n_prompt, percent(all.below),
                    percent(all.by_channels), percent(all.by_radius));
        std::fflush(stdout);
    }
}

}  // namespace sekv_eval
