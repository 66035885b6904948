/* Views: strides larger than the row, three element types, memory between rows that nobody owns,
 * numbers that no cache can hold, and sizes beyond 32 bits. */
#include "check.h"

enum { TOKENS = 40, GAP = 12 };

static sekv_model *model;

/* Conversions of a test: exact for the numbers that it uses, which have 8 significant bits. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t exponent = bits >> 23 & 0xff;
    if (exponent < 113) {
        return (uint16_t)(bits >> 16 & 0x8000); /* below the normal numbers: zero */
    }
    return (uint16_t)((bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
}

static float from_f16(uint16_t half) {
    const uint32_t exponent = half >> 10 & 0x1f;
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t bits = exponent == 0 ? sign : sign | (exponent + 112) << 23 | (uint32_t)(half & 0x3ff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static size_t size_of(int32_t dtype) { return dtype == SEKV_F32 ? 4 : 2; }

static float load(const unsigned char *at, int32_t dtype) {
    float wide;
    uint16_t half;
    if (dtype == SEKV_F32) {
        memcpy(&wide, at, 4);
        return wide;
    }
    memcpy(&half, at, 2);
    return dtype == SEKV_F16 ? from_f16(half) : from_bf16(half);
}

static void store(unsigned char *at, int32_t dtype, float value) {
    const uint16_t half = dtype == SEKV_F16 ? to_f16(value) : to_bf16(value);
    if (dtype == SEKV_F32) {
        memcpy(at, &value, 4);
    } else {
        memcpy(at, &half, 2);
    }
}

/* Rows with gaps after each row and each token, at an odd address. Every byte that is no row is
 * 0xff: NaN in each of the three types. */
typedef struct strided {
    unsigned char *memory;
    size_t n_bytes;
    sekv_view view;
} strided;

static strided gapped(int32_t n_head, int32_t dtype) {
    strided rows;
    const size_t stride_head = DIM * size_of(dtype) + GAP + 1;
    const size_t stride_tok = (size_t)n_head * stride_head + GAP;
    rows.n_bytes = 1 + TOKENS * stride_tok;
    rows.memory = malloc(rows.n_bytes);
    CHECK(rows.memory != NULL);
    memset(rows.memory, 0xff, rows.n_bytes);
    const sekv_view view = {rows.memory + 1, dtype, SEKV_MEMORY_HOST, DIM, n_head, TOKENS,
                            stride_head, stride_tok};
    rows.view = view;
    return rows;
}

static unsigned char *element(const strided *rows, int token, int head, int e) {
    return (unsigned char *)rows->view.data + (size_t)token * rows->view.stride_tok +
           (size_t)head * rows->view.stride_head + (size_t)e * size_of(rows->view.dtype);
}

/* Fills the rows; `plain` gets what was stored, packed. */
static void fill(strided *rows, float *plain, uint64_t *random) {
    for (int t = 0, i = 0; t < TOKENS; t++) {
        for (int h = 0; h < rows->view.n_head; h++) {
            for (int e = 0; e < DIM; e++, i++) {
                store(element(rows, t, h, e), rows->view.dtype, noise(random));
                plain[i] = load(element(rows, t, h, e), rows->view.dtype);
            }
        }
    }
}

static int is_in_a_row(const strided *rows, size_t byte) {
    if (byte == 0) {
        return 0;
    }
    const size_t in_token = (byte - 1) % rows->view.stride_tok;
    const size_t head = in_token / rows->view.stride_head;
    return head < (size_t)rows->view.n_head &&
           in_token % rows->view.stride_head < DIM * size_of(rows->view.dtype);
}

static void strides_and_types(int32_t in, int32_t to) {
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    uint64_t random = 5;
    sequence_log log = {.n = TOKENS};
    int32_t positions[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        positions[t] = 3 * t;
    }
    sekv_batch batch = {sizeof batch, TOKENS, positions, NULL, NULL};
    OK(sekv_begin(context, &batch));
    for (int layer = 0; layer < LAYERS; layer++) {
        strided k = gapped(KV_HEADS, in), v = gapped(KV_HEADS, in);
        strided q = gapped(HEADS, in), out = gapped(HEADS, to);
        float *plain_q = malloc(TOKENS * HEADS * DIM * sizeof(float));
        float *plain_out = malloc(TOKENS * HEADS * DIM * sizeof(float));
        log.keys[layer] = malloc(TOKENS * KV_HEADS * DIM * sizeof(float));
        log.values[layer] = malloc(TOKENS * KV_HEADS * DIM * sizeof(float));
        CHECK(plain_q && plain_out && log.keys[layer] && log.values[layer]);
        fill(&k, log.keys[layer], &random);
        fill(&v, log.values[layer], &random);
        fill(&q, plain_q, &random);
        OK(sekv_prefill_ingest(context, layer, &k.view, &v.view));
        OK(sekv_attend(context, layer, &q.view, NULL, &out.view));
        for (int t = 0, i = 0; t < TOKENS; t++) {
            for (int h = 0; h < HEADS; h++) {
                for (int e = 0; e < DIM; e++, i++) {
                    plain_out[i] = load(element(&out, t, h, e), to);
                }
            }
        }
        const double bound = to == SEKV_F32 ? ROUNDING : to == SEKV_F16 ? 1e-3 : 8e-3;
        CHECK(difference(&log, layer, plain_q, plain_out, TOKENS) < bound);
        for (size_t i = 0; i < out.n_bytes; i++) {
            CHECK(is_in_a_row(&out, i) || out.memory[i] == 0xff); /* nothing between rows is written */
        }
        free(k.memory);
        free(v.memory);
        free(q.memory);
        free(out.memory);
        free(plain_q);
        free(plain_out);
    }
    OK(sekv_commit(context, NULL));
    /* Sealed now, gaps and all: what comes after is right too. */
    CHECK(statistics_of(context).n_sealed_tokens == TOKENS);
    int32_t next = 3 * TOKENS;
    sekv_batch one = {sizeof one, 1, &next, NULL, NULL};
    OK(sekv_begin(context, &one));
    float *rows = noisy(HEADS * DIM, &random), results[HEADS * DIM];
    sekv_view kv = packed(rows, KV_HEADS, 1), q = packed(rows, HEADS, 1), out = packed(results, HEADS, 1);
    append(&log.keys[0], TOKENS, rows, 1);
    append(&log.values[0], TOKENS, rows, 1);
    log.n++;
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_attend(context, 0, &q, NULL, &out));
    CHECK(difference(&log, 0, rows, results, 1) < ROUNDING);
    free(rows);
    free_log(&log);
    sekv_context_free(context);
}

static sekv_context *open_pass(int32_t n_tok) {
    static int32_t positions[4] = {0, 1, 2, 3};
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    sekv_batch batch = {sizeof batch, n_tok, positions, NULL, NULL};
    OK(sekv_begin(context, &batch));
    return context;
}

#define REFUSES(status, what, change)                                                     \
    do {                                                                                  \
        sekv_view k = packed(rows, KV_HEADS, 4), v = k;                                   \
        change;                                                                           \
        FAILS(status, what, sekv_prefill_ingest(context, 0, &k, &v));                     \
    } while (0)

static void shapes_that_do_not_fit(void) {
    sekv_context *context = open_pass(4);
    uint64_t random = 6;
    float *rows = noisy(4 * HEADS * DIM, &random);
    REFUSES(SEKV_ERR_SHAPE, "n_elem of k is -1", k.n_elem = -1);
    REFUSES(SEKV_ERR_SHAPE, "n_head of v is -2147483648", v.n_head = INT32_MIN);
    REFUSES(SEKV_ERR_SHAPE, "n_tok of k is -4", k.n_tok = -4);
    REFUSES(SEKV_ERR_SHAPE, "k is 0 x", k.n_elem = 0);
    REFUSES(SEKV_ERR_SHAPE, "k is 33 x", k.n_elem = DIM + 1);
    REFUSES(SEKV_ERR_SHAPE, "expected 32 x 2 x 4", v.n_head = HEADS);
    REFUSES(SEKV_ERR_SHAPE, "v is", v.n_tok = 3);
    REFUSES(SEKV_ERR_SHAPE, "2147483647", k.n_tok = INT32_MAX);
    REFUSES(SEKV_ERR_SHAPE, "stride_head of k", k.stride_head = DIM * sizeof(float) - 1);
    REFUSES(SEKV_ERR_SHAPE, "stride_tok of v", v.stride_tok = 0);
    REFUSES(SEKV_ERR_SHAPE, "address space", k.stride_tok = SIZE_MAX / 2);
    REFUSES(SEKV_ERR_SHAPE, "address space", v.stride_head = SIZE_MAX - 4);
    REFUSES(SEKV_ERR_ARGUMENT, "dtype of k is 3", k.dtype = 3);
    REFUSES(SEKV_ERR_ARGUMENT, "dtype of v is -1", v.dtype = -1);
    REFUSES(SEKV_ERR_ARGUMENT, "memory of k is 2", k.memory = 2);
    REFUSES(SEKV_ERR_UNSUPPORTED, "without a device backend", v.memory = SEKV_MEMORY_CUDA);
    sekv_view kv = packed(rows, KV_HEADS, 4), q = packed(rows, HEADS, 4), out = q;
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    FAILS(SEKV_ERR_SHAPE, "q is", sekv_attend(context, 0, &kv, NULL, &out));
    FAILS(SEKV_ERR_SHAPE, "out is", sekv_attend(context, 0, &q, NULL, &kv));
    out.memory = SEKV_MEMORY_CUDA;
    FAILS(SEKV_ERR_UNSUPPORTED, "out", sekv_attend(context, 0, &q, NULL, &out));
    sekv_context_free(context);
    free(rows);
}

static void numbers_that_are_refused(void) {
    const float bad[] = {NAN, INFINITY, -INFINITY, 65505.0f, -65505.0f, 3e38f};
    const size_t at = (1 * KV_HEADS + 1) * DIM + 5; /* head 1 of token 1 */
    sekv_context *context = open_pass(4);
    uint64_t random = 7;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        float *rows = noisy(4 * HEADS * DIM, &random), *good = noisy(4 * HEADS * DIM, &random);
        float results[4 * HEADS * DIM];
        sekv_view kv = packed(rows, KV_HEADS, 4), good_kv = packed(good, KV_HEADS, 4);
        sekv_view q = packed(rows, HEADS, 4), out = packed(results, HEADS, 4);
        rows[at] = bad[i];
        FAILS(SEKV_ERR_VALUE, "K of layer 0, head 1, token 1", sekv_prefill_ingest(context, 0, &kv, &good_kv));
        FAILS(SEKV_ERR_VALUE, "V of layer 0, head 1, token 1", sekv_prefill_ingest(context, 0, &good_kv, &kv));
        /* What was refused is not there, and may come again. */
        OK(sekv_prefill_ingest(context, 0, &good_kv, &good_kv));
        rows[at] = 0;
        rows[(2 * HEADS + 3) * DIM + 9] = bad[i];
        sekv_plan *plan = NULL;
        FAILS(SEKV_ERR_VALUE, "Q of layer 0, head 3, token 2", sekv_attend(context, 0, &q, NULL, &out));
        FAILS(SEKV_ERR_VALUE, "head 3", sekv_route(context, 0, &q, &plan));
        FAILS(SEKV_ERR_VALUE, "head 3", sekv_observe(context, 0, &q));
        OK(sekv_abort(context));
        CHECK(statistics_of(context).n_tokens == 0 && plan == NULL);
        free(rows);
        free(good);
        sekv_context_free(context);
        context = open_pass(4);
    }
    /* The largest f16 is no error. */
    float largest[4 * HEADS * DIM], results[4 * HEADS * DIM];
    for (int i = 0; i < 4 * HEADS * DIM; i++) {
        largest[i] = i % 2 ? 65504.0f : -65504.0f;
    }
    sekv_view kv = packed(largest, KV_HEADS, 4), q = packed(largest, HEADS, 4), out = packed(results, HEADS, 4);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_attend(context, 0, &q, NULL, &out));
    for (int i = 0; i < 4 * HEADS * DIM; i++) {
        CHECK(fabsf(results[i] - largest[i]) <= 1.0f);
    }
    sekv_context_free(context);
}

