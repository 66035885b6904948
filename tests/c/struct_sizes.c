/* Structs of older and newer hosts. */
#include "check.h"

#include <stddef.h>

/* The first version's layout, on machines of 64 bits: fields are only added behind it. */
#if UINTPTR_MAX == UINT64_MAX
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
AT(sekv_model_params, n_head_per_layer, 56);
AT(sekv_model_params, fingerprint, 88);
AT(sekv_params, dense_layers, 72);
AT(sekv_params, fetch_budget, 96);
AT(sekv_params, seed, 144);
AT(sekv_view, stride_tok, 40);
AT(sekv_batch, seq_id, 32);
AT(sekv_attend_opts, plan, 8);
AT(sekv_memory, full_f16_bytes, 80);
AT(sekv_statistics, scratch_peak_bytes, 136);
AT(sekv_statistics, seal, 560);
_Static_assert(sizeof(sekv_memory) == 128, "sekv_memory never grows");
#endif

static sekv_model *model;

/* A newer host's params: what this library knows, and more. */
typedef struct newer_params {
    sekv_params known;
    uint64_t added[4];
} newer_params;

static void older_params_get_defaults(void) {
    sekv_params params, defaults = exact_params();
    memset(&params, 0xee, sizeof params);
    const size_t older = offsetof(sekv_params, dense_threshold);
    OK(sekv_params_init(&params, older));
    CHECK(params.struct_size == older && params.window == 128);
    const unsigned char *beyond = (const unsigned char *)&params + older;
    for (size_t i = 0; i < sizeof params - older; i++) {
        CHECK(beyond[i] == 0xee); /* not the host's to be written */
    }
    /* The garbage beyond its size isn't read. */
    sekv_context_free(new_context(model, &params));
    params.struct_size = sizeof(size_t);
    sekv_context_free(new_context(model, &params));
    (void)defaults;
}

static void newer_params_must_be_zero_beyond(void) {
    newer_params params;
    memset(&params, 0xee, sizeof params);
    OK(sekv_params_init(&params.known, sizeof params));
    CHECK(params.known.struct_size == sizeof params && params.added[3] == 0);
    sekv_context_free(new_context(model, &params.known));
    sekv_context *out = NULL;
    params.added[3] = 1;
    FAILS(SEKV_ERR_ARGUMENT, "zeros", sekv_init(model, &params.known, &out));
    sekv_memory memory = {.struct_size = sizeof memory};
    FAILS(SEKV_ERR_ARGUMENT, "zeros", sekv_estimate(model, &params.known, 1, &memory));
    CHECK(out == NULL);
}

static void impossible_sizes_are_refused(void) {
    const size_t sizes[] = {0, 1, sizeof(size_t) - 1, sizeof(size_t) + 4, sizeof(sekv_params) - 1,
                            (size_t)1 << 40, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sekv_params params = exact_params();
        sekv_context *context = NULL;
        params.struct_size = sizes[i];
        FAILS(SEKV_ERR_ARGUMENT, "struct_size of sekv_params", sekv_init(model, &params, &context));
        FAILS(SEKV_ERR_ARGUMENT, "struct_size of sekv_params", sekv_params_init(&params, sizes[i]));
        sekv_model_params shape = small_shape();
        sekv_model *other = NULL;
        shape.struct_size = sizes[i];
        FAILS(SEKV_ERR_ARGUMENT, "struct_size", sekv_model_from_params(&shape, &other));
        FAILS(SEKV_ERR_ARGUMENT, "struct_size", sekv_model_params_init(&shape, sizes[i]));
    }
}

