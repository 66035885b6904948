//! Basis files: where the slow tier lies when its host has named a folder for it.
//!
//! A basis file has no name: no other process can reach it to cut it short, and it is gone with the
//! process that made it. Its space is reserved before it is used, so that a full disk is an error of
//! the reservation and never one of a write to mapped memory, which would be a SIGBUS. What is left
//! of that risk is a medium that fails under the mapping; `BasisIo::Pread` takes it away.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result, Status, fail};

/// Sizes and places of what is reserved are multiples of this: whole pages everywhere.
pub const GRAIN: usize = 64 << 10;

/// How basis files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BasisIo {
    /// Through mappings.
    Mmap,
    /// By reads and writes. Slower, and an error of the medium is an error of the call.
    Pread,
}

/// A folder for the basis files of one context.
#[derive(Debug)]
pub struct BasisFolder {
    path: PathBuf,
    /// Bytes that all files of the context may take together.
    limit: u64,
    io: BasisIo,
    reserved: AtomicU64,
}

impl BasisFolder {
    /// Fails where no file can be made in the folder.
    pub fn open(path: &Path, limit: u64, io: BasisIo) -> Result<Arc<Self>> {
        let folder = Self { path: path.to_owned(), limit, io, reserved: AtomicU64::new(0) };
        folder.unnamed_file()?;
        Ok(Arc::new(folder))
    }

    pub fn io(&self) -> BasisIo {
        self.io
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn unnamed_file(&self) -> Result<File> {
        let path = &self.path;
        unnamed_file(path).map_err(|e| {
            Error::new(Status::Io, format!("cannot make a basis file in {path:?}: {e}"))
        })
    }
}

/// A file in a folder that has no name there. Only this process reaches it.
pub fn unnamed_file(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    #[cfg(target_os = "linux")]
    match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
        // A file system that cannot, or a kernel that takes the flag for that of a folder.
        Err(e) if [libc::EOPNOTSUPP, libc::EISDIR].map(Some).contains(&e.raw_os_error()) => {}
        result => return result,
    }
    let (path, file) = named_file(folder, &mut options, "basis")?;
    std::fs::remove_file(path)?;
    Ok(file)
}

/// A new file under a name that nobody has.
pub fn named_file(
    folder: &Path,
    options: &mut OpenOptions,
    kind: &str,
) -> io::Result<(PathBuf, File)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".sekv-{kind}-{}-{number}", std::process::id()));
        match options.create_new(true).open(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
            Ok(file) => return Ok((path, file)),
        }
    }
}

/// One sequence's file. It grows at its end; what is freed becomes a hole.
#[derive(Debug)]
pub struct BasisFile {
    folder: Arc<BasisFolder>,
    file: File,
    len: Mutex<u64>,
}

impl BasisFile {
    pub fn create(folder: &Arc<BasisFolder>) -> Result<Arc<Self>> {
        let file = folder.unnamed_file()?;
        Ok(Arc::new(Self { folder: Arc::clone(folder), file, len: Mutex::new(0) }))
    }

    pub fn io(&self) -> BasisIo {
        self.folder.io
    }

    /// Reserves `len` bytes, a multiple of [`GRAIN`], and returns where.
    pub fn reserve(&self, len: usize) -> Result<u64> {
        let mut end = self.len.lock().unwrap_or_else(PoisonError::into_inner);
        let (folder, size) = (&self.folder, len as u64);
        let add = |reserved: u64| reserved.checked_add(size).filter(|sum| *sum <= folder.limit);
        let (order, limit) = (Ordering::Relaxed, folder.limit);
        if let Err(reserved) = folder.reserved.fetch_update(order, order, add) {
            fail!(
                Io,
                "the basis files take {reserved} bytes, and {len} more are over their limit of \
                 {limit}"
            );
        }
        let reserved = check_file_size(*end + size).and_then(|()| allocate(self, *end, size));
        if let Err(e) = reserved {
            folder.reserved.fetch_sub(size, order);
            let path = &folder.path;
            fail!(Io, "cannot reserve {len} bytes for a basis file in {path:?}: {e}");
        }
        let start = *end;
        *end += size;
        Ok(start)
    }

