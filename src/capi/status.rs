//! Statuses, versions and messages.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use crate::error::{Error, Status};

/// 0 (SEKV_OK) or one of `enum sekv_status_code`.
pub type sekv_status = i32;

/// What a status means. The numbers never change; new ones may come in the gaps.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_status_code {
    SEKV_OK = 0,
    /// NULL, a number out of its range, a struct size that nobody knows.
    SEKV_ERR_ARGUMENT = 10,
    /// A view whose shape, stride or element type does not fit the model or the batch.
    SEKV_ERR_SHAPE = 20,
    /// A number that is not finite or beyond 65,504: the message names layer, head and token.
    SEKV_ERR_VALUE = 30,
    /// A duplicate, negative or decreasing position.
    SEKV_ERR_POSITION = 40,
    /// A sequence id outside 0 to n_seq_max - 1, or missing, or of an empty sequence.
    SEKV_ERR_SEQUENCE = 50,
    /// Calls out of order.
    SEKV_ERR_ORDER = 60,
    /// Another thread is inside this context, or the process is a fork of the one that made it.
    SEKV_ERR_BUSY = 70,
    /// What must stay on the fast tier does not fit its budget: the message has both in bytes.
    SEKV_ERR_BUDGET = 80,
    /// An allocation failed, or a thread could not be started.
    SEKV_ERR_MEMORY = 90,
    /// The operating system refused to read or write.
    SEKV_ERR_IO = 100,
    /// A file is not what it should be.
    SEKV_ERR_FORMAT = 110,
    /// A model or a request that cannot be served: the message names what.
    SEKV_ERR_UNSUPPORTED = 120,
    /// A device failed.
    SEKV_ERR_DEVICE = 130,
    /// A fault of the library. The context can only be freed.
    SEKV_ERR_INTERNAL = 140,
}

impl From<Status> for sekv_status_code {
    fn from(status: Status) -> Self {
        match status {
            Status::Argument => Self::SEKV_ERR_ARGUMENT,
            Status::Shape => Self::SEKV_ERR_SHAPE,
            Status::Value => Self::SEKV_ERR_VALUE,
            Status::Position => Self::SEKV_ERR_POSITION,
            Status::Sequence => Self::SEKV_ERR_SEQUENCE,
            Status::Order => Self::SEKV_ERR_ORDER,
            Status::Busy => Self::SEKV_ERR_BUSY,
            Status::Budget => Self::SEKV_ERR_BUDGET,
            Status::Memory => Self::SEKV_ERR_MEMORY,
            Status::Io => Self::SEKV_ERR_IO,
            Status::Format => Self::SEKV_ERR_FORMAT,
            Status::Unsupported => Self::SEKV_ERR_UNSUPPORTED,
            Status::Device => Self::SEKV_ERR_DEVICE,
            Status::Internal => Self::SEKV_ERR_INTERNAL,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// A message as C can hold it. Paths and names from files may hold what a line of text can't.
pub(super) fn c_text(text: &str) -> CString {
    let line = text.replace(|c: char| c.is_control(), " ");
    CString::new(line).unwrap_or_default()
}

/// Remembers the error for this thread and gives its number.
pub(super) fn fail_with(error: &Error) -> sekv_status {
    let text = c_text(&error.message);
    // A thread that is ending has no storage left; its status says what can be said.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    sekv_status_code::from(error.status) as sekv_status
}

const VERSION: [&str; 3] = [
    env!("CARGO_PKG_VERSION_MAJOR"),
    env!("CARGO_PKG_VERSION_MINOR"),
    env!("CARGO_PKG_VERSION_PATCH"),
];

/// The library's version, as 0xMMmmpp: major, minor, patch.
///
/// Threads: any. Cannot fail.
#[unsafe(no_mangle)]
pub extern "C" fn sekv_version() -> u32 {
    VERSION.iter().fold(0, |sum, part| sum << 8 | part.parse::<u32>().unwrap_or(0))
}

/// The library's version as text, such as "0.1.0".
///
/// The text is static. Threads: any. Cannot fail.
#[unsafe(no_mangle)]
pub extern "C" fn sekv_version_string() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The name of a status, such as "SEKV_ERR_SHAPE"; "unknown status" for a number that is none.
///
/// The text is static. Threads: any. Cannot fail.
#[unsafe(no_mangle)]
pub extern "C" fn sekv_status_name(status: sekv_status) -> *const c_char {
    let name = match status {
        0 => c"SEKV_OK",
        10 => c"SEKV_ERR_ARGUMENT",
        20 => c"SEKV_ERR_SHAPE",
        30 => c"SEKV_ERR_VALUE",
        40 => c"SEKV_ERR_POSITION",
        50 => c"SEKV_ERR_SEQUENCE",
        60 => c"SEKV_ERR_ORDER",
        70 => c"SEKV_ERR_BUSY",
        80 => c"SEKV_ERR_BUDGET",
        90 => c"SEKV_ERR_MEMORY",
        100 => c"SEKV_ERR_IO",
        110 => c"SEKV_ERR_FORMAT",
        120 => c"SEKV_ERR_UNSUPPORTED",
        130 => c"SEKV_ERR_DEVICE",
        140 => c"SEKV_ERR_INTERNAL",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// What went wrong in this thread's last call that failed: one sentence without a newline, saying
/// what was wrong, what was found and what was expected. Empty before the first failure; a call
/// that succeeds leaves it as it is.
///
/// The text is the library's and lasts until this thread's next failure, or its end. Never NULL.
/// Threads: any; each has its own. Cannot fail.
#[unsafe(no_mangle)]
pub extern "C" fn sekv_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn messages_are_one_line_of_text() {
        assert_eq!(c_text("a\nb\0c\td").to_bytes(), b"a b c d");
    }

    #[test]
    fn every_status_has_its_name_and_number() {
        for status in [
            Status::Argument,
            Status::Shape,
            Status::Value,
            Status::Position,
            Status::Sequence,
            Status::Order,
            Status::Busy,
            Status::Budget,
            Status::Memory,
            Status::Io,
            Status::Format,
            Status::Unsupported,
            Status::Device,
            Status::Internal,
        ] {
            let number = sekv_status_code::from(status) as sekv_status;
            assert_eq!(number, status as i32);
            // SAFETY: a static text.
            let name = unsafe { CStr::from_ptr(sekv_status_name(number)) };
            let name = name.to_str().unwrap();
            assert_eq!(name, format!("SEKV_ERR_{}", format!("{status:?}").to_uppercase()));
        }
    }
}
