//! A slot: where one thread puts down what it has made, and where another waits for it.
//!
//! Not a channel: its receiver would leave a handle of the standard library's in a host's thread
//! that has to wait.

use std::sync::PoisonError;

use sync::{Arc, Condvar, Mutex};

/// `make loom` puts the model checker in the standard library's place; nothing else uses it.
mod sync {
    #[cfg(all(test, loom))]
    pub use loom::sync::{Arc, Condvar, Mutex};
    #[cfg(not(all(test, loom)))]
    pub use std::sync::{Arc, Condvar, Mutex};
}

/// Both ends of a new slot.
pub fn slot<T>() -> (Filler<T>, Taker<T>) {
    let slot = Arc::new(Slot { progress: Mutex::new(Progress::Making), ready: Condvar::new() });
    (Filler(Arc::clone(&slot)), Taker(slot))
}

struct Slot<T> {
    progress: Mutex<Progress<T>>,
    ready: Condvar,
}

enum Progress<T> {
    Making,
    /// None where it could not be made.
    Done(Option<T>),
}

/// The maker's end: dropped without anything, as by a panic, it says so.
pub struct Filler<T>(Arc<Slot<T>>);

impl<T> Filler<T> {
    pub fn fill(self, made: Option<T>) {
        self.put(made);
    }

    /// The first to come counts.
    fn put(&self, made: Option<T>) {
        let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*progress, Progress::Making) {
            *progress = Progress::Done(made);
        }
        self.0.ready.notify_one();
    }
}

impl<T> Drop for Filler<T> {
    fn drop(&mut self) {
        self.put(None);
    }
}

/// The end of who waits. It may go first: what is put down then goes with the slot.
pub struct Taker<T>(Arc<Slot<T>>);

impl<T> Taker<T> {
    /// Waits for what is made; None where it could not be.
    pub fn take(self) -> Option<T> {
        let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match std::mem::replace(&mut *progress, Progress::Making) {
                Progress::Done(made) => return made,
                Progress::Making => {
                    progress = self.0.ready.wait(progress).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Of the model checker's own, which finds out when one is never given back.
    type Made = Arc<i32>;

    /// Runs a maker and a taker in every order that their steps can have. The model checker fails
    /// where one waits for ever.
    fn in_every_order(make: fn(Filler<Made>), take: fn(Taker<Made>)) {
        let orders = std::sync::Arc::new(AtomicUsize::new(0));
        let seen = std::sync::Arc::clone(&orders);
        loom::model(move || {
            seen.fetch_add(1, Ordering::Relaxed);
            let (filler, taker) = slot();
            let maker = loom::thread::spawn(move || make(filler));
            take(taker);
            maker.join().unwrap();
        });
        let orders = orders.load(Ordering::Relaxed);
        println!("{orders} orders");
        assert!(orders > 1);
    }

    fn gets_seven(taker: Taker<Made>) {
        assert_eq!(taker.take().as_deref(), Some(&7));
    }

    fn gets_nothing(taker: Taker<Made>) {
        assert!(taker.take().is_none());
    }

    #[test]
    fn whoever_takes_waits_and_gets_what_was_put_down() {
        in_every_order(|filler| filler.fill(Some(Arc::new(7))), gets_seven);
    }

    #[test]
    fn what_could_not_be_made_is_told() {
        in_every_order(|filler| filler.fill(None), gets_nothing);
    }

    #[test]
    fn a_maker_that_is_dropped_or_panics_leaves_nobody_waiting() {
        in_every_order(drop, gets_nothing);
        let panics = |filler| {
            let work = AssertUnwindSafe(|| {
                let _filler = filler;
                resume_unwind(Box::new("a fault"));
            });
            assert!(catch_unwind(work).is_err());
        };
        in_every_order(panics, gets_nothing);
    }

    #[test]
    fn what_nobody_takes_is_given_back() {
        in_every_order(|filler| filler.fill(Some(Arc::new(7))), drop);
        in_every_order(drop, drop);
    }
}
