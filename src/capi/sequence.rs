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
///         SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
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
///         SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY, SEKV_ERR_BUSY,
///         SEKV_ERR_INTERNAL
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

/// Adds delta to the positions of the tokens of a sequence with positions p0 to p1 - 1, and turns
/// their keys accordingly (RoPE). The tokens keep their order: none may come onto or past another,
/// or below 0. An empty range and an empty sequence are no error. Between passes only.
///
/// Nothing that is stored is written anew, but for at most two sealed blocks for each layer, which
/// a range that begins or ends inside divides: a shift is remembered and applied on read, so that
/// a thousand by 1 are one by 1,000.
///
/// @param seq    0 to n_seq_max - 1
/// @param p0     negative: from the start
/// @param p1     negative: to the end
/// @param delta  positions, of either sign
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_POSITION (a position would be below 0, above INT32_MAX, or not between those of
///         the other tokens), SEKV_ERR_IO (a basis file could not be read), SEKV_ERR_MEMORY,
///         SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_add(
    context: Option<&sekv_context>,
    seq: i32,
    p0: i32,
    p1: i32,
    delta: i32,
) -> sekv_status {
    in_context(context, |state| state.cache.shift(seq, p0, p1, delta))
}

/// Would divide the positions of tokens of a sequence, as llama_memory_seq_div does, and is not
/// served: tokens would share a position, and each would turn by another angle. Where it would
/// change nothing (d = 1, an empty range, an empty sequence) it succeeds.
///
/// @param seq  0 to n_seq_max - 1
/// @param p0   negative: from the start
/// @param p1   negative: to the end
/// @param d    1 or more
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_SEQUENCE, SEKV_ERR_ORDER (during a pass),
///         SEKV_ERR_UNSUPPORTED, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_seq_div(
    context: Option<&sekv_context>,
    seq: i32,
    p0: i32,
    p1: i32,
    d: i32,
) -> sekv_status {
    in_context(context, |state| state.cache.divide(seq, p0, p1, d))
}

/// Tells whether sekv_seq_add can move any token. Models for which it could not are refused when
/// they are opened.
///
/// @param out  gets 1
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_can_shift(
    context: Option<&sekv_context>,
    out: Option<&mut MaybeUninit<i32>>,
) -> sekv_status {
    in_context(context, |state| {
        let out = required(out, "out")?;
        out.write(i32::from(state.cache.can_shift()));
        Ok(())
    })
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
