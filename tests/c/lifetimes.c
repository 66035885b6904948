/* Who frees what and when, what a host's process keeps, budgets, and the log. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <fenv.h>
#include <locale.h>
#include <signal.h>

static void models_are_shared(void) {
    /* Two handles to one model: the same description, each freed once, in any order. */
    sekv_model *first = small_model(), *second = small_model();
    sekv_params params = exact_params();
    sekv_context *contexts[] = {new_context(first, &params), new_context(first, &params),
                                new_context(second, &params)};
    sekv_model_free(first);
    sekv_model_free(second);
    for (int i = 0; i < 3; i++) {
        sequence_log log = {.random = 20};
        CHECK(pass(contexts[i], &log, 20) < ROUNDING);
        CHECK(pass(contexts[i], &log, 1) < ROUNDING);
        free_log(&log);
        sekv_context_free(contexts[i]);
    }
}

static void contexts_end_at_any_time(const sekv_model *model) {
    sekv_params params = exact_params();
    params.n_threads = 4;
    for (int when = 0; when < 5; when++) {
        sekv_context *context = new_context(model, &params);
        int32_t pos[] = {0, 1};
        float rows[2 * HEADS * DIM] = {0}, results[2 * HEADS * DIM];
        sekv_view kv = packed(rows, KV_HEADS, 2), q = packed(rows, HEADS, 2), out = packed(results, HEADS, 2);
        sekv_batch batch = {sizeof batch, 2, pos, NULL, NULL};
        sekv_plan *plan = NULL;
        if (when > 0) {
            OK(sekv_begin(context, &batch));
        }
        if (when > 1) {
            OK(sekv_prefill_ingest(context, 0, &kv, &kv));
        }
        if (when > 2) {
            OK(sekv_route(context, 0, &q, &plan));
            OK(sekv_zoom(context, plan));
        }
        if (when > 3) {
            OK(sekv_attend(context, 0, &q, NULL, &out));
        }
        sekv_context_free(context);
        sekv_plan_free(plan); /* gone with its context */
    }
    /* At once after work that its threads took part in. */
    for (int i = 0; i < 20; i++) {
        sekv_context *context = new_context(model, &params);
        sequence_log log = {.random = 21};
        CHECK(pass(context, &log, 64) < ROUNDING);
        free_log(&log);
        sekv_context_free(context);
    }
}

/* Inputs are the host's: it may free or overwrite them as soon as the call returns. */
static void inputs_are_not_kept(const sekv_model *model) {
    sekv_params *params = malloc(sizeof *params);
    int32_t *list = malloc(sizeof *list);
    CHECK(params != NULL && list != NULL);
    *params = exact_params();
    *list = 1;
    params->dense = SEKV_DENSE_LIST;
    params->dense_layers = list;
    params->n_dense_layers = 1;
    sekv_context *context = new_context(model, params);
    *list = 99;
    free(list);
    free(params);
    sequence_log log = {.random = 22};
    CHECK(pass(context, &log, 40) < ROUNDING);
    CHECK(pass(context, &log, 1) < ROUNDING);
    CHECK(statistics_of(context).n_dense_layers == 1);
    free_log(&log);
    sekv_context_free(context);
}

typedef struct heard {
    sekv_context *context;
    int n_lines;
    char last[512];
} heard;

static void listen(int32_t level, const char *text, void *user) {
    heard *ear = user;
    CHECK(level == SEKV_LOG_WARNING || level == SEKV_LOG_ERROR);
    CHECK(strlen(text) > 10 && strchr(text, '\n') == NULL);
    snprintf(ear->last, sizeof ear->last, "%s", text);
    ear->n_lines++;
    /* The context may be used from here. */
    CHECK(statistics_of(ear->context).struct_size == sizeof(sekv_statistics));
}

static void fallbacks_are_told(const sekv_model *model) {
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    heard ear = {context, 0, ""};
    OK(sekv_set_log_callback(context, listen, &ear));
    /* A layout that is chosen from keys alone. */
    float rows[16 * KV_HEADS * DIM] = {0};
    int32_t pos[16];
    for (int i = 0; i < 16; i++) {
        pos[i] = i;
    }
    sekv_view kv = packed(rows, KV_HEADS, 16);
    sekv_batch batch = {sizeof batch, 16, pos, NULL, NULL};
    OK(sekv_begin(context, &batch));
    for (int layer = 0; layer < LAYERS; layer++) {
        OK(sekv_prefill_ingest(context, layer, &kv, &kv));
    }
    OK(sekv_commit(context, NULL));
    CHECK(ear.n_lines == 1 && strstr(ear.last, "without having seen a query") != NULL);
    CHECK(statistics_of(context).layout_without_queries == 1);
    CHECK(ear.n_lines == 1); /* told once */
    OK(sekv_set_log_callback(context, NULL, NULL));
    sekv_context_free(context);
}

