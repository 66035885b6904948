//! Contexts, and the guard at their door.

use std::cell::UnsafeCell;
use std::ffi::{CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use super::boundary::{OK, call, catch, required};
use super::log::{Entries, Log, sekv_log_callback};
use super::model::sekv_model;
use super::params::{fast_budget_bytes, fetch_budget, read_params, sekv_params};
use super::plan::PlanHandles;
use super::status::{c_text, fail_with, sekv_status};
use crate::cache::Context;
use crate::error::{Error, Result, Status, fail};

/// The KV cache of some sequences of one model. One thread at a time.
pub struct sekv_context {
    /// The process that made it: a forked child has none of its threads.
    process: u32,
    /// A thread is inside.
    entered: AtomicBool,
    state: UnsafeCell<State>,
}

// SAFETY: `state` is reached by the one thread that turned `entered` from false to true, and what
// it holds may move between threads (checked below).
unsafe impl Sync for sekv_context {}

const _: fn() = || {
    fn may_move<T: Send>() {}
    may_move::<State>();
};

/// What a call finds inside a context.
pub(super) struct State {
    pub cache: Context,
    pub plans: PlanHandles,
    pub log: Log,
    last_error: CString,
    /// The panic that ended it.
    poison: Option<String>,
}

/// Lets the next thread in, also when this one unwinds.
struct Entered<'a>(&'a AtomicBool);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl sekv_context {
    fn new(cache: Context) -> Self {
        let state = State {
            cache,
            plans: PlanHandles::default(),
            log: Log::default(),
            last_error: CString::default(),
            poison: None,
        };
        Self {
            process: std::process::id(),
            entered: AtomicBool::new(false),
            state: UnsafeCell::new(state),
        }
    }

    fn forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Takes the context for this thread.
    fn enter(&self) -> Result<Entered<'_>> {
        if self.forked() {
            fail!(
                Busy,
                "this process is a fork of the one that made the context ({}): its threads are not \
                 here, make a new context",
                self.process
            );
        }
        if self.entered.swap(true, Ordering::Acquire) {
            fail!(Busy, "another thread is inside this context, one at a time may use it");
        }
        Ok(Entered(&self.entered))
    }
}

/// Runs the body of an export inside a context; a panic is its last one.
pub(super) fn in_context(
    context: Option<&sekv_context>,
    body: impl FnOnce(&mut State) -> Result<()>,
) -> sekv_status {
    let entered = catch(|| {
        let context = required(context, "context")?;
        Ok((context, context.enter()?))
    });
    let (context, entered) = match entered {
        Ok(entered) => entered,
        Err(error) => return fail_with(&error),
    };
    // SAFETY: this thread is the one that entered, until `entered` is dropped.
    let state = unsafe { &mut *context.state.get() };
    let (status, entries) = run(state, body);
    let log = state.log.target();
    drop(entered);
    // Outside, so that a callback may use the context.
    if let Some(target) = log {
        target.write(&entries);
    }
    status
}

fn run(state: &mut State, body: impl FnOnce(&mut State) -> Result<()>) -> (sekv_status, Entries) {
    if let Some(panic) = &state.poison {
        let message = format!("the context can only be freed, because earlier {panic}");
        return (fail_with(&Error::new(Status::Internal, message)), Entries::new());
    }
    let caught = catch(|| {
        state.plans.drop_freed(&mut state.cache);
        let result = body(state);
        Ok((result, state.log.collect(&mut state.cache)))
    });
    let (result, entries) = caught.unwrap_or_else(|panic| {
        state.poison = Some(panic.message.clone());
        (Err(panic), Entries::new())
    });
    match result {
        Ok(()) => (OK, entries),
        Err(error) => {
            state.last_error = c_text(&error.message);
            (fail_with(&error), entries)
        }
    }
}

/// Makes a context: an empty cache for up to n_seq_max sequences. Starts n_threads - 1 threads,
/// and, where there are any, one more that makes blocks while a sequence decodes.
///
/// @param model   shared with the context; the handle may be freed at once
/// @param params  filled by sekv_params_init, then by the host; read during the call only
/// @param out     gets the context, which the host frees with sekv_context_free
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_UNSUPPORTED (a combination of params), SEKV_ERR_IO
///         (no file can be made in basis_folder), SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_init(
    model: Option<&sekv_model>,
    params: *const sekv_params,
    out: Option<&mut MaybeUninit<*mut sekv_context>>,
) -> sekv_status {
    call(|| {
        let model = required(model, "model")?;
        // SAFETY: as the header says of `params`.
        let params = unsafe { read_params(params)? };
        let out = required(out, "out")?;
        let context = sekv_context::new(Context::new(model.model.clone(), params)?);
        out.write(Box::into_raw(Box::new(context)));
        Ok(())
    })
}

