//! State files: whole or absent.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{Sink, Source};
use crate::error::{Error, Result, Status, fail};
use crate::store::{check_file_size, named_file};

/// Small writes are gathered, and small reads come from what was read with a larger one; what is
/// larger goes past these buffers.
const WRITE_BUFFER: usize = 1 << 20;
const READ_BUFFER: usize = 16 << 10;

/// Writes a file of `size` bytes beside the old one, if there is one, and puts it in its place when
/// all of it is on the disk. Only its owner can read it: it holds what the context was told.
pub fn save_file(
    path: &Path,
    size: u64,
    write: impl FnOnce(&mut Sink) -> Result<()>,
) -> Result<()> {
    let failed = |e: io::Error| {
        let message = format!("cannot save the state to {path:?}: {e}; nothing was written there");
        Error::new(Status::Io, message)
    };
    check_file_size(size).map_err(failed)?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut draft = Draft::new(folder).map_err(failed)?;
    let mut out = BufWriter::with_capacity(WRITE_BUFFER, &mut draft.file);
    write(&mut |bytes| out.write_all(bytes).map_err(failed))?;
    out.flush().map_err(failed)?;
    drop(out);
    draft.publish(folder, path).map_err(failed)
}

/// A file that is not there yet. Where the system can, it has no name, and nothing is left of it
/// when the process dies.
struct Draft {
    file: File,
    name: Option<PathBuf>,
}

impl Draft {
    fn new(folder: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        #[cfg(target_os = "linux")]
        if Path::new("/proc/self/fd").exists()
            && let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(folder)
        {
            return Ok(Self { file, name: None });
        }
        let (name, file) = named_file(folder, &mut options, "state")?;
        Ok(Self { file, name: Some(name) })
    }

    fn publish(mut self, folder: &Path, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        #[cfg(target_os = "linux")]
        if self.name.is_none() {
            self.name = Some(link(&self.file, folder)?);
        }
        if let Some(name) = &self.name {
            std::fs::rename(name, path)?;
        }
        self.name = None;
        // The name is as safe as the content.
        File::open(folder)?.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = std::fs::remove_file(name);
        }
    }
}

/// Gives an unnamed file a name that nobody has.
#[cfg(target_os = "linux")]
fn link(file: &File, folder: &Path) -> io::Result<PathBuf> {
    use std::ffi::CString;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::sync::atomic::{AtomicU64, Ordering};

    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = folder.join(format!(".sekv-saved-{}-{number}", std::process::id()));
        let to = CString::new(name.as_os_str().as_bytes())?;
        // SAFETY: two texts that end with zero.
        let result = unsafe {
            let here = libc::AT_FDCWD;
            libc::linkat(here, from.as_ptr(), here, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
        };
        match (result, io::Error::last_os_error()) {
            (0, _) => return Ok(name),
            (_, e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            (_, e) => return Err(e),
        }
    }
}

/// Reads a file through plain reads: whoever cuts it short meanwhile makes an error, not a signal.
/// `read` gets its length. The file must end where `read` does.
pub fn load_file<R>(path: &Path, read: impl FnOnce(u64, &mut Source) -> Result<R>) -> Result<R> {
    let failed = |e: io::Error| Error::new(Status::Io, format!("cannot read the state: {e}"));
    let load = || {
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            fail!(Io, "this is not a regular file");
        }
        let mut file = BufReader::with_capacity(READ_BUFFER, file);
        read(metadata.len(), &mut |out| match file.read_exact(out) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                fail!(Format, "the file ends before the state does")
            }
            result => result.map_err(failed),
        })
    };
    load().map_err(|e| Error::new(e.status, format!("{path:?}: {}", e.message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("sekv-file-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let folder = folder("whole");
        let path = folder.join("a");
        save_file(&path, 3, |sink| sink(b"one")).unwrap();
        let error = save_file(&path, 3, |sink| {
            sink(b"tw")?;
            fail!(Io, "planted")
        });
        assert_eq!(error.unwrap_err().message, "planted");
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        save_file(&path, 3, |sink| sink(b"two")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(names(&folder), ["a"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_is_none_and_a_path_that_is_a_folder_are_refused() {
        let folder = folder("refused");
        let inside = folder.join("inside");
        std::fs::create_dir(&inside).unwrap();
        for path in [folder.join("missing/a"), inside] {
            let error = save_file(&path, 1, |sink| sink(b"1")).unwrap_err();
            assert!(error.message.contains("nothing was written"), "{error}");
            assert!(load_file(&path, |_, _| Ok(())).is_err());
        }
        assert_eq!(names(&folder), ["inside"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn reads_what_is_there_and_no_more() {
        let folder = folder("reads");
        let path = folder.join("a");
        std::fs::write(&path, b"12345").unwrap();
        let mut bytes = [0; 4];
        let len = load_file(&path, |len, source| source(&mut bytes).map(|()| len)).unwrap();
        assert_eq!((len, &bytes), (5, b"1234"));
        let error = load_file(&path, |_, source| source(&mut [0; 6])).unwrap_err();
        assert_eq!(error.status, Status::Format);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
