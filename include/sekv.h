/*
 * libsekv: a resolution-adaptive KV cache with hierarchical semantic memory.
 *
 * A pass of a model over some tokens is sekv_begin, then for each layer sekv_prefill_ingest and
 * sekv_attend, then sekv_commit. ffi_examples/c has the smallest complete program.
 *
 * Every function that can fail returns a sekv_status, 0 (SEKV_OK) for success. After a failure the
 * outputs and the state are as they were before the call, and sekv_last_error() has one sentence
 * that says what was wrong, what was found and what was expected.
 *
 * Thread safety
 *   - A sekv_model never changes: any number of threads and contexts may share it.
 *   - A sekv_context serves one thread at a time, whichever; functions that take it as const are no
 *     exception. A second thread inside gets SEKV_ERR_BUSY, always, and so does a forked child of
 *     the process that made the context. Different contexts are independent.
 *   - A log callback runs on the thread that made the call.
 *
 * Aliasing
 *   - Inputs of one call may overlap each other; an output overlaps nothing else of its call.
 *   - A pointer to const is read only, a pointer to non-const is written. sekv_view is one struct
 *     for both: the parameter's description says which it is.
 *
 * Ownership
 *   - The host owns what it passes: views, batches, arrays, texts and params are used during the
 *     call only, and are never kept or freed.
 *   - What comes through an out parameter of sekv_model, sekv_context or sekv_plan is the host's to
 *     free, with the function of its name; each of them takes NULL. A context keeps what it needs
 *     of its model. Plans also end with their pass or context; freeing one afterwards is harmless.
 *   - Texts that are returned are the library's.
 *
 * Structs that begin with struct_size: fill them with their init function, or set it to sizeof.
 * Older, smaller structs are accepted, with defaults for what they lack; in larger ones, bytes
 * beyond what the library knows must be zero.
 */


#ifndef SEKV_H
#define SEKV_H

#include <stddef.h>
#include <stdint.h>

/**
 * What a status means. The numbers never change; new ones may come in the gaps.
 */
typedef enum sekv_status_code {
  SEKV_OK = 0,
  /**
   * NULL, a number out of its range, a struct size that nobody knows.
   */
  SEKV_ERR_ARGUMENT = 10,
  /**
   * A view whose shape, stride or element type does not fit the model or the batch.
   */
  SEKV_ERR_SHAPE = 20,
  /**
   * A number that is not finite or beyond 65,504: the message names layer, head and token.
   */
  SEKV_ERR_VALUE = 30,
  /**
   * A duplicate, negative or decreasing position.
   */
  SEKV_ERR_POSITION = 40,
  /**
   * A sequence id outside 0 to n_seq_max - 1, or missing, or of an empty sequence.
   */
  SEKV_ERR_SEQUENCE = 50,
  /**
   * Calls out of order.
   */
  SEKV_ERR_ORDER = 60,
  /**
   * Another thread is inside this context, or the process is a fork of the one that made it.
   */
  SEKV_ERR_BUSY = 70,
  /**
   * What must stay on the fast tier does not fit its budget: the message has both in bytes.
   */
  SEKV_ERR_BUDGET = 80,
  /**
   * An allocation failed, or a thread could not be started.
   */
  SEKV_ERR_MEMORY = 90,
  /**
   * The operating system refused to read or write.
   */
  SEKV_ERR_IO = 100,
  /**
   * A file is not what it should be.
   */
  SEKV_ERR_FORMAT = 110,
  /**
   * A model or a request that cannot be served: the message names what.
   */
  SEKV_ERR_UNSUPPORTED = 120,
  /**
   * A device failed.
   */
  SEKV_ERR_DEVICE = 130,
  /**
   * A fault of the library. The context can only be freed.
   */
  SEKV_ERR_INTERNAL = 140,
} sekv_status_code;

/**
 * Element types.
 */
typedef enum sekv_dtype {
  SEKV_F32 = 0,
  SEKV_F16 = 1,
  SEKV_BF16 = 2,
} sekv_dtype;

/**
 * Where a view's memory is.
 */
typedef enum sekv_memory_kind {
  SEKV_MEMORY_HOST = 0,
  /**
   * Device memory. SEKV_ERR_UNSUPPORTED where the library was built without a device backend.
   */
  SEKV_MEMORY_CUDA = 1,
} sekv_memory_kind;

/**
 * Which dimensions RoPE rotates together.
 */
typedef enum sekv_rope_kind {
  SEKV_ROPE_NONE = 0,
  /**
   * Neighbours: (2i, 2i + 1).
   */
  SEKV_ROPE_NORM = 1,
  /**
   * Halves: (i, i + n_rot / 2).
   */
  SEKV_ROPE_NEOX = 2,
} sekv_rope_kind;

/**
 * How queries find their tokens.
 */
typedef enum sekv_routing {
  /**
   * Every token is scored from a sketch; those that matter are read exactly.
   */
  SEKV_ROUTING_LADDER = 0,
  /**
   * The published method: spans cut by surprisal, gates, low-rank bases.
   */
  SEKV_ROUTING_PAPER = 1,
} sekv_routing;

