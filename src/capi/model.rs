//! Models.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use super::boundary::{array, call, catch, count, required};
use super::sized::{self, SizedStruct};
use super::status::sekv_status;
use crate::error::{Result, fail};
use crate::model::{MAX_HEAD_DIM, MAX_LAYERS, Model, ModelParams, RopeKind};

/// A model: the shape of its attention, and what was trained for it. Immutable.
pub struct sekv_model {
    pub(super) model: Arc<Model>,
}

/// Which dimensions RoPE rotates together.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_rope_kind {
    SEKV_ROPE_NONE = 0,
    /// Neighbours: (2i, 2i + 1).
    SEKV_ROPE_NORM = 1,
    /// Halves: (i, i + n_rot / 2).
    SEKV_ROPE_NEOX = 2,
}

/// A model described by its host. The arrays and texts are the host's and are read during the
/// call only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sekv_model_params {
    /// sizeof(sekv_model_params).
    pub struct_size: usize,
    /// 1 to 1,024.
    pub n_layer: i32,
    /// Query heads, 1 to 1,024.
    pub n_head: i32,
    /// KV heads, a divisor of n_head; 0: n_head.
    pub n_head_kv: i32,
    /// Elements of a key and a query, 1 to 1,024.
    pub head_dim_k: i32,
    /// Elements of a value; 0: head_dim_k.
    pub head_dim_v: i32,
    /// enum sekv_rope_kind.
    pub rope_kind: i32,
    /// Dimensions that RoPE rotates; 0: head_dim_k.
    pub n_rot: i32,
    /// Tokens the model was trained with; 0: unknown.
    pub n_ctx_train: i32,
    /// 0: 10,000.
    pub rope_freq_base: f32,
    /// What every frequency is multiplied by; 0: 1.
    pub rope_freq_scale: f32,
    /// What a score is multiplied by; 0: 1 / sqrt(head_dim_k).
    pub attention_scale: f32,
    /// 0.
    pub reserved0: i32,
    /// [n_layer], instead of n_head; or NULL.
    pub n_head_per_layer: *const i32,
    /// [n_layer], instead of n_head_kv; or NULL.
    pub n_head_kv_per_layer: *const i32,
    /// [n_rot / 2], what each frequency is divided by; or NULL.
    pub rope_freq_factors: *const f32,
    /// GGUF file of what was trained for routing; or NULL.
    pub sidecar_path: *const c_char,
    /// The host's own identity of geometry and weights, which saved states are matched by; all
    /// zero: none.
    pub fingerprint: [u8; 32],
}

// SAFETY: `struct_size` first, numbers and pointers, ends with 32 bytes after a pointer.
unsafe impl SizedStruct for sekv_model_params {
    const NAME: &'static str = "sekv_model_params";

    fn defaults() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            n_layer: 0,
            n_head: 0,
            n_head_kv: 0,
            head_dim_k: 0,
            head_dim_v: 0,
            rope_kind: sekv_rope_kind::SEKV_ROPE_NONE as i32,
            n_rot: 0,
            n_ctx_train: 0,
            rope_freq_base: 0.0,
            rope_freq_scale: 0.0,
            attention_scale: 0.0,
            reserved0: 0,
            n_head_per_layer: ptr::null(),
            n_head_kv_per_layer: ptr::null(),
            rope_freq_factors: ptr::null(),
            sidecar_path: ptr::null(),
            fingerprint: [0; 32],
        }
    }
}

/// # Safety
/// Its arrays are of the lengths that they are described with, or NULL.
unsafe fn model_params(from: &sekv_model_params) -> Result<ModelParams> {
    let n_layer = count("n_layer", from.n_layer)?;
    if n_layer > MAX_LAYERS {
        fail!(Argument, "n_layer is {n_layer}, expected 1 to {MAX_LAYERS}");
    }
    let head_dim_k = count("head_dim_k", from.head_dim_k)?;
    let n_rot = count("n_rot", from.n_rot)?;
    let rope = match from.rope_kind {
        0 => RopeKind::None,
        1 => RopeKind::Norm,
        2 => RopeKind::Neox,
        other => fail!(
            Argument,
            "rope_kind is {other}, expected SEKV_ROPE_NONE (0), SEKV_ROPE_NORM (1) or \
             SEKV_ROPE_NEOX (2)"
        ),
    };
    if from.reserved0 != 0 {
        fail!(Argument, "reserved0 of sekv_model_params is {}, expected 0", from.reserved0);
    }
    let heads = |values: *const i32, name: &str| -> Result<Option<Vec<usize>>> {
        if values.is_null() {
            return Ok(None);
        }
        // SAFETY: n_layer values, by the caller's promise.
        let values = unsafe { array(values, n_layer, name)? };
        values.iter().map(|&n| count(name, n)).collect::<Result<_>>().map(Some)
    };
    let rope_freq_factors = if from.rope_freq_factors.is_null() {
        None
    } else {
        // Sizes beyond the limit are refused below; no more is read than any legal size has.
        let n_pairs = (if n_rot == 0 { head_dim_k } else { n_rot }).min(MAX_HEAD_DIM) / 2;
        // SAFETY: n_rot / 2 values, by the caller's promise.
        Some(unsafe { array(from.rope_freq_factors, n_pairs, "rope_freq_factors")? }.to_vec())
    };
    Ok(ModelParams {
        n_layer,
        n_head: count("n_head", from.n_head)?,
        n_head_kv: count("n_head_kv", from.n_head_kv)?,
        head_dim_k,
        head_dim_v: count("head_dim_v", from.head_dim_v)?,
        rope,
        n_rot,
        n_ctx_train: count("n_ctx_train", from.n_ctx_train)?,
        rope_freq_base: from.rope_freq_base,
        rope_freq_scale: from.rope_freq_scale,
        attention_scale: from.attention_scale,
        n_head_per_layer: heads(from.n_head_per_layer, "n_head_per_layer")?,
        n_head_kv_per_layer: heads(from.n_head_kv_per_layer, "n_head_kv_per_layer")?,
        rope_freq_factors,
        // SAFETY: a text or NULL, by the caller's promise.
        sidecar_path: unsafe { path(from.sidecar_path, "sidecar_path")? },
        fingerprint: from.fingerprint,
    })
}

