//! Saved state.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

use super::boundary::required;
use super::context::{in_context, sekv_context};
use super::model::path;
use super::status::sekv_status;
use crate::error::{Result, fail};

/// Takes the next size bytes of a state, and returns 0; any other number ends the call with
/// SEKV_ERR_IO. It must return (no C++ exception, no longjmp), and may not use the context.
pub type sekv_write_callback =
    Option<unsafe extern "C" fn(data: *const c_void, size: usize, user: *mut c_void) -> i32>;

/// Fills data with the next size bytes of a state, all of them, and returns 0; any other number
/// ends the call with SEKV_ERR_IO. It must return (no C++ exception, no longjmp), and may not use
/// the context.
pub type sekv_read_callback =
    Option<unsafe extern "C" fn(data: *mut c_void, size: usize, user: *mut c_void) -> i32>;

/// Tells how many bytes a state has that was saved now. Between passes only.
///
/// @param seq  0 to n_seq_max - 1; -1: all sequences
/// @param out  gets bytes
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_state_size(
    context: Option<&sekv_context>,
    seq: i32,
    out: Option<&mut MaybeUninit<u64>>,
) -> sekv_status {
    in_context(context, |state| {
        let out = required(out, "out")?;
        out.write(state.cache.state_size(seq)?);
        Ok(())
    })
}

/// Saves a sequence, or all, to a file: everything that decoding needs, but for the tokens
/// themselves, which are the host's. Between passes only.
///
/// The file is written beside the old one and takes its place when all of it is on the disk: it is
/// whole or absent, also when the process is killed. Only its owner can read it. An empty sequence
/// can be saved; a state of it empties the sequence that it is loaded to.
///
/// @param seq   0 to n_seq_max - 1; -1: all sequences
/// @param path  zero-terminated
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_IO (the old file is as it was), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_state_save(
    context: Option<&sekv_context>,
    seq: i32,
    path: *const c_char,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of `path`.
        let path = unsafe { required_path(path)? };
        state.cache.save_file(seq, &path)
    })
}

/// Loads a state that sekv_state_save wrote: into one sequence, or all as they were, and whatever
/// they held before is gone. Between passes only.
///
/// All of the file is verified before anything changes: checksums, the format's version, the
/// model's fingerprint and shape, and those params on which the meaning of the bytes depends
/// (routing, value_sketch, the codecs; for routing PAPER the seed or the sidecar). All other params
/// may differ, and serve from here on. Contexts of one process that load the same state share its
/// slow-tier bytes.
///
/// @param seq   0 to n_seq_max - 1: the state must hold one sequence at the most, of whatever
///              number; -1: all sequences, by their numbers
/// @param path  zero-terminated
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE (more or other sequences than fit),
///         SEKV_ERR_ORDER (during a pass), SEKV_ERR_IO, SEKV_ERR_FORMAT (damaged, or not a state),
///         SEKV_ERR_UNSUPPORTED (another version, model or params), SEKV_ERR_BUDGET,
///         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_state_load(
    context: Option<&sekv_context>,
    seq: i32,
    path: *const c_char,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of `path`.
        let path = unsafe { required_path(path)? };
        state.cache.load_file(seq, &path)
    })
}

/// Saves a sequence, or all, through a callback, which gets the bytes in order: the same as
/// sekv_state_save writes. Between passes only.
///
/// @param seq    0 to n_seq_max - 1; -1: all sequences
/// @param write  called by this thread, during the call only
/// @param user   given to the callback; the host's
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_IO (the callback failed), SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_state_save_to(
    context: Option<&sekv_context>,
    seq: i32,
    write: sekv_write_callback,
    user: *mut c_void,
) -> sekv_status {
    in_context(context, |state| {
        let write = required(write, "write")?;
        state.cache.save_to(seq, &mut |bytes| {
            // SAFETY: the host's function, called as its type says.
            let result = unsafe { write(bytes.as_ptr().cast(), bytes.len(), user) };
            done("write", result, bytes.len())
        })
    })
}

/// Loads a state through a callback that gives its bytes in order, as sekv_state_load does from a
/// file. Nothing is read beyond the state's end.
///
/// @param seq   as for sekv_state_load
/// @param read  called by this thread, during the call only
/// @param user  given to the callback; the host's
/// @return as sekv_state_load; SEKV_ERR_IO where the callback failed
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_state_load_from(
    context: Option<&sekv_context>,
    seq: i32,
    read: sekv_read_callback,
    user: *mut c_void,
) -> sekv_status {
    in_context(context, |state| {
        let read = required(read, "read")?;
        state.cache.load_from(seq, None, &mut |out| {
            // SAFETY: the host's function, called as its type says.
            let result = unsafe { read(out.as_mut_ptr().cast(), out.len(), user) };
            done("read", result, out.len())
        })
    })
}

fn done(name: &str, result: i32, len: usize) -> Result<()> {
    if result != 0 {
        fail!(Io, "the {name} callback returned {result} for {len} bytes, expected 0");
    }
    Ok(())
}

/// # Safety
/// As of [`path`].
unsafe fn required_path(text: *const c_char) -> Result<std::path::PathBuf> {
    // SAFETY: the caller's promise.
    let path = unsafe { path(text, "path")? };
    required(path, "path")
}
