/* A forked child has none of its parent's threads: its copy of a context says so, and neither
 * process hangs. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static sekv_model *model;

static void child(sekv_context *context, sekv_plan *plan) {
    int32_t pos = 100;
    float rows[HEADS * DIM] = {0};
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    sekv_view view = packed(rows, HEADS, 1);
    sekv_statistics statistics = {.struct_size = sizeof statistics};
    FAILS(SEKV_ERR_BUSY, "fork", sekv_begin(context, &batch));
    FAILS(SEKV_ERR_BUSY, "fork", sekv_attend(context, 0, &view, NULL, &view));
    FAILS(SEKV_ERR_BUSY, "fork", sekv_abort(context));
    FAILS(SEKV_ERR_BUSY, "fork", sekv_stats(context, &statistics));
    FAILS(SEKV_ERR_BUSY, "fork", sekv_seq_pos_max(context, 0, &pos));
    CHECK(strstr(sekv_context_last_error(context), "fork") != NULL);
    sekv_plan_free(plan);
    sekv_context_free(context);

    /* A context of its own works, on the same model. */
    sekv_params params = exact_params();
    params.n_threads = 2;
    sekv_context *own = new_context(model, &params);
    sequence_log log = {.random = 12};
    CHECK(pass(own, &log, 20) < ROUNDING);
    CHECK(pass(own, &log, 1) < ROUNDING);
    sekv_plan *own_plan = NULL;
    pos = 100;
    OK(sekv_begin(own, &batch));
    OK(sekv_route(own, 0, &view, &own_plan));
    OK(sekv_zoom(own, own_plan));
    sekv_plan_free(own_plan);
    sekv_context_free(own);
    sekv_model_free(model);
    free_log(&log);
    _exit(0);
}

int main(void) {
    model = small_model();
    sekv_params params = exact_params();
    params.n_threads = 3;
    sekv_context *context = new_context(model, &params);
    sequence_log log = {.random = 13};
    CHECK(pass(context, &log, 40) < ROUNDING);

    int32_t pos = log.n;
    sekv_batch batch = {sizeof batch, 1, &pos, NULL, NULL};
    float rows[HEADS * DIM] = {0};
    sekv_view q = packed(rows, HEADS, 1);
    sekv_plan *plan = NULL;
    OK(sekv_begin(context, &batch));
    OK(sekv_route(context, 0, &q, &plan));
    const pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        alarm(60); /* a child that hangs is ended, and its parent sees that */
        child(context, plan);
    }
    int status = 0;
    CHECK(waitpid(process, &status, 0) == process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);

    /* The parent's pass, plan and context are as they were. */
    OK(sekv_zoom(context, plan));
    OK(sekv_abort(context));
    CHECK(pass(context, &log, 1) < ROUNDING);
    free_log(&log);
    sekv_context_free(context);
    sekv_model_free(model);
    return 0;
}
