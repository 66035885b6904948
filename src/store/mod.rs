//! Where sealed data lies: aligned memory for the fast tier, segments for the slow tier; and what a
//! saved sequence is made of.

mod aligned;
mod basis_file;
mod chunk;
mod image;
mod loader;
mod slow;

pub use aligned::AlignedBytes;
pub use basis_file::{BasisFolder, BasisIo, check_file_size, named_file, unnamed_file};
pub use image::{Image, ImageReader, Parts, Stored};
pub use loader::Loader;
pub use slow::{Reserved, Segment, SlowStore};

/// CRC-32C of some bytes.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}
