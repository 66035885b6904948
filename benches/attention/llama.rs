//! llama.cpp's flash attention, through `benches/ggml_attention.cpp`.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use half::f16;

use crate::generator::{DIM, N_HEADS, N_KV_HEADS};
use crate::memory::Buffer;

/// What llama.cpp can keep its cache in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheType {
    F16 = 0,
    Q8 = 1,
    Q4 = 2,
}

type Bytes = unsafe extern "C" fn(i32, i64) -> usize;
type Quantize = unsafe extern "C" fn(i32, *const f32, *mut c_void, i64, i64);
type New = unsafe extern "C" fn(
    i32,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i32,
    *mut c_void,
    *mut c_void,
) -> *mut c_void;

/// The shim's functions; each mirrors its declaration in `ggml_attention.cpp`.
pub struct Llama {
    bytes: Bytes,
    quantize: Quantize,
    new: New,
    set_queries: unsafe extern "C" fn(*mut c_void, *const f32),
    compute: unsafe extern "C" fn(*mut c_void) -> i32,
    output: unsafe extern "C" fn(*mut c_void, *mut f32),
    rest: unsafe extern "C" fn(*mut c_void, i32),
    free: unsafe extern "C" fn(*mut c_void),
}

impl Llama {
    /// Builds and loads the shim; the message says what is missing.
    pub fn load() -> Result<Arc<Self>, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/build_ggml.sh");
        let built = Command::new(&script).output().map_err(|e| format!("{script:?}: {e}"))?;
        if !built.status.success() {
            return Err(String::from_utf8_lossy(&built.stderr).trim().to_string());
        }
        let path = CString::new(String::from_utf8_lossy(&built.stdout).trim())
            .map_err(|e| e.to_string())?;
        // SAFETY: a path with its NUL; the library stays open until the process ends.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(format!("{path:?} can't be loaded"));
        }
        let symbol = |name: &str| {
            let name = CString::new(name).map_err(|e| e.to_string())?;
            // SAFETY: an open library and a name with its NUL.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            if address.is_null() { Err(format!("{name:?} is missing")) } else { Ok(address) }
        };
        // SAFETY: each name is defined in ggml_attention.cpp with the type of its field.
        unsafe {
            Ok(Arc::new(Self {
                bytes: std::mem::transmute::<*mut c_void, Bytes>(symbol("bench_ggml_bytes")?),
                quantize: std::mem::transmute::<*mut c_void, Quantize>(symbol(
                    "bench_ggml_quantize",
                )?),
                new: std::mem::transmute::<*mut c_void, New>(symbol("bench_ggml_new")?),
                set_queries: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *const f32),
                >(symbol("bench_ggml_set_queries")?),
                compute: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> i32>(
                    symbol("bench_ggml_compute")?,
                ),
                output: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *mut f32),
                >(symbol("bench_ggml_output")?),
                rest: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, i32)>(
                    symbol("bench_ggml_rest")?,
                ),
                free: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(
                    symbol("bench_ggml_free")?,
                ),
            }))
        }
    }
}

/// A cache of one layer in one type: keys and values, `[token][n_kv_heads][dim]`, filled from the
/// front.
pub struct LlamaCache {
    llama: Arc<Llama>,
    cache_type: CacheType,
    row_len: usize,
    keys: Buffer<u8>,
    values: Buffer<u8>,
}

impl LlamaCache {
    pub fn new(llama: &Arc<Llama>, cache_type: CacheType, row_len: usize, capacity: usize) -> Self {
        // SAFETY: takes numbers only.
        let row = unsafe { (llama.bytes)(cache_type as i32, row_len as i64) };
        Self {
            llama: Arc::clone(llama),
            cache_type,
            row_len,
            keys: Buffer::new(row * capacity),
            values: Buffer::new(row * capacity),
        }
    }

