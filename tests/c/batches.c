/* Batches, sequences and surprisal as C hosts give them. */
#include "check.h"

static sekv_model *model;
static sekv_context *context;

static sekv_status begin(int32_t n_tok, const int32_t *pos, const int32_t *n_seq_id, const int32_t *const *seq_id) {
    sekv_batch batch = {sizeof batch, n_tok, pos, n_seq_id, seq_id};
    return sekv_begin(context, &batch);
}

/* Brings the running pass's rows, all zero, and commits. */
static void finish(int32_t n_tok, const float *surprisal) {
    float *rows = calloc((size_t)n_tok * KV_HEADS * DIM, sizeof *rows);
    CHECK(rows != NULL);
    sekv_view kv = packed(rows, KV_HEADS, n_tok);
    for (int layer = 0; layer < LAYERS; layer++) {
        OK(sekv_prefill_ingest(context, layer, &kv, &kv));
    }
    OK(sekv_commit(context, surprisal));
    free(rows);
}

static int32_t first(int32_t seq) {
    int32_t pos = -7;
    OK(sekv_seq_pos_min(context, seq, &pos));
    return pos;
}

static int32_t last(int32_t seq) {
    int32_t pos = -7;
    OK(sekv_seq_pos_max(context, seq, &pos));
    return pos;
}

