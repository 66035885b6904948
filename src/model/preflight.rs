//! A bounded scan of a GGUF header, before anything parses or allocates by what it says.
//!
//! A GGUF file comes from outside, and its counts and lengths can say anything. The scan checks
//! every one of them against the bytes that are there and refuses the file at the first fault. It
//! copies nothing: what it finds are slices of the file. Its own memory is one entry for each
//! metadata key and tensor, each of which takes several bytes of the file.

use std::collections::HashSet;

use super::tensor_type::TensorType;
use crate::error::{Result, fail};

/// Value types of metadata, as GGUF numbers them.
pub(crate) mod value_type {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
/// Where `general.alignment` is absent.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

const MAX_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
/// The format's limit for keys.
const MAX_KEY_BYTES: usize = 65_535;
/// ggml keeps a name in 64 bytes with its final zero.
const MAX_TENSOR_NAME_BYTES: usize = 63;
/// The least that an entry takes: a key's length, one byte of key, a type, one byte of value.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The least that a tensor takes: a name's length, its dimension count, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// One metadata entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a> {
    pub key: &'a str,
    /// The entry as it stands in the file: key, type and value.
    pub raw: &'a [u8],
    /// Elements of an array, 1 for anything else.
    pub n_values: u64,
}

/// One tensor of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorInfo<'a> {
    pub name: &'a str,
    /// Elements by dimension, the fastest first; 1 beyond the last.
    pub dims: [u64; 4],
    pub tensor_type: TensorType,
    pub data: &'a [u8],
}

/// What the scan found.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    pub entries: Vec<Entry<'a>>,
    pub tensors: Vec<TensorInfo<'a>>,
    /// Everything before the tensor data: metadata and tensor table.
    pub bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Scans a whole file. Every slice in the result lies inside it.
    pub fn scan(file: &'a [u8]) -> Result<Self> {
        let mut reader = Reader { bytes: file, at: 0 };
        check_version(&mut reader)?;
        let n_tensors = reader.u64("the tensor count")?;
        let n_entries = reader.u64("the metadata count")?;
        if n_entries > MAX_ENTRIES || n_tensors > MAX_TENSORS {
            fail!(
                Format,
                "the header announces {n_entries} metadata entries and {n_tensors} tensors, \
                 expected at most {MAX_ENTRIES} and {MAX_TENSORS}"
            );
        }
        let least = n_entries * MIN_ENTRY_BYTES + n_tensors * MIN_TENSOR_BYTES;
        if least > reader.remaining() {
            fail!(
                Format,
                "the header announces {n_entries} metadata entries and {n_tensors} tensors, which \
                 take at least {least} bytes, and {} are left in the file",
                reader.remaining()
            );
        }

        let (entries, alignment) = scan_entries(&mut reader, n_entries)?;
        let unplaced = scan_tensors(&mut reader, n_tensors, alignment)?;
        let tensors = place_tensors(file, reader.at, alignment, unplaced)?;
        let bytes = &file[..reader.at];
        Ok(Self { entries, tensors, bytes })
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo<'a>> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn check_version(reader: &mut Reader) -> Result<()> {
    let magic = reader.take(4, "the magic")?;
    if magic == b"FUGG" {
        fail!(Unsupported, "this is a big-endian GGUF file, expected a little-endian one");
    }
    if magic != MAGIC {
        fail!(Format, "this is no GGUF file: it begins with {magic:02x?}, expected \"GGUF\"");
    }
    match reader.u32("the version")? {
        2 | 3 => Ok(()),
        1 => fail!(Unsupported, "this is GGUF version 1, expected 2 or 3"),
        // A small version seen through the wrong byte order is large.
        version if version & 0xffff == 0 && version != 0 => {
            fail!(Unsupported, "this is a big-endian GGUF file, expected a little-endian one")
        }
        version => fail!(Format, "the GGUF version is {version}, expected 2 or 3"),
    }
}

