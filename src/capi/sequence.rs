//! Operations on sequences, after llama_memory_*.

use std::mem::MaybeUninit;

use super::boundary::required;
use super::context::{in_context, sekv_context};
use super::status::sekv_status;

/// Removes the tokens of a sequence with positions p0 to p1 - 1; the others keep theirs. An empty
/// range and an empty sequence are no error. Between passes only.
///
/// Sealed blocks of which some tokens stay are sealed anew, at most two for each layer.
///
/// @param seq  0 to n_seq_max - 1; negative: every sequence
/// @param p0   negative: from the start
/// @param p1   negative: to the end
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_rm(
    context: Option<&sekv_context>,
    seq: i32,
    p0: i32,
    p1: i32,
) -> sekv_status {
    in_context(context, |state| state.cache.remove(seq, p0, p1))
}

/// Copies the tokens of a sequence with positions p0 to p1 - 1 to an empty sequence. An empty
/// range copies nothing, and neither does a copy of a sequence onto itself. Between passes only.
///
/// What is sealed is shared and never copied; a copy takes the bytes of its resident tokens, at
/// once. What one of both does later the other does not see.
///
/// @param seq_src  0 to n_seq_max - 1
/// @param seq_dst  0 to n_seq_max - 1
/// @param p0       negative: from the start
/// @param p1       negative: to the end
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_UNSUPPORTED (seq_dst holds tokens: remove them first), SEKV_ERR_BUDGET,
///         SEKV_ERR_MEMORY, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_cp(
    context: Option<&sekv_context>,
    seq_src: i32,
    seq_dst: i32,
    p0: i32,
    p1: i32,
) -> sekv_status {
    in_context(context, |state| state.cache.copy(seq_src, seq_dst, p0, p1))
}

/// Removes every token of every other sequence. Between passes only.
///
/// @param seq  0 to n_seq_max - 1
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_keep(context: Option<&sekv_context>, seq: i32) -> sekv_status {
    in_context(context, |state| state.cache.keep(seq))
}

/// Removes every token of every sequence. Between passes only.
///
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_ORDER (during a pass), SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_clear(context: Option<&sekv_context>) -> sekv_status {
    in_context(context, |state| state.cache.clear())
}

/// Tells the smallest position of a sequence; -1 where it is empty. A running pass does not count.
///
/// @param seq  0 to n_seq_max - 1
/// @param out  gets the position
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_pos_min(
    context: Option<&sekv_context>,
    seq: i32,
    out: Option<&mut MaybeUninit<i32>>,
) -> sekv_status {
    in_context(context, |state| {
        let out = required(out, "out")?;
        out.write(state.cache.position_min(seq)?);
        Ok(())
    })
}

/// Tells the largest position of a sequence; -1 where it is empty. A running pass does not count.
///
/// @param seq  0 to n_seq_max - 1
/// @param out  gets the position
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_pos_max(
    context: Option<&sekv_context>,
    seq: i32,
    out: Option<&mut MaybeUninit<i32>>,
) -> sekv_status {
    in_context(context, |state| {
        let out = required(out, "out")?;
        out.write(state.cache.position_max(seq)?);
        Ok(())
    })
}
