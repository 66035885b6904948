/* Saved state through the C ABI: files, callbacks, and what they refuse. */
#include "check.h"

#include <sys/resource.h>
#include <unistd.h>

static sekv_model *model;
static char path[4096];

/* A state in memory. */
typedef struct memory {
    unsigned char *bytes;
    size_t n, at;
    int fails_at; /* calls until it fails; negative: never */
} memory;

static int32_t put(const void *data, size_t size, void *user) {
    memory *to = user;
    if (to->fails_at >= 0 && to->fails_at-- == 0) {
        return 7;
    }
    to->bytes = realloc(to->bytes, to->n + size + 1);
    CHECK(to->bytes != NULL);
    memcpy(to->bytes + to->n, data, size);
    to->n += size;
    return 0;
}

static int32_t get(void *data, size_t size, void *user) {
    memory *from = user;
    if ((from->fails_at >= 0 && from->fails_at-- == 0) || size > from->n - from->at) {
        return -3;
    }
    memcpy(data, from->bytes + from->at, size);
    from->at += size;
    return 0;
}

static void files(void) {
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params);
    sequence_log log = {.random = 1};
    CHECK(pass(context, &log, 50) < ROUNDING);
    OK(sekv_state_save(context, 0, path));
    uint64_t size = 0;
    OK(sekv_state_size(context, 0, &size));
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0 && (uint64_t)ftell(file) == size);
    fclose(file);
    sekv_context_free(context);

    context = new_context(model, &params);
    OK(sekv_state_load(context, 0, path));
    CHECK(pass(context, &log, 1) < ROUNDING);
    CHECK(pass(context, &log, 30) < ROUNDING);
    FAILS(SEKV_ERR_IO, "no-such", sekv_state_load(context, 0, "/no-such/state"));
    FAILS(SEKV_ERR_IO, "no-such", sekv_state_save(context, 0, "/no-such/state"));
    FAILS(SEKV_ERR_ARGUMENT, "path", sekv_state_load(context, 0, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "path", sekv_state_save(context, 0, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "path", sekv_state_save(context, 0, ""));
    FAILS(SEKV_ERR_ARGUMENT, "out", sekv_state_size(context, 0, NULL));
    FAILS(SEKV_ERR_SEQUENCE, "99", sekv_state_save(context, 99, path));
    FAILS(SEKV_ERR_SEQUENCE, "-2", sekv_state_load(context, -2, path));
    FAILS(SEKV_ERR_ARGUMENT, "context", sekv_state_load(NULL, 0, path));
    CHECK(pass(context, &log, 1) < ROUNDING);
    sekv_context_free(context);
    free_log(&log);
}

static void callbacks(void) {
    sekv_params params = exact_params();
    sekv_context *context = new_context(model, &params), *other = new_context(model, &params);
    sequence_log log = {.random = 2};
    CHECK(pass(context, &log, 50) < ROUNDING);
    memory state = {.fails_at = -1};
    OK(sekv_state_save_to(context, 0, put, &state));
    OK(sekv_state_load_from(other, 0, get, &state));
    CHECK(state.at == state.n);
    CHECK(pass(other, &log, 20) < ROUNDING);
    for (int calls = 0; calls < 5; calls++) {
        memory broken = {.fails_at = calls};
        FAILS(SEKV_ERR_IO, "returned 7", sekv_state_save_to(context, 0, put, &broken));
        free(broken.bytes);
        state.at = 0;
        state.fails_at = calls;
        FAILS(SEKV_ERR_IO, "returned -3", sekv_state_load_from(other, 0, get, &state));
    }
    FAILS(SEKV_ERR_ARGUMENT, "write", sekv_state_save_to(context, 0, NULL, NULL));
    FAILS(SEKV_ERR_ARGUMENT, "read", sekv_state_load_from(context, 0, NULL, NULL));
    CHECK(pass(other, &log, 1) < ROUNDING);
    /* A damaged byte. */
    state.at = 0;
    state.fails_at = -1;
    state.bytes[state.n / 2] ^= 4;
    FAILS(SEKV_ERR_FORMAT, "damaged", sekv_state_load_from(other, 0, get, &state));
    CHECK(pass(other, &log, 1) < ROUNDING);
    free(state.bytes);
    sekv_context_free(context);
    sekv_context_free(other);
    free_log(&log);
}

typedef struct told {
    int n;
    char text[512];
} told;

static void tell(int32_t level, const char *text, void *user) {
    told *log = user;
    CHECK(level == SEKV_LOG_ERROR || level == SEKV_LOG_WARNING);
    log->n++;
    snprintf(log->text, sizeof log->text, "%s", text);
}

/* A full disk, as a limit on the size of files: the signal must not come. */
static void full_disks(void) {
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = '\0';
    for (int io = SEKV_BASIS_MMAP; io <= SEKV_BASIS_PREAD; io++) {
        sekv_params params = exact_params();
        params.basis_folder = folder;
        params.basis_io = io;
        sekv_context *context = new_context(model, &params);
        told log = {.n = 0};
        OK(sekv_set_log_callback(context, tell, &log));
        sequence_log rows = {.random = 3};
        CHECK(pass(context, &rows, 100) < ROUNDING);
        sekv_statistics before = statistics_of(context);
        CHECK(before.memory.slow_file_bytes == before.memory.slow_bytes && before.memory.slow_bytes > 0);
        OK(sekv_state_save(context, 0, path));

        struct rlimit old, small = {.rlim_cur = 300 << 10};
        CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
        small.rlim_max = old.rlim_max;
        CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
        for (int i = 0; i < 8; i++) {
            CHECK(pass(context, &rows, 100) < ROUNDING);
        }
        CHECK(log.n == 1 && strstr(log.text, "goes on in memory") != NULL);
        sekv_statistics after = statistics_of(context);
        CHECK(after.memory.slow_file_bytes > 0);
        CHECK(after.memory.slow_file_bytes < after.memory.slow_bytes);
        CHECK(after.n_seal_failures == 0);
        FAILS(SEKV_ERR_IO, "nothing was written", sekv_state_save(context, 0, path));
        CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);

        /* The old file is as it was. */
        sekv_context *other = new_context(model, &params);
        OK(sekv_state_load(other, 0, path));
        CHECK(statistics_of(other).n_tokens == 100);
        sekv_context_free(other);
        OK(sekv_state_save(context, 0, path));
        CHECK(pass(context, &rows, 1) < ROUNDING);
        sekv_context_free(context);
        free_log(&rows);
    }
}

