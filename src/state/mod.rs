//! Saved state as bytes: the container, and files that are whole or absent (docs/state.md).

mod container;
mod file;

pub use container::{Identity, Sink, Source, read, size, write};
pub use file::{load_file, save_file};
