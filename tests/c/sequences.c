/* Operations on sequences: each leaves what dense attention over the same tokens would see. */
#include "check.h"

static sekv_model *model;
static sekv_context *context;

static int32_t position(sekv_status tell(const sekv_context *, int32_t, int32_t *), int32_t seq) {
    int32_t pos = -7;
    OK(tell(context, seq, &pos));
    return pos;
}

#define FIRST(seq) position(sekv_seq_pos_min, (seq))
#define LAST(seq) position(sekv_seq_pos_max, (seq))

/* A key as it is, moved by some positions: RoPE of half-split pairs, base 10,000. */
static void turn(float *key, int shift) {
    for (int i = 0; i < DIM / 2; i++) {
        const double angle = shift * (double)(float)pow(10000, -2.0 * i / DIM);
        const double x = key[i], y = key[i + DIM / 2];
        key[i] = (float)(x * cos(angle) - y * sin(angle));
        key[i + DIM / 2] = (float)(x * sin(angle) + y * cos(angle));
    }
}

static void move(sequence_log *log, int from, int to, int shift) {
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int row = from * KV_HEADS; row < to * KV_HEADS; row++) {
            turn(log->keys[layer] + (size_t)row * DIM, shift);
        }
    }
}

static void forget(sequence_log *log, int from, int to) {
    const size_t row = KV_HEADS * DIM;
    for (int layer = 0; layer < LAYERS; layer++) {
        float *rows[] = {log->keys[layer], log->values[layer]};
        for (int i = 0; i < 2; i++) {
            memmove(rows[i] + (size_t)from * row, rows[i] + (size_t)to * row,
                    (size_t)(log->n - to) * row * sizeof(float));
        }
    }
    log->n -= to - from;
}

/* One token of a sequence at a position, behind n logged ones; the largest difference. Not kept. */
static double step(const sequence_log *log, int32_t seq, int32_t pos) {
    const int32_t *ids = &seq;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, &ids};
    sequence_log copy = {.n = log->n, .random = 77};
    double worst = 0;
    OK(sekv_begin(context, &batch));
    for (int layer = 0; layer < LAYERS; layer++) {
        float *k = noisy(KV_HEADS * DIM, &copy.random), *v = noisy(KV_HEADS * DIM, &copy.random);
        float *q = noisy(HEADS * DIM, &copy.random), *out = noisy(HEADS * DIM, &copy.random);
        sekv_view k_view = packed(k, KV_HEADS, 1), v_view = packed(v, KV_HEADS, 1);
        sekv_view q_view = packed(q, HEADS, 1), out_view = packed(out, HEADS, 1);
        append(&copy.keys[layer], 0, log->keys[layer], log->n);
        append(&copy.values[layer], 0, log->values[layer], log->n);
        append(&copy.keys[layer], log->n, k, 1);
        append(&copy.values[layer], log->n, v, 1);
        OK(sekv_prefill_ingest(context, layer, &k_view, &v_view));
        OK(sekv_attend(context, layer, &q_view, NULL, &out_view));
        copy.n = log->n + 1;
        worst = fmax(worst, difference(&copy, layer, q, out, 1));
        free(k);
        free(v);
        free(q);
        free(out);
    }
    OK(sekv_abort(context));
    free_log(&copy);
    return worst;
}