    /// Writes tokens from `first` on.
    pub fn write(&mut self, first: usize, keys: &[f32], values: &[f32]) {
        let n = keys.len() / self.row_len;
        let (cache_type, len) = (self.cache_type as i32, self.row_len as i64);
        // SAFETY: takes numbers only.
        let row = unsafe { (self.llama.bytes)(cache_type, len) };
        for (cache, rows) in [(&mut self.keys, keys), (&mut self.values, values)] {
            let out = &mut cache.as_mut_slice()[first * row..(first + n) * row];
            // SAFETY: n rows of `len` floats in, n encoded rows out, as both slices have.
            unsafe {
                (self.llama.quantize)(
                    cache_type,
                    rows.as_ptr(),
                    out.as_mut_ptr().cast(),
                    n as i64,
                    len,
                );
            }
        }
    }

    /// The attention of the last `n_query` of the first `n_tokens` tokens.
    pub fn attention(
        &self,
        n_threads: usize,
        n_tokens: usize,
        n_query: usize,
    ) -> LlamaAttention<'_> {
        let (keys, values) = (self.keys.as_slice(), self.values.as_slice());
        self.llama.attention(n_threads, [n_tokens, 0, n_query], self.cache_type, keys, values)
    }
}

impl Llama {
    /// The attention of the last tokens over f16 rows that lie head by head,
    /// `[n_kv_heads][capacity][dim]`.
    pub fn attention_by_head<'a>(
        &'a self,
        n_threads: usize,
        n_tokens: usize,
        keys: &'a [f16],
        values: &'a [f16],
    ) -> LlamaAttention<'a> {
        let capacity = keys.len() / (N_KV_HEADS * DIM);
        self.attention(n_threads, [n_tokens, capacity, 1], CacheType::F16, keys, values)
    }

    fn attention<'a, T>(
        &'a self,
        n_threads: usize,
        [n_tokens, capacity, n_query]: [usize; 3],
        cache_type: CacheType,
        keys: &'a [T],
        values: &'a [T],
    ) -> LlamaAttention<'a> {
        // SAFETY: the rows hold n_tokens tokens and outlive the attention, which only reads them.
        let handle = unsafe {
            (self.new)(
                n_threads as i32,
                N_HEADS as i64,
                N_KV_HEADS as i64,
                DIM as i64,
                n_tokens as i64,
                capacity as i64,
                n_query as i64,
                cache_type as i32,
                keys.as_ptr().cast_mut().cast(),
                values.as_ptr().cast_mut().cast(),
            )
        };
        assert!(!handle.is_null(), "llama.cpp could not set up its attention");
        let attention = LlamaAttention { llama: self, handle, len: n_query * N_HEADS * DIM };
        attention.rest(true);
        attention
    }
}

pub struct LlamaAttention<'a> {
    llama: &'a Llama,
    handle: *mut c_void,
    len: usize,
}

impl LlamaAttention<'_> {
    /// Lets its workers sleep, or wakes them.
    pub fn rest(&self, rest: bool) {
        // SAFETY: a live handle.
        unsafe { (self.llama.rest)(self.handle, i32::from(rest)) };
    }

    pub fn set_queries(&mut self, q: &[f32]) {
        assert_eq!(q.len(), self.len);
        // SAFETY: a live handle and as many floats as its queries have.
        unsafe { (self.llama.set_queries)(self.handle, q.as_ptr()) };
    }

    pub fn compute(&mut self) {
        // SAFETY: a live handle.
        let status = unsafe { (self.llama.compute)(self.handle) };
        assert_eq!(status, 0, "llama.cpp's attention failed");
    }

    pub fn output(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len];
        // SAFETY: a live handle and room for its output.
        unsafe { (self.llama.output)(self.handle, out.as_mut_ptr()) };
        out
    }
}

impl Drop for LlamaAttention<'_> {
    fn drop(&mut self) {
        self.rest(false);
        // SAFETY: made by `new`, freed once.
        unsafe { (self.llama.free)(self.handle) };
    }
}
