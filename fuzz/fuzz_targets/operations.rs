//! Any bytes as choices of operations on sequences, beside plain lists of their tokens and dense
//! attention in f64.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sekv_fuzz::common::operations::{Choices, operate};

/// Choices of up to 256 take a byte.
struct Bytes<'a>(&'a [u8]);

impl Choices for Bytes<'_> {
    fn below(&mut self, n: usize) -> usize {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(first) % n
    }

    fn are_used_up(&self) -> bool {
        self.0.is_empty()
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let seed = bytes.below(256) as u64;
    operate(&mut bytes, seed, 12);
});
