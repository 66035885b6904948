//! The slow tier: immutable segments, written once at seal and read by rows.
//!
//! Segments of one sequence share chunks: a row that is fetched lies anywhere among them, and few
//! large chunks are found faster than many small allocations. A chunk lies in anonymous memory or
//! in the sequence's basis file, and is given back with its last segment.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::basis_file::{BasisFile, BasisFolder, BasisIo, GRAIN};
use super::chunk::Chunk;
use super::{AlignedBytes, checksum};
use crate::error::{Error, Result, fail};

/// Segments begin at a multiple of this.
pub const ALIGN: usize = 64;

/// Bytes of a sequence's first chunk, and of its largest. Each is twice the one before.
const FIRST_CHUNK: usize = 256 << 10;
const LARGEST_CHUNK: usize = 16 << 20;

/// What all sequences of a context have in common.
#[derive(Default)]
struct Shared {
    folder: Option<Arc<BasisFolder>>,
    /// Bytes of all segments that are alive, and of those in files.
    bytes: AtomicU64,
    file_bytes: AtomicU64,
    trouble: Mutex<Trouble>,
}

/// What went wrong and was not told yet.
#[derive(Default)]
struct Trouble {
    /// Files are given up, and what comes goes to memory.
    in_memory: bool,
    events: Vec<Error>,
    /// The first read that failed; who asked got zeros.
    fault: Option<Error>,
}

impl Shared {
    fn trouble<R>(&self, with: impl FnOnce(&mut Trouble) -> R) -> R {
        with(&mut self.trouble.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From here on everything goes to memory; said once.
    fn give_up_files(&self, cause: &Error) {
        self.trouble(|trouble| {
            if !trouble.in_memory {
                let message = format!("{cause}; the slow tier goes on in memory");
                trouble.events.push(Error::new(cause.status, message));
            }
            trouble.in_memory = true;
        });
    }
}

/// Slow-tier memory of one sequence.
#[derive(Default)]
pub struct SlowStore {
    shared: Arc<Shared>,
    filling: Mutex<Filling>,
}

/// The chunk that is being filled, and the file that the next one comes from.
#[derive(Default)]
struct Filling {
    chunk: Option<Arc<Chunk>>,
    used: usize,
    file: Option<Arc<BasisFile>>,
}

impl SlowStore {
    /// The store of a context; without a folder it lies in anonymous memory.
    pub fn new(folder: Option<Arc<BasisFolder>>) -> Self {
        let shared = Shared { folder, ..Shared::default() };
        Self { shared: Arc::new(shared), filling: Mutex::default() }
    }

    /// A store for another sequence of the same context.
    pub fn for_sequence(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), filling: Mutex::default() }
    }

    /// A segment of `len` bytes, zero at first, filled by `write`.
    pub fn append(&self, len: usize, write: impl FnOnce(&mut [u8])) -> Result<Segment> {
        self.fill(self.reserve(len)?, write)
    }

    /// Room for a segment of `len` bytes. Who makes many at once asks for all of the room first:
    /// what lives long then lies apart from what is given back soon, and leaves no holes between.
    pub fn reserve(&self, len: usize) -> Result<Reserved> {
        let (chunk, start) = self.take(len)?;
        Ok(Reserved(self.segment(chunk, start, len, 0)))
    }

    /// The segment of some room, zero at first, filled by `write`.
    pub fn fill(&self, room: Reserved, write: impl FnOnce(&mut [u8])) -> Result<Segment> {
        let (chunk, start) = room.0.place();
        let len = room.0.len();
        if chunk.is_file() {
            // By one system call: a mapping would ask for each page by itself.
            let mut bytes = AlignedBytes::zeroed(len)?;
            write(&mut bytes);
            let checksum = checksum(&bytes);
            return self.write_to(room, &bytes, checksum);
        }
        let Some(data) = chunk.memory() else {
            fail!(Internal, "a chunk of memory has no address");
        };
        // SAFETY: the room was handed out once; it lies within the chunk.
        let bytes = unsafe { std::slice::from_raw_parts_mut(data.add(start), len) };
        write(bytes);
        let checksum = checksum(bytes);
        room.filled(checksum)
    }

    /// A segment of these bytes, of which the checksum is known.
    pub fn append_bytes(&self, bytes: &[u8], checksum: u32) -> Result<Segment> {
        self.write_to(self.reserve(bytes.len())?, bytes, checksum)
    }

    /// Writes some room. A file that cannot be written is given up, and the bytes go to memory.
    fn write_to(&self, room: Reserved, bytes: &[u8], checksum: u32) -> Result<Segment> {
        let (chunk, start) = room.0.place();
        // SAFETY: the room was handed out once.
        match unsafe { chunk.write(start, bytes) } {
            Ok(()) => room.filled(checksum),
            Err(cause) if chunk.is_file() => {
                self.shared.give_up_files(&cause);
                self.append_bytes(bytes, checksum)
            }
            Err(cause) => Err(cause),
        }
    }

