//! A saved sequence as its parts: an index of numbers, and the bytes that it speaks of.
//!
//! The index is written by whoever knows what the bytes mean. The bytes stay where they are until
//! they are written: blobs, which a load brings to memory, and segments, which it brings to the
//! slow tier. What several sequences share is in the image once.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use super::{AlignedBytes, Segment};
use crate::error::{Result, fail};

/// Something whose bytes go into an image as they are.
pub trait Stored: Send + Sync {
    fn stored(&self) -> &[u8];
}

impl Stored for Vec<u8> {
    fn stored(&self) -> &[u8] {
        self
    }
}

/// What is being saved.
#[derive(Default)]
pub struct Image {
    pub index: Vec<u8>,
    /// Kept alive until they are written.
    pub blobs: Vec<Arc<dyn Stored>>,
    pub segments: Vec<Segment>,
    numbers: HashMap<usize, u32>,
}

impl Image {
    pub fn u8(&mut self, n: u8) {
        self.index.push(n);
    }

    pub fn flag(&mut self, flag: bool) {
        self.u8(u8::from(flag));
    }

    pub fn u32(&mut self, n: u32) {
        self.index.extend_from_slice(&n.to_le_bytes());
    }

    pub fn i32(&mut self, n: i32) {
        self.index.extend_from_slice(&n.to_le_bytes());
    }

    pub fn u64(&mut self, n: u64) {
        self.index.extend_from_slice(&n.to_le_bytes());
    }

    /// A number of things, and never of bytes: those are 32 bits.
    pub fn count(&mut self, n: usize) {
        self.u64(n as u64);
    }

    /// Adds bytes of its own and writes their number.
    pub fn blob(&mut self, bytes: Vec<u8>) {
        self.u32(self.blobs.len() as u32);
        self.blobs.push(Arc::new(bytes));
    }

    /// Adds the bytes of something that others may share, once, and writes their number.
    pub fn shared_blob<T>(&mut self, shared: &Arc<T>, bytes: impl FnOnce() -> Arc<dyn Stored>) {
        let (next, address) = (self.blobs.len() as u32, Arc::as_ptr(shared).addr());
        let number = *self.numbers.entry(address).or_insert(next);
        if number == next {
            self.blobs.push(bytes());
        }
        self.u32(number);
    }

    /// Adds a segment, once, and writes its number.
    pub fn segment(&mut self, segment: &Segment) {
        let next = self.segments.len() as u32;
        let number = *self.numbers.entry(segment.address()).or_insert(next);
        if number == next {
            self.segments.push(segment.clone());
        }
        self.u32(number);
    }
}

/// The bytes of an image that was loaded.
#[derive(Default)]
pub struct Parts {
    pub blobs: Vec<AlignedBytes>,
    pub segments: Vec<Segment>,
}

/// Reads an image's index. Nothing in it is trusted.
pub struct ImageReader<'a> {
    index: &'a [u8],
    blobs: Vec<Option<AlignedBytes>>,
    segments: Vec<Segment>,
    /// What was made of shared blobs.
    made: HashMap<u32, Arc<dyn Any + Send + Sync>>,
}