static void copies(void) {
    sequence_log log = {.random = 1};
    CHECK(pass(context, &log, 50) < ROUNDING);
    const sekv_statistics one = statistics_of(context);
    OK(sekv_seq_cp(context, 0, 1, -1, -1));
    OK(sekv_seq_cp(context, 0, 2, 10, 30));
    CHECK(FIRST(1) == 0 && LAST(1) == 49 && FIRST(2) == 10 && LAST(2) == 29);
    const sekv_statistics all = statistics_of(context);
    CHECK(all.n_tokens == 120 && all.memory.fast_layout_bytes == one.memory.fast_layout_bytes);
    CHECK(all.memory.slow_bytes < one.memory.slow_bytes * 3 / 2);
    CHECK(step(&log, 0, 50) < ROUNDING && step(&log, 1, 50) < ROUNDING);
    FAILS(SEKV_ERR_UNSUPPORTED, "sequence 1", sekv_seq_cp(context, 0, 1, -1, -1));
    OK(sekv_seq_cp(context, 0, 0, -1, -1));
    OK(sekv_seq_cp(context, 3, 0, -1, -1)); /* nothing to copy */
    FAILS(SEKV_ERR_SEQUENCE, "sequence 4", sekv_seq_cp(context, 0, 4, -1, -1));
    FAILS(SEKV_ERR_SEQUENCE, "sequence -1", sekv_seq_cp(context, -1, 0, -1, -1));
    /* One side changes, the others don't. */
    OK(sekv_seq_rm(context, 0, 0, 20));
    CHECK(FIRST(0) == 20 && FIRST(1) == 0 && FIRST(2) == 10);
    CHECK(step(&log, 1, 50) < ROUNDING);
    FAILS(SEKV_ERR_SEQUENCE, "sequence 9", sekv_seq_keep(context, 9));
    OK(sekv_seq_keep(context, 1));
    CHECK(LAST(0) == -1 && LAST(1) == 49 && LAST(2) == -1);
    CHECK(step(&log, 1, 50) < ROUNDING);
    OK(sekv_clear(context));
    CHECK(statistics_of(context).memory.slow_bytes == 0);
    free_log(&log);
}

/* A full context: the oldest tokens but the first four go, the others move up. */
static void a_context_that_is_shifted(void) {
    sequence_log log = {.random = 2};
    CHECK(pass(context, &log, 60) < ROUNDING);
    int32_t can = -1;
    OK(sekv_can_shift(context, &can));
    CHECK(can == 1);
    OK(sekv_seq_rm(context, 0, 4, 29));
    forget(&log, 4, 29);
    CHECK(FIRST(0) == 0 && LAST(0) == 59);
    CHECK(step(&log, 0, 60) < ROUNDING);
    OK(sekv_seq_add(context, 0, 29, -1, -25));
    move(&log, 4, log.n, -25);
    CHECK(FIRST(0) == 0 && LAST(0) == 34);
    CHECK(pass(context, &log, 20) < ROUNDING);
    CHECK(step(&log, 0, 55) < ROUNDING);
    for (int i = 0; i < 100; i++) {
        OK(sekv_seq_add(context, 0, -1, -1, 1));
    }
    move(&log, 0, log.n, 100);
    CHECK(FIRST(0) == 100 && LAST(0) == 154);
    CHECK(step(&log, 0, 155) < ROUNDING);
    FAILS(SEKV_ERR_POSITION, "-101", sekv_seq_add(context, 0, -1, -1, -101));
    FAILS(SEKV_ERR_POSITION, "its token at 109", sekv_seq_add(context, 0, 110, -1, -1));
    FAILS(SEKV_ERR_POSITION, "2147483647", sekv_seq_add(context, 0, -1, -1, INT32_MAX));
    FAILS(SEKV_ERR_SEQUENCE, "sequence -1", sekv_seq_add(context, -1, -1, -1, 1));
    FAILS(SEKV_ERR_UNSUPPORTED, "divided", sekv_seq_div(context, 0, -1, -1, 2));
    FAILS(SEKV_ERR_ARGUMENT, "divisor is 0", sekv_seq_div(context, 0, -1, -1, 0));
    OK(sekv_seq_div(context, 0, -1, -1, 1));
    CHECK(FIRST(0) == 100 && LAST(0) == 154);
    CHECK(step(&log, 0, 155) < ROUNDING);
    OK(sekv_clear(context));
    free_log(&log);
}

int main(void) {
    model = small_model();
    sekv_params params = exact_params();
    params.n_seq_max = 4;
    context = new_context(model, &params);
    copies();
    a_context_that_is_shifted();
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
