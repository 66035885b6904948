//! What can go wrong, as values: a status that never changes its number, and one sentence.
//!
//! A message says what was wrong, what was found and what was expected, in that order, with no
//! newline, so that a host can show it as it is.

use std::fmt;

/// The kind of an error. The numbers are part of the ABI: gaps are left for new kinds, and no
/// number is ever given to another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// NULL, a number out of its range, a struct size nobody knows.
    Argument = 10,
    /// A view whose shape, stride or element type does not fit the model or the batch.
    Shape = 20,
    /// A number that is not finite, or beyond what f16 holds.
    Value = 30,
    /// A duplicate, negative or decreasing position.
    Position = 40,
    /// A sequence id outside its range.
    Sequence = 50,
    /// Calls out of order.
    Order = 60,
    /// Another thread is inside the context, or the process is a fork of its owner.
    Busy = 70,
    /// What must stay on the fast tier does not fit its budget.
    Budget = 80,
    /// An allocation failed.
    Memory = 90,
    /// The operating system refused to read or write.
    Io = 100,
    /// A file is not what it should be.
    Format = 110,
    /// A model or a request that cannot be served.
    Unsupported = 120,
    /// A device failed.
    Device = 130,
    /// A fault of this library. The context can only be freed.
    Internal = 140,
}

/// A status with the sentence that explains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub status: Status,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<std::collections::TryReserveError> for Error {
    fn from(e: std::collections::TryReserveError) -> Self {
        Self::new(Status::Memory, format!("an allocation failed: {e}"))
    }
}

/// `fail!(Shape, "head_dim is {}, expected {}", a, b)` returns that error from the function.
macro_rules! fail {
    ($status:ident, $($arg:tt)*) => {
        return Err($crate::error::Error::new($crate::error::Status::$status, format!($($arg)*)))
    };
}
pub(crate) use fail;
