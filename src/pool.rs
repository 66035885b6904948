//! The library's workers, and how one call shares its work among them.
//!
//! A call opens a **team** once (one wake-up of the workers) and runs any number of parallel loops
//! in it. The calling thread takes part. Items are handed out one by one through an atomic ticket,
//! so a worker that wakes late, or never, costs nothing but its help: nobody waits for it.
//!
//! rayon supplies the threads; the loops are our own, because rayon's scopes wait for every job
//! they spawned to have started, and on a machine whose cores the host keeps busy that wait is
//! longer than the work.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};

use crate::error::{Result, fail};

/// Spins before a waiting thread lets others run.
const SPINS: u32 = 4096;

/// One parallel loop: a type-erased closure over item numbers.
struct Job {
    run: &'static (dyn Fn(usize) + Sync),
}

/// A loop's ticket: generation (16 bits), number of items (24), next item (24).
const ITEM_BITS: u32 = 24;
const ITEM_MASK: u64 = (1 << ITEM_BITS) - 1;

/// Items of one loop at the most; longer ranges are cut into several loops.
const MAX_ITEMS: usize = ITEM_MASK as usize - 4096;

#[derive(Default)]
struct Shared {
    ticket: AtomicU64,
    job: AtomicPtr<Job>,
    done: AtomicUsize,
    open: AtomicBool,
    /// Workers inside `help`, or on their way there.
    workers: AtomicUsize,
    panicked: AtomicBool,
}

impl Shared {
    /// Takes the next item of the running loop and works on it; false when none is left.
    fn run_one(&self) -> bool {
        let seen = self.ticket.load(Ordering::Acquire);
        if (seen & ITEM_MASK) >= (seen >> ITEM_BITS) & ITEM_MASK {
            return false;
        }
        let ticket = self.ticket.fetch_add(1, Ordering::AcqRel);
        let (item, n_items) = (ticket & ITEM_MASK, (ticket >> ITEM_BITS) & ITEM_MASK);
        if item >= n_items {
            return false;
        }
        // SAFETY: this thread holds an item that isn't done, so the loop that published the job
        // (before the ticket, with release) cannot have returned: the job is alive and current.
        let job = unsafe { &*self.job.load(Ordering::Acquire) };
        if catch_unwind(AssertUnwindSafe(|| (job.run)(item as usize))).is_err() {
            self.panicked.store(true, Ordering::Release);
        }
        self.done.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// A worker's life within a team.
    fn help(&self) {
        let mut spins = 0;
        while self.open.load(Ordering::Acquire) {
            if self.run_one() {
                spins = 0;
            } else {
                wait(&mut spins);
            }
        }
        self.workers.fetch_sub(1, Ordering::AcqRel);
    }
}

fn wait(spins: &mut u32) {
    *spins += 1;
    if *spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
}

/// The workers of one context: `n_threads - 1` threads, joined when it is dropped.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Option<rayon::ThreadPool>,
    /// The workers' threads: rayon would leave them to end by themselves.
    threads: Vec<JoinHandle<()>>,
    n_threads: usize,
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Tells the workers to end.
        self.workers = None;
        for thread in self.threads.drain(..) {
            // A worker's panics are caught where it works; there is nobody to tell of others.
            let _ = thread.join();
        }
    }
}

impl Pool {
    /// `n_threads` counts the calling thread; 0 means one for each core.
    pub fn new(n_threads: usize) -> Result<Self> {
        let n_threads = match n_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let mut pool =
            Self { shared: Arc::default(), workers: None, threads: Vec::new(), n_threads };
        if n_threads > 1 {
            // An error leaves the threads that did start in `pool`, which joins them.
            let threads = &mut pool.threads;
            let built = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads - 1)
                .spawn_handler(|worker| {
                    let thread = Builder::new().name(format!("sekv-{}", worker.index()));
                    threads.push(thread.spawn(|| worker.run())?);
                    Ok(())
                })
                .build();
            match built {
                Ok(workers) => pool.workers = Some(workers),
                Err(e) => {
                    fail!(Memory, "{} worker threads could not be started: {e}", n_threads - 1)
                }
            }
        }
        Ok(pool)
    }

    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Wakes the workers, runs `work` with them, and lets them go.
    ///
    /// Takes `&mut self`: a pool serves one team at a time.
    pub fn team<R>(&mut self, work: impl FnOnce(&Team) -> R) -> R {
        let Some(workers) = &self.workers else {
            return work(&Team { shared: None });
        };
        self.shared.open.store(true, Ordering::Release);
        let present = self.shared.workers.load(Ordering::Acquire);
        for _ in present..self.n_threads - 1 {
            self.shared.workers.fetch_add(1, Ordering::AcqRel);
            let shared = Arc::clone(&self.shared);
            workers.spawn(move || shared.help());
        }
        let close = CloseOnDrop(&self.shared);
        let result = work(&Team { shared: Some(&self.shared) });
        drop(close);
        result
    }
}