static void sizes_that_are_refused(void) {
    const int32_t pos = 0;
    FAILS(SEKV_ERR_ARGUMENT, "n_tok of batch is 0", begin(0, &pos, NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "n_tok of batch is -1", begin(-1, &pos, NULL, NULL));
    /* Before a single position is read. */
    FAILS(SEKV_ERR_ARGUMENT, "n_batch_max = 64", begin(65, &pos, NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "n_batch_max = 64", begin(INT32_MAX, &pos, NULL, NULL));
}

static void positions_that_are_refused(void) {
    const int32_t twice[] = {3, 3}, falling[] = {3, 2}, negative[] = {-1}, rising[] = {0, 5};
    FAILS(SEKV_ERR_POSITION, "position 3", begin(2, twice, NULL, NULL));
    FAILS(SEKV_ERR_POSITION, "position 2", begin(2, falling, NULL, NULL));
    FAILS(SEKV_ERR_POSITION, "position -1", begin(1, negative, NULL, NULL));
    CHECK(last(0) == -1 && first(0) == -1);
    OK(begin(2, rising, NULL, NULL));
    CHECK(last(0) == -1); /* not before the commit */
    finish(2, NULL);
    CHECK(first(0) == 0 && last(0) == 5);
    FAILS(SEKV_ERR_POSITION, "position 5", begin(1, rising + 1, NULL, NULL));
}

static void sequences_that_are_refused(void) {
    const int32_t pos[] = {6, 7}, one = 1, none = 0, minus = -1, many = 4;
    const int32_t beyond[] = {3}, negative[] = {-1}, twice[] = {1, 1};
    const int32_t two = 2;
    const int32_t *ids = beyond;
    FAILS(SEKV_ERR_SEQUENCE, "sequence 3", begin(1, pos, &one, &ids));
    FAILS(SEKV_ERR_SEQUENCE, "sequence 3", begin(1, pos, NULL, &ids));
    ids = negative;
    FAILS(SEKV_ERR_SEQUENCE, "sequence -1", begin(1, pos, &one, &ids));
    FAILS(SEKV_ERR_SEQUENCE, "0 sequences", begin(1, pos, &none, &ids));
    FAILS(SEKV_ERR_SEQUENCE, "-1 sequences", begin(1, pos, &minus, &ids));
    FAILS(SEKV_ERR_SEQUENCE, "4 sequences", begin(1, pos, &many, &ids));
    ids = twice;
    FAILS(SEKV_ERR_SEQUENCE, "twice", begin(1, pos, &two, &ids));
    int32_t out = 0;
    FAILS(SEKV_ERR_SEQUENCE, "sequence 3", sekv_seq_pos_min(context, 3, &out));
    FAILS(SEKV_ERR_SEQUENCE, "sequence -1", sekv_seq_pos_max(context, -1, &out));
    FAILS(SEKV_ERR_SEQUENCE, "sequence 3", sekv_seq_rm(context, 3, 0, -1));
}

static void tokens_of_several_sequences(void) {
    const int32_t pos[] = {10, 11, 12};
    const int32_t n_ids[] = {2, 1, 1}, both[] = {1, 2}, second[] = {2}, third[] = {1};
    const int32_t *ids[] = {both, second, third};
    OK(begin(3, pos, n_ids, ids));
    finish(3, NULL);
    CHECK(first(1) == 10 && last(1) == 12 && first(2) == 10 && last(2) == 11 && last(0) == 5);
    OK(sekv_seq_rm(context, 1, 12, -1));
    CHECK(last(1) == 10 && last(2) == 11);
    OK(sekv_seq_rm(context, 1, 5, 5));
    OK(sekv_seq_rm(context, 1, -1, -1));
    OK(sekv_seq_rm(context, 1, 0, 100)); /* empty already */
    CHECK(last(1) == -1 && last(2) == 11);
    OK(sekv_seq_rm(context, 2, 10, 11));
    CHECK(first(2) == 11 && last(2) == 11);
    OK(sekv_seq_rm(context, -1, 11, -1));
    CHECK(last(2) == -1 && last(0) == 5);
    OK(sekv_clear(context));
    CHECK(last(0) == -1 && last(2) == -1 && statistics_of(context).n_tokens == 0);
}

static void surprisal_at_the_commit_and_later(void) {
    int32_t pos[32];
    float nats[32];
    for (int i = 0; i < 32; i++) {
        pos[i] = 2 * i;
        nats[i] = i % 3 ? 0.5f : NAN;
    }
    OK(begin(32, pos, NULL, NULL));
    float *rows = calloc(32 * KV_HEADS * DIM, sizeof *rows);
    CHECK(rows != NULL);
    sekv_view kv = packed(rows, KV_HEADS, 32);
    for (int layer = 0; layer < LAYERS; layer++) {
        OK(sekv_prefill_ingest(context, layer, &kv, &kv));
    }
    free(rows);
    const float bad[] = {INFINITY, -INFINITY, -0.5f};
    for (int i = 0; i < 3; i++) {
        nats[31] = bad[i];
        FAILS(SEKV_ERR_VALUE, "surprisal of token 31", sekv_commit(context, nats));
    }
    nats[31] = 0;
    OK(sekv_commit(context, nats));
    sekv_statistics statistics = statistics_of(context);
    CHECK(statistics.surprisal_source == SEKV_SURPRISAL_HOST && statistics.n_surprisal_tokens == 21);

    /* The rest, in pieces: from position 1 on the next token is at 2. */
    const float late[] = {1, 2, 3};
    OK(sekv_surprisal(context, 0, 0, late, 1));
    OK(sekv_surprisal(context, 0, 5, late, 3));
    OK(sekv_surprisal(context, 0, 62, late, 1));
    OK(sekv_surprisal(context, 0, 62, late, 0));
    CHECK(statistics_of(context).n_surprisal_tokens == 23); /* positions 0 and 6 were unknown */
    FAILS(SEKV_ERR_ARGUMENT, "has 1 tokens there", sekv_surprisal(context, 0, 62, late, 2));
    FAILS(SEKV_ERR_ARGUMENT, "n is -1", sekv_surprisal(context, 0, 0, late, -1));
    FAILS(SEKV_ERR_VALUE, "token 0", sekv_surprisal(context, 0, 0, bad, 1));
    FAILS(SEKV_ERR_SEQUENCE, "empty", sekv_surprisal(context, 1, 0, late, 1));
    FAILS(SEKV_ERR_SEQUENCE, "sequence 3", sekv_surprisal(context, 3, 0, late, 1));
}

int main(void) {
    model = small_model();
    sekv_params params = exact_params();
    params.n_seq_max = 3;
    params.n_batch_max = 64;
    context = new_context(model, &params);
    CHECK(statistics_of(context).surprisal_source == SEKV_SURPRISAL_NONE);
    sizes_that_are_refused();
    positions_that_are_refused();
    sequences_that_are_refused();
    tokens_of_several_sequences();
    surprisal_at_the_commit_and_later();
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
