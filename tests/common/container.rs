//! The container of a state (docs/state.md) taken apart and put together again: afterwards lengths
//! and checksums agree with whatever its parts say, so that a fuzzer gets past them.

use sekv::store::checksum;

const VERSION: u32 = 1;
const BYTE_ORDER: u32 = 0x0a0b_0c0d;
const HEADER: usize = 128;
const ALIGN: usize = 64;
const ENTRY: usize = 12;

pub struct Container {
    /// What stands behind the table of blobs and segments.
    pub index: Vec<u8>,
    /// Blobs, then segments.
    pub parts: Vec<Part>,
    n_blobs: usize,
}

#[derive(Default)]
pub struct Part {
    pub bytes: Vec<u8>,
    /// Bytes that it is said to have beyond the container's end.
    missing: usize,
}

impl Part {
    fn len(&self) -> usize {
        self.bytes.len().saturating_add(self.missing)
    }
}

impl Container {
    /// Takes apart what has room for a header. The index ends where the bytes end.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(HEADER)?;
        let index_len = number::<8>(header, 56).min(rest.len());
        let (index, _) = rest.split_at(index_len);
        let most = index_len / ENTRY;
        let n_blobs = number::<4>(header, 64).min(most);
        let n_parts = n_blobs + number::<4>(header, 68).min(most - n_blobs);
        let (table, index) = index.split_at(n_parts * ENTRY);
        let mut rest = rest.get(index_len.next_multiple_of(ALIGN)..).unwrap_or_default();
        let mut parts = Vec::new();
        for entry in table.chunks_exact(ENTRY) {
            let said = number::<8>(entry, 0);
            let len = said.min(rest.len());
            parts.push(Part { bytes: rest[..len].to_vec(), missing: said - len });
            rest = rest.get(len.next_multiple_of(ALIGN)..).unwrap_or_default();
        }
        Some(Self { index: index.to_vec(), parts, n_blobs })
    }

    /// The container of these parts, for a model without a fingerprint.
    pub fn encode(&self) -> Vec<u8> {
        let mut index = Vec::new();
        for part in &self.parts {
            index.extend_from_slice(&(part.len() as u64).to_le_bytes());
            index.extend_from_slice(&checksum(&part.bytes).to_le_bytes());
        }
        index.extend_from_slice(&self.index);
        let lens = [HEADER, index.len()].into_iter().chain(self.parts.iter().map(Part::len));
        let len = lens.fold(0usize, |sum, len| {
            sum.saturating_add(len.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX))
        });

        let mut bytes = b"SEKVSTAT".to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        bytes.extend_from_slice(&[0; 32]);
        bytes.extend_from_slice(&(len as u64).to_le_bytes());
        bytes.extend_from_slice(&(index.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.n_blobs as u32).to_le_bytes());
        bytes.extend_from_slice(&((self.parts.len() - self.n_blobs) as u32).to_le_bytes());
        bytes.extend_from_slice(&checksum(&index).to_le_bytes());
        bytes.resize(HEADER - 4, 0);
        let sum = checksum(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        for part in std::iter::once(&index).chain(self.parts.iter().map(|part| &part.bytes)) {
            bytes.extend_from_slice(part);
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        }
        bytes
    }
}

/// `N` bytes as a number.
fn number<const N: usize>(bytes: &[u8], at: usize) -> usize {
    bytes[at..at + N].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
}
