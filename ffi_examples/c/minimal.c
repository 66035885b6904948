/* The smallest complete host of libsekv: synthetic keys and values, a prompt, some decoding.
 *
 * It plays the model's part with random numbers, keeps all keys and values besides in two plain
 * arrays, attends to those densely, and prints what the cache takes and how far its answers are
 * from the dense ones.
 *
 *     minimal [prompt tokens] [decoded tokens]
 */
#include "sekv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, GROUP = HEADS / KV_HEADS, DIM = 64, CHUNK = 512, MAX_TOKENS = 1 << 16 };

static float *keys[LAYERS], *values[LAYERS]; /* [token][KV head][DIM], what a full cache would hold */

static void check(sekv_status status) {
    if (status != SEKV_OK) {
        fprintf(stderr, "%s: %s\n", sekv_status_name(status), sekv_last_error());
        exit(1);
    }
}

static float *floats(size_t n) {
    float *memory = malloc(n * sizeof *memory);
    if (memory == NULL) {
        fprintf(stderr, "no memory for %zu floats\n", n);
        exit(1);
    }
    return memory;
}

/* -1 to 1. */
static float noise(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (float)(1 << 23) - 1.0f;
}

/* Packed rows [token][head][DIM]; a view takes any strides. */
static sekv_view view_of(float *rows, int n_heads, int n_tokens) {
    sekv_view view;
    view.data = rows;
    view.dtype = SEKV_F32;
    view.memory = SEKV_MEMORY_HOST;
    view.n_elem = DIM;
    view.n_head = n_heads;
    view.n_tok = n_tokens;
    view.stride_head = DIM * sizeof(float);
    view.stride_tok = (size_t)n_heads * DIM * sizeof(float);
    return view;
}

/* The model's part: new keys and values, and queries that each look for an earlier token. As in
 * real models, some dimensions of the keys vary much more than others. */
static void project(int layer, int first, int n, float *queries) {
    for (size_t i = (size_t)first * KV_HEADS * DIM; i < (size_t)(first + n) * KV_HEADS * DIM; i++) {
        keys[layer][i] = 5.0f * powf(0.97f, (float)(i % DIM)) * noise();
        values[layer][i] = noise();
    }
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < HEADS; h++) {
            const int wanted = (int)((noise() + 1.0f) / 2.0f * (float)(first + t));
            const float *key = keys[layer] + ((size_t)wanted * KV_HEADS + h / GROUP) * DIM;
            for (int e = 0; e < DIM; e++) {
                queries[((size_t)t * HEADS + h) * DIM + e] = key[e] + 0.3f * noise();
            }
        }
    }
}

/* Largest difference of the last token's output to attention over the plain arrays. */
static double difference(int layer, int n_tokens, const float *queries, const float *outputs) {
    double *weights = malloc((size_t)n_tokens * sizeof *weights), largest = 0;
    if (weights == NULL) {
        exit(1);
    }
    for (int h = 0; h < HEADS; h++) {
        double out[DIM] = {0}, top = -INFINITY, sum = 0;
        for (int t = 0; t < n_tokens; t++) {
            const float *key = keys[layer] + ((size_t)t * KV_HEADS + h / GROUP) * DIM;
            weights[t] = 0;
            for (int e = 0; e < DIM; e++) {
                weights[t] += (double)queries[h * DIM + e] * key[e] / sqrt(DIM);
            }
            top = fmax(top, weights[t]);
        }
        for (int t = 0; t < n_tokens; t++) {
            const float *value = values[layer] + ((size_t)t * KV_HEADS + h / GROUP) * DIM;
            const double weight = exp(weights[t] - top);
            sum += weight;
            for (int e = 0; e < DIM; e++) {
                out[e] += weight * value[e];
            }
        }
        for (int e = 0; e < DIM; e++) {
            largest = fmax(largest, fabs(out[e] / sum - outputs[h * DIM + e]));
        }
    }
    free(weights);
    return largest;
}

