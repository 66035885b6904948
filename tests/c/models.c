/* Models of other shapes: layers with different heads, values of another size than keys, head
 * sizes that are no power of two; and files that are no model. */
#include "check.h"

/* A pass of n tokens, one element a head set; attention over equal keys is the mean of values. */
static void attends(const sekv_model_params *shape) {
    enum { TOKENS = 5 };
    sekv_model *model = NULL;
    OK(sekv_model_from_params(shape, &model));
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    const int32_t dk = shape->head_dim_k, dv = shape->head_dim_v == 0 ? dk : shape->head_dim_v;
    int32_t positions[TOKENS] = {0, 1, 2, 3, 4};
    sekv_batch batch = {sizeof batch, TOKENS, positions, NULL, NULL};
    OK(sekv_begin(context, &batch));
    for (int32_t layer = 0; layer < shape->n_layer; layer++) {
        const int32_t heads = shape->n_head_per_layer ? shape->n_head_per_layer[layer] : shape->n_head;
        const int32_t kv_heads = shape->n_head_kv_per_layer ? shape->n_head_kv_per_layer[layer] : shape->n_head_kv;
        float *k = calloc((size_t)TOKENS * kv_heads * dk, sizeof *k), *v = malloc((size_t)TOKENS * kv_heads * dv * sizeof *v);
        float *q = calloc((size_t)TOKENS * heads * dk, sizeof *q), *out = malloc((size_t)TOKENS * heads * dv * sizeof *out);
        CHECK(k && v && q && out);
        for (int32_t i = 0; i < TOKENS * kv_heads * dv; i++) {
            v[i] = (float)(i / (kv_heads * dv)) + (float)(i / dv % kv_heads) * 0.25f; /* token + head / 4 */
        }
        const sekv_view k_view = {k, SEKV_F32, SEKV_MEMORY_HOST, dk, kv_heads, TOKENS, (size_t)dk * 4, (size_t)kv_heads * dk * 4};
        const sekv_view v_view = {v, SEKV_F32, SEKV_MEMORY_HOST, dv, kv_heads, TOKENS, (size_t)dv * 4, (size_t)kv_heads * dv * 4};
        const sekv_view q_view = {q, SEKV_F32, SEKV_MEMORY_HOST, dk, heads, TOKENS, (size_t)dk * 4, (size_t)heads * dk * 4};
        const sekv_view out_view = {out, SEKV_F32, SEKV_MEMORY_HOST, dv, heads, TOKENS, (size_t)dv * 4, (size_t)heads * dv * 4};
        OK(sekv_prefill_ingest(context, layer, &k_view, &v_view));
        OK(sekv_attend(context, layer, &q_view, NULL, &out_view));
        for (int32_t i = 0; i < TOKENS * heads * dv; i++) {
            const int32_t token = i / (heads * dv), head = i / dv % heads;
            const double mean = token / 2.0 + (head / (heads / kv_heads)) * 0.25;
            CHECK(fabs(out[i] - mean) < ROUNDING);
        }
        free(k);
        free(v);
        free(q);
        free(out);
    }
    OK(sekv_commit(context, NULL));
    sekv_context_free(context);
    sekv_model_free(model);
}

static void shapes(void) {
    const int32_t heads[3] = {8, 6, 5}, kv_heads[3] = {2, 6, 1};
    sekv_model_params shape = small_shape();
    shape.n_layer = 3;
    shape.n_head_per_layer = heads;
    shape.n_head_kv_per_layer = kv_heads;
    attends(&shape);
    shape = small_shape();
    shape.head_dim_v = 20;
    attends(&shape);
    const int32_t dims[] = {64, 72, 80, 88, 96, 100, 112, 128, 192, 256};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        shape = small_shape();
        shape.head_dim_k = dims[i];
        shape.head_dim_v = 0;
        shape.rope_kind = (int32_t)(i % 3);
        shape.n_head_kv = 1 + (int32_t)(i % 2);
        attends(&shape);
    }
}

/* A host's own scale and frequencies are taken; the scale shows in the scores. */
static void scales_and_factors(void) {
    float factors[DIM / 2];
    for (int i = 0; i < DIM / 2; i++) {
        factors[i] = 1.0f + (float)i;
    }
    sekv_model_params shape = small_shape();
    shape.rope_freq_factors = factors;
    shape.rope_freq_base = 500000;
    shape.rope_freq_scale = 0.25f;
    attends(&shape);

    shape.attention_scale = 2.0f;
    sekv_model *model = NULL;
    OK(sekv_model_from_params(&shape, &model));
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    int32_t positions[2] = {0, 1};
    sekv_batch batch = {sizeof batch, 2, positions, NULL, NULL};
    OK(sekv_begin(context, &batch));
    float k[2 * KV_HEADS * DIM] = {0}, v[2 * KV_HEADS * DIM] = {0}, q[2 * HEADS * DIM] = {0}, out[2 * HEADS * DIM];
    for (int h = 0; h < KV_HEADS; h++) {
        k[(KV_HEADS + h) * DIM] = 1; /* token 1 scores 2, token 0 scores 0 */
        v[(KV_HEADS + h) * DIM] = 1;
    }
    for (int h = 0; h < HEADS; h++) {
        q[(HEADS + h) * DIM] = 1;
    }
    const sekv_view k_view = packed(k, KV_HEADS, 2), v_view = packed(v, KV_HEADS, 2), q_view = packed(q, HEADS, 2),
                    out_view = packed(out, HEADS, 2);
    OK(sekv_prefill_ingest(context, 0, &k_view, &v_view));
    OK(sekv_attend(context, 0, &q_view, NULL, &out_view));
    CHECK(fabs(out[HEADS * DIM] - exp(2) / (1 + exp(2))) < ROUNDING);
    sekv_context_free(context);
    sekv_model_free(model);
}

static void files_that_are_no_model(void) {
    sekv_model *const mark = (sekv_model *)(uintptr_t)64;
    sekv_model *model = mark;
    const char *contents[] = {"", "GG", "GGUF", "GGUF\003\0\0\0", "not a GGUF file at all, but long enough to be one"};
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
        char path[L_tmpnam + 32];
        snprintf(path, sizeof path, "sekv-%p.gguf", (void *)&model);
        FILE *file = fopen(path, "wb");
        CHECK(file != NULL);
        fwrite(contents[i], 1, i == 3 ? 8 : strlen(contents[i]), file);
        fclose(file);
        FAILS(SEKV_ERR_FORMAT, path, sekv_model_from_gguf(path, NULL, &model));
        sekv_model_params shape = small_shape();
        shape.sidecar_path = path;
        FAILS(SEKV_ERR_FORMAT, path, sekv_model_from_params(&shape, &model));
        remove(path);
        FAILS(SEKV_ERR_IO, path, sekv_model_from_params(&shape, &model));
    }
    FAILS(SEKV_ERR_IO, "/", sekv_model_from_gguf("/", NULL, &model));
    FAILS(SEKV_ERR_IO, "no such", sekv_model_from_gguf("no such\nfile", NULL, &model));
    CHECK(model == mark);
}

int main(void) {
    shapes();
    scales_and_factors();
    files_that_are_no_model();
    return 0;
}