    /// Gives a reserved part back to the file system.
    pub fn release(&self, start: u64, len: usize) {
        // A file system that cannot keeps the space until the file is closed.
        #[cfg(target_os = "linux")]
        // SAFETY: a call on an open descriptor, on a part that nobody uses any more.
        let _ = unsafe {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            libc::fallocate(self.file.as_raw_fd(), mode, start as i64, len as i64)
        };
        self.folder.reserved.fetch_sub(len as u64, Ordering::Relaxed);
    }

    /// Maps a reserved part.
    pub fn map(&self, start: u64, len: usize) -> Result<MmapRaw> {
        let map = MmapOptions::new().offset(start).len(len).map_raw(&self.file);
        map.map_err(|e| {
            Error::new(Status::Io, format!("cannot map {len} bytes of a basis file: {e}"))
        })
    }

    pub fn read(&self, start: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, start).map_err(|e| {
            Error::new(Status::Io, format!("cannot read {} bytes of a basis file: {e}", out.len()))
        })
    }

    pub fn write(&self, start: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, start).map_err(|e| {
            let n = bytes.len();
            Error::new(Status::Io, format!("cannot write {n} bytes of a basis file: {e}"))
        })
    }
}

/// Refuses a file size beyond the process's limit: the system would answer with a signal.
pub fn check_file_size(size: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is what the call fills.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if result == 0 && limit.rlim_cur != libc::RLIM_INFINITY && size > limit.rlim_cur {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn allocate(basis: &BasisFile, start: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: a call on an open descriptor.
        let result =
            unsafe { libc::fallocate(basis.file.as_raw_fd(), 0, start as i64, len as i64) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // Writes reserve what they need, or fail.
            Some(libc::EOPNOTSUPP) if basis.io() == BasisIo::Pread => return Ok(()),
            _ => return Err(error),
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn allocate(basis: &BasisFile, _: u64, _: u64) -> io::Result<()> {
    match basis.io() {
        BasisIo::Pread => Ok(()),
        BasisIo::Mmap => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this system cannot reserve space for a mapping; pread needs none",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(limit: u64, io: BasisIo) -> Arc<BasisFile> {
        let folder = BasisFolder::open(&std::env::temp_dir(), limit, io).unwrap();
        BasisFile::create(&folder).unwrap()
    }

    #[test]
    fn parts_follow_each_other_and_hold_what_was_written() {
        let file = file(u64::MAX, BasisIo::Pread);
        for i in 0..3u8 {
            let start = file.reserve(GRAIN).unwrap();
            assert_eq!(start, u64::from(i) * GRAIN as u64);
            file.write(start + 5, &[i; 100]).unwrap();
        }
        let mut bytes = [0; 100];
        file.read(GRAIN as u64 + 5, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 100]);
        let map = file.map(0, GRAIN).unwrap();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { *map.as_ptr().add(5) }, 0);
    }

    #[test]
    fn the_limit_counts_what_is_reserved_now() {
        let file = file(3 * GRAIN as u64, BasisIo::Mmap);
        let first = file.reserve(2 * GRAIN).unwrap();
        let error = file.reserve(2 * GRAIN).unwrap_err();
        assert_eq!(error.status, Status::Io);
        assert!(error.message.contains("over their limit of 196608"), "{error}");
        file.release(first, 2 * GRAIN);
        assert_eq!(file.reserve(3 * GRAIN).unwrap(), 2 * GRAIN as u64);
    }

    #[test]
    fn a_folder_that_is_none_is_refused() {
        let missing = std::env::temp_dir().join("sekv-no-such-folder");
        let error = BasisFolder::open(&missing, u64::MAX, BasisIo::Mmap).unwrap_err();
        assert!(error.message.contains("sekv-no-such-folder"), "{error}");
    }
}