/// Ends a team also when its work panics.
struct CloseOnDrop<'a>(&'a Shared);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.open.store(false, Ordering::Release);
    }
}

/// The threads that work on one call.
pub struct Team<'a> {
    shared: Option<&'a Shared>,
}

impl Team<'_> {
    /// A team of the calling thread alone.
    pub const SERIAL: Team<'static> = Team { shared: None };

    /// Whether a loop can use more than one thread.
    pub fn is_parallel(&self) -> bool {
        self.shared.is_some()
    }

    /// Calls `run` once for each of `0..n_items`, in any order, on any of the team's threads, and
    /// returns when all are done. Loops don't nest.
    pub fn for_each(&self, n_items: usize, run: impl Fn(usize) + Sync) {
        let mut start = 0;
        while start < n_items {
            let n = (n_items - start).min(MAX_ITEMS);
            self.run_loop(n, &|item| run(start + item));
            start += n;
        }
    }

    /// `for_each` over the elements of a slice, each given to one thread.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], run: impl Fn(usize, &mut T) + Sync) {
        struct Base<T>(*mut T);
        // SAFETY: the pointer is only used to reach elements of a `&mut [T]` with T: Send, each
        // of them by one thread.
        unsafe impl<T: Send> Sync for Base<T> {}
        let base = Base(items.as_mut_ptr());
        let base = &base;
        self.for_each(items.len(), |i| {
            // SAFETY: `for_each` hands out each index below `items.len()` exactly once, and
            // `items` stays borrowed until it returns.
            run(i, unsafe { &mut *base.0.add(i) });
        });
    }

    /// `for_each` over the elements of two slices of one length, side by side.
    pub fn for_each_pair<A: Send, B: Send>(
        &self,
        first: &mut [A],
        second: &mut [B],
        run: impl Fn(usize, &mut A, &mut B) + Sync,
    ) {
        assert_eq!(first.len(), second.len());
        struct Base<A, B>(*mut A, *mut B);
        // SAFETY: as in `for_each_mut`, for each of the two.
        unsafe impl<A: Send, B: Send> Sync for Base<A, B> {}
        let base = Base(first.as_mut_ptr(), second.as_mut_ptr());
        let base = &base;
        self.for_each(first.len(), |i| {
            // SAFETY: as in `for_each_mut`, for each of the two.
            unsafe { run(i, &mut *base.0.add(i), &mut *base.1.add(i)) };
        });
    }

    fn run_loop(&self, n_items: usize, run: &(dyn Fn(usize) + Sync)) {
        let shared = match self.shared {
            Some(shared) if n_items > 1 => shared,
            _ => {
                (0..n_items).for_each(run);
                return;
            }
        };
        // SAFETY: only the lifetime is changed. The job is used by threads that hold one of its
        // items, and this function returns after every item is done.
        let run = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run)
        };
        let job = Job { run };
        shared.done.store(0, Ordering::Relaxed);
        shared.job.store((&raw const job).cast_mut(), Ordering::Release);
        let generation = (shared.ticket.load(Ordering::Relaxed) >> (2 * ITEM_BITS)).wrapping_add(1);
        let ticket = (generation << (2 * ITEM_BITS)) | ((n_items as u64) << ITEM_BITS);
        shared.ticket.store(ticket, Ordering::Release);
        while shared.run_one() {}
        let mut spins = 0;
        while shared.done.load(Ordering::Acquire) < n_items {
            wait(&mut spins);
        }
        if shared.panicked.swap(false, Ordering::AcqRel) {
            resume_unwind(Box::new("a worker panicked"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_in_every_loop() {
        for n_threads in [1, 2, 5] {
            let mut pool = Pool::new(n_threads).unwrap();
            for round in 0..50 {
                pool.team(|team| {
                    for n in [0, 1, 2, 7, 100, 1000 + round] {
                        let counts: Vec<AtomicUsize> =
                            (0..n).map(|_| AtomicUsize::new(0)).collect();
                        team.for_each(n, |i| {
                            counts[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        }
    }

    #[test]
    fn slices_are_handed_out_element_by_element() {
        let mut pool = Pool::new(3).unwrap();
        let mut items = vec![0usize; 333];
        pool.team(|team| team.for_each_mut(&mut items, |i, item| *item += i));
        assert!(items.iter().enumerate().all(|(i, &item)| item == i));
        let mut others = vec![1usize; 333];
        pool.team(|team| {
            team.for_each_pair(&mut items, &mut others, |i, item, other| {
                *other += *item;
                *item = i + 1;
            });
        });
        assert!(items.iter().eq(others.iter()));
    }

    #[test]
    fn a_panic_in_an_item_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(2).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.team(|team| team.for_each(64, |i| assert!(i != 40, "planted")));
        }));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.team(|team| {
            team.for_each(10, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