/**
 * How a pass of more than 16 tokens of a sequence attends.
 */
typedef enum sekv_prefill {
  /**
   * Over every token, read back from the slow tier.
   */
  SEKV_PREFILL_EXACT = 0,
  /**
   * Each query through the routing, as in decoding.
   */
  SEKV_PREFILL_LADDER = 1,
} sekv_prefill;

/**
 * How much of a key the sketch keeps, of d dimensions.
 */
typedef enum sekv_sketch {
  /**
   * STANDARD below 96 dimensions, else COMPACT.
   */
  SEKV_SKETCH_AUTO = 0,
  /**
   * d/8 at 4 bits, d/4 at 2.
   */
  SEKV_SKETCH_COMPACT = 1,
  /**
   * d/4 at 4 bits, d/4 at 2.
   */
  SEKV_SKETCH_STANDARD = 2,
  /**
   * d/2 at 4 bits.
   */
  SEKV_SKETCH_HIGH = 3,
  /**
   * All as f32, for tests.
   */
  SEKV_SKETCH_RAW = 4,
} sekv_sketch;

/**
 * How rows are stored.
 */
typedef enum sekv_codec {
  SEKV_CODEC_F32 = 0,
  SEKV_CODEC_F16 = 1,
  /**
   * 8 bits an element and an f16 scale for each 16 of a row.
   */
  SEKV_CODEC_INT8 = 2,
  /**
   * A span's truncated SVD, its factors as f16. For codec_basis, routing PAPER only.
   */
  SEKV_CODEC_LOW_RANK_F16 = 3,
  /**
   * The same, its factors as int8.
   */
  SEKV_CODEC_LOW_RANK_INT8 = 4,
  /**
   * The same, its factors as f32.
   */
  SEKV_CODEC_LOW_RANK_F32 = 5,
} sekv_codec;

/**
 * Which layers keep all their tokens on the fast tier.
 */
typedef enum sekv_dense {
  /**
   * Those whose attention is diffuse, at most one in 16.
   */
  SEKV_DENSE_RULE = 0,
  /**
   * Those in dense_layers.
   */
  SEKV_DENSE_LIST = 1,
  SEKV_DENSE_NONE = 2,
} sekv_dense;

/**
 * How basis files are read and written.
 */
typedef enum sekv_basis_io {
  /**
   * Through memory maps. A medium that fails while a row is fetched is the system's SIGBUS.
   */
  SEKV_BASIS_MMAP = 0,
  /**
   * By reads and writes: slower, and such a failure is SEKV_ERR_IO.
   */
  SEKV_BASIS_PREAD = 1,
} sekv_basis_io;

/**
 * How much a log line matters.
 */
typedef enum sekv_log_level {
  SEKV_LOG_INFO = 1,
  /**
   * A fallback was taken.
   */
  SEKV_LOG_WARNING = 2,
  /**
   * Work failed without failing a call, such as sealing; the cache goes on.
   */
  SEKV_LOG_ERROR = 3,
} sekv_log_level;

/**
 * Where a context's surprisal came from.
 */
typedef enum sekv_surprisal_source {
  /**
   * No token has any.
   */
  SEKV_SURPRISAL_NONE = 0,
  /**
   * The host gave it, for n_surprisal_tokens tokens.
   */
  SEKV_SURPRISAL_HOST = 1,
} sekv_surprisal_source;

/**
 * The KV cache of some sequences of one model. One thread at a time.
 */
typedef struct sekv_context sekv_context;

/**
 * A model: the shape of its attention, and what was trained for it. Immutable.
 */
typedef struct sekv_model sekv_model;

/**
 * What a route decided. Belongs to its context and to the pass it was made in.
 */
typedef struct sekv_plan sekv_plan;

/**
 * 0 (SEKV_OK) or one of `enum sekv_status_code`.
 */
typedef int32_t sekv_status;

/**
 * A model described by its host. The arrays and texts are the host's and are read during the
 * call only.
 */
typedef struct sekv_model_params {
  /**
   * sizeof(sekv_model_params).
   */
  size_t struct_size;
  /**
   * 1 to 1,024.
   */
  int32_t n_layer;
  /**
   * Query heads, 1 to 1,024.
   */
  int32_t n_head;
  /**
   * KV heads, a divisor of n_head; 0: n_head.
   */
  int32_t n_head_kv;
  /**
   * Elements of a key and a query, 1 to 1,024.
   */
  int32_t head_dim_k;
  /**
   * Elements of a value; 0: head_dim_k.
   */
  int32_t head_dim_v;
  /**
   * enum sekv_rope_kind.
   */
  int32_t rope_kind;
  /**
   * Dimensions that RoPE rotates; 0: head_dim_k.
   */
  int32_t n_rot;
  /**
   * Tokens the model was trained with; 0: unknown.
   */
  int32_t n_ctx_train;
  /**
   * 0: 10,000.
   */
  float rope_freq_base;
  /**
   * What every frequency is multiplied by; 0: 1.
   */
  float rope_freq_scale;
  /**
   * What a score is multiplied by; 0: 1 / sqrt(head_dim_k).
   */
  float attention_scale;
  /**
   * 0.
   */
  int32_t reserved0;
  /**
   * [n_layer], instead of n_head; or NULL.
   */
  const int32_t *n_head_per_layer;
  /**
   * [n_layer], instead of n_head_kv; or NULL.
   */
  const int32_t *n_head_kv_per_layer;
  /**
   * [n_rot / 2], what each frequency is divided by; or NULL.
   */
  const float *rope_freq_factors;
  /**
   * GGUF file of what was trained for routing; or NULL.
   */
  const char *sidecar_path;
  /**
   * The host's own identity of geometry and weights, which saved states are matched by; all
   * zero: none.
   */
  uint8_t fingerprint[32];
} sekv_model_params;