fn scan_entries<'a>(reader: &mut Reader<'a>, count: u64) -> Result<(Vec<Entry<'a>>, u64)> {
    let mut entries = Vec::new();
    let mut seen = HashSet::new();
    entries.try_reserve_exact(count as usize)?;
    seen.try_reserve(count as usize)?;
    let mut alignment = DEFAULT_ALIGNMENT;
    for index in 0..count {
        let start = reader.at;
        let key = reader.name(MAX_KEY_BYTES, || format!("the key of metadata entry {index}"))?;
        if !seen.insert(key) {
            fail!(Format, "the metadata key {} stands twice", quoted(key));
        }
        let value_type = reader.u32("a value's type")?;
        let value_start = reader.at;
        let n_values = scan_value(reader, key, value_type)?;
        if key == "general.alignment" {
            alignment = read_alignment(value_type, &reader.bytes[value_start..reader.at])?;
        }
        entries.push(Entry { key, raw: &reader.bytes[start..reader.at], n_values });
    }
    Ok((entries, alignment))
}

/// Steps over a value and says how many elements it has.
fn scan_value(reader: &mut Reader, key: &str, value_type: u32) -> Result<u64> {
    let what = || format!("the value of {}", quoted(key));
    if value_type == value_type::STRING {
        reader.string(what)?;
        return Ok(1);
    }
    if value_type != value_type::ARRAY {
        let Some(bytes) = scalar_bytes(value_type) else {
            fail!(Format, "the value of {} has type {value_type}, expected 0 to 12", quoted(key));
        };
        reader.take_with(bytes, what)?;
        return Ok(1);
    }
    let element_type = reader.u32("an array's element type")?;
    let n_values = reader.u64("an array's length")?;
    if element_type == value_type::STRING {
        // Each takes at least its length, so that the loop is bounded before it starts.
        if n_values > reader.remaining() / 8 {
            fail!(
                Format,
                "{} announces {n_values} strings and {} bytes are left in the file",
                what(),
                reader.remaining()
            );
        }
        for _ in 0..n_values {
            reader.string(what)?;
        }
        return Ok(n_values);
    }
    let Some(bytes) = scalar_bytes(element_type) else {
        fail!(
            Format,
            "{} is an array of elements of type {element_type}, expected a number, bool or string",
            what()
        );
    };
    reader.take_with(n_values.saturating_mul(bytes), what)?;
    Ok(n_values)
}

fn scalar_bytes(value_type: u32) -> Option<u64> {
    use value_type::*;
    match value_type {
        U8 | I8 | BOOL => Some(1),
        U16 | I16 => Some(2),
        U32 | I32 | F32 => Some(4),
        U64 | I64 | F64 => Some(8),
        _ => None,
    }
}

fn read_alignment(value_type: u32, value: &[u8]) -> Result<u64> {
    let (value_type::U32, &[a, b, c, d]) = (value_type, value) else {
        fail!(Format, "general.alignment has value type {value_type}, expected 4 (u32)");
    };
    let alignment = u64::from(u32::from_le_bytes([a, b, c, d]));
    if !alignment.is_power_of_two() {
        fail!(Format, "general.alignment is {alignment}, expected a power of two");
    }
    Ok(alignment)
}

/// A row of the tensor table whose data has not been located yet.
struct Unplaced<'a> {
    name: &'a str,
    dims: [u64; 4],
    tensor_type: TensorType,
    /// Relative to the start of the tensor data.
    offset: u64,
    bytes: u64,
}