/// Frees a context, its plans and its threads; a running pass ends with it.
///
/// In a forked child nothing is freed: the threads that would have to end are not there. A
/// context with another thread inside is not freed either; sekv_last_error() tells.
///
/// @param context  the host's, not used again; NULL does nothing
///
/// Threads: any, while no other is inside. Cannot fail.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_context_free(context: *mut sekv_context) {
    if context.is_null() {
        return;
    }
    // SAFETY: it came from sekv_init, and the host frees it once.
    let shared = unsafe { &*context };
    match shared.enter() {
        Ok(entered) => std::mem::forget(entered),
        Err(error) => {
            fail_with(&error);
            return;
        }
    }
    let freed = catch(|| {
        // SAFETY: as above; no other thread is inside, and none gets in any more.
        drop(unsafe { Box::from_raw(context) });
        Ok(())
    });
    if let Err(error) = freed {
        fail_with(&error);
    }
}

/// What went wrong in the last call on this context that failed, like sekv_last_error(), for hosts
/// that move between threads. SEKV_ERR_BUSY is not among it: that call never got in.
///
/// @param context  NULL gives a text that says so
/// @return the text, the library's, which lasts until the context's next failure or its end; never
///         NULL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_context_last_error(context: Option<&sekv_context>) -> *const c_char {
    let Some(context) = context else { return c"context is NULL, expected a pointer".as_ptr() };
    match context.enter() {
        Err(error) => {
            fail_with(&error);
            super::status::sekv_last_error()
        }
        // SAFETY: this thread is inside; the text stays where it is until the next failure.
        Ok(_entered) => unsafe { (*context.state.get()).last_error.as_ptr() },
    }
}

/// Sets what gets the context's log lines: work that failed without failing a call, and fallbacks
/// that were taken. It is called by the thread that made the call, at its end, when the context
/// may be used again.
///
/// @param callback  NULL: none. It must return: no C++ exception, no longjmp
/// @param user      given to the callback; the host's
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_set_log_callback(
    context: Option<&sekv_context>,
    callback: sekv_log_callback,
    user: *mut c_void,
) -> sekv_status {
    in_context(context, |state| {
        state.log.set(callback, user);
        Ok(())
    })
}

/// Changes the fast tier's budget, from the next sekv_begin on.
///
/// @param bytes  UINT64_MAX: no limit
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_set_fast_budget(
    context: Option<&sekv_context>,
    bytes: u64,
) -> sekv_status {
    in_context(context, |state| {
        state.cache.set_fast_budget(fast_budget_bytes(bytes));
        Ok(())
    })
}

/// Changes how many tokens a step and KV head may read exactly, from the next route on.
///
/// @param tokens  0: none, coarse only; negative: no limit
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_set_fetch_budget(
    context: Option<&sekv_context>,
    tokens: i64,
) -> sekv_status {
    in_context(context, |state| {
        state.cache.set_fetch_budget(fetch_budget(tokens));
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::capi::status::sekv_status_code;
    use crate::model::{Model, ModelParams};
    use crate::params::Params;

    #[test]
    fn a_panic_inside_poisons_the_context() {
        let params = ModelParams { n_layer: 1, n_head: 1, head_dim_k: 8, ..Default::default() };
        let model = Arc::new(Model::from_params(&params).unwrap());
        let cache = Context::new(model, Params { n_threads: 2, ..Params::default() }).unwrap();
        let context = Box::into_raw(Box::new(sekv_context::new(cache)));
        // SAFETY: alive until it is freed below.
        let shared = unsafe { &*context };
        let internal = sekv_status_code::SEKV_ERR_INTERNAL as sekv_status;
        assert_eq!(in_context(Some(shared), |_| panic!("planted")), internal);
        assert_eq!(in_context(Some(shared), |_| Ok(())), internal);
        // SAFETY: the text is the context's, which is alive.
        let text = unsafe { std::ffi::CStr::from_ptr(sekv_context_last_error(Some(shared))) };
        assert!(text.to_str().unwrap().contains("planted"));
        // SAFETY: made above, freed once.
        unsafe { sekv_context_free(context) };
    }
}
