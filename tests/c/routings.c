/* Both routings and both ways to prefill, with surprisal of every kind, as a C host asks for them:
 * answers that an attention can give, and statistics that say what was done. */
#include "check.h"

enum { TOKENS = 240, STEPS = 6 };

typedef enum surprisal_kind { NEVER, EQUAL, ZERO, LATE, IN_PIECES, PEAKS, ALL_ANCHORS_BUT_ONE, N_KINDS } surprisal_kind;

static sekv_model *model;

/* Nats of token i; NaN: not known at its commit. */
static float nats_of(surprisal_kind kind, int i) {
    switch (kind) {
    case EQUAL:
        return 2.5f;
    case ZERO:
        return 0;
    case IN_PIECES:
        return i % 50 < 25 ? (float)(i % 7) : NAN;
    case PEAKS:
        return i % 37 == 0 ? 9.0f : 0.5f;
    case ALL_ANCHORS_BUT_ONE:
        return i == 100 ? 0.0f : 5.0f;
    default:
        return NAN;
    }
}

static void run(int32_t routing, int32_t prefill, int32_t codec, surprisal_kind kind) {
    sekv_params params;
    OK(sekv_params_init(&params, sizeof params));
    params.routing = routing;
    params.prefill = prefill;
    params.codec_basis = codec;
    params.n_threads = 1;
    params.window = 32;
    params.block_tokens = 16;
    params.layout_tokens = 64;
    params.dense = SEKV_DENSE_NONE;
    sekv_context *context = new_context(model, &params);
    uint64_t random = 30;
    int n = 0;
    const int sizes[] = {150, TOKENS - 150};
    for (int round = 0; round < 2 + STEPS; round++) {
        const int more = round < 2 ? sizes[round] : 1;
        int32_t *pos = malloc((size_t)more * sizeof *pos);
        float *nats = malloc((size_t)more * sizeof *nats);
        CHECK(pos != NULL && nats != NULL);
        for (int i = 0; i < more; i++) {
            pos[i] = n + i;
            nats[i] = nats_of(kind, n + i);
        }
        sekv_batch batch = {sizeof batch, more, pos, NULL, NULL};
        OK(sekv_begin(context, &batch));
        for (int layer = 0; layer < LAYERS; layer++) {
            float *kv = noisy((size_t)more * KV_HEADS * DIM, &random), *q = noisy((size_t)more * HEADS * DIM, &random);
            float *out = malloc((size_t)more * HEADS * DIM * sizeof *out);
            CHECK(out != NULL);
            memset(out, 0xff, (size_t)more * HEADS * DIM * sizeof *out);
            const sekv_view kv_view = packed(kv, KV_HEADS, more), q_view = packed(q, HEADS, more),
                            out_view = packed(out, HEADS, more);
            OK(sekv_prefill_ingest(context, layer, &kv_view, &kv_view));
            OK(sekv_attend(context, layer, &q_view, NULL, &out_view));
            for (int i = 0; i < more * HEADS * DIM; i++) {
                CHECK(fabsf(out[i]) < 1.5f); /* values are within 1: a mean of them, and a codec's error */
            }
            free(kv);
            free(q);
            free(out);
        }
        OK(sekv_commit(context, kind == NEVER || kind == LATE ? NULL : nats));
        n += more;
        if (kind == LATE) {
            for (int i = 0; i < more; i++) {
                nats[i] = nats_of(PEAKS, n - more + i);
            }
            OK(sekv_surprisal(context, 0, pos[0], nats, more));
        }
        free(pos);
        free(nats);
    }
    const sekv_statistics all = statistics_of(context);
    CHECK(all.n_tokens == n && all.n_sealed_tokens > 0 && all.n_seal_failures == 0);
    CHECK(all.surprisal_source == (kind == NEVER ? SEKV_SURPRISAL_NONE : SEKV_SURPRISAL_HOST));
    CHECK((kind == NEVER) == (all.n_surprisal_tokens == 0));
    if (kind != NEVER && kind != IN_PIECES) {
        CHECK(all.n_surprisal_tokens == n);
    }
    if (routing == SEKV_ROUTING_LADDER) {
        CHECK(all.n_tokens_without_surprisal == 0); /* it needs none */
    } else if (kind == NEVER) {
        CHECK(all.n_tokens_without_surprisal > 0);
    }
    CHECK(all.n_steps > 0 && all.memory.fast_bytes > 0 && all.memory.slow_bytes > 0);
    /* The first token, the attention's sink, is there whatever the anchors. */
    int32_t first = -1;
    OK(sekv_seq_pos_min(context, 0, &first));
    CHECK(first == 0);
    sekv_context_free(context);
}

int main(void) {
    model = small_model();
    for (int32_t prefill = SEKV_PREFILL_EXACT; prefill <= SEKV_PREFILL_LADDER; prefill++) {
        run(SEKV_ROUTING_LADDER, prefill, SEKV_CODEC_INT8, PEAKS);
        run(SEKV_ROUTING_LADDER, prefill, SEKV_CODEC_F16, NEVER);
        for (int kind = NEVER; kind < N_KINDS; kind++) {
            run(SEKV_ROUTING_PAPER, prefill, SEKV_CODEC_LOW_RANK_F16, (surprisal_kind)kind);
        }
    }
    for (int32_t codec = SEKV_CODEC_F32; codec <= SEKV_CODEC_LOW_RANK_F32; codec++) {
        run(SEKV_ROUTING_PAPER, SEKV_PREFILL_EXACT, codec, PEAKS);
    }
    sekv_model_free(model);
    return 0;
}
