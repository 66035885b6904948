//! Segments from outside: copied in, or found where another context has them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::basis_file::BasisIo;
use super::chunk::Chunk;
use super::slow::{Segment, SlowStore};
use crate::error::Result;

/// The segments of a state as it describes them: length and checksum of each.
pub type Description = Vec<(usize, u32)>;

/// What was loaded, and where its segments lie.
struct Loaded {
    medium: Option<(PathBuf, BasisIo)>,
    description: Arc<Description>,
    places: Vec<(Weak<Chunk>, usize)>,
}

/// What has been loaded in this process and may be in use still.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// Takes the segments of one state, in order. Where a context that is alive has loaded the same,
/// its bytes serve both: they never change.
pub struct Loader<'a> {
    store: &'a SlowStore,
    description: Arc<Description>,
    /// Where the same bytes are said to lie already.
    known: Vec<(Arc<Chunk>, usize)>,
    segments: Vec<Segment>,
}

impl<'a> Loader<'a> {
    pub fn new(store: &'a SlowStore, description: Description) -> Self {
        let medium = store.medium();
        // A list of weak references is right whatever a thread that panicked did to it.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|entry| entry.places.iter().any(|(chunk, _)| chunk.strong_count() > 0));
        let known = loaded
            .iter()
            .filter(|entry| entry.medium == medium && *entry.description == description)
            .find_map(|entry| {
                let places = entry.places.iter();
                places.map(|(chunk, start)| Some((chunk.upgrade()?, *start))).collect()
            });
        Self {
            store,
            description: Arc::new(description),
            known: known.unwrap_or_default(),
            segments: Vec::new(),
        }
    }

    /// Takes the next segment's bytes, of which the checksum was compared.
    pub fn add(&mut self, bytes: &[u8], room: &mut Vec<u8>) -> Result<()> {
        let number = self.segments.len();
        if let Some((chunk, start)) = self.known.get(number) {
            let checksum = self.description[number].1;
            let shared = self.store.segment(Arc::clone(chunk), *start, bytes.len(), checksum);
            room.resize(bytes.len(), 0);
            // A checksum is no proof.
            if shared.copy_to(room).is_ok() && room == bytes {
                self.segments.push(shared);
                return Ok(());
            }
        }
        let segment = self.store.append_bytes(bytes, self.description[number].1)?;
        self.segments.push(segment);
        Ok(())
    }

    /// All segments, which other contexts may find from here on.
    pub fn finish(self) -> Vec<Segment> {
        let places = self.segments.iter().map(|segment| {
            let (chunk, start) = segment.place();
            (Arc::downgrade(chunk), start)
        });
        if self.known.is_empty() && !self.segments.is_empty() {
            let (medium, places) = (self.store.medium(), places.collect());
            let loaded = Loaded { medium, description: self.description, places };
            LOADED.lock().unwrap_or_else(PoisonError::into_inner).push(loaded);
        }
        self.segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::checksum;

    fn load(store: &SlowStore, parts: &[&[u8]]) -> Vec<Segment> {
        let describe = |bytes: &&[u8]| (bytes.len(), checksum(bytes));
        let mut loader = Loader::new(store, parts.iter().map(describe).collect());
        parts.iter().for_each(|bytes| loader.add(bytes, &mut Vec::new()).unwrap());
        loader.finish()
    }

    fn same_place(a: &Segment, b: &Segment) -> bool {
        Arc::ptr_eq(a.place().0, b.place().0) && a.place().1 == b.place().1
    }

    #[test]
    fn what_is_loaded_twice_lies_in_memory_once() {
        let (one, other) = (SlowStore::default(), SlowStore::default());
        let parts: [&[u8]; 2] = [&[21; 100], &[22; 300]];
        let first = load(&one, &parts);
        let second = load(&other, &parts);
        assert!(first.iter().zip(&second).all(|(a, b)| same_place(a, b)));
        assert_eq!((one.bytes(), other.bytes()), (400, 400));
        drop(first);
        assert_eq!(second[1].memory().unwrap(), [22; 300]);
        let third = load(&one, &parts);
        assert!(same_place(&second[0], &third[0]));
        let different = load(&one, &[&[21; 100], &[23; 300]]);
        assert!(!same_place(&second[0], &different[0]));
    }

    #[test]
    fn one_checksum_is_not_one_content() {
        let store = SlowStore::default();
        let held = load(&store, &[&[31; 64]]);
        let mut loader = Loader::new(&store, vec![(64, checksum(&[31; 64]))]);
        loader.add(&[32; 64], &mut Vec::new()).unwrap();
        let segments = loader.finish();
        assert!(!same_place(&held[0], &segments[0]));
        assert_eq!(segments[0].memory().unwrap(), [32; 64]);
    }
}
