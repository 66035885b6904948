//! Views of the host's tensors, and batches of tokens.

use std::ffi::c_void;
use std::ptr;

use super::boundary::{array, required};
use super::sized::{self, SizedStruct};
use crate::cache::BatchToken;
use crate::error::{Result, fail};
use crate::tensor::{Dtype, View};

/// Element types.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_dtype {
    SEKV_F32 = 0,
    SEKV_F16 = 1,
    SEKV_BF16 = 2,
}

/// Where a view's memory is.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_memory_kind {
    SEKV_MEMORY_HOST = 0,
    /// Device memory. SEKV_ERR_UNSUPPORTED where the library was built without a device backend.
    SEKV_MEMORY_CUDA = 1,
}

/// A tensor of n_elem x n_head x n_tok that the host owns. The elements of a row are contiguous;
/// element e of head h and token t is at data + h * stride_head + t * stride_tok + e * (bytes of
/// an element). Rows need no alignment and may not overlap. The library reads or writes it only
/// during the call that it is given to, and touches no byte between the rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sekv_view {
    /// Host pointer, or device pointer where memory is SEKV_MEMORY_CUDA.
    pub data: *mut c_void,
    /// enum sekv_dtype.
    pub dtype: i32,
    /// enum sekv_memory_kind.
    pub memory: i32,
    pub n_elem: i32,
    pub n_head: i32,
    pub n_tok: i32,
    /// Bytes from one head's row to the next head's; any value where n_head is 1.
    pub stride_head: usize,
    /// Bytes from one token's row to the next token's; any value where n_tok is 1.
    pub stride_tok: usize,
}

/// The tokens of one pass. A token may belong to several sequences, as in llama_batch; its query
/// attends over the first of them. The arrays are the host's and are read during sekv_begin only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sekv_batch {
    /// sizeof(sekv_batch).
    pub struct_size: usize,
    /// 1 to n_batch_max.
    pub n_tok: i32,
    /// [n_tok]; each above the last of its sequences. Gaps are allowed.
    pub pos: *const i32,
    /// [n_tok]: sequences of each token; NULL: one each. Not read where seq_id is NULL.
    pub n_seq_id: *const i32,
    /// [n_tok][n_seq_id[i]]: their ids, 0 to n_seq_max - 1; NULL: sequence 0.
    pub seq_id: *const *const i32,
}

// SAFETY: `struct_size` first, numbers and pointers, a pointer at the end.
unsafe impl SizedStruct for sekv_batch {
    const NAME: &'static str = "sekv_batch";

    fn defaults() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            n_tok: 0,
            pos: ptr::null(),
            n_seq_id: ptr::null(),
            seq_id: ptr::null(),
        }
    }
}

/// A host's view. Its shape is checked against the model where it is used.
///
/// # Safety
/// Its rows are valid while the result is used, and writable where it is an output.
pub(super) unsafe fn view_of(view: Option<&sekv_view>, name: &str) -> Result<View> {
    let view = required(view, name)?;
    let dtype = match view.dtype {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Bf16,
        other => fail!(
            Argument,
            "dtype of {name} is {other}, expected SEKV_F32 (0), SEKV_F16 (1) or SEKV_BF16 (2)"
        ),
    };
    match view.memory {
        0 => {}
        1 => fail!(
            Unsupported,
            "{name} is in device memory (SEKV_MEMORY_CUDA), and this library was built without a \
             device backend"
        ),
        other => fail!(
            Argument,
            "memory of {name} is {other}, expected SEKV_MEMORY_HOST (0) or SEKV_MEMORY_CUDA (1)"
        ),
    }
    let mut shape = [0; 3];
    let fields = [("n_elem", view.n_elem), ("n_head", view.n_head), ("n_tok", view.n_tok)];
    for (n, (field, value)) in shape.iter_mut().zip(fields) {
        match usize::try_from(value) {
            Ok(value) => *n = value,
            Err(_) => fail!(Shape, "{field} of {name} is {value}, expected a positive number"),
        }
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { View::new(view.data.cast(), dtype, shape, [view.stride_head, view.stride_tok]) })
}

/// Reads a host's batch and gives its tokens to `body`.
///
/// # Safety
/// `batch` is NULL or a batch as its type describes, valid during the call.
pub(super) unsafe fn with_tokens<R>(
    batch: *const sekv_batch,
    n_batch_max: usize,
    n_seq_max: usize,
    body: impl FnOnce(&[BatchToken]) -> Result<R>,
) -> Result<R> {
    // SAFETY: the caller's promise.
    let batch = unsafe { sized::read(batch, "batch")? };
    // Before any array is read by it.
    let n_tok = match usize::try_from(batch.n_tok) {
        Ok(n @ 1..) if n <= n_batch_max => n,
        _ => fail!(
            Argument,
            "n_tok of batch is {}, expected 1 to n_batch_max = {n_batch_max}",
            batch.n_tok
        ),
    };
    // SAFETY: arrays of n_tok values, by the caller's promise.
    let positions = unsafe { array(batch.pos, n_tok, "pos of batch")? };
    let mut tokens = Vec::new();
    tokens.try_reserve_exact(n_tok)?;
    for (i, &position) in positions.iter().enumerate() {
        // SAFETY: as promised for token i.
        let sequences = unsafe { sequences_of(&batch, n_tok, i, n_seq_max)? };
        tokens.push(BatchToken { position, sequences });
    }
    body(&tokens)
}

/// # Safety
/// As `with_tokens`; `i` is below `n_tok`.
unsafe fn sequences_of<'a>(
    batch: &sekv_batch,
    n_tok: usize,
    i: usize,
    n_seq_max: usize,
) -> Result<&'a [i32]> {
    if batch.seq_id.is_null() {
        return Ok(&[0]);
    }
    let n = if batch.n_seq_id.is_null() {
        1
    } else {
        // SAFETY: an array of n_tok values, by the caller's promise.
        let n = unsafe { array(batch.n_seq_id, n_tok, "n_seq_id of batch")?[i] };
        match usize::try_from(n) {
            Ok(n @ 1..) if n <= n_seq_max => n,
            _ => fail!(
                Sequence,
                "token {i} belongs to {n} sequences, expected 1 to n_seq_max = {n_seq_max}"
            ),
        }
    };
    // SAFETY: an array of n_tok arrays of n values each, by the caller's promise.
    unsafe {
        let ids = array(batch.seq_id, n_tok, "seq_id of batch")?[i];
        array(ids, n, &format!("seq_id[{i}] of batch"))
    }
}