/**
 * What a host chooses for a context. The defaults are the measured best; small extremes (one
 * token a block, no window, no sinks) are legal.
 */
typedef struct sekv_params {
  /**
   * sizeof(sekv_params).
   */
  size_t struct_size;
  /**
   * Sequences, 1 to 4,096. Default 16.
   */
  int32_t n_seq_max;
  /**
   * Tokens of a batch at the most, 1 to 1,048,576. Default 2048.
   */
  int32_t n_batch_max;
  /**
   * Threads, the calling one included; 0: one for each core. Default 0.
   */
  int32_t n_threads;
  /**
   * enum sekv_routing. Default SEKV_ROUTING_LADDER.
   */
  int32_t routing;
  /**
   * enum sekv_prefill. Default SEKV_PREFILL_EXACT.
   */
  int32_t prefill;
  /**
   * The first tokens of a sequence that stay resident. Default 4.
   */
  int32_t n_sinks;
  /**
   * The last tokens that stay resident. Default 128.
   */
  int32_t window;
  /**
   * Tokens that are sealed together, 1 to 1,024. Default 64.
   */
  int32_t block_tokens;
  /**
   * Tokens of a sequence at which its sketch's layout is chosen; before, nothing is sealed.
   * Default 1024.
   */
  int32_t layout_tokens;
  /**
   * enum sekv_sketch. Default SEKV_SKETCH_AUTO.
   */
  int32_t sketch;
  /**
   * 1: values have a sketch too; 0: not. Default 1.
   */
  int32_t value_sketch;
  /**
   * enum sekv_codec of sinks, window and dense layers. Default SEKV_CODEC_INT8.
   */
  int32_t codec_resident;
  /**
   * enum sekv_codec of sealed tokens. Default SEKV_CODEC_INT8.
   */
  int32_t codec_basis;
  /**
   * enum sekv_codec of coarse rows. Default SEKV_CODEC_INT8.
   */
  int32_t codec_mean;
  /**
   * enum sekv_dense. Default SEKV_DENSE_RULE.
   */
  int32_t dense;
  /**
   * Length of dense_layers. Default 0.
   */
  int32_t n_dense_layers;
  /**
   * [n_dense_layers] for SEKV_DENSE_LIST; else not read. Read during the call only.
   */
  const int32_t *dense_layers;
  /**
   * Attention mass on tokens of small share above which a layer is diffuse. Default 0.5.
   */
  float dense_threshold;
  /**
   * A token is read exactly where its share of the attention exceeds this (epsilon).
   */
  float share_threshold;
  /**
   * Tokens of a sequence at which share_threshold holds as it is; it scales as the square root
   * of this over their number. 0: it always holds as it is. Default 4096.
   */
  int32_t share_reference;
  /**
   * Tokens whose share exceeds this fraction of epsilon add their value sketch; beyond twice
   * share_reference tokens, of epsilon at that length. Default 0.1.
   */
  float middle_fraction;
  /**
   * Tokens that a step and KV head may read exactly; 0: none; negative: no limit. Default -1.
   */
  int64_t fetch_budget;
  /**
   * Bytes that the fast tier may take; UINT64_MAX: no limit. Default UINT64_MAX.
   */
  uint64_t fast_budget_bytes;
  /**
   * The same as a fraction of a full f16 cache of the same tokens; negative: no limit.
   * Default -1. At most one of both may be a limit.
   */
  float fast_budget_fraction;
  /**
   * Anchors are tokens whose surprisal exceeds mean + alpha * deviation. Default 1.
   */
  float surprisal_alpha;
  /**
   * Spans shorter than this stay whole (l_min). Default 16.
   */
  int32_t span_min;
  /**
   * Longer spans are split (l_max). Default 512.
   */
  int32_t span_max;
  /**
   * Largest rank of a low-rank basis, 1 to 1,024. Default 32.
   */
  int32_t r_max;
  /**
   * Relative error at which a basis may stop below r_max; 0: never. Default 0.
   */
  float low_rank_error;
  /**
   * Tokens that a sequence is expected to reach; 0: unknown. It only reserves memory.
   */
  int64_t n_tokens_hint;
  uint64_t seed;
  /**
   * Folder for the basis files, in which the slow tier then lies: unnamed files that end with
   * the context. Read during the call only. NULL: the slow tier lies in anonymous memory.
   * Default NULL.
   */
  const char *basis_folder;
  /**
   * Bytes that the basis files may take together; UINT64_MAX: no limit. Beyond it, or when the
   * disk is full, the slow tier goes on in anonymous memory, and a log line says so. Default
   * UINT64_MAX.
   */
  uint64_t basis_limit_bytes;
  /**
   * enum sekv_basis_io. Default SEKV_BASIS_MMAP.
   */
  int32_t basis_io;
  /**
   * 0.
   */
  int32_t reserved0;
} sekv_params;