/* One pass: n tokens from position `first` on, of sequence 0. */
static double pass(sekv_context *context, int first, int n) {
    int32_t positions[CHUNK];
    for (int t = 0; t < n; t++) {
        positions[t] = first + t;
    }
    sekv_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.struct_size = sizeof batch;
    batch.n_tok = n;
    batch.pos = positions;
    check(sekv_begin(context, &batch));

    double largest = 0;
    float *queries = floats((size_t)n * HEADS * DIM), *outputs = floats((size_t)n * HEADS * DIM);
    for (int layer = 0; layer < LAYERS; layer++) {
        project(layer, first, n, queries);
        sekv_view k = view_of(keys[layer] + (size_t)first * KV_HEADS * DIM, KV_HEADS, n);
        sekv_view v = view_of(values[layer] + (size_t)first * KV_HEADS * DIM, KV_HEADS, n);
        sekv_view q = view_of(queries, HEADS, n), out = view_of(outputs, HEADS, n);
        check(sekv_prefill_ingest(context, layer, &k, &v));
        check(sekv_attend(context, layer, &q, NULL, &out));
        const size_t last = (size_t)(n - 1) * HEADS * DIM;
        largest = fmax(largest, difference(layer, first + n, queries + last, outputs + last));
    }
    check(sekv_commit(context, NULL));
    free(queries);
    free(outputs);
    return largest;
}

int main(int argc, char **argv) {
    const int n_prompt = argc > 1 ? atoi(argv[1]) : 2048, n_decode = argc > 2 ? atoi(argv[2]) : 64;
    if (n_prompt < 1 || n_decode < 0 || n_prompt > MAX_TOKENS || n_decode > MAX_TOKENS) {
        fprintf(stderr, "usage: minimal [prompt tokens] [decoded tokens], each up to %d\n", MAX_TOKENS);
        return 2;
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        keys[layer] = floats((size_t)(n_prompt + n_decode) * KV_HEADS * DIM);
        values[layer] = floats((size_t)(n_prompt + n_decode) * KV_HEADS * DIM);
    }

    sekv_model_params shape; /* with a GGUF file: sekv_model_from_gguf */
    check(sekv_model_params_init(&shape, sizeof shape));
    shape.n_layer = LAYERS;
    shape.n_head = HEADS;
    shape.n_head_kv = KV_HEADS;
    shape.head_dim_k = DIM;
    sekv_model *model;
    check(sekv_model_from_params(&shape, &model));

    sekv_params params;
    check(sekv_params_init(&params, sizeof params));
    params.n_batch_max = CHUNK;
    sekv_context *context;
    check(sekv_init(model, &params, &context));
    sekv_model_free(model); /* the context keeps what it needs */

    double prompt = 0, decoding = 0;
    for (int first = 0; first < n_prompt; first += CHUNK) {
        const int left = n_prompt - first;
        prompt = fmax(prompt, pass(context, first, left < CHUNK ? left : CHUNK));
    }
    for (int t = 0; t < n_decode; t++) {
        decoding = fmax(decoding, pass(context, n_prompt + t, 1));
    }

    sekv_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    check(sekv_stats(context, &statistics));
    const double f16 = (double)statistics.memory.full_f16_bytes;
    printf("%d + %d tokens: a full f16 cache takes %.0f bytes\n", n_prompt, n_decode, f16);
    printf("fast tier %.0f bytes (%.1f %% of that), slow tier %.0f bytes\n",
           (double)statistics.memory.fast_bytes, 100.0 * (double)statistics.memory.fast_bytes / f16,
           (double)statistics.memory.slow_bytes);
    printf("tokens fetched a step and KV head: %.1f of %.0f\n", statistics.fetched_mean,
           (double)statistics.n_tokens);
    printf("largest difference to dense attention, values being up to 1: prompt %.4f, decoding %.4f\n", prompt,
           decoding);

    sekv_context_free(context);
    for (int layer = 0; layer < LAYERS; layer++) {
        free(keys[layer]);
        free(values[layer]);
    }
    return prompt < 0.05 && decoding < 0.05 ? 0 : 1;
}