fn scan_tensors<'a>(
    reader: &mut Reader<'a>,
    count: u64,
    alignment: u64,
) -> Result<Vec<Unplaced<'a>>> {
    let mut tensors = Vec::new();
    let mut seen = HashSet::new();
    tensors.try_reserve_exact(count as usize)?;
    seen.try_reserve(count as usize)?;
    for index in 0..count {
        let name = reader.name(MAX_TENSOR_NAME_BYTES, || format!("the name of tensor {index}"))?;
        if !seen.insert(name) {
            fail!(Format, "the tensor {} stands twice", quoted(name));
        }
        let n_dims = reader.u32("a tensor's dimension count")?;
        if n_dims > 4 {
            fail!(Format, "tensor {} has {n_dims} dimensions, expected up to 4", quoted(name));
        }
        let mut dims = [1; 4];
        for dim in &mut dims[..n_dims as usize] {
            *dim = reader.u64("a tensor's dimension")?;
            if *dim == 0 {
                fail!(Format, "tensor {} has a dimension of 0", quoted(name));
            }
        }
        let type_number = reader.u32("a tensor's type")?;
        let offset = reader.u64("a tensor's offset")?;
        let Some(tensor_type) = TensorType::from_number(type_number) else {
            fail!(Unsupported, "tensor {} has unknown type {type_number}", quoted(name));
        };
        if offset % alignment != 0 {
            fail!(
                Format,
                "tensor {} begins at offset {offset}, expected a multiple of {alignment}",
                quoted(name)
            );
        }
        let Some(bytes) = tensor_type.tensor_bytes(&dims) else {
            fail!(
                Format,
                "tensor {} has shape {dims:?}, expected rows of whole {} blocks of {} and a size \
                 in 64 bits",
                quoted(name),
                tensor_type.name,
                tensor_type.elements
            );
        };
        tensors.push(Unplaced { name, dims, tensor_type, offset, bytes });
    }
    Ok(tensors)
}

/// Finds each tensor's data and checks that it lies inside the file and that no two overlap.
fn place_tensors<'a>(
    file: &'a [u8],
    header_end: usize,
    alignment: u64,
    unplaced: Vec<Unplaced<'a>>,
) -> Result<Vec<TensorInfo<'a>>> {
    let length = file.len() as u64;
    let data_start = (header_end as u64).checked_next_multiple_of(alignment);
    let mut tensors = Vec::new();
    let mut ranges = Vec::new();
    tensors.try_reserve_exact(unplaced.len())?;
    ranges.try_reserve_exact(unplaced.len())?;
    for Unplaced { name, dims, tensor_type, offset, bytes } in unplaced {
        let start = data_start.and_then(|start| start.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(bytes));
        let (Some(start), Some(end)) = (start, end.filter(|&end| end <= length)) else {
            fail!(
                Format,
                "tensor {} takes {bytes} bytes at offset {offset}, beyond the end of the file \
                 ({length} bytes)",
                quoted(name)
            );
        };
        // Both are at most the length of a slice.
        let data = &file[start as usize..end as usize];
        ranges.push((start, end, name));
        tensors.push(TensorInfo { name, dims, tensor_type, data });
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        if pair[1].0 < pair[0].1 {
            fail!(Format, "tensors {} and {} overlap", quoted(pair[0].2), quoted(pair[1].2));
        }
    }
    Ok(tensors)
}

/// Text from a file as it may stand in a message: short and on one line.
pub(crate) fn quoted(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("\"{}...\"", text[..end].escape_debug()),
        None => format!("\"{}\"", text.escape_debug()),
    }
}

/// Walks through the bytes of a file and never past their end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8]> {
        self.take_with(count, || what.to_owned())
    }

    /// `what` names the part that is being read, and is only asked for in an error.
    fn take_with(&mut self, count: u64, what: impl FnOnce() -> String) -> Result<&'a [u8]> {
        if count > self.remaining() {
            fail!(
                Format,
                "the file ends inside {}: {count} bytes expected at {}, {} left",
                what(),
                self.at,
                self.remaining()
            );
        }
        let start = self.at;
        self.at += count as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: impl FnOnce() -> String) -> Result<&'a [u8]> {
        let length = self.u64("a string's length")?;
        self.take_with(length, what)
    }

    /// A key or a tensor's name: UTF-8, not empty, not too long.
    fn name(&mut self, max_bytes: usize, what: impl Fn() -> String) -> Result<&'a str> {
        let bytes = self.string(&what)?;
        if bytes.is_empty() || bytes.len() > max_bytes {
            fail!(Format, "{} has {} bytes, expected 1 to {max_bytes}", what(), bytes.len());
        }
        match std::str::from_utf8(bytes) {
            Ok(name) => Ok(name),
            Err(_) => fail!(Format, "{} is not UTF-8", what()),
        }
    }
}

#[cfg(test)]
mod tests;