/**
 * Gets log lines: a sekv_log_level, one line without a newline that lasts during the call, and
 * what was given to sekv_set_log_callback.
 */
typedef void (*sekv_log_callback)(int32_t level, const char *text, void *user);

/**
 * The tokens of one pass. A token may belong to several sequences, as in llama_batch; its query
 * attends over the first of them. The arrays are the host's and are read during sekv_begin only.
 */
typedef struct sekv_batch {
  /**
   * sizeof(sekv_batch).
   */
  size_t struct_size;
  /**
   * 1 to n_batch_max.
   */
  int32_t n_tok;
  /**
   * [n_tok]; each above the last of its sequences. Gaps are allowed.
   */
  const int32_t *pos;
  /**
   * [n_tok]: sequences of each token; NULL: one each. Not read where seq_id is NULL.
   */
  const int32_t *n_seq_id;
  /**
   * [n_tok][n_seq_id[i]]: their ids, 0 to n_seq_max - 1; NULL: sequence 0.
   */
  const int32_t *const *seq_id;
} sekv_batch;

/**
 * A tensor of n_elem x n_head x n_tok that the host owns. The elements of a row are contiguous;
 * element e of head h and token t is at data + h * stride_head + t * stride_tok + e * (bytes of
 * an element). Rows need no alignment and may not overlap. The library reads or writes it only
 * during the call that it is given to, and touches no byte between the rows.
 */
typedef struct sekv_view {
  /**
   * Host pointer, or device pointer where memory is SEKV_MEMORY_CUDA.
   */
  void *data;
  /**
   * enum sekv_dtype.
   */
  int32_t dtype;
  /**
   * enum sekv_memory_kind.
   */
  int32_t memory;
  int32_t n_elem;
  int32_t n_head;
  int32_t n_tok;
  /**
   * Bytes from one head's row to the next head's; any value where n_head is 1.
   */
  size_t stride_head;
  /**
   * Bytes from one token's row to the next token's; any value where n_tok is 1.
   */
  size_t stride_tok;
} sekv_view;

/**
 * What sekv_attend may be told.
 */
typedef struct sekv_attend_opts {
  /**
   * sizeof(sekv_attend_opts).
   */
  size_t struct_size;
  /**
   * A plan of this pass, or NULL. One that was made after this layer's ingest from the same
   * queries is used as it is; from any other, attend scores for itself.
   */
  const struct sekv_plan *plan;
} sekv_attend_opts;

/**
 * Takes the next size bytes of a state, and returns 0; any other number ends the call with
 * SEKV_ERR_IO. It must return (no C++ exception, no longjmp), and may not use the context.
 */
typedef int32_t (*sekv_write_callback)(const void *data, size_t size, void *user);

/**
 * Fills data with the next size bytes of a state, all of them, and returns 0; any other number
 * ends the call with SEKV_ERR_IO. It must return (no C++ exception, no longjmp), and may not use
 * the context.
 */
typedef int32_t (*sekv_read_callback)(void *data, size_t size, void *user);

/**
 * Bytes by tier and kind. What copies of a sequence share counts once.
 */
typedef struct sekv_memory {
  /**
   * sizeof(sekv_memory).
   */
  size_t struct_size;
  /**
   * Everything held on the fast tier between passes: the sum of the fast_*_bytes below.
   */
  uint64_t fast_bytes;
  uint64_t slow_bytes;
  /**
   * Buffers of the library's own, on neither tier.
   */
  uint64_t scratch_bytes;
  /**
   * Rows kept whole: sinks, window, dense layers, anchors.
   */
  uint64_t fast_resident_bytes;
  /**
   * Partial keys that sealed tokens are scored by.
   */
  uint64_t fast_sketch_bytes;
  /**
   * Partial values.
   */
  uint64_t fast_value_sketch_bytes;
  /**
   * Coarse rows.
   */
  uint64_t fast_mean_bytes;
  /**
   * Centres, channel orders, value bases.
   */
  uint64_t fast_layout_bytes;
  /**
   * Positions, surprisal, block headers and lists.
   */
  uint64_t fast_metadata_bytes;
  /**
   * What a full f16 cache of the same tokens would take, each sequence's by itself.
   */
  uint64_t full_f16_bytes;
  /**
   * What of slow_bytes lies in basis files. Contexts that have loaded the same state count its
   * bytes each.
   */
  uint64_t slow_file_bytes;
  /**
   * 0. The struct is part of sekv_statistics, so its size never changes.
   */
  uint64_t reserved[4];
} sekv_memory;

/**
 * Times of one kind of work, in seconds.
 */