static void models_of_both_ages(void) {
    struct {
        sekv_model_params known;
        uint64_t added;
    } newer;
    memset(&newer, 0, sizeof newer);
    newer.known = small_shape();
    newer.known.struct_size = sizeof newer;
    sekv_model *other = NULL;
    OK(sekv_model_from_params(&newer.known, &other));
    sekv_model_free(other);
    newer.added = UINT64_C(1) << 63;
    FAILS(SEKV_ERR_ARGUMENT, "zeros", sekv_model_from_params(&newer.known, &other));
    sekv_model_params older = small_shape();
    older.struct_size = offsetof(sekv_model_params, n_head_per_layer);
    memset(&older.n_head_per_layer, 0xee, sizeof older - older.struct_size);
    OK(sekv_model_from_params(&older, &other));
    sekv_model_free(other);
}

static void batches_and_options_of_both_ages(sekv_context *context) {
    struct {
        sekv_batch known;
        uint64_t added;
    } batch;
    memset(&batch, 0, sizeof batch);
    int32_t pos = 0;
    batch.known.struct_size = sizeof batch;
    batch.known.n_tok = 1;
    batch.known.pos = &pos;
    batch.added = 1;
    FAILS(SEKV_ERR_ARGUMENT, "zeros", sekv_begin(context, &batch.known));
    batch.added = 0;
    OK(sekv_begin(context, &batch.known));
    OK(sekv_abort(context));
    /* Without the sequences, which it doesn't know. */
    batch.known.struct_size = offsetof(sekv_batch, n_seq_id);
    batch.known.n_seq_id = (const int32_t *)(uintptr_t)64;
    batch.known.seq_id = (const int32_t *const *)(uintptr_t)64;
    OK(sekv_begin(context, &batch.known));
    float rows[HEADS * DIM] = {0}, result[HEADS * DIM];
    sekv_view kv = packed(rows, KV_HEADS, 1), q = packed(rows, HEADS, 1), out = packed(result, HEADS, 1);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    sekv_attend_opts opts = {0, NULL};
    FAILS(SEKV_ERR_ARGUMENT, "struct_size", sekv_attend(context, 0, &q, &opts, &out));
    opts.struct_size = sizeof(size_t);
    opts.plan = (const sekv_plan *)(uintptr_t)64;
    OK(sekv_attend(context, 0, &q, &opts, &out));
    OK(sekv_abort(context));
    batch.known.struct_size = sizeof(size_t);
    FAILS(SEKV_ERR_ARGUMENT, "n_tok", sekv_begin(context, &batch.known));
}

static void outputs_of_both_ages(sekv_context *context) {
    struct {
        sekv_statistics known;
        uint64_t added;
    } newer;
    memset(&newer, 0xee, sizeof newer);
    newer.known.struct_size = sizeof newer;
    OK(sekv_stats(context, &newer.known));
    CHECK(newer.added == 0 && newer.known.struct_size == sizeof newer && newer.known.n_tokens == 0);
    CHECK(newer.known.memory.struct_size == sizeof(sekv_memory));

    sekv_statistics older;
    memset(&older, 0xee, sizeof older);
    older.struct_size = offsetof(sekv_statistics, n_steps);
    OK(sekv_stats(context, &older));
    CHECK(older.n_sealed_tokens == 0 && older.n_steps == UINT64_C(0xeeeeeeeeeeeeeeee));
    older.struct_size = 3;
    FAILS(SEKV_ERR_ARGUMENT, "sekv_statistics", sekv_stats(context, &older));

    sekv_params params = exact_params();
    sekv_memory memory;
    memset(&memory, 0xee, sizeof memory);
    memory.struct_size = offsetof(sekv_memory, scratch_bytes);
    OK(sekv_estimate(model, &params, 100, &memory));
    CHECK(memory.fast_bytes > 0 && memory.scratch_bytes == UINT64_C(0xeeeeeeeeeeeeeeee));
    memory.struct_size = 0;
    FAILS(SEKV_ERR_ARGUMENT, "sekv_memory", sekv_estimate(model, &params, 100, &memory));
}

int main(void) {
    model = small_model();
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    older_params_get_defaults();
    newer_params_must_be_zero_beyond();
    impossible_sizes_are_refused();
    models_of_both_ages();
    outputs_of_both_ages(context);
    batches_and_options_of_both_ages(context);
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
