// llama.cpp's own attention of one layer, for the bench to call: GGML_OP_FLASH_ATTN_EXT over a
// cache laid out as llama.cpp lays it out, on its CPU backend with a threadpool of its own.
//
// Built by benches/build_ggml.sh, loaded with dlopen by benches/attention/llama.rs, which mirrors
// these declarations.

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Attention {
    ggml_backend_t        backend    = nullptr;
    ggml_threadpool_t     threadpool = nullptr;
    ggml_context        * context    = nullptr;
    ggml_backend_buffer_t keys       = nullptr;
    ggml_backend_buffer_t values     = nullptr;
    ggml_backend_buffer_t own        = nullptr;
    ggml_tensor         * q          = nullptr;
    ggml_tensor         * out        = nullptr;
    ggml_cgraph         * graph      = nullptr;

    ~Attention() {
        if (own) { ggml_backend_buffer_free(own); }
        if (keys) { ggml_backend_buffer_free(keys); }
        if (values) { ggml_backend_buffer_free(values); }
        if (context) { ggml_free(context); }
        if (backend) { ggml_backend_free(backend); }
        if (threadpool) { ggml_threadpool_free(threadpool); }
    }
};

ggml_type cache_type(int32_t type) {
    switch (type) {
        case 0:  return GGML_TYPE_F16;
        case 1:  return GGML_TYPE_Q8_0;
        default: return GGML_TYPE_Q4_0;
    }
}

// The host's memory, seen as flash attention wants it: [n_head_kv][n_kv][dim]. It lies as
// llama.cpp lays out its cache, [n_kv][n_head_kv][dim], or, with a capacity, head by head,
// [n_head_kv][capacity][dim].
ggml_tensor * cache_view(ggml_context * ctx, ggml_backend_buffer_t buffer, void * data,
                         ggml_type type, int64_t dim, int64_t n_head_kv, int64_t n_kv,
                         int64_t capacity) {
    if (capacity > 0) {
        ggml_tensor * cache = ggml_new_tensor_3d(ctx, type, dim, capacity, n_head_kv);
        ggml_backend_tensor_alloc(buffer, cache, data);
        return ggml_view_3d(ctx, cache, dim, n_kv, n_head_kv, cache->nb[1], cache->nb[2], 0);
    }
    ggml_tensor * cache = ggml_new_tensor_3d(ctx, type, dim, n_head_kv, n_kv);
    ggml_backend_tensor_alloc(buffer, cache, data);
    return ggml_permute(ctx, cache, 0, 2, 1, 3);
}

}  // namespace

extern "C" {

// Bytes of n elements in a cache type (0 f16, 1 q8_0, 2 q4_0).
size_t bench_ggml_bytes(int32_t type, int64_t n) {
    return ggml_row_size(cache_type(type), n);
}

// Alignment that the cache's memory must have.
size_t bench_ggml_alignment(void) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

// Writes n_rows rows of row_len elements in a cache type.
void bench_ggml_quantize(int32_t type, const float * src, void * dst, int64_t n_rows,
                         int64_t row_len) {
    ggml_quantize_chunk(cache_type(type), src, dst, 0, n_rows, row_len, nullptr);
}

// One layer's attention of the last n_query tokens of n_kv. keys and values are the caller's and
// stay its own; for capacity see cache_view. NULL on failure.
void * bench_ggml_new(int32_t n_threads, int64_t n_head, int64_t n_head_kv, int64_t dim,
                      int64_t n_kv, int64_t capacity, int64_t n_query, int32_t type, void * keys,
                      void * values) {
    Attention * a = new Attention;
    a->backend    = ggml_backend_cpu_init();
    ggml_threadpool_params pool = ggml_threadpool_params_default(n_threads);
    a->threadpool               = ggml_threadpool_new(&pool);
    ggml_init_params params     = {};
    params.mem_size             = 32 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc             = true;
    a->context                  = ggml_init(params);
    if (!a->backend || !a->threadpool || !a->context) {
        delete a;
        return nullptr;
    }
    ggml_backend_cpu_set_n_threads(a->backend, n_threads);
    ggml_backend_cpu_set_threadpool(a->backend, a->threadpool);

    const ggml_type kv_type = cache_type(type);
    const int64_t   n_cells = capacity > 0 ? capacity : n_kv;
    const size_t    bytes   = ggml_row_size(kv_type, dim * n_head_kv) * (size_t) n_cells;
    a->keys                 = ggml_backend_cpu_buffer_from_ptr(keys, bytes);
    a->values               = ggml_backend_cpu_buffer_from_ptr(values, bytes);
    ggml_tensor * k = cache_view(a->context, a->keys, keys, kv_type, dim, n_head_kv, n_kv, capacity);
    ggml_tensor * v = cache_view(a->context, a->values, values, kv_type, dim, n_head_kv, n_kv, capacity);

    // q comes as [token][head][dim] and is permuted, as llama.cpp does.
    a->q               = ggml_new_tensor_3d(a->context, GGML_TYPE_F32, dim, n_head, n_query);
    ggml_tensor * mask = ggml_new_tensor_2d(a->context, GGML_TYPE_F16, n_kv, n_query);
    ggml_tensor * q    = ggml_permute(a->context, a->q, 0, 2, 1, 3);
    const float scale  = 1.0f / std::sqrt((float) dim);
    a->out             = ggml_flash_attn_ext(a->context, q, k, v, mask, scale, 0.0f, 0.0f);
    a->graph           = ggml_new_graph(a->context);
    ggml_build_forward_expand(a->graph, a->out);

    // The other tensors (the cache's already have their place).
    a->own = ggml_backend_alloc_ctx_tensors(a->context, a->backend);
    if (!a->own) {
        delete a;
        return nullptr;
    }
    std::vector<ggml_fp16_t> row((size_t) n_kv);
    const ggml_fp16_t seen   = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    for (int64_t i = 0; i < n_query; i++) {
        for (int64_t j = 0; j < n_kv; j++) {
            row[(size_t) j] = j <= n_kv - n_query + i ? seen : hidden;
        }
        ggml_backend_tensor_set(mask, row.data(), (size_t) i * mask->nb[1], row.size() * 2);
    }
    return a;
}

// Sets the queries, [n_query][n_head][dim].
void bench_ggml_set_queries(void * attention, const float * q) {
    Attention * a = static_cast<Attention *>(attention);
    ggml_backend_tensor_set(a->q, q, 0, ggml_nbytes(a->q));
}

// Computes once; 0 on success.
int32_t bench_ggml_compute(void * attention) {
    Attention * a = static_cast<Attention *>(attention);
    return (int32_t) ggml_backend_graph_compute(a->backend, a->graph);
}

// The output, [n_query][n_head][dim].
void bench_ggml_output(void * attention, float * out) {
    Attention * a = static_cast<Attention *>(attention);
    ggml_backend_tensor_get(a->out, out, 0, ggml_nbytes(a->out));
}

// Its workers poll between graphs, on the cores that the rivals want: they rest in between.
void bench_ggml_rest(void * attention, int32_t rest) {
    Attention * a = static_cast<Attention *>(attention);
    if (rest) {
        ggml_threadpool_pause(a->threadpool);
    } else {
        ggml_threadpool_resume(a->threadpool);
    }
}

void bench_ggml_free(void * attention) { delete static_cast<Attention *>(attention); }

}  // extern "C"