typedef struct sekv_times {
  /**
   * Times measured.
   */
  uint64_t count;
  /**
   * Median. Above 102 microseconds, quantiles are exact to 19 %.
   */
  double p50;
  double p99;
  double max;
} sekv_times;

/**
 * What a context takes and did since sekv_init. All of it is counted or measured. A step is one
 * query token, one KV head and one layer that went through the routing.
 */
typedef struct sekv_statistics {
  /**
   * sizeof(sekv_statistics).
   */
  size_t struct_size;
  /**
   * Now; its struct_size is filled in too.
   */
  struct sekv_memory memory;
  /**
   * Most that scratch_bytes has been at the end of a pass.
   */
  uint64_t scratch_peak_bytes;
  /**
   * Tokens of all sequences: resident ones are held whole, sealed ones at three resolutions.
   */
  int64_t n_tokens;
  int64_t n_resident_tokens;
  int64_t n_sealed_tokens;
  uint64_t n_steps;
  /**
   * Tokens read exactly from the slow tier, a step.
   */
  double fetched_mean;
  double fetched_p99;
  double fetched_max;
  /**
   * Tokens seen through their value sketch, a step.
   */
  double middle_mean;
  /**
   * Layers that keep all their tokens resident, of the first sequence that has tokens.
   */
  int32_t n_dense_layers;
  /**
   * 1: a sketch's layout was chosen without having seen a query.
   */
  int32_t layout_without_queries;
  /**
   * Bytes moved from the slow tier.
   */
  uint64_t fetched_bytes;
  /**
   * Committed passes.
   */
  uint64_t n_passes;
  /**
   * Plans that attend used as they were, and those it scored anew for.
   */
  uint64_t n_plans_used;
  uint64_t n_plans_ignored;
  /**
   * Sealings that failed; their tokens stayed resident.
   */
  uint64_t n_seal_failures;
  /**
   * Blocks whose sketch a short budget made smaller.
   */
  uint64_t n_repacked_blocks;
  /**
   * Anchors that a short budget turned into ordinary tokens.
   */
  uint64_t n_demoted_anchors;
  /**
   * Sealed tokens in spans of fixed length for lack of surprisal (routing PAPER).
   */
  uint64_t n_tokens_without_surprisal;
  /**
   * enum sekv_surprisal_source.
   */
  int32_t surprisal_source;
  /**
   * 0.
   */
  int32_t reserved0;
  /**
   * Tokens whose surprisal is known.
   */
  int64_t n_surprisal_tokens;
  /**
   * Sealed spans, or blocks.
   */
  uint64_t n_spans;
  /**
   * Their lengths: element i counts those of 2^i to 2^(i+1) - 1 tokens.
   */
  uint64_t span_lengths[20];
  /**
   * Scoring and selecting, a layer of a pass.
   */
  struct sekv_times route;
  /**
   * Starting to bring what was selected.
   */
  struct sekv_times zoom;
  /**
   * Attending, a layer of a pass, its routing included.
   */
  struct sekv_times attend;
  /**
   * Sealing, a pass that sealed.
   */
  struct sekv_times seal;
  /**
   * Blocks that were made while their tokens were in the window, before the commit that sealed
   * them.
   */
  uint64_t n_sealed_ahead;
} sekv_statistics;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The library's version, as 0xMMmmpp: major, minor, patch.
 *
 * Threads: any. Cannot fail.
 */
uint32_t sekv_version(void);

/**
 * The library's version as text, such as "0.1.0".
 *
 * The text is static. Threads: any. Cannot fail.
 */
const char *sekv_version_string(void);

/**
 * The name of a status, such as "SEKV_ERR_SHAPE"; "unknown status" for a number that is none.
 *
 * The text is static. Threads: any. Cannot fail.
 */
const char *sekv_status_name(sekv_status status);

/**
 * What went wrong in this thread's last call that failed: one sentence without a newline, saying
 * what was wrong, what was found and what was expected. Empty before the first failure; a call
 * that succeeds leaves it as it is.
 *
 * The text is the library's and lasts until this thread's next failure, or its end. Never NULL.
 * Threads: any; each has its own. Cannot fail.
 */
const char *sekv_last_error(void);

/**
 * Fills a sekv_model_params with its defaults: all zero, struct_size as given.
 *
 * @param params       the host's; its first struct_size bytes are written
 * @param struct_size  sizeof(sekv_model_params) as the host was compiled
 * @return SEKV_OK, SEKV_ERR_ARGUMENT (NULL, an impossible size)
 *
 * Threads: any.
 */
sekv_status sekv_model_params_init(struct sekv_model_params *params, size_t struct_size);

/**
 * Makes a model from its GGUF file. The header and small samples of the weights are read, and the
 * file is closed again.
 *
 * @param gguf_path     a path, zero-terminated
 * @param sidecar_path  GGUF file of what was trained for routing, or NULL
 * @param out           gets the model, which the host frees with sekv_model_free
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_IO, SEKV_ERR_FORMAT, SEKV_ERR_UNSUPPORTED (the
 *         message names what cannot be served), SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
 *
 * Threads: any.
 */
