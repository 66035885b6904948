/* What the programs of this folder share: checks, a small model, and rows of repeatable numbers. A
 * program that finds all as it should be prints nothing and returns 0. */
#ifndef CHECK_H
#define CHECK_H

#include "sekv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);        \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

#define OK(call) check_status((call), SEKV_OK, NULL, #call, __LINE__)
/* The call fails with this status, and its message names `what`. */
#define FAILS(status, what, call) check_status((call), (status), (what), #call, __LINE__)

static inline void check_status(sekv_status got, sekv_status wanted, const char *what, const char *call,
                                int line) {
    const char *message = got == SEKV_OK ? "" : sekv_last_error();
    if (got != wanted) {
        fprintf(stderr, "line %d: %s returned %s (%s), expected %s\n", line, call, sekv_status_name(got),
                message, sekv_status_name(wanted));
        exit(1);
    }
    if (got != SEKV_OK && (strlen(message) < 10 || strchr(message, '\n') != NULL)) {
        fprintf(stderr, "line %d: %s: '%s' is no sentence\n", line, call, message);
        exit(1);
    }
    if (what != NULL && strstr(message, what) == NULL) {
        fprintf(stderr, "line %d: %s: '%s' does not name '%s'\n", line, call, message, what);
        exit(1);
    }
}

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, DIM = 32, GROUP = HEADS / KV_HEADS };

static inline sekv_model_params small_shape(void) {
    sekv_model_params shape;
    OK(sekv_model_params_init(&shape, sizeof shape));
    shape.n_layer = LAYERS;
    shape.n_head = HEADS;
    shape.n_head_kv = KV_HEADS;
    shape.head_dim_k = shape.head_dim_v = DIM;
    shape.rope_kind = SEKV_ROPE_NEOX;
    return shape;
}

static inline sekv_model *small_model(void) {
    sekv_model_params shape = small_shape();
    sekv_model *model = NULL;
    OK(sekv_model_from_params(&shape, &model));
    return model;
}

/* Everything raw f32 and, but for a block that isn't full, sealed; every sealed token read. What
 * is left of a difference to dense attention is rounding. */
static inline sekv_params exact_params(void) {
    sekv_params params;
    OK(sekv_params_init(&params, sizeof params));
    params.n_threads = 1;
    params.n_sinks = 0;
    params.window = 0;
    params.block_tokens = 8;
    params.layout_tokens = 8;
    params.sketch = SEKV_SKETCH_RAW;
    params.value_sketch = 0;
    params.codec_resident = params.codec_basis = params.codec_mean = SEKV_CODEC_F32;
    params.dense = SEKV_DENSE_NONE;
    params.share_threshold = 0;
    return params;
}

static inline sekv_context *new_context(const sekv_model *model, const sekv_params *params) {
    sekv_context *context = NULL;
    OK(sekv_init(model, params, &context));
    return context;
}

/* -1 to 1, repeatable (splitmix64). */
static inline float noise(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (float)((z ^ (z >> 31)) >> 40) / (float)(1 << 23) - 1.0f;
}

static inline float *noisy(size_t n, uint64_t *state) {
    float *values = malloc(n * sizeof *values);
    CHECK(values != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = noise(state);
    }
    return values;
}

/* Packed f32 rows: [token][head][element]. */
static inline sekv_view packed(float *data, int32_t n_head, int32_t n_tok) {
    sekv_view view = {data, SEKV_F32, SEKV_MEMORY_HOST, DIM, n_head, n_tok, DIM * sizeof(float),
                      (size_t)n_head * DIM * sizeof(float)};
    return view;
}