/// A host's path; None for NULL.
///
/// # Safety
/// `text` is NULL or ends with a zero byte.
pub(super) unsafe fn path(text: *const c_char, name: &str) -> Result<Option<PathBuf>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(text) };
    if bytes.is_empty() {
        fail!(Argument, "{name} is empty, expected the path of a file");
    }
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        Ok(Some(std::ffi::OsStr::from_bytes(bytes.to_bytes()).into()))
    }
    #[cfg(not(unix))]
    match bytes.to_str() {
        Ok(text) => Ok(Some(text.into())),
        Err(_) => fail!(Argument, "{name} is not UTF-8"),
    }
}

/// Fills a sekv_model_params with its defaults: all zero, struct_size as given.
///
/// @param params       the host's; its first struct_size bytes are written
/// @param struct_size  sizeof(sekv_model_params) as the host was compiled
/// @return SEKV_OK, SEKV_ERR_ARGUMENT (NULL, an impossible size)
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_model_params_init(
    params: *mut sekv_model_params,
    struct_size: usize,
) -> sekv_status {
    // SAFETY: as the header says of `params`.
    call(|| unsafe { sized::write(params, "params", struct_size, SizedStruct::defaults()) })
}

/// Makes a model from its GGUF file. The header and small samples of the weights are read, and the
/// file is closed again.
///
/// @param gguf_path     a path, zero-terminated
/// @param sidecar_path  GGUF file of what was trained for routing, or NULL
/// @param out           gets the model, which the host frees with sekv_model_free
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_IO, SEKV_ERR_FORMAT, SEKV_ERR_UNSUPPORTED (the
///         message names what cannot be served), SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_model_from_gguf(
    gguf_path: *const c_char,
    sidecar_path: *const c_char,
    out: Option<&mut MaybeUninit<*mut sekv_model>>,
) -> sekv_status {
    call(|| {
        // SAFETY: as the header says of paths.
        let (gguf, sidecar) =
            unsafe { (path(gguf_path, "gguf_path")?, path(sidecar_path, "sidecar_path")?) };
        let gguf = required(gguf, "gguf_path")?;
        let out = required(out, "out")?;
        let model = Arc::new(Model::from_gguf(&gguf, sidecar.as_deref())?);
        out.write(Box::into_raw(Box::new(sekv_model { model })));
        Ok(())
    })
}

/// Makes a model as its host describes it, where there is no GGUF file.
///
/// @param params  filled by sekv_model_params_init, then by the host
/// @param out     gets the model, which the host frees with sekv_model_free
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, and where there is a sidecar SEKV_ERR_IO, SEKV_ERR_FORMAT,
///         SEKV_ERR_UNSUPPORTED; SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_model_from_params(
    params: *const sekv_model_params,
    out: Option<&mut MaybeUninit<*mut sekv_model>>,
) -> sekv_status {
    call(|| {
        // SAFETY: as the header says of `params` and its arrays.
        let params = unsafe { model_params(&sized::read(params, "params")?)? };
        let out = required(out, "out")?;
        let model = Arc::new(Model::from_params(&params)?);
        out.write(Box::into_raw(Box::new(sekv_model { model })));
        Ok(())
    })
}

/// Frees a model. Contexts that were made from it go on: they share what they need.
///
/// @param model  the host's, not used again; NULL does nothing
///
/// Threads: any, while no other uses this handle. Cannot fail.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_model_free(model: *mut sekv_model) {
    if model.is_null() {
        return;
    }
    let _ = catch(|| {
        // SAFETY: it came from Box::into_raw above, and the host frees it once.
        drop(unsafe { Box::from_raw(model) });
        Ok(())
    });
}