sekv_status sekv_model_from_gguf(const char *gguf_path,
                                 const char *sidecar_path,
                                 struct sekv_model **out);

/**
 * Makes a model as its host describes it, where there is no GGUF file.
 *
 * @param params  filled by sekv_model_params_init, then by the host
 * @param out     gets the model, which the host frees with sekv_model_free
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, and where there is a sidecar SEKV_ERR_IO, SEKV_ERR_FORMAT,
 *         SEKV_ERR_UNSUPPORTED; SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
 *
 * Threads: any.
 */
sekv_status sekv_model_from_params(const struct sekv_model_params *params, struct sekv_model **out);

/**
 * Frees a model. Contexts that were made from it go on: they share what they need.
 *
 * @param model  the host's, not used again; NULL does nothing
 *
 * Threads: any, while no other uses this handle. Cannot fail.
 */
void sekv_model_free(struct sekv_model *model);

/**
 * Fills a sekv_params with the defaults.
 *
 * @param params       the host's; its first struct_size bytes are written
 * @param struct_size  sizeof(sekv_params) as the host was compiled
 * @return SEKV_OK, SEKV_ERR_ARGUMENT (NULL, an impossible size)
 *
 * Threads: any.
 */
sekv_status sekv_params_init(struct sekv_params *params, size_t struct_size);

/**
 * Makes a context: an empty cache for up to n_seq_max sequences. Starts n_threads - 1 threads,
 * and, where there are any, one more that makes blocks while a sequence decodes.
 *
 * @param model   shared with the context; the handle may be freed at once
 * @param params  filled by sekv_params_init, then by the host; read during the call only
 * @param out     gets the context, which the host frees with sekv_context_free
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_UNSUPPORTED (a combination of params), SEKV_ERR_IO
 *         (no file can be made in basis_folder), SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
 *
 * Threads: any.
 */
sekv_status sekv_init(const struct sekv_model *model,
                      const struct sekv_params *params,
                      struct sekv_context **out);

/**
 * Frees a context, its plans and its threads; a running pass ends with it.
 *
 * In a forked child nothing is freed: the threads that would have to end are not there. A
 * context with another thread inside is not freed either; sekv_last_error() tells.
 *
 * @param context  the host's, not used again; NULL does nothing
 *
 * Threads: any, while no other is inside. Cannot fail.
 */
void sekv_context_free(struct sekv_context *context);

/**
 * What went wrong in the last call on this context that failed, like sekv_last_error(), for hosts
 * that move between threads. SEKV_ERR_BUSY is not among it: that call never got in.
 *
 * @param context  NULL gives a text that says so
 * @return the text, the library's, which lasts until the context's next failure or its end; never
 *         NULL
 *
 * Threads: the one that uses the context.
 */
const char *sekv_context_last_error(const struct sekv_context *context);

/**
 * Sets what gets the context's log lines: work that failed without failing a call, and fallbacks
 * that were taken. It is called by the thread that made the call, at its end, when the context
 * may be used again.
 *
 * @param callback  NULL: none. It must return: no C++ exception, no longjmp
 * @param user      given to the callback; the host's
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_set_log_callback(const struct sekv_context *context,
                                  sekv_log_callback callback,
                                  void *user);

/**
 * Changes the fast tier's budget, from the next sekv_begin on.
 *
 * @param bytes  UINT64_MAX: no limit
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_set_fast_budget(const struct sekv_context *context, uint64_t bytes);

/**
 * Changes how many tokens a step and KV head may read exactly, from the next route on.
 *
 * @param tokens  0: none, coarse only; negative: no limit
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_set_fetch_budget(const struct sekv_context *context, int64_t tokens);

/**
 * Frees a plan. One that is gone already, because it was freed or because its pass or its context
 * has ended, is ignored.
 *
 * @param plan  NULL does nothing
 *
 * Threads: any. Cannot fail.
 */
void sekv_plan_free(struct sekv_plan *plan);