/* 2^32 elements and more, in strides that reach over 4 GiB without an allocation of that size: by
 * arithmetic alone, since a view of one token may have any stride. */
static void sizes_beyond_32_bits(void) {
    sekv_context *context = open_pass(1);
    uint64_t random = 8;
    float *rows = noisy(HEADS * DIM, &random), results[HEADS * DIM];
    sekv_view kv = packed(rows, KV_HEADS, 1), q = packed(rows, HEADS, 1), out = packed(results, HEADS, 1);
    kv.stride_tok = q.stride_tok = (size_t)1 << (sizeof(size_t) * 8 - 2);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_attend(context, 0, &q, NULL, &out));
    sekv_context_free(context);
    free(rows);

    sekv_model_params shape = small_shape();
    shape.n_layer = shape.n_head = 1024;
    shape.n_head_kv = 1024;
    shape.head_dim_k = shape.head_dim_v = 1024;
    sekv_model *large = NULL;
    OK(sekv_model_from_params(&shape, &large));
    sekv_params params;
    OK(sekv_params_init(&params, sizeof params));
    sekv_memory memory = {.struct_size = sizeof memory};
    OK(sekv_estimate(large, &params, 1 << 20, &memory));
    /* 2^20 tokens x 2^10 layers x 2^10 heads x 2^10 elements x 2 (K and V) x 2 bytes. */
    CHECK(memory.full_f16_bytes == UINT64_C(1) << 52);
    CHECK(memory.slow_bytes > memory.full_f16_bytes / 4 && memory.slow_bytes < memory.full_f16_bytes);
    CHECK(memory.fast_bytes > 0 && memory.fast_bytes < memory.full_f16_bytes);
    for (params.routing = SEKV_ROUTING_LADDER; params.routing <= SEKV_ROUTING_PAPER; params.routing++) {
        sekv_memory most = {.struct_size = sizeof most};
        OK(sekv_estimate(model, &params, INT32_MAX, &most));
        CHECK(most.full_f16_bytes == (uint64_t)INT32_MAX * LAYERS * KV_HEADS * DIM * 2 * 2);
        const uint64_t both = most.fast_bytes + most.slow_bytes;
        CHECK(both > most.full_f16_bytes / 4 && both < most.full_f16_bytes * 2);
        FAILS(SEKV_ERR_ARGUMENT, "2147483648", sekv_estimate(model, &params, INT64_C(1) << 31, &most));
        FAILS(SEKV_ERR_ARGUMENT, "64 bits", sekv_estimate(large, &params, INT32_MAX, &most));
    }
    sekv_model_free(large);
}

int main(void) {
    model = small_model();
    for (int32_t in = SEKV_F32; in <= SEKV_BF16; in++) {
        for (int32_t to = SEKV_F32; to <= SEKV_BF16; to++) {
            strides_and_types(in, to);
        }
    }
    shapes_that_do_not_fit();
    numbers_that_are_refused();
    sizes_beyond_32_bits();
    sekv_model_free(model);
    return 0;
}
