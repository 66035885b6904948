/* Calls out of order, and plans: an error that says so, and the pass goes on. */
#include "check.h"

static sekv_model *model;
static sekv_context *context;
static float kv_rows[KV_HEADS * DIM], q_rows[HEADS * DIM], other_rows[HEADS * DIM], results[HEADS * DIM];
static sekv_view kv, q, other_q, out;

static void begin(int32_t pos) {
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    OK(sekv_begin(context, &batch));
}

static void without_a_pass(void) {
    sekv_plan *plan = NULL;
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_prefill_ingest(context, 0, &kv, &kv));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_observe(context, 0, &q));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_route(context, 0, &q, &plan));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_attend(context, 0, &q, NULL, &out));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_commit(context, NULL));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_abort(context));
    CHECK(plan == NULL);
    CHECK(strstr(sekv_context_last_error(context), "no pass") != NULL);
}

static void within_a_pass(void) {
    int32_t pos = 0;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    float nats = 1;
    begin(0);
    FAILS(SEKV_ERR_ORDER, "a pass is running", sekv_begin(context, &batch));
    FAILS(SEKV_ERR_ORDER, "layer 0", sekv_attend(context, 0, &q, NULL, &out));
    FAILS(SEKV_ERR_ORDER, "layer 0", sekv_prefill_ingest(context, 1, &kv, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "layer 2", sekv_prefill_ingest(context, LAYERS, &kv, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "layer is -1", sekv_prefill_ingest(context, -1, &kv, &kv));
    FAILS(SEKV_ERR_ARGUMENT, "layer 2", sekv_attend(context, LAYERS, &q, NULL, &out));
    FAILS(SEKV_ERR_ARGUMENT, "layer", sekv_observe(context, INT32_MAX, &q));
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    FAILS(SEKV_ERR_ORDER, "already", sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_attend(context, 0, &q, NULL, &out));
    FAILS(SEKV_ERR_ORDER, "already", sekv_attend(context, 0, &q, NULL, &out));
    FAILS(SEKV_ERR_ORDER, "layer 1", sekv_commit(context, NULL));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_seq_rm(context, 0, 0, -1));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_seq_cp(context, 0, 1, 0, -1));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_seq_keep(context, 0));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_seq_add(context, 0, 0, -1, 1));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_seq_div(context, 0, 0, -1, 1));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_clear(context));
    FAILS(SEKV_ERR_ORDER, "during a pass", sekv_surprisal(context, 0, 0, &nats, 1));
    /* A layer need not be attended. */
    OK(sekv_prefill_ingest(context, 1, &kv, &kv));
    OK(sekv_commit(context, NULL));
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_abort(context));
}

static void an_aborted_pass_never_was(void) {
    int32_t last = 7;
    begin(1);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_abort(context));
    OK(sekv_seq_pos_max(context, 0, &last));
    CHECK(last == 0 && statistics_of(context).n_tokens == 1);
}

static void attend_with(const sekv_plan *plan) {
    sekv_attend_opts opts = {sizeof opts, plan};
    OK(sekv_attend(context, 0, &q, &opts, &out));
}

static void plans_are_used_or_ignored(void) {
    sekv_plan *plan = NULL;
    const sekv_statistics before = statistics_of(context);
    /* From the same queries after ingest: used. */
    begin(1);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_route(context, 0, &q, &plan));
    OK(sekv_zoom(context, plan));
    OK(sekv_zoom(context, plan));
    attend_with(plan);
    OK(sekv_abort(context));
    CHECK(statistics_of(context).n_plans_used == before.n_plans_used + 1);
    /* Before ingest, from an estimate: prefetches only, and the result is the same. */
    float used[HEADS * DIM];
    memcpy(used, results, sizeof used);
    begin(1);
    OK(sekv_route(context, 0, &other_q, &plan));
    OK(sekv_zoom(context, plan));
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    attend_with(plan);
    OK(sekv_abort(context));
    CHECK(statistics_of(context).n_plans_ignored == before.n_plans_ignored + 1);
    CHECK(memcmp(used, results, sizeof used) == 0);
}

static void plans_that_are_gone_are_refused(void) {
    sekv_plan *plan = NULL, *ended = NULL, *second = NULL;
    begin(1);
    OK(sekv_prefill_ingest(context, 0, &kv, &kv));
    OK(sekv_route(context, 0, &q, &plan));
    sekv_plan_free(plan);
    sekv_plan_free(plan);
    FAILS(SEKV_ERR_ORDER, "gone", sekv_zoom(context, plan));
    sekv_attend_opts opts = {sizeof opts, plan};
    FAILS(SEKV_ERR_ORDER, "gone", sekv_attend(context, 0, &q, &opts, &out));
    OK(sekv_route(context, 0, &q, &ended));
    OK(sekv_abort(context));
    FAILS(SEKV_ERR_ORDER, "gone", sekv_zoom(context, ended));
    sekv_plan_free(ended);

    /* Another context's, and what never was a plan. */
    sekv_params params = exact_params();
    sekv_context *first = context;
    context = new_context(model, &params);
    begin(0);
    OK(sekv_route(context, 0, &q, &second));
    FAILS(SEKV_ERR_ARGUMENT, "another context", sekv_zoom(first, second));
    sekv_context_free(context);
    context = first;
    FAILS(SEKV_ERR_ORDER, "gone", sekv_zoom(context, second));
    sekv_plan_free(second);
    FAILS(SEKV_ERR_ORDER, "gone", sekv_zoom(context, (const sekv_plan *)(const void *)&params));
    sekv_plan_free((sekv_plan *)(void *)&params);
}

/* A route that fails leaves its output alone. */
static void failures_leave_outputs_alone(void) {
    sekv_plan *const mark = (sekv_plan *)(uintptr_t)64;
    sekv_plan *plan = mark;
    begin(1);
    FAILS(SEKV_ERR_SHAPE, "q is", sekv_route(context, 0, &kv, &plan));
    OK(sekv_abort(context));
    CHECK(plan == mark);
    int32_t last = 64;
    FAILS(SEKV_ERR_SEQUENCE, "sequence 99", sekv_seq_pos_max(context, 99, &last));
    CHECK(last == 64);
}

int main(void) {
    uint64_t random = 3;
    for (int i = 0; i < HEADS * DIM; i++) {
        kv_rows[i % (KV_HEADS * DIM)] = noise(&random);
        q_rows[i] = noise(&random);
        other_rows[i] = noise(&random);
    }
    kv = packed(kv_rows, KV_HEADS, 1);
    q = packed(q_rows, HEADS, 1);
    other_q = packed(other_rows, HEADS, 1);
    out = packed(results, HEADS, 1);
    model = small_model();
    sekv_params params = exact_params();
    context = new_context(model, &params);
    without_a_pass();
    within_a_pass();
    an_aborted_pass_never_was();
    plans_are_used_or_ignored();
    plans_that_are_gone_are_refused();
    failures_leave_outputs_alone();
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