/**
 * Begins a pass. All of the batch is checked before anything changes; a pass may be undone by
 * sekv_abort until it is committed.
 *
 * @param batch  the tokens; read during the call only
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_POSITION, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (a
 *         pass is running), SEKV_ERR_BUDGET, SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_begin(const struct sekv_context *context, const struct sekv_batch *batch);

/**
 * Takes a layer's keys and values of the pass, after RoPE. Layers come in order, each once.
 *
 * @param layer  0 to n_layer - 1
 * @param k      head_dim_k x KV heads of the layer x n_tok; read during the call only
 * @param v      head_dim_v x KV heads of the layer x n_tok; read during the call only
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
 *         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL; after a failure
 *         the layer may be ingested again
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_prefill_ingest(const struct sekv_context *context,
                                int32_t layer,
                                const struct sekv_view *k,
                                const struct sekv_view *v);

/**
 * Shows a layer's queries without attending, for hosts that replay recorded keys and values: the
 * sketch's layout is chosen better when it has seen the last 64 queries of a prompt. sekv_attend
 * does it by itself.
 *
 * @param layer  0 to n_layer - 1
 * @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
 *               only
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
 *         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_observe(const struct sekv_context *context,
                         int32_t layer,
                         const struct sekv_view *q);

/**
 * Scores a layer's sealed tokens and selects what to read: the first step of sekv_attend. Made
 * before the layer's ingest, or from an estimate of the queries, a plan is good for prefetching.
 *
 * @param layer  0 to n_layer - 1
 * @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
 *               only
 * @param out    gets the plan, which lives until sekv_plan_free, sekv_commit or sekv_abort
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
 *         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_route(const struct sekv_context *context,
                       int32_t layer,
                       const struct sekv_view *q,
                       struct sekv_plan **out);

/**
 * Starts to bring what a plan selected to the fast tier, and returns at once.
 *
 * @param plan  a plan of this context and pass
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (the plan is gone), SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_zoom(const struct sekv_context *context, const struct sekv_plan *plan);

/**
 * Attends: each token's query over its sequence, up to and including the token itself. Routes,
 * zooms and attends in one; after sekv_prefill_ingest of the same layer, once.
 *
 * @param layer  0 to n_layer - 1
 * @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
 *               only
 * @param opts   or NULL
 * @param out    head_dim_v x query heads of the layer x n_tok, written; must not overlap q
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
 *         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_IO (a basis file could not be read with
 *         SEKV_BASIS_PREAD: out is void, and the call may be made again), SEKV_ERR_MEMORY,
 *         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_attend(const struct sekv_context *context,
                        int32_t layer,
                        const struct sekv_view *q,
                        const struct sekv_attend_opts *opts,
                        const struct sekv_view *out);

/**
 * Ends the pass: its tokens count from now on, and those that leave the window may be sealed.
 * Plans of the pass are gone.
 *
 * @param surprisal  [n_tok] in nats, NaN where unknown; or NULL: none is known
 * @return SEKV_OK, SEKV_ERR_VALUE (infinite or negative surprisal), SEKV_ERR_ORDER (no pass, or a
 *         layer was not ingested), SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL; after a
 *         failure the pass runs on
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_commit(const struct sekv_context *context, const float *surprisal);

/**
 * Ends the pass as if sekv_begin had never been called. Plans of the pass are gone.
 *
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (no pass), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_abort(const struct sekv_context *context);

/**
 * Gives tokens their surprisal after their commit: values[i] belongs to the i-th token of the
 * sequence from first_pos on. Between passes only.
 *
 * @param seq        0 to n_seq_max - 1
 * @param first_pos  a position
 * @param values     [n] in nats, NaN where unknown; read during the call only
 * @param n          0 or more, at most the number of tokens there
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_VALUE, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a
 *         pass), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_surprisal(const struct sekv_context *context,
                           int32_t seq,
                           int32_t first_pos,
                           const float *values,
                           int32_t n);

/**
 * Removes the tokens of a sequence with positions p0 to p1 - 1; the others keep theirs. An empty
 * range and an empty sequence are no error. Between passes only.
 *
 * Sealed blocks of which some tokens stay are sealed anew, at most two for each layer.
 *
 * @param seq  0 to n_seq_max - 1; negative: every sequence
 * @param p0   negative: from the start
 * @param p1   negative: to the end
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_rm(const struct sekv_context *context, int32_t seq, int32_t p0, int32_t p1);

/**
 * Copies the tokens of a sequence with positions p0 to p1 - 1 to an empty sequence. An empty
 * range copies nothing, and neither does a copy of a sequence onto itself. Between passes only.
 *
 * What is sealed is shared and never copied; a copy takes the bytes of its resident tokens, at
 * once. What one of both does later the other does not see.
 *
 * @param seq_src  0 to n_seq_max - 1
 * @param seq_dst  0 to n_seq_max - 1
 * @param p0       negative: from the start
 * @param p1       negative: to the end
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_UNSUPPORTED (seq_dst holds tokens: remove them first), SEKV_ERR_BUDGET,
 *         SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_cp(const struct sekv_context *context,
                        int32_t seq_src,
                        int32_t seq_dst,
                        int32_t p0,
                        int32_t p1);

/**
 * Adds delta to the positions of the tokens of a sequence with positions p0 to p1 - 1, and turns
 * their keys accordingly (RoPE). The tokens keep their order: none may come onto or past another,
 * or below 0. An empty range and an empty sequence are no error. Between passes only.
 *
 * Nothing that is stored is written anew, but for at most two sealed blocks for each layer, which
 * a range that begins or ends inside divides: a shift is remembered and applied on read, so that
 * a thousand by 1 are one by 1,000.
 *
 * @param seq    0 to n_seq_max - 1
 * @param p0     negative: from the start
 * @param p1     negative: to the end
 * @param delta  positions, of either sign
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_POSITION (a position would be below 0, above INT32_MAX, or not between those of
 *         the other tokens), SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY,
 *         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_add(const struct sekv_context *context,
                         int32_t seq,
                         int32_t p0,
                         int32_t p1,
                         int32_t delta);

/**
 * Would divide the positions of tokens of a sequence, as llama_memory_seq_div does, and is not
 * served: tokens would share a position, and each would turn by another angle. Where it would
 * change nothing (d = 1, an empty range, an empty sequence) it succeeds.
 *
 * @param seq  0 to n_seq_max - 1
 * @param p0   negative: from the start
 * @param p1   negative: to the end
 * @param d    1 or more
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_UNSUPPORTED, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_div(const struct sekv_context *context,
                         int32_t seq,
                         int32_t p0,
                         int32_t p1,
                         int32_t d);

/**
 * Tells whether sekv_seq_add can move any token. Models for which it could not are refused when
 * they are opened.
 *
 * @param out  gets 1
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_can_shift(const struct sekv_context *context, int32_t *out);

/**
 * Removes every token of every other sequence. Between passes only.
 *
 * @param seq  0 to n_seq_max - 1
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_keep(const struct sekv_context *context, int32_t seq);

/**
 * Removes every token of every sequence. Between passes only.
 *
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (during a pass), SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_clear(const struct sekv_context *context);

/**
 * Tells the smallest position of a sequence; -1 where it is empty. A running pass does not count.
 *
 * @param seq  0 to n_seq_max - 1
 * @param out  gets the position
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_pos_min(const struct sekv_context *context, int32_t seq, int32_t *out);

/**
 * Tells the largest position of a sequence; -1 where it is empty. A running pass does not count.
 *
 * @param seq  0 to n_seq_max - 1
 * @param out  gets the position
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_seq_pos_max(const struct sekv_context *context, int32_t seq, int32_t *out);

/**
 * Tells how many bytes a state has that was saved now. Between passes only.
 *
 * @param seq  0 to n_seq_max - 1; -1: all sequences
 * @param out  gets bytes
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_state_size(const struct sekv_context *context, int32_t seq, uint64_t *out);

/**
 * Saves a sequence, or all, to a file: everything that decoding needs, but for the tokens
 * themselves, which are the host's. Between passes only.
 *
 * The file is written beside the old one and takes its place when all of it is on the disk: it is
 * whole or absent, also when the process is killed. Only its owner can read it. An empty sequence
 * can be saved; a state of it empties the sequence that it is loaded to.
 *
 * @param seq   0 to n_seq_max - 1; -1: all sequences
 * @param path  zero-terminated
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_IO (the old file is as it was), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
 *         SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_state_save(const struct sekv_context *context, int32_t seq, const char *path);

/**
 * Loads a state that sekv_state_save wrote: into one sequence, or all as they were, and whatever
 * they held before is gone. Between passes only.
 *
 * All of the file is verified before anything changes: checksums, the format's version, the
 * model's fingerprint and shape, and those params on which the meaning of the bytes depends
 * (routing, value_sketch, the codecs; for routing PAPER the seed or the sidecar). All other params
 * may differ, and serve from here on. Contexts of one process that load the same state share its
 * slow-tier bytes.
 *
 * @param seq   0 to n_seq_max - 1: the state must hold one sequence at the most, of whatever
 *              number; -1: all sequences, by their numbers
 * @param path  zero-terminated
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE (more or other sequences than fit),
 *         SEKV_ERR_ORDER (during a pass), SEKV_ERR_IO, SEKV_ERR_FORMAT (damaged, or not a state),
 *         SEKV_ERR_UNSUPPORTED (another version, model or params), SEKV_ERR_BUDGET,
 *         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_state_load(const struct sekv_context *context, int32_t seq, const char *path);

/**
 * Saves a sequence, or all, through a callback, which gets the bytes in order: the same as
 * sekv_state_save writes. Between passes only.
 *
 * @param seq    0 to n_seq_max - 1; -1: all sequences
 * @param write  called by this thread, during the call only
 * @param user   given to the callback; the host's
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
 *         SEKV_ERR_IO (the callback failed), SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_state_save_to(const struct sekv_context *context,
                               int32_t seq,
                               sekv_write_callback write,
                               void *user);

/**
 * Loads a state through a callback that gives its bytes in order, as sekv_state_load does from a
 * file. Nothing is read beyond the state's end.
 *
 * @param seq   as for sekv_state_load
 * @param read  called by this thread, during the call only
 * @param user  given to the callback; the host's
 * @return as sekv_state_load; SEKV_ERR_IO where the callback failed
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_state_load_from(const struct sekv_context *context,
                                 int32_t seq,
                                 sekv_read_callback read,
                                 void *user);

/**
 * Tells what a context of one sequence of n_tokens would take, before one is made. A dense layer
 * that a rule would choose is not in it.
 *
 * @param params    filled by sekv_params_init, then by the host; read during the call only
 * @param n_tokens  0 to 2^31 - 1: positions are no larger
 * @param out       its struct_size is set by the host; the rest is filled
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_UNSUPPORTED, SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
 *
 * Threads: any.
 */
sekv_status sekv_estimate(const struct sekv_model *model,
                          const struct sekv_params *params,
                          int64_t n_tokens,
                          struct sekv_memory *out);

/**
 * Tells what a context takes and did.
 *
 * @param out  its struct_size is set by the host; the rest is filled
 * @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
 *
 * Threads: the one that uses the context.
 */
sekv_status sekv_stats(const struct sekv_context *context, struct sekv_statistics *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SEKV_H */
