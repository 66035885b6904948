//! Plans. A handle is a number, not an address, so that one that is freed, used up or from
//! somewhere else is found out instead of followed.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cache::{Context, PlanId};
use crate::error::{Result, fail};

/// What a route decided. Belongs to its context and to the pass it was made in.
pub struct sekv_plan {
    _number: [u8; 0],
}

/// Plans that were freed and wait for their context's next call: freeing needs no entry.
type Freed = Arc<Mutex<Vec<PlanId>>>;

/// One context's plans.
#[derive(Default)]
pub(super) struct PlanHandles {
    freed: Freed,
    handles: Vec<usize>,
}

/// The plans of every context of this process.
struct Registry {
    process: u32,
    plans: Mutex<Plans>,
}

#[derive(Default)]
struct Plans {
    last: usize,
    by_handle: BTreeMap<usize, (Freed, PlanId)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that runs under these locks can leave them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's registry. A forked child gets its own: in the parent's, a thread that isn't
/// here may hold the lock for ever.
fn registry() -> &'static Registry {
    static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());
    let process = std::process::id();
    let seen = CURRENT.load(Ordering::Acquire);
    // SAFETY: a registry is never freed.
    if let Some(registry) = unsafe { seen.as_ref() }
        && registry.process == process
    {
        return registry;
    }
    let new = Box::into_raw(Box::new(Registry { process, plans: Mutex::default() }));
    match CURRENT.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: never freed from here on.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: `new` was not published. `other` is never freed, and of this process: only
            // a thread of this process can have put it there.
            unsafe {
                drop(Box::from_raw(new));
                &*other
            }
        }
    }
}

impl PlanHandles {
    /// A handle for a plan of this context.
    pub fn insert(&mut self, plan: PlanId) -> *mut sekv_plan {
        let mut plans = lock(&registry().plans);
        plans.last += 1;
        let handle = plans.last;
        plans.by_handle.insert(handle, (Arc::clone(&self.freed), plan));
        self.handles.push(handle);
        ptr::without_provenance_mut(handle)
    }

    /// The plan of a handle.
    pub fn get(&self, plan: *const sekv_plan) -> Result<PlanId> {
        let plans = lock(&registry().plans);
        match plans.by_handle.get(&plan.addr()) {
            Some((freed, id)) if Arc::ptr_eq(freed, &self.freed) => Ok(*id),
            Some(_) => fail!(Argument, "the plan belongs to another context"),
            None => fail!(
                Order,
                "the plan is gone: plans live until they are freed, or their pass ends"
            ),
        }
    }

    /// Drops what the host has freed since the last call.
    pub fn drop_freed(&mut self, cache: &mut Context) {
        for plan in std::mem::take(&mut *lock(&self.freed)) {
            cache.free_plan(plan);
        }
    }

    /// The pass has ended, and its plans with it.
    pub fn clear(&mut self) {
        if self.handles.is_empty() {
            return;
        }
        let mut plans = lock(&registry().plans);
        for handle in self.handles.drain(..) {
            plans.by_handle.remove(&handle);
        }
    }
}

impl Drop for PlanHandles {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Frees a plan. One that is gone already, because it was freed or because its pass or its context
/// has ended, is ignored.
///
/// @param plan  NULL does nothing
///
/// Threads: any. Cannot fail.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_plan_free(plan: *mut sekv_plan) {
    if plan.is_null() {
        return;
    }
    let _ = super::boundary::catch(|| {
        let found = lock(&registry().plans).by_handle.remove(&plan.addr());
        if let Some((freed, id)) = found {
            lock(&freed).push(id);
        }
        Ok(())
    });
}