/* Attends a query head densely over n tokens, in double; keys and values are [token][KV head]. */
static inline void dense_head(const float *q, const float *keys, const float *values, int n, int kv_head,
                              double *out) {
    double *weights = malloc((size_t)n * sizeof *weights);
    CHECK(weights != NULL);
    double largest = -INFINITY, sum = 0;
    for (int t = 0; t < n; t++) {
        weights[t] = 0;
        for (int e = 0; e < DIM; e++) {
            weights[t] += (double)q[e] * keys[(t * KV_HEADS + kv_head) * DIM + e] / sqrt(DIM);
        }
        largest = fmax(largest, weights[t]);
    }
    memset(out, 0, DIM * sizeof *out);
    for (int t = 0; t < n; t++) {
        weights[t] = exp(weights[t] - largest);
        sum += weights[t];
    }
    for (int t = 0; t < n; t++) {
        for (int e = 0; e < DIM; e++) {
            out[e] += weights[t] / sum * values[(t * KV_HEADS + kv_head) * DIM + e];
        }
    }
    free(weights);
}

/* One sequence's rows of every layer so far, beside its context. */
typedef struct sequence_log {
    float *keys[LAYERS], *values[LAYERS];
    int n;
    uint64_t random;
} sequence_log;

static inline void append(float **rows, int n_before, const float *more, int n) {
    const size_t row = KV_HEADS * DIM;
    *rows = realloc(*rows, (size_t)(n_before + n) * row * sizeof(float));
    CHECK(*rows != NULL);
    memcpy(*rows + (size_t)n_before * row, more, (size_t)n * row * sizeof(float));
}

/* Largest difference of a layer's outputs to dense attention; the log has the pass's rows. */
static inline double difference(const sequence_log *log, int layer, const float *q, const float *out, int n) {
    double worst = 0, want[DIM];
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < HEADS; h++) {
            const size_t row = ((size_t)t * HEADS + h) * DIM;
            dense_head(q + row, log->keys[layer], log->values[layer], log->n - n + t + 1, h / GROUP, want);
            for (int e = 0; e < DIM; e++) {
                const double d = fabs(out[row + e] - want[e]);
                worst = d <= worst ? worst : d;
            }
        }
    }
    return worst;
}

/* A pass of n tokens of sequence 0 at the next positions; returns the largest difference. */
static inline double pass(sekv_context *context, sequence_log *log, int n) {
    int32_t *positions = malloc((size_t)n * sizeof *positions);
    CHECK(positions != NULL);
    for (int i = 0; i < n; i++) {
        positions[i] = log->n + i;
    }
    sekv_batch batch = {sizeof batch, n, positions, NULL, NULL};
    OK(sekv_begin(context, &batch));
    double worst = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        float *k = noisy((size_t)n * KV_HEADS * DIM, &log->random);
        float *v = noisy((size_t)n * KV_HEADS * DIM, &log->random);
        float *q = noisy((size_t)n * HEADS * DIM, &log->random);
        float *out = noisy((size_t)n * HEADS * DIM, &log->random);
        sekv_view k_view = packed(k, KV_HEADS, n), v_view = packed(v, KV_HEADS, n);
        sekv_view q_view = packed(q, HEADS, n), out_view = packed(out, HEADS, n);
        append(&log->keys[layer], log->n, k, n);
        append(&log->values[layer], log->n, v, n);
        OK(sekv_prefill_ingest(context, layer, &k_view, &v_view));
        OK(sekv_attend(context, layer, &q_view, NULL, &out_view));
        log->n += n;
        worst = fmax(worst, difference(log, layer, q, out, n));
        log->n -= n;
        free(k);
        free(v);
        free(q);
        free(out);
    }
    OK(sekv_commit(context, NULL));
    log->n += n;
    free(positions);
    return worst;
}

static inline void free_log(sequence_log *log) {
    for (int layer = 0; layer < LAYERS; layer++) {
        free(log->keys[layer]);
        free(log->values[layer]);
    }
}

static inline sekv_statistics statistics_of(const sekv_context *context) {
    sekv_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(sekv_stats(context, &statistics));
    return statistics;
}

/* Outputs of values up to 1 in f32. */
#define ROUNDING 1e-5

#endif