/* Several contexts in one folder never meet. */
static void one_folder(void) {
    sekv_params params = exact_params();
    params.basis_folder = ".";
    params.basis_limit_bytes = 1 << 20;
    sekv_context *one = new_context(model, &params), *other = new_context(model, &params);
    sequence_log rows = {.random = 4}, others = {.random = 5};
    for (int i = 0; i < 6; i++) {
        CHECK(pass(one, &rows, 40) < ROUNDING);
        CHECK(pass(other, &others, 40) < ROUNDING);
    }
    sekv_context_free(one);
    CHECK(pass(other, &others, 40) < ROUNDING);
    sekv_context_free(other);
    free_log(&rows);
    free_log(&others);

    sekv_context *none = NULL;
    params.basis_folder = "/no-such-folder";
    FAILS(SEKV_ERR_IO, "no-such-folder", sekv_init(model, &params, &none));
    params.basis_folder = "";
    FAILS(SEKV_ERR_ARGUMENT, "basis_folder", sekv_init(model, &params, &none));
    params.basis_folder = ".";
    params.basis_io = 2;
    FAILS(SEKV_ERR_ARGUMENT, "basis_io", sekv_init(model, &params, &none));
    params.basis_io = 0;
    params.reserved0 = 1;
    FAILS(SEKV_ERR_ARGUMENT, "reserved0", sekv_init(model, &params, &none));
    CHECK(none == NULL);
}

int main(int n, char **arguments) {
    /* Beside the program. */
    CHECK(n > 0 && strrchr(arguments[0], '/') != NULL);
    snprintf(path, sizeof path, "%s.saved", arguments[0]);
    model = small_model();
    files();
    callbacks();
    full_disks();
    one_folder();
    sekv_model_free(model);
    CHECK(remove(path) == 0);
    return 0;
}
