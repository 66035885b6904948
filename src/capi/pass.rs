//! A forward pass: begin, then each layer's ingest and attend, then commit.

use std::mem::MaybeUninit;
use std::ptr;

use super::batch::{sekv_batch, sekv_view, view_of, with_tokens};
use super::boundary::{array, count, required};
use super::context::{in_context, sekv_context};
use super::plan::sekv_plan;
use super::sized::{self, SizedStruct};
use super::status::sekv_status;
use crate::error::fail;

/// What sekv_attend may be told.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sekv_attend_opts {
    /// sizeof(sekv_attend_opts).
    pub struct_size: usize,
    /// A plan of this pass, or NULL. One that was made after this layer's ingest from the same
    /// queries is used as it is; from any other, attend scores for itself.
    pub plan: *const sekv_plan,
}

// SAFETY: `struct_size` first, then a pointer.
unsafe impl SizedStruct for sekv_attend_opts {
    const NAME: &'static str = "sekv_attend_opts";

    fn defaults() -> Self {
        Self { struct_size: size_of::<Self>(), plan: ptr::null() }
    }
}

/// Begins a pass. All of the batch is checked before anything changes; a pass may be undone by
/// sekv_abort until it is committed.
///
/// @param batch  the tokens; read during the call only
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_POSITION, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (a
///         pass is running), SEKV_ERR_BUDGET, SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_begin(
    context: Option<&sekv_context>,
    batch: *const sekv_batch,
) -> sekv_status {
    in_context(context, |state| {
        let params = state.cache.params();
        let (n_batch_max, n_seq_max) = (params.n_batch_max, params.n_seq_max);
        // SAFETY: as the header says of `batch`.
        unsafe { with_tokens(batch, n_batch_max, n_seq_max, |tokens| state.cache.begin(tokens)) }
    })
}

/// Takes a layer's keys and values of the pass, after RoPE. Layers come in order, each once.
///
/// @param layer  0 to n_layer - 1
/// @param k      head_dim_k x KV heads of the layer x n_tok; read during the call only
/// @param v      head_dim_v x KV heads of the layer x n_tok; read during the call only
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
///         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL; after a failure
///         the layer may be ingested again
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_prefill_ingest(
    context: Option<&sekv_context>,
    layer: i32,
    k: Option<&sekv_view>,
    v: Option<&sekv_view>,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of views.
        let (k, v) = unsafe { (view_of(k, "k")?, view_of(v, "v")?) };
        state.cache.ingest(count("layer", layer)?, &k, &v)
    })
}

/// Shows a layer's queries without attending, for hosts that replay recorded keys and values: the
/// sketch's layout is chosen better when it has seen the last 64 queries of a prompt. sekv_attend
/// does it by itself.
///
/// @param layer  0 to n_layer - 1
/// @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
///               only
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
///         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_observe(
    context: Option<&sekv_context>,
    layer: i32,
    q: Option<&sekv_view>,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of views.
        let q = unsafe { view_of(q, "q")? };
        state.cache.observe(count("layer", layer)?, &q)
    })
}

/// Scores a layer's sealed tokens and selects what to read: the first step of sekv_attend. Made
/// before the layer's ingest, or from an estimate of the queries, a plan is good for prefetching.
///
/// @param layer  0 to n_layer - 1
/// @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
///               only
/// @param out    gets the plan, which lives until sekv_plan_free, sekv_commit or sekv_abort
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
///         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_route(
    context: Option<&sekv_context>,
    layer: i32,
    q: Option<&sekv_view>,
    out: Option<&mut MaybeUninit<*mut sekv_plan>>,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of views.
        let q = unsafe { view_of(q, "q")? };
        let out = required(out, "out")?;
        let plan = state.cache.route(count("layer", layer)?, &q)?;
        out.write(state.plans.insert(plan));
        Ok(())
    })
}

/// Starts to bring what a plan selected to the fast tier, and returns at once.
///
/// @param plan  a plan of this context and pass
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (the plan is gone), SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_zoom(
    context: Option<&sekv_context>,
    plan: *const sekv_plan,
) -> sekv_status {
    in_context(context, |state| {
        if plan.is_null() {
            fail!(Argument, "plan is NULL, expected a plan");
        }
        let plan = state.plans.get(plan)?;
        state.cache.zoom(plan)
    })
}

/// Attends: each token's query over its sequence, up to and including the token itself. Routes,
/// zooms and attends in one; after sekv_prefill_ingest of the same layer, once.
///
/// @param layer  0 to n_layer - 1
/// @param q      head_dim_k x query heads of the layer x n_tok, after RoPE; read during the call
///               only
/// @param opts   or NULL
/// @param out    head_dim_v x query heads of the layer x n_tok, written; must not overlap q
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SHAPE, SEKV_ERR_VALUE, SEKV_ERR_ORDER,
///         SEKV_ERR_UNSUPPORTED (device memory), SEKV_ERR_IO (a basis file could not be read with
///         SEKV_BASIS_PREAD: out is void, and the call may be made again), SEKV_ERR_MEMORY,
///         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_attend(
    context: Option<&sekv_context>,
    layer: i32,
    q: Option<&sekv_view>,
    opts: *const sekv_attend_opts,
    out: Option<&sekv_view>,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of views.
        let (q, out) = unsafe { (view_of(q, "q")?, view_of(out, "out")?) };
        let mut plan = ptr::null();
        if !opts.is_null() {
            // SAFETY: as the header says of `opts`.
            plan = unsafe { sized::read(opts, "opts")? }.plan;
        }
        let plan = if plan.is_null() { None } else { Some(state.plans.get(plan)?) };
        state.cache.attend(count("layer", layer)?, &q, plan, &out)
    })
}

/// Ends the pass: its tokens count from now on, and those that leave the window may be sealed.
/// Plans of the pass are gone.
///
/// @param surprisal  [n_tok] in nats, NaN where unknown; or NULL: none is known
/// @return SEKV_OK, SEKV_ERR_VALUE (infinite or negative surprisal), SEKV_ERR_ORDER (no pass, or a
///         layer was not ingested), SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL; after a
///         failure the pass runs on
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_commit(
    context: Option<&sekv_context>,
    surprisal: *const f32,
) -> sekv_status {
    in_context(context, |state| {
        let values = match state.cache.pass_tokens() {
            // SAFETY: as many values as the batch has tokens, as the header says.
            Some(n) if !surprisal.is_null() => Some(unsafe { array(surprisal, n, "surprisal")? }),
            _ => None,
        };
        state.cache.commit(values)?;
        state.plans.clear();
        Ok(())
    })
}

/// Ends the pass as if sekv_begin had never been called. Plans of the pass are gone.
///
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (no pass), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_abort(context: Option<&sekv_context>) -> sekv_status {
    in_context(context, |state| {
        state.cache.abort()?;
        state.plans.clear();
        Ok(())
    })
}

/// Gives tokens their surprisal after their commit: values[i] belongs to the i-th token of the
/// sequence from first_pos on. Between passes only.
///
/// @param seq        0 to n_seq_max - 1
/// @param first_pos  a position
/// @param values     [n] in nats, NaN where unknown; read during the call only
/// @param n          0 or more, at most the number of tokens there
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_VALUE, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a
///         pass), SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_surprisal(
    context: Option<&sekv_context>,
    seq: i32,
    first_pos: i32,
    values: *const f32,
    n: i32,
) -> sekv_status {
    in_context(context, |state| {
        let n = count("n", n)?;
        // SAFETY: n values, as the header says.
        let values = unsafe { array(values, n, "values")? };
        state.cache.set_surprisal(seq, first_pos, values)
    })
}