    /// A segment of bytes that lie in a chunk already.
    pub fn segment(&self, chunk: Arc<Chunk>, start: usize, len: usize, checksum: u32) -> Segment {
        self.shared.bytes.fetch_add(len as u64, Ordering::Relaxed);
        if chunk.is_file() {
            self.shared.file_bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
        let shared = Arc::clone(&self.shared);
        Segment(Arc::new(Run { chunk, start, len, checksum, shared }))
    }

    /// A part of a chunk that nobody has had.
    fn take(&self, len: usize) -> Result<(Arc<Chunk>, usize)> {
        let mut filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(room) = len.checked_next_multiple_of(ALIGN) else {
            fail!(Memory, "a segment of {len} bytes is larger than memory");
        };
        let in_memory = self.shared.trouble(|trouble| trouble.in_memory);
        if let Some(chunk) = &filling.chunk
            && chunk.len() - filling.used >= room
            && !(in_memory && chunk.is_file())
        {
            let (chunk, start) = (Arc::clone(chunk), filling.used);
            filling.used += room;
            return Ok((chunk, start));
        }
        let size = filling.chunk.as_ref().map_or(FIRST_CHUNK, |last| 2 * last.len());
        let size = size.min(LARGEST_CHUNK).max(room);
        if let Some(full) = filling.chunk.take() {
            full.expect_few_reads();
        }
        let chunk = Arc::new(self.new_chunk(&mut filling, size)?);
        (filling.chunk, filling.used) = (Some(Arc::clone(&chunk)), room);
        Ok((chunk, 0))
    }

    /// In the sequence's file where there is one and it has room, else in memory.
    fn new_chunk(&self, filling: &mut Filling, size: usize) -> Result<Chunk> {
        let shared = &self.shared;
        let Some(folder) = &shared.folder else { return Chunk::in_memory(size) };
        if shared.trouble(|trouble| trouble.in_memory) {
            return Chunk::in_memory(size);
        }
        let mut in_file = || {
            let file = match &filling.file {
                Some(file) => Arc::clone(file),
                None => BasisFile::create(folder)?,
            };
            filling.file = Some(Arc::clone(&file));
            Chunk::in_file(file, size.next_multiple_of(GRAIN))
        };
        in_file().or_else(|cause| {
            shared.give_up_files(&cause);
            Chunk::in_memory(size)
        })
    }

    /// Bytes of all segments of the context that are alive.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Those of them that lie in basis files.
    pub fn file_bytes(&self) -> u64 {
        self.shared.file_bytes.load(Ordering::Relaxed)
    }

    /// What went wrong without failing anything, oldest first; taking them empties the list.
    pub fn take_events(&self) -> Vec<Error> {
        self.shared.trouble(|trouble| std::mem::take(&mut trouble.events))
    }

    /// A read that failed since the last time this was asked.
    pub fn take_fault(&self) -> Result<()> {
        match self.shared.trouble(|trouble| trouble.fault.take()) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Says where segments lie that may serve another context as well: the folder and how it is
    /// read, or memory.
    pub fn medium(&self) -> Option<(std::path::PathBuf, BasisIo)> {
        self.shared.folder.as_ref().map(|folder| (folder.path().to_owned(), folder.io()))
    }
}

/// Room for a segment that nobody else knows of.
pub struct Reserved(Segment);

impl Reserved {
    fn filled(mut self, checksum: u32) -> Result<Segment> {
        match Arc::get_mut(&mut self.0.0) {
            Some(run) => run.checksum = checksum,
            None => fail!(Internal, "the room for a segment is shared"),
        }
        Ok(self.0)
    }
}

/// One appended run of bytes, shared by its owners.
#[derive(Clone)]
pub struct Segment(Arc<Run>);

struct Run {
    chunk: Arc<Chunk>,
    start: usize,
    len: usize,
    checksum: u32,
    shared: Arc<Shared>,
}

#[expect(clippy::len_without_is_empty, reason = "nobody asks whether a segment is empty")]
impl Segment {
    /// Bytes that a segment takes besides what it holds.
    pub const METADATA: usize = size_of::<Self>() + size_of::<Run>() + 2 * size_of::<usize>();

    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Of what was written.
    pub fn checksum(&self) -> u32 {
        self.0.checksum
    }

    /// The bytes, where they can be addressed.
    pub fn memory(&self) -> Option<&[u8]> {
        let Run { chunk, start, len, .. } = &*self.0;
        // SAFETY: this part was written before the segment was made, and is only read since.
        chunk.memory().map(|data| unsafe { std::slice::from_raw_parts(data.add(*start), *len) })
    }

    /// Some of the bytes: where they are, or read into `room`, which is as long. A read that fails
    /// gives zeros, and [`SlowStore::take_fault`] tells.
    pub fn read<'a>(&'a self, range: Range<usize>, room: &'a mut [u8]) -> &'a [u8] {
        if let Some(bytes) = self.memory() {
            return &bytes[range];
        }
        let Run { chunk, start, len, shared, .. } = &*self.0;
        assert!(range.end <= *len && room.len() == range.len(), "a read beyond a segment");
        if let Err(fault) = chunk.read(start + range.start, room) {
            room.fill(0);
            shared.trouble(|trouble| {
                trouble.fault.get_or_insert(fault);
            });
        }
        room
    }

    /// Copies all bytes, which must be what was written.
    pub fn copy_to(&self, out: &mut [u8]) -> Result<()> {
        match self.memory() {
            Some(bytes) => out.copy_from_slice(bytes),
            None => self.0.chunk.read(self.0.start, out)?,
        }
        let (found, written) = (checksum(out), self.0.checksum);
        if found != written {
            fail!(
                Io,
                "{} bytes of the slow tier have the checksum {found:08x}, expected {written:08x}: \
                 memory or a disk has failed",
                out.len()
            );
        }
        Ok(())
    }

    /// Where the segment lies.
    pub fn place(&self) -> (&Arc<Chunk>, usize) {
        (&self.0.chunk, self.0.start)
    }

    /// Tells segments apart.
    pub fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.shared.bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
        if self.chunk.is_file() {
            self.shared.file_bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
