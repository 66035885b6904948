#include "quiet_threads.h"

namespace sekv_llama {

bool quiet_threads::attach(llama_context * context, int32_t n_threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll = 0;
    pool_ = ggml_threadpool_new(&params);
    if (pool_ == nullptr) {
        return false;
    }
    llama_attach_threadpool(context, pool_, pool_);
    return true;
}

quiet_threads::~quiet_threads() {
    if (pool_ != nullptr) {
        ggml_threadpool_free(pool_);
    }
}

}  // namespace sekv_llama