static void budgets(const sekv_model *model) {
    sekv_params params = exact_params();
    params.fast_budget_bytes = 0;
    sekv_context *context = new_context(model, &params);
    int32_t pos = 0;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    FAILS(SEKV_ERR_BUDGET, "budget is 0", sekv_begin(context, &batch));
    CHECK(statistics_of(context).n_tokens == 0);
    OK(sekv_set_fast_budget(context, 5000));
    int32_t many[64];
    for (int i = 0; i < 64; i++) {
        many[i] = i;
    }
    sekv_batch large = {sizeof large, 64, many, NULL, NULL};
    FAILS(SEKV_ERR_BUDGET, "budget is 5000", sekv_begin(context, &large));
    OK(sekv_set_fast_budget(context, UINT64_MAX));
    sequence_log log = {.random = 23};
    CHECK(pass(context, &log, 100) < ROUNDING);
    /* A budget that the next token crosses, and room again. */
    const sekv_statistics full = statistics_of(context);
    OK(sekv_set_fast_budget(context, 1000));
    pos = log.n;
    FAILS(SEKV_ERR_BUDGET, "1000", sekv_begin(context, &batch));
    CHECK(statistics_of(context).memory.fast_bytes == full.memory.fast_bytes);
    OK(sekv_set_fast_budget(context, UINT64_MAX));
    CHECK(pass(context, &log, 1) < ROUNDING);
    /* No fetches, then all of them. */
    OK(sekv_set_fetch_budget(context, 0));
    const sekv_statistics before = statistics_of(context);
    CHECK(pass(context, &log, 1) < 2.0);
    CHECK(statistics_of(context).fetched_bytes == before.fetched_bytes);
    OK(sekv_set_fetch_budget(context, -1));
    CHECK(pass(context, &log, 1) < ROUNDING);
    CHECK(statistics_of(context).fetched_max >= 96);
    free_log(&log);
    sekv_context_free(context);
}

/* What is said of sizes adds up, before and after. */
static void sizes_add_up(const sekv_model *model) {
    sekv_params params;
    OK(sekv_params_init(&params, sizeof params));
    params.layout_tokens = 64;
    params.window = 32;
    params.block_tokens = 16;
    params.dense = SEKV_DENSE_NONE;
    sekv_context *context = new_context(model, &params);
    sequence_log log = {.random = 24};
    pass(context, &log, 300);
    for (int i = 0; i < 20; i++) {
        pass(context, &log, 1);
    }
    const sekv_statistics all = statistics_of(context);
    const sekv_memory *memory = &all.memory;
    CHECK(memory->fast_bytes == memory->fast_resident_bytes + memory->fast_sketch_bytes +
                                    memory->fast_value_sketch_bytes + memory->fast_mean_bytes +
                                    memory->fast_layout_bytes + memory->fast_metadata_bytes);
    CHECK(memory->full_f16_bytes == UINT64_C(320) * LAYERS * KV_HEADS * 2 * DIM * 2);
    CHECK(all.n_tokens == 320 && all.n_resident_tokens + all.n_sealed_tokens == 320);
    CHECK(all.n_steps == 20 * LAYERS * KV_HEADS && all.n_passes == 21);
    CHECK(all.fetched_mean <= all.fetched_max && all.fetched_p99 <= all.fetched_max);
    CHECK(all.attend.count == 21 * LAYERS && all.attend.p50 > 0 && all.attend.p99 >= all.attend.p50 &&
          all.attend.max < 3600 && all.route.count > 0 && all.seal.count > 0);
    uint64_t spans = 0;
    for (int i = 0; i < 20; i++) {
        spans += all.span_lengths[i];
    }
    CHECK(spans == all.n_spans && spans > 0 && all.n_seal_failures == 0);

    sekv_memory estimate = {.struct_size = sizeof estimate};
    OK(sekv_estimate(model, &params, 320, &estimate));
    CHECK(estimate.full_f16_bytes == memory->full_f16_bytes);
    CHECK(estimate.fast_bytes > memory->fast_bytes * 3 / 4 && estimate.fast_bytes < memory->fast_bytes * 5 / 4);
    OK(sekv_estimate(model, &params, 0, &estimate));
    CHECK(estimate.full_f16_bytes == 0 && estimate.slow_bytes == 0);
    free_log(&log);
    sekv_context_free(context);
}

int main(void) {
    struct sigaction handlers[3], handlers_after[3];
    const int signals[] = {SIGSEGV, SIGPIPE, SIGINT};
    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], NULL, &handlers[i]);
    }
    const int rounding = fegetround();

    models_are_shared();
    sekv_model *model = small_model();
    contexts_end_at_any_time(model);
    inputs_are_not_kept(model);
    fallbacks_are_told(model);
    budgets(model);
    sizes_add_up(model);
    sekv_model_free(model);

    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], NULL, &handlers_after[i]);
        CHECK(handlers[i].sa_handler == handlers_after[i].sa_handler);
    }
    CHECK(fegetround() == rounding);
    CHECK(strcmp(setlocale(LC_ALL, NULL), "C") == 0);
    return 0;
}
