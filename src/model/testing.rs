//! Hand-made models for the tests of this folder.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::geometry::{Geometry, LayerGeometry, RopeKind};
use super::gguf_writer::GgufWriter;
use super::preflight::value_type;

/// A model of two layers, 4 query heads, 2 KV heads and keys of 8 dimensions, as `model_keys`
/// describes it.
pub(crate) fn small_geometry() -> Geometry {
    Geometry {
        layers: vec![LayerGeometry { n_heads: 4, n_kv_heads: 2 }; 2],
        key_dim: 8,
        value_dim: 8,
        rope: RopeKind::Norm,
        n_rot: 8,
        rope_frequencies: vec![1.0, 0.1, 0.01, 0.001],
        attention_scale: 1.0 / 8f32.sqrt(),
        n_ctx_train: 2048,
    }
}

/// The keys that every model has, under that architecture.
pub(crate) fn model_keys(architecture: &str) -> GgufWriter {
    let mut writer = GgufWriter::new();
    let key = |suffix: &str| format!("{architecture}.{suffix}");
    writer
        .text("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("embedding_length"), 32)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .u32(&key("context_length"), 2048);
    writer
}

impl GgufWriter {
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.entry(key, value_type::F32, &value.to_le_bytes())
    }

    pub fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.entry(key, value_type::BOOL, &[u8::from(value)])
    }
}

/// A file that goes when the test does.
pub(crate) struct TemporaryFile(PathBuf);

impl TemporaryFile {
    /// A name nobody else uses; the file itself is not made.
    pub fn unwritten() -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("sekv-test-{}-{number}.gguf", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub fn with(bytes: &[u8]) -> Self {
        let file = Self::unwritten();
        std::fs::write(&file.0, bytes).expect("a temporary file can be written");
        file
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Damages files by one to four random changes, the same for the same seed.
pub(crate) struct Mutations(u64);

impl Mutations {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// xorshift64 (Marsaglia 2003).
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    pub fn mutate(&mut self, original: &[u8]) -> Vec<u8> {
        /// Lengths and counts that tend to break arithmetic.
        const HARD: [u64; 13] = [
            0,
            1,
            2,
            8,
            12,
            40,
            0xff,
            1 << 20,
            1 << 28,
            1 << 31,
            u32::MAX as u64,
            1 << 63,
            u64::MAX,
        ];
        let mut file = original.to_vec();
        for _ in 0..1 + self.below(4) {
            if file.is_empty() {
                break;
            }
            let at = self.below(file.len());
            match self.below(6) {
                0 => file[at] ^= 1 << self.below(8),
                1 => file[at] = self.below(256) as u8,
                2 => self.overwrite(&mut file, at, HARD),
                3 => {
                    let small = self.below(64) as u64;
                    self.overwrite(&mut file, at, [small]);
                }
                4 => file.truncate(at),
                _ => {
                    let end = (at + self.below(9)).min(file.len());
                    file.drain(at..end);
                }
            }
        }
        file
    }

    /// Writes one of the numbers over what stands at `at`, as u32 or u64.
    fn overwrite<const N: usize>(&mut self, file: &mut [u8], at: usize, numbers: [u64; N]) {
        let bytes = numbers[self.below(N)].to_le_bytes();
        let width = [4, 8][self.below(2)].min(file.len() - at);
        file[at..at + width].copy_from_slice(&bytes[..width]);
    }
}

/// The system's allocator, and the largest request that each thread has made of it. A reader that
/// believes a file's counts shows here, even where the request would be granted.
struct WatchedAllocator;

#[global_allocator]
static ALLOCATOR: WatchedAllocator = WatchedAllocator;

thread_local! {
    static LARGEST_REQUEST: Cell<usize> = const { Cell::new(0) };
}

/// The largest request of this thread since the last call.
pub(crate) fn take_largest_request() -> usize {
    LARGEST_REQUEST.replace(0)
}

fn note_request(bytes: usize) {
    // A thread that is ending has no such cell any more; nobody asks it.
    let _ = LARGEST_REQUEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every request goes to the system's allocator as it came; the cell that is written beside
// it needs no allocation and no destructor.
unsafe impl GlobalAlloc for WatchedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_request(layout.size());
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note_request(layout.size());
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note_request(new_size);
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}
