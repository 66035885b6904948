/* NULL for each pointer, numbers out of their ranges: an error that names the argument, and
 * nothing changes. */
#include "check.h"

static sekv_model *model;
static sekv_context *context;

static void null_pointers_of_models(void) {
    sekv_model_params shape = small_shape();
    sekv_model *out = NULL;
    FAILS(SEKV_ERR_ARGUMENT, "params is NULL", sekv_model_params_init(NULL, sizeof shape));
    FAILS(SEKV_ERR_ARGUMENT, "params is NULL", sekv_model_from_params(NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_model_from_params(&shape, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "gguf_path is NULL", sekv_model_from_gguf(NULL, NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_model_from_gguf("no-such-file.gguf", NULL, NULL));
    FAILS(SEKV_ERR_IO, "no-such-file.gguf", sekv_model_from_gguf("no-such-file.gguf", NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "gguf_path is empty", sekv_model_from_gguf("", NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "sidecar_path is empty", sekv_model_from_gguf("x", "", &out));
    CHECK(out == NULL);
    sekv_model_free(NULL);
}

static void null_pointers_of_contexts(void) {
    sekv_params params = exact_params();
    sekv_context *out = NULL;
    FAILS(SEKV_ERR_ARGUMENT, "params is NULL", sekv_params_init(NULL, sizeof params));
    FAILS(SEKV_ERR_ARGUMENT, "model is NULL", sekv_init(NULL, &params, &out));
    FAILS(SEKV_ERR_ARGUMENT, "params is NULL", sekv_init(model, NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_init(model, &params, NULL));
    CHECK(out == NULL);
    sekv_memory memory = {.struct_size = sizeof memory};
    FAILS(SEKV_ERR_ARGUMENT, "model is NULL", sekv_estimate(NULL, &params, 1, &memory));
    FAILS(SEKV_ERR_ARGUMENT, "params is NULL", sekv_estimate(model, NULL, 1, &memory));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_estimate(model, &params, 1, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_stats(context, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_seq_pos_min(context, 0, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_seq_pos_max(context, 0, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_can_shift(context, NULL));
    OK(sekv_set_log_callback(context, NULL, NULL));
    sekv_context_free(NULL);
    sekv_plan_free(NULL);
}

static void null_contexts(void) {
    int32_t pos = 0;
    float value = 0;
    sekv_plan *plan = NULL;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    sekv_view view = packed(&value, 1, 1);
    sekv_statistics statistics = {.struct_size = sizeof statistics};
    const char *what = "context is NULL";
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_set_log_callback(NULL, NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_set_fast_budget(NULL, 1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_set_fetch_budget(NULL, 1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_begin(NULL, &batch));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_prefill_ingest(NULL, 0, &view, &view));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_observe(NULL, 0, &view));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_route(NULL, 0, &view, &plan));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_zoom(NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_attend(NULL, 0, &view, NULL, &view));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_commit(NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_abort(NULL));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_surprisal(NULL, 0, 0, &value, 1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_rm(NULL, 0, 0, -1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_cp(NULL, 0, 1, 0, -1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_keep(NULL, 0));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_add(NULL, 0, 0, -1, 1));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_div(NULL, 0, 0, -1, 2));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_can_shift(NULL, &pos));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_clear(NULL));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_pos_min(NULL, 0, &pos));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_seq_pos_max(NULL, 0, &pos));
    FAILS(SEKV_ERR_ARGUMENT, what, sekv_stats(NULL, &statistics));
    CHECK(strstr(sekv_context_last_error(NULL), what) != NULL);
}

static void null_pointers_of_passes(void) {
    uint64_t random = 1;
    float *rows = noisy(HEADS * DIM, &random);
    sekv_view kv = packed(rows, KV_HEADS, 1), q = packed(rows, HEADS, 1), nowhere = kv;
    float result[HEADS * DIM];
    sekv_view out = packed(result, HEADS, 1);
    nowhere.data = NULL;
    int32_t pos = 0;
    sekv_batch batch = {sizeof batch, 1, NULL, NULL, NULL};
    sekv_plan *plan = NULL;
    FAILS(SEKV_ERR_ARGUMENT, "batch is NULL", sekv_begin(context, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "pos of batch is NULL", sekv_begin(context, &batch));
    batch.pos = &pos;
    const int32_t *no_ids = NULL;
    batch.seq_id = &no_ids;
    FAILS(SEKV_ERR_ARGUMENT, "seq_id[0] of batch is NULL", sekv_begin(context, &batch));
    batch.seq_id = NULL;
    OK(sekv_begin(context, &batch));
    FAILS(SEKV_ERR_ARGUMENT, "k is NULL", sekv_prefill_ingest(context, 0, NULL, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "v is NULL", sekv_prefill_ingest(context, 0, &kv, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "data of k is NULL", sekv_prefill_ingest(context, 0, &nowhere, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "data of v is NULL", sekv_prefill_ingest(context, 0, &kv, &nowhere));
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "q is NULL", sekv_observe(context, 0, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "q is NULL", sekv_route(context, 0, NULL, &plan));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_route(context, 0, &q, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "plan is NULL", sekv_zoom(context, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "q is NULL", sekv_attend(context, 0, NULL, NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "out is NULL", sekv_attend(context, 0, &q, NULL, NULL));
    nowhere = out;
    nowhere.data = NULL;
    FAILS(SEKV_ERR_ARGUMENT, "data of out is NULL", sekv_attend(context, 0, &q, NULL, &nowhere));
    sekv_attend_opts opts = {sizeof opts, NULL};
    OK(sekv_attend(context, 0, &q, &opts, &out));
    OK(sekv_abort(context));
    FAILS(SEKV_ERR_ARGUMENT, "values is NULL", sekv_surprisal(context, 0, 0, NULL, 1));
    CHECK(plan == NULL);
    free(rows);
}

#define REFUSES_MODEL(what, change)                                                    \
    do {                                                                               \
        sekv_model_params shape = small_shape();                                       \
        change;                                                                        \
        sekv_model *out = NULL;                                                        \
        FAILS(SEKV_ERR_ARGUMENT, what, sekv_model_from_params(&shape, &out));          \
        CHECK(out == NULL);                                                            \
    } while (0)

static void numbers_of_models(void) {
    REFUSES_MODEL("n_layer", shape.n_layer = 0);
    REFUSES_MODEL("n_layer", shape.n_layer = -1);
    REFUSES_MODEL("n_layer", shape.n_layer = INT32_MAX);
    REFUSES_MODEL("heads", shape.n_head = 0);
    REFUSES_MODEL("n_head", shape.n_head = -4);
    REFUSES_MODEL("KV heads", shape.n_head_kv = 3);
    REFUSES_MODEL("n_head_kv", shape.n_head_kv = -1);
    REFUSES_MODEL("head_dim_k", shape.head_dim_k = 0);
    REFUSES_MODEL("head_dim_k", shape.head_dim_k = INT32_MAX);
    REFUSES_MODEL("head_dim_v", shape.head_dim_v = -1);
    REFUSES_MODEL("rope_kind is 3", shape.rope_kind = 3);
    REFUSES_MODEL("rope_kind is -1", shape.rope_kind = -1);
    REFUSES_MODEL("n_rot", shape.n_rot = 3);
    REFUSES_MODEL("n_rot", shape.n_rot = INT32_MAX - 1);
    REFUSES_MODEL("n_ctx_train", shape.n_ctx_train = -1);
    REFUSES_MODEL("base", shape.rope_freq_base = NAN);
    REFUSES_MODEL("scale", shape.rope_freq_scale = -INFINITY);
    REFUSES_MODEL("attention_scale", shape.attention_scale = NAN);
    REFUSES_MODEL("reserved0", shape.reserved0 = 1);
    const int32_t heads[LAYERS] = {HEADS, -1};
    REFUSES_MODEL("n_head_per_layer", shape.n_head_per_layer = heads);
    REFUSES_MODEL("n_head_kv_per_layer", shape.n_head_kv_per_layer = heads);
    const float factors[DIM / 2] = {0};
    REFUSES_MODEL("factor", shape.rope_freq_factors = factors);
}

#define REFUSES(what, change)                                                         \
    do {                                                                              \
        sekv_params params = exact_params();                                          \
        change;                                                                       \
        sekv_context *out = NULL;                                                     \
        FAILS(SEKV_ERR_ARGUMENT, what, sekv_init(model, &params, &out));              \
        CHECK(out == NULL);                                                           \
    } while (0)

static void numbers_of_params(void) {
    REFUSES("n_seq_max", params.n_seq_max = 0);
    REFUSES("n_seq_max", params.n_seq_max = -1);
    REFUSES("n_seq_max", params.n_seq_max = INT32_MAX);
    REFUSES("n_batch_max", params.n_batch_max = 0);
    REFUSES("n_threads", params.n_threads = -1);
    REFUSES("n_threads", params.n_threads = INT32_MAX);
    REFUSES("routing is 2", params.routing = 2);
    REFUSES("prefill is -1", params.prefill = -1);
    REFUSES("n_sinks", params.n_sinks = -1);
    REFUSES("window", params.window = -1);
    REFUSES("block_tokens", params.block_tokens = 0);
    REFUSES("layout_tokens", params.layout_tokens = 0);
    REFUSES("sketch is 5", params.sketch = 5);
    REFUSES("value_sketch is 2", params.value_sketch = 2);
    REFUSES("codec_resident is 3", params.codec_resident = SEKV_CODEC_LOW_RANK_F16);
    REFUSES("codec_basis is 6", params.codec_basis = 6);
    REFUSES("codec_mean is 4", params.codec_mean = SEKV_CODEC_LOW_RANK_INT8);
    REFUSES("dense is 3", params.dense = 3);
    REFUSES("n_dense_layers", params.n_dense_layers = -1);
    REFUSES("dense_layers is NULL", params.dense = SEKV_DENSE_LIST; params.n_dense_layers = 1);
    const int32_t beyond = LAYERS, negative = -1;
    REFUSES("dense layer 2", params.dense = SEKV_DENSE_LIST; params.n_dense_layers = 1;
            params.dense_layers = &beyond);
    REFUSES("dense layer", params.dense = SEKV_DENSE_LIST; params.n_dense_layers = 1;
            params.dense_layers = &negative);
    REFUSES("dense_threshold", params.dense_threshold = NAN);
    REFUSES("share_threshold", params.share_threshold = -1);
    REFUSES("share_reference", params.share_reference = -1);
    REFUSES("middle_fraction", params.middle_fraction = 2);
    REFUSES("fast_budget_fraction", params.fast_budget_fraction = NAN);
    REFUSES("fast_budget_fraction", params.fast_budget_fraction = INFINITY);
    REFUSES("at most one limit", params.fast_budget_fraction = 0.5f; params.fast_budget_bytes = 1);
    REFUSES("surprisal_alpha", params.surprisal_alpha = NAN);
    REFUSES("span_min", params.span_min = 0);
    REFUSES("span_max", params.span_max = 1);
    REFUSES("r_max", params.r_max = 0);
    REFUSES("low_rank_error", params.low_rank_error = NAN);
    REFUSES("n_tokens_hint", params.n_tokens_hint = -1);
    sekv_params params = exact_params();
    sekv_context *out = NULL;
    params.codec_basis = SEKV_CODEC_LOW_RANK_F32;
    FAILS(SEKV_ERR_UNSUPPORTED, "paper", sekv_init(model, &params, &out));
    sekv_memory memory = {.struct_size = sizeof memory};
    params = exact_params();
    FAILS(SEKV_ERR_ARGUMENT, "n_tokens", sekv_estimate(model, &params, -1, &memory));
    FAILS(SEKV_ERR_ARGUMENT, "n_tokens", sekv_estimate(model, &params, INT64_MAX, &memory));
}

int main(void) {
    CHECK(sekv_version() >> 16 == 0 && sekv_version_string()[0] == '0');
    CHECK(strcmp(sekv_status_name(0), "SEKV_OK") == 0);
    CHECK(strcmp(sekv_status_name(-1), "unknown status") == 0);
    CHECK(strcmp(sekv_last_error(), "") == 0);
    model = small_model();
    sekv_params params = exact_params();
    context = new_context(model, &params);
    CHECK(strcmp(sekv_context_last_error(context), "") == 0);

    null_pointers_of_models();
    null_pointers_of_contexts();
    null_contexts();
    null_pointers_of_passes();
    numbers_of_models();
    numbers_of_params();

    /* After all that, the context is as it was. */
    sequence_log log = {.random = 2};
    CHECK(pass(context, &log, 20) < ROUNDING);
    free_log(&log);
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
