//! The container of a saved state, version 1. Numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | header | 128 bytes, below |
//! | index | a table of (length u64, CRC-32C u32) of every blob, then of every segment; then what the cache and its routing wrote |
//! | blobs | each begins at a multiple of 64 |
//! | segments | each begins at a multiple of 64 |
//!
//! What lies between is zero, and the end is a multiple of 64.
//!
//! | offset in the header | what |
//! |---|---|
//! | 0 | "SEKVSTAT" |
//! | 8 | version, u32 |
//! | 12 | 0x0a0b0c0d as u32: the order of bytes |
//! | 16 | the model's fingerprint, 32 bytes |
//! | 48 | length of it all, u64 |
//! | 56 | length of the index, u64 |
//! | 64 | number of blobs, u32 |
//! | 68 | number of segments, u32 |
//! | 72 | CRC-32C of the index, u32 |
//! | 76 | zeros |
//! | 124 | CRC-32C of the header up to here, u32 |
//!
//! Every bit is covered by a checksum or known to be zero.

use crate::error::{Result, fail};
use crate::store::{AlignedBytes, Image, Loader, Parts, SlowStore, checksum};

/// Takes bytes in order.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Fills all of a slice with the next bytes, or fails.
pub type Source<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

const MAGIC: &[u8; 8] = b"SEKVSTAT";
const VERSION: u32 = 1;
const BYTE_ORDER: u32 = 0x0a0b_0c0d;
const HEADER: usize = 128;
const ALIGN: usize = 64;
const ENTRY: usize = 12;

/// Bytes that are taken from a source without knowing that there are so many.
const STEP: usize = 1 << 20;

/// What a state must agree with.
pub struct Identity<'a> {
    pub fingerprint: &'a [u8; 32],
    /// The length that the source has; None: unknown.
    pub len: Option<u64>,
}

fn padded(len: u64) -> u64 {
    len.next_multiple_of(ALIGN as u64)
}

/// The index with its table before it.
fn whole_index(image: &Image) -> Vec<u8> {
    let n = image.blobs.len() + image.segments.len();
    let mut index = Vec::with_capacity(n * ENTRY + image.index.len());
    let mut entry = |len: usize, checksum: u32| {
        index.extend_from_slice(&(len as u64).to_le_bytes());
        index.extend_from_slice(&checksum.to_le_bytes());
    };
    for blob in &image.blobs {
        entry(blob.stored().len(), checksum(blob.stored()));
    }
    for segment in &image.segments {
        entry(segment.len(), segment.checksum());
    }
    index.extend_from_slice(&image.index);
    index
}

/// Bytes that [`write()`] gives out.
pub fn size(image: &Image) -> u64 {
    let n = image.blobs.len() + image.segments.len();
    let index = n * ENTRY + image.index.len();
    let blobs = image.blobs.iter().map(|blob| padded(blob.stored().len() as u64));
    let segments = image.segments.iter().map(|segment| padded(segment.len() as u64));
    HEADER as u64 + padded(index as u64) + blobs.sum::<u64>() + segments.sum::<u64>()
}

/// Gives out an image's bytes in order.
pub fn write(fingerprint: &[u8; 32], image: &Image, sink: &mut Sink) -> Result<()> {
    let index = whole_index(image);
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&BYTE_ORDER.to_le_bytes());
    header.extend_from_slice(fingerprint);
    header.extend_from_slice(&size(image).to_le_bytes());
    header.extend_from_slice(&(index.len() as u64).to_le_bytes());
    header.extend_from_slice(&(image.blobs.len() as u32).to_le_bytes());
    header.extend_from_slice(&(image.segments.len() as u32).to_le_bytes());
    header.extend_from_slice(&checksum(&index).to_le_bytes());
    header.resize(HEADER - 4, 0);
    let sum = checksum(&header);
    header.extend_from_slice(&sum.to_le_bytes());
    sink(&header)?;
    write_padded(&index, sink)?;
    for blob in &image.blobs {
        write_padded(blob.stored(), sink)?;
    }
    let mut room = Vec::new();
    for segment in &image.segments {
        room.resize(segment.len(), 0);
        segment.copy_to(&mut room)?;
        write_padded(&room, sink)?;
    }
    Ok(())
}

fn write_padded(bytes: &[u8], sink: &mut Sink) -> Result<()> {
    sink(bytes)?;
    let rest = bytes.len().next_multiple_of(ALIGN) - bytes.len();
    if rest > 0 { sink(&[0; ALIGN][..rest]) } else { Ok(()) }
}

/// What a header says.
struct Header {
    len: u64,
    index_len: u64,
    n_blobs: usize,
    n_segments: usize,
    index_checksum: u32,
}

/// Reads a state: its index, and the bytes that belong to it. Everything is verified; segments go
/// to the store.
pub fn read(
    identity: &Identity,
    store: &SlowStore,
    source: &mut Source,
) -> Result<(Vec<u8>, Parts)> {
    let mut bytes = [0; HEADER];
    source(&mut bytes)?;
    let header = read_header(&bytes, identity)?;
    let mut index = Vec::new();
    read_bytes(header.index_len, &mut index, source)?;
    verify("index", &index, header.index_checksum)?;
    let n = (header.n_blobs + header.n_segments) * ENTRY;
    if index.len() < n {
        fail!(Format, "the state's index has {} bytes, its table alone {n}", index.len());
    }
    let rest = index.split_off(n);
    let table: Vec<(u64, u32)> = index.chunks_exact(ENTRY).map(entry).collect();
    let lengths = table.iter().map(|&(len, _)| len);
    let total = [HEADER as u64, header.index_len]
        .into_iter()
        .chain(lengths)
        .try_fold(0u64, |sum, len| sum.checked_add(len.checked_next_multiple_of(ALIGN as u64)?));
    if total != Some(header.len) {
        fail!(
            Format,
            "the state's parts are longer or shorter than the {} bytes of it",
            header.len
        );
    }
    let (blobs, segments) = table.split_at(header.n_blobs);
    let parts = Parts {
        blobs: read_blobs(blobs, source)?,
        segments: read_segments(segments, store, source)?,
    };
    Ok((rest, parts))
}

