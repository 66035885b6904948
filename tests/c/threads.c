/* Threads: each its own context, or several in one, which is found out. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <time.h>

enum { THREADS = 4 };

static sekv_model *model;

static void *one_context_each(void *seed) {
    sekv_params params = exact_params();
    params.n_threads = 2;
    sekv_context *context = new_context(model, &params);
    sequence_log log = {.random = (uint64_t)(uintptr_t)seed};
    const int sizes[] = {30, 1, 1, 17, 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK(pass(context, &log, sizes[i]) < ROUNDING);
    }
    free_log(&log);
    /* Messages are a thread's own. */
    char what[32];
    snprintf(what, sizeof what, "sequence %d", 1000 + (int)(uintptr_t)seed);
    for (int i = 0; i < 100; i++) {
        FAILS(SEKV_ERR_SEQUENCE, what, sekv_seq_rm(context, 1000 + (int)(uintptr_t)seed, 0, -1));
    }
    sekv_context_free(context);
    return NULL;
}

static void several_contexts(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, one_context_each, (void *)(uintptr_t)(i + 1)) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/* A context that two threads use: one works, the other looks. */
typedef struct shared_context {
    sekv_context *context;
    pthread_mutex_t lock;
    int done;
    long n_busy, n_ok;
} shared_context;

static int is_done(shared_context *shared) {
    CHECK(pthread_mutex_lock(&shared->lock) == 0);
    const int done = shared->done;
    CHECK(pthread_mutex_unlock(&shared->lock) == 0);
    return done;
}

static void *look(void *argument) {
    shared_context *shared = argument;
    while (!is_done(shared)) {
        sekv_statistics statistics = {.struct_size = sizeof statistics};
        const sekv_status status = sekv_stats(shared->context, &statistics);
        CHECK(status == SEKV_OK || status == SEKV_ERR_BUSY);
        if (status == SEKV_ERR_BUSY) {
            CHECK(strstr(sekv_last_error(), "another thread") != NULL);
            CHECK(statistics.n_tokens == 0);
            shared->n_busy++;
        } else {
            shared->n_ok++;
        }
    }
    return NULL;
}

#define UNTIL_FREE(call)                                  \
    do {                                                  \
        sekv_status status;                               \
        while ((status = (call)) == SEKV_ERR_BUSY) {      \
            n_busy++;                                     \
        }                                                 \
        CHECK(status == SEKV_OK);                         \
    } while (0)

static void two_threads_in_one_context(void) {
    enum { TOKENS = 256 };
    sekv_params params = exact_params();
    params.n_threads = 1;
    shared_context shared = {new_context(model, &params), PTHREAD_MUTEX_INITIALIZER, 0, 0, 0};
    uint64_t random = 9;
    float *kv_rows = noisy(TOKENS * KV_HEADS * DIM, &random);
    float *q_rows = noisy(TOKENS * HEADS * DIM, &random);
    float *results = noisy(TOKENS * HEADS * DIM, &random);
    sekv_view kv = packed(kv_rows, KV_HEADS, TOKENS);
    sekv_view q = packed(q_rows, HEADS, TOKENS), out = packed(results, HEADS, TOKENS);
    int32_t positions[TOKENS];
    pthread_t looker;
    CHECK(pthread_create(&looker, NULL, look, &shared) == 0);
    long n_busy = 0;
    const time_t start = time(NULL);
    for (int round = 0; round < 8 || (n_busy == 0 && time(NULL) < start + 60); round++) {
        for (int t = 0; t < TOKENS; t++) {
            positions[t] = t;
        }
        sekv_batch batch = {sizeof batch, TOKENS, positions, NULL, NULL};
        UNTIL_FREE(sekv_begin(shared.context, &batch));
        for (int layer = 0; layer < LAYERS; layer++) {
            UNTIL_FREE(sekv_prefill_ingest(shared.context, layer, &kv, &kv));
            UNTIL_FREE(sekv_attend(shared.context, layer, &q, NULL, &out));
        }
        UNTIL_FREE(sekv_commit(shared.context, NULL));
        UNTIL_FREE(sekv_clear(shared.context));
    }
    CHECK(pthread_mutex_lock(&shared.lock) == 0);
    shared.done = 1;
    CHECK(pthread_mutex_unlock(&shared.lock) == 0);
    CHECK(pthread_join(looker, NULL) == 0);
    CHECK(n_busy + shared.n_busy > 0 && shared.n_ok > 0);

    /* Nothing came of it. */
    sequence_log log = {.random = 10};
    CHECK(pass(shared.context, &log, 20) < ROUNDING);
    free_log(&log);
    sekv_context_free(shared.context);
    free(kv_rows);
    free(q_rows);
    free(results);
}

static void *free_plan(void *plan) {
    sekv_plan_free(plan);
    return NULL;
}

static void plans_may_be_freed_anywhere(void) {
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    sekv_plan *plan = NULL;
    float rows[HEADS * DIM] = {0};
    sekv_view q = packed(rows, HEADS, 1);
    int32_t pos = 0;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    OK(sekv_begin(context, &batch));
    OK(sekv_route(context, 0, &q, &plan));
    pthread_t other;
    CHECK(pthread_create(&other, NULL, free_plan, plan) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    FAILS(SEKV_ERR_ORDER, "gone", sekv_zoom(context, plan));
    sekv_context_free(context);
}

/* A context may move from thread to thread. */
static void *go_on(void *argument) {
    sequence_log log = {.random = 11};
    CHECK(pass(argument, &log, 9) < ROUNDING);
    CHECK(pass(argument, &log, 1) < ROUNDING);
    free_log(&log);
    FAILS(SEKV_ERR_ORDER, "no pass", sekv_abort(argument));
    return NULL;
}

static void contexts_move(void) {
    sekv_params params = exact_params();
    params.n_threads = 3;
    sekv_context *context = new_context(model, &params);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, go_on, context) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    /* The other thread's message is the context's, not this thread's. */
    CHECK(strstr(sekv_context_last_error(context), "no pass") != NULL);
    sekv_context_free(context);
}

int main(void) {
    model = small_model();
    several_contexts();
    two_threads_in_one_context();
    plans_may_be_freed_anywhere();
    contexts_move();
    sekv_model_free(model);
    return 0;
}
