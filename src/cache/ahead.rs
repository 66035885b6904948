//! Sealing ahead: while a sequence decodes, its next block is made by a thread of its own, long
//! before it leaves the window, so that no step waits for a block to be made.
//!
//! What is made, and when a sequence takes it over, do not depend on how fast the thread is: the
//! block is taken over by the commit that would have made it, which waits where it has to. Until
//! then its tokens are residents like all others.

use std::any::Any;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use super::residents::Residents;
use super::slot::{Taker, slot};
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::Geometry;
use crate::routing::{OpenRows, RowBytes, SealWork, copy_row};

/// What [`SealWork::run`] made.
pub type Made = Box<dyn Any + Send>;

type Job = Box<dyn FnOnce() + Send>;

/// The thread that makes blocks; it sleeps where there is nothing to make.
pub struct Sealer {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Sealer {
    pub fn new() -> Result<Self> {
        let (jobs, waiting) = channel::<Job>();
        let work = move || {
            while let Ok(job) = waiting.recv() {
                // A panic is the block's: nobody gets it, and it is made by the commit instead.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            }
        };
        match Builder::new().name("sekv-seal".to_owned()).spawn(work) {
            Ok(thread) => Ok(Self { jobs: Some(jobs), thread: Some(thread) }),
            Err(e) => fail!(Memory, "the sealing thread could not be started: {e}"),
        }
    }

    /// Begins to make a block.
    pub fn start(&self, first: usize, rows: BlockRows, work: Box<dyn SealWork>) -> Option<Ahead> {
        let (filler, taker) = slot();
        let n = rows.n;
        let job = move || filler.fill(work.run(&rows).ok());
        self.jobs.as_ref()?.send(Box::new(job)).ok()?;
        Some(Ahead { first, n, taker })
    }
}

impl Drop for Sealer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

/// A block that is being made.
pub struct Ahead {
    /// Its first token in the sequence, and how many it has.
    pub first: usize,
    pub n: usize,
    taker: Taker<Made>,
}

impl Ahead {
    /// Waits for the block; None where it could not be made.
    pub fn take(self) -> Option<Made> {
        self.taker.take()
    }
}

/// A block's rows, copied: the sequence may change while the block is made.
pub struct BlockRows {
    codec: RowCodec,
    first: usize,
    n: usize,
    /// `[layer][KV head]`: the rows' keys, and their values.
    tables: Vec<Vec<(Vec<u8>, Vec<u8>)>>,
    row_bytes: (usize, usize),
}

impl BlockRows {
    /// Copies tokens `first..first + n` of a sequence, which begin at resident row `row`.
    pub fn copy(
        geometry: &Geometry,
        residents: &Residents,
        first: usize,
        row: usize,
        n: usize,
    ) -> Result<Self> {
        let codec = residents.codec();
        let row_bytes = (codec.row_bytes(geometry.key_dim), codec.row_bytes(geometry.value_dim));
        let mut tables = Vec::with_capacity(geometry.layers.len());
        for (layer, shape) in geometry.layers.iter().enumerate() {
            let heads = (0..shape.n_kv_heads).map(|head| {
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                keys.try_reserve_exact(n * row_bytes.0)?;
                values.try_reserve_exact(n * row_bytes.1)?;
                for row in row..row + n {
                    keys.extend_from_slice(residents.key(layer, head, row));
                    values.extend_from_slice(residents.value(layer, head, row));
                }
                Ok((keys, values))
            });
            tables.push(heads.collect::<Result<Vec<_>>>()?);
        }
        Ok(Self { codec, first, n, tables, row_bytes })
    }

    fn row(&self, layer: usize, head: usize, token: usize) -> (&[u8], &[u8]) {
        let ((keys, values), row) = (&self.tables[layer][head], token - self.first);
        let (key_bytes, value_bytes) = self.row_bytes;
        (&keys[row * key_bytes..][..key_bytes], &values[row * value_bytes..][..value_bytes])
    }
}

impl OpenRows for BlockRows {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        let (key_row, value_row) = self.row(layer, head, token);
        self.codec.decode(key_row, key);
        self.codec.decode(value_row, value);
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        layer: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let is_same = codec == self.codec;
        if is_same {
            copy_row(self.row(layer, head, token), out);
        }
        is_same
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of no tokens: what is made of it is told by a closure.
    fn start(make: impl FnOnce() -> Result<Made> + Send + 'static, sealer: &Sealer) -> Ahead {
        struct Work<F>(F);
        impl<F: FnOnce() -> Result<Made> + Send> SealWork for Work<F> {
            fn run(self: Box<Self>, _: &dyn OpenRows) -> Result<Made> {
                (self.0)()
            }
        }
        let rows =
            BlockRows { codec: RowCodec::F32, first: 0, n: 0, tables: vec![], row_bytes: (0, 0) };
        sealer.start(0, rows, Box::new(Work(make))).unwrap()
    }

    #[test]
    fn whoever_takes_a_block_waits_for_it() {
        let sealer = Sealer::new().unwrap();
        let (let_go, gate) = channel();
        let ahead = start(
            move || {
                gate.recv().unwrap();
                Ok(Box::new(7))
            },
            &sealer,
        );
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| ahead.take());
            let_go.send(()).unwrap();
            assert_eq!(*taken.join().unwrap().unwrap().downcast::<i32>().unwrap(), 7);
        });
    }

    #[test]
    fn what_fails_or_panics_leaves_no_block_and_the_next_is_made() {
        let sealer = Sealer::new().unwrap();
        let failed = start(|| fail!(Memory, "no room"), &sealer);
        let panicked = start(|| std::panic::resume_unwind(Box::new("a fault")), &sealer);
        let made = start(|| Ok(Box::new(7)), &sealer);
        assert!(failed.take().is_none());
        assert!(panicked.take().is_none());
        assert!(made.take().is_some());
        let unwanted = start(|| Ok(Box::new(7)), &sealer);
        drop(unwanted);
        let last = start(|| Ok(Box::new(8)), &sealer);
        drop(sealer);
        assert!(last.take().is_some(), "what was begun before the end is made");
    }
}