fn entry(bytes: &[u8]) -> (u64, u32) {
    (number(bytes, 0), number(bytes, 8) as u32)
}

/// Eight bytes, or as many as there are, as a number.
fn number(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes[at..].iter().take(8);
    bytes.rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

fn read_header(bytes: &[u8; HEADER], identity: &Identity) -> Result<Header> {
    if !bytes.starts_with(MAGIC) {
        fail!(Format, "this is not a state of libsekv: it begins with other bytes");
    }
    let word = |at: usize| number(&bytes[..at + 4], at) as u32;
    if word(12) == BYTE_ORDER.swap_bytes() {
        fail!(Unsupported, "the state has the other order of bytes, expected little-endian");
    }
    let (found, written) = (checksum(&bytes[..HEADER - 4]), word(HEADER - 4));
    let is_sound = found == written && word(12) == BYTE_ORDER && bytes[76..124] == [0; 48];
    // A newer version may have another header.
    let version = word(8);
    if version != VERSION && (is_sound || version > VERSION && version < 1000) {
        fail!(Unsupported, "the state has version {version}, expected {VERSION}");
    }
    if !is_sound {
        fail!(Format, "the state's header is damaged");
    }
    if bytes[16..48] != identity.fingerprint[..] {
        fail!(Unsupported, "the state belongs to another model: the fingerprints differ");
    }
    let header = Header {
        len: number(bytes, 48),
        index_len: number(bytes, 56),
        n_blobs: word(64) as usize,
        n_segments: word(68) as usize,
        index_checksum: word(72),
    };
    if let Some(len) = identity.len.filter(|&len| len != header.len) {
        fail!(Format, "the state has {len} bytes, its header says {}", header.len);
    }
    if header.index_len > header.len {
        fail!(Format, "the state's index is longer than the state");
    }
    Ok(header)
}

/// Reads some bytes and the zeros behind them. Memory grows with what comes.
fn read_bytes(len: u64, out: &mut Vec<u8>, source: &mut Source) -> Result<()> {
    let Ok(len) = usize::try_from(len) else {
        fail!(Memory, "a part of {len} bytes is larger than memory");
    };
    let mut at = 0;
    while at < len {
        let end = len.min(at + STEP);
        if out.len() < end {
            out.try_reserve(end - out.len())?;
            out.resize(end, 0);
        }
        source(&mut out[at..end])?;
        at = end;
    }
    out.truncate(len);
    read_padding(len, source)
}

fn read_padding(len: usize, source: &mut Source) -> Result<()> {
    let rest = len.next_multiple_of(ALIGN) - len;
    let mut zeros = [0; ALIGN];
    if rest > 0 {
        source(&mut zeros[..rest])?;
    }
    if zeros != [0; ALIGN] {
        fail!(Format, "the state has something between its parts, expected zeros");
    }
    Ok(())
}

fn verify(what: &str, bytes: &[u8], expected: u32) -> Result<()> {
    let found = checksum(bytes);
    if found != expected {
        fail!(
            Format,
            "the state's {what} is damaged: its checksum is {found:08x}, expected {expected:08x}"
        );
    }
    Ok(())
}

fn read_blobs(table: &[(u64, u32)], source: &mut Source) -> Result<Vec<AlignedBytes>> {
    let mut blobs = Vec::new();
    blobs.try_reserve_exact(table.len())?;
    for (number, &(len, expected)) in table.iter().enumerate() {
        let Ok(len) = usize::try_from(len) else {
            fail!(Memory, "a part of {len} bytes is larger than memory");
        };
        // Untouched memory is not in use: a source that ends early has cost nothing.
        let mut blob = AlignedBytes::zeroed(len)?;
        blob.chunks_mut(STEP).try_for_each(&mut *source)?;
        read_padding(len, source)?;
        verify(&format!("part {number}"), &blob, expected)?;
        blobs.push(blob);
    }
    Ok(blobs)
}

fn read_segments(
    table: &[(u64, u32)],
    store: &SlowStore,
    source: &mut Source,
) -> Result<Vec<crate::store::Segment>> {
    let mut description = Vec::new();
    description.try_reserve_exact(table.len())?;
    for &(len, checksum) in table {
        match usize::try_from(len) {
            Ok(len) => description.push((len, checksum)),
            Err(_) => fail!(Memory, "a part of {len} bytes is larger than memory"),
        }
    }
    let mut loader = Loader::new(store, description);
    let (mut bytes, mut room) = (Vec::new(), Vec::new());
    for (number, &(len, expected)) in table.iter().enumerate() {
        read_bytes(len, &mut bytes, source)?;
        verify(&format!("segment {number}"), &bytes, expected)?;
        loader.add(&bytes, &mut room)?;
    }
    Ok(loader.finish())
}

#[cfg(test)]
mod tests;