impl<'a> ImageReader<'a> {
    pub fn new(index: &'a [u8], parts: Parts) -> Self {
        let blobs = parts.blobs.into_iter().map(Some).collect();
        Self { index, blobs, segments: parts.segments, made: HashMap::new() }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((bytes, rest)) = self.index.split_first_chunk::<N>() else {
            fail!(Format, "the state's index ends where a number was expected");
        };
        self.index = rest;
        Ok(*bytes)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.take::<1>()?[0])
    }

    pub fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => fail!(Format, "the state has {other} where 0 or 1 was expected"),
        }
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    pub fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_le_bytes(self.take()?))
    }

    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// A number of `what`, from `low` to `high`.
    pub fn count(&mut self, what: &str, low: usize, high: usize) -> Result<usize> {
        let n = self.u64()?;
        match usize::try_from(n).ok().filter(|n| (low..=high).contains(n)) {
            Some(n) => Ok(n),
            None => fail!(Format, "the state has {n} {what}, expected {low} to {high}"),
        }
    }

    /// A list's length, of entries that take at least a byte of the index each.
    pub fn length(&mut self, what: &str) -> Result<usize> {
        let left = self.index.len();
        self.count(what, 0, left)
    }

    /// Takes a blob of `len` bytes that belongs to one owner.
    pub fn blob(&mut self, what: &str, len: usize) -> Result<AlignedBytes> {
        let number = self.u32()?;
        self.take_blob(number, what, len)
    }

    fn take_blob(&mut self, number: u32, what: &str, len: usize) -> Result<AlignedBytes> {
        let blob = self.blobs.get_mut(number as usize).and_then(Option::take);
        match blob {
            Some(blob) if blob.len() == len => Ok(blob),
            Some(blob) => {
                fail!(Format, "the state has {} bytes of {what}, expected {len}", blob.len())
            }
            None => fail!(Format, "the state's {what} is missing or in use twice"),
        }
    }

    /// What `make` makes of a blob of `len` bytes; who names the same blob later gets the same,
    /// where `is_same` agrees.
    pub fn shared_blob<T: Send + Sync + 'static>(
        &mut self,
        what: &str,
        len: usize,
        is_same: impl FnOnce(&T) -> bool,
        make: impl FnOnce(AlignedBytes) -> Result<T>,
    ) -> Result<Arc<T>> {
        let number = self.u32()?;
        if let Some(made) = self.made.get(&number) {
            return match Arc::clone(made).downcast::<T>() {
                Ok(made) if is_same(&made) => Ok(made),
                _ => fail!(Format, "the state has one {what} in two meanings"),
            };
        }
        let made = Arc::new(make(self.take_blob(number, what, len)?)?);
        self.made.insert(number, Arc::clone(&made) as Arc<dyn Any + Send + Sync>);
        Ok(made)
    }

    /// A segment, of at least `least` bytes and at most `most`.
    pub fn segment(&mut self, what: &str, least: usize, most: usize) -> Result<Segment> {
        let number = self.u32()? as usize;
        let Some(segment) = self.segments.get(number) else {
            fail!(Format, "the state's {what} number {number} is missing");
        };
        if !(least..=most).contains(&segment.len()) {
            let found = segment.len();
            fail!(Format, "the state has {found} bytes of {what}, expected {least} to {most}");
        }
        Ok(segment.clone())
    }

    /// The index has been read to its end.
    pub fn finish(&self) -> Result<()> {
        if !self.index.is_empty() {
            fail!(Format, "the state's index goes on for {} bytes after its end", self.index.len());
        }
        if self.blobs.iter().any(Option::is_some) {
            fail!(Format, "the state has bytes that its index does not speak of");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SlowStore;

    fn aligned(bytes: &[u8]) -> AlignedBytes {
        let mut copy = AlignedBytes::zeroed(bytes.len()).unwrap();
        copy.copy_from_slice(bytes);
        copy
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let mut image = Image::default();
        let shared = Arc::new(vec![1u8, 2, 3]);
        let segment = SlowStore::default().append(5, |bytes| bytes.fill(9)).unwrap();
        image.u8(200);
        image.flag(true);
        image.i32(-5);
        image.count(77);
        image.shared_blob(&shared, || shared.clone());
        image.blob(vec![4, 5]);
        image.shared_blob(&shared, || shared.clone());
        image.segment(&segment);
        image.segment(&segment);
        assert_eq!((image.blobs.len(), image.segments.len()), (2, 1));

        let blobs = image.blobs.iter().map(|blob| aligned(blob.stored())).collect();
        let parts = Parts { blobs, segments: image.segments.clone() };
        let mut reader = ImageReader::new(&image.index, parts);
        assert_eq!(reader.u8().unwrap(), 200);
        assert!(reader.flag().unwrap());
        assert_eq!(reader.i32().unwrap(), -5);
        assert_eq!(reader.count("things", 77, 77).unwrap(), 77);
        let make = |bytes: AlignedBytes| Ok(bytes.to_vec());
        let first = reader.shared_blob("vector", 3, |_| true, make).unwrap();
        assert_eq!(&*reader.blob("pair", 2).unwrap(), [4, 5]);
        let again = reader.shared_blob("vector", 3, |v| v.len() == 3, make).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(reader.segment("rows", 5, 5).unwrap().len(), 5);
        assert_eq!(reader.segment("rows", 0, 5).unwrap().len(), 5);
        reader.finish().unwrap();
        assert!(reader.u8().is_err());
    }

    #[test]
    fn an_index_that_says_what_cannot_be_is_refused() {
        let read = |index: &[u8]| {
            let parts = Parts { blobs: vec![aligned(&[1, 2])], segments: Vec::new() };
            let index: Box<[u8]> = index.into();
            ImageReader::new(Box::leak(index), parts)
        };
        assert!(read(&[2]).flag().is_err());
        assert!(read(&7u64.to_le_bytes()).count("heads", 0, 6).is_err());
        assert!(read(&9u64.to_le_bytes()).length("heads").is_err());
        assert!(read(&[0; 4]).blob("rows", 3).is_err());
        assert!(read(&[1, 0, 0, 0]).blob("rows", 2).is_err());
        let mut twice = read(&[0; 8]);
        assert!(twice.blob("rows", 2).is_ok());
        assert!(twice.blob("rows", 2).is_err());
        assert!(read(&[0; 4]).segment("rows", 0, 9).is_err());
        assert!(read(&[]).finish().is_err());
    }
}
