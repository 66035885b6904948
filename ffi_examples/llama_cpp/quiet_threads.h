// A llama.cpp threadpool that sleeps between sub-graphs.
//
// The hook stops llama.cpp's graph once a layer. By default its workers spin through such a stop,
// on the very cores that libsekv's workers want; with polling off they sleep.
#pragma once

#include "ggml-cpu.h"
#include "llama.h"

namespace sekv_llama {

class quiet_threads {
public:
    quiet_threads() = default;
    ~quiet_threads();
    quiet_threads(const quiet_threads &) = delete;
    quiet_threads & operator=(const quiet_threads &) = delete;

    // False when the pool could not be made; llama.cpp then keeps its own threads. The context must
    // be freed, or detached, before this object goes.
    bool attach(llama_context * context, int32_t n_threads);

private:
    ggml_threadpool * pool_ = nullptr;
};

}  // namespace sekv_llama
