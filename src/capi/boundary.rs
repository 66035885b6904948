//! The one door between C and the library.

use std::any::Any;
use std::cell::Cell;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::status::{fail_with, sekv_status, sekv_status_code};
use crate::error::{Error, Result, Status, fail};

pub(super) const OK: sekv_status = sekv_status_code::SEKV_OK as sekv_status;

/// Runs the body of an export: no panic leaves it, and a failure leaves its message.
pub(super) fn call(body: impl FnOnce() -> Result<()>) -> sekv_status {
    match catch(body) {
        Ok(()) => OK,
        Err(error) => fail_with(&error),
    }
}

/// Runs `body`; a panic becomes an error of status `Internal`.
pub(super) fn catch<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    quiet_panics();
    let outer = INSIDE.replace(true);
    let caught = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(outer);
    caught.unwrap_or_else(|payload| {
        let text = text_of(&*payload);
        discard(payload);
        fail!(Internal, "the library failed inside: {text}; this is a bug, please report it")
    })
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without text".to_owned())
}

/// Drops what a panic carried; a payload whose own drop panics is let go.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(second);
    }
}

thread_local! {
    /// This thread is inside a call.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Rust reports a panic on stderr before it unwinds, and stderr is the host's. Panics of this
/// library become a message instead; any other in the process is reported as it was before.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    // A hook can't be set while a panic of the host's unwinds through this call.
    if std::thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let ours = INSIDE.try_with(Cell::get).unwrap_or(false);
            let worker = std::thread::current().name().is_some_and(|n| n.starts_with("sekv-"));
            if !ours && !worker {
                report(panic);
            }
        }));
    });
}

/// The target of a pointer that must not be NULL.
pub(super) fn required<T>(pointer: Option<T>, name: &str) -> Result<T> {
    match pointer {
        Some(target) => Ok(target),
        None => Err(Error::new(Status::Argument, format!("{name} is NULL, expected a pointer"))),
    }
}

/// A host's array.
///
/// # Safety
/// Where `data` is not NULL, it points at `len` values that live and don't change for `'a`.
pub(super) unsafe fn array<'a, T>(data: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    if data.is_null() {
        fail!(Argument, "{name} is NULL, expected {len} values");
    }
    if !data.is_aligned() {
        fail!(Argument, "{name} is at {data:p}, expected an address aligned for its values");
    }
    // SAFETY: not NULL, aligned, and of this length by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// A number that counts something.
pub(super) fn count(name: &str, value: i32) -> Result<usize> {
    match usize::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => fail!(Argument, "{name} is {value}, expected 0 or more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_text() {
        let error = catch::<()>(|| panic!("planted {}", 7)).unwrap_err();
        assert_eq!(error.status, Status::Internal);
        assert!(error.message.contains("planted 7"), "{error}");
        assert_eq!(catch(|| Ok(3)), Ok(3));
    }

    #[test]
    fn a_payload_that_panics_when_it_is_dropped_ends_here_too() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        let error = catch::<()>(|| std::panic::panic_any(Bomb)).unwrap_err();
        assert_eq!(error.status, Status::Internal);
    }
}
