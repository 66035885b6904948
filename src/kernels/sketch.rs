//! Scores of a block of tokens from their sketch: a partial key, some channels at 4 bits and some
//! at 2, `key[c] ~= minimum[c] + scale[c] * code[c]`.
//!
//! Channels are in the sketch's own order: the 4-bit ones (padded to a multiple of 8), then the
//! 2-bit ones (padded to 16). Tokens are packed in groups of 16; a group holds its 4-bit units,
//! then its 2-bit units, 64 bytes each, byte `t * 4 + c` for token t of 16:
//!
//! - 4-bit unit u, channels 8u..8u+8, c in 0..4: low nibble channel 8u + c, high 8u + 4 + c;
//! - 2-bit unit u, channels 16u..16u+16 of the 2-bit ones: bits 2k..2k+2 are channel 16u + 4k + c.
//!
//! One 64-byte load is then 16 tokens of 8 or 16 channels, and after a shift and a mask each dword
//! holds four neighbouring channels of one token, which is what a dot product of bytes wants.

use super::convert::{f16_at_least, f16_at_most};
use crate::model::MAX_HEAD_DIM;
use half::f16;
use std::slice::ChunksMut;

mod run;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use run::{BlockSums, Candidates, GROUP, SketchRun, sketch_run, sketch_run_at};

/// Tokens that share a unit.
pub const GROUP_TOKENS: usize = 16;
/// Bytes of a unit.
pub const UNIT_BYTES: usize = 64;
/// Channels that a sketch may have: the largest head dimension and its padding.
pub const MAX_CHANNELS: usize = MAX_HEAD_DIM + 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct SketchShape {
    /// Channels of 4 bits, a multiple of 8.
    pub n4: usize,
    /// Channels of 2 bits, a multiple of 16.
    pub n2: usize,
}

impl SketchShape {
    pub fn channels(&self) -> usize {
        self.n4 + self.n2
    }

    /// Bytes of the codes of `n_tokens` tokens; the last group is whole.
    pub fn code_bytes(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(GROUP_TOKENS) * self.group_bytes()
    }

    fn group_bytes(&self) -> usize {
        (self.n4 / 8 + self.n2 / 16) * UNIT_BYTES
    }

    /// Token `t`'s code of channel `c`.
    #[inline(always)]
    fn code(&self, codes: &[u8], t: usize, c: usize) -> u8 {
        let group = t / GROUP_TOKENS * self.group_bytes();
        let lane = t % GROUP_TOKENS * 4 + c % 4;
        if c < self.n4 {
            codes[group + c / 8 * UNIT_BYTES + lane] >> (c % 8 / 4 * 4) & 15
        } else {
            let c = c - self.n4;
            let unit = self.n4 / 8 + c / 16;
            codes[group + unit * UNIT_BYTES + lane] >> (c % 16 / 4 * 2) & 3
        }
    }

    fn check(&self) {
        assert!(self.n4.is_multiple_of(8) && self.n2.is_multiple_of(16), "{self:?}");
        assert!(self.channels() <= MAX_CHANNELS, "{self:?}");
    }
}

/// Packs `rows`, `[n_tokens][channels]` in the sketch's order of channels.
///
/// Codes are made against the minimum and scale as rounded to f16. The minimum is rounded down
/// and the scale up, so that the codes span the channel and none is clipped; a constant channel
/// has scale 0 and its value, to the nearest, as minimum.
pub fn sketch_pack(
    shape: &SketchShape,
    rows: &[f32],
    n_tokens: usize,
    codes: &mut [u8],
    minimum: &mut [f16],
    scale: &mut [f16],
) {
    shape.check();
    let channels = shape.channels();
    assert_eq!(rows.len(), n_tokens * channels);
    assert_eq!(codes.len(), shape.code_bytes(n_tokens));
    assert_eq!((minimum.len(), scale.len()), (channels, channels));
    codes.fill(0);
    let (units4, units2) = (shape.n4 / 8, shape.n2 / 16);
    for unit in 0..units4 + units2 {
        // Unit by unit, since these are the channels that share bytes.
        let pack = if unit < units4 { pack_unit::<8> } else { pack_unit::<16> };
        let c = if unit < units4 { 8 * unit } else { shape.n4 + 16 * (unit - units4) };
        let units = codes[unit * UNIT_BYTES..].chunks_mut(shape.group_bytes());
        pack(c, rows, channels, units, &mut minimum[c..], &mut scale[c..]);
    }
}

/// Channels c..c + WIDTH, as codes of 32 / WIDTH bits, in the units that begin each of `units`.
fn pack_unit<const WIDTH: usize>(
    c: usize,
    rows: &[f32],
    channels: usize,
    units: ChunksMut<u8>,
    minimum: &mut [f16],
    scale: &mut [f16],
) {
    let bits = 32 / WIDTH;
    let grids = Grids::<WIDTH>::over(rows.chunks_exact(channels).map(|row| &row[c..]), bits);
    minimum[..WIDTH].copy_from_slice(&grids.minimum);
    scale[..WIDTH].copy_from_slice(&grids.scale);
    for (unit, rows) in units.zip(rows.chunks(GROUP_TOKENS * channels)) {
        for (bytes, row) in unit.chunks_exact_mut(4).zip(rows.chunks_exact(channels)) {
            for (i, code) in grids.codes(&row[c..]).into_iter().enumerate() {
                bytes[i % 4] |= code << (i / 4 * bits);
            }
        }
    }
}

/// The evenly spaced values that the codes of WIDTH neighbouring channels stand for. Written so
/// that the compiler makes vectors of it.
pub(super) struct Grids<const WIDTH: usize> {
    pub minimum: [f16; WIDTH],
    pub scale: [f16; WIDTH],
    origin: [f32; WIDTH],
    inverse: [f32; WIDTH],
    top: f32,
}

impl<const WIDTH: usize> Grids<WIDTH> {
    /// The grids that span the first WIDTH values of each row, all finite.
    pub fn over<'a>(rows: impl Iterator<Item = &'a [f32]>, bits: usize) -> Self {
        let mut low = [f32::INFINITY; WIDTH];
        let mut high = [f32::NEG_INFINITY; WIDTH];
        for row in rows {
            for i in 0..WIDTH {
                low[i] = if row[i] < low[i] { row[i] } else { low[i] };
                high[i] = if row[i] > high[i] { row[i] } else { high[i] };
            }
        }
        let mut grids = Grids {
            minimum: [f16::ZERO; WIDTH],
            scale: [f16::ZERO; WIDTH],
            origin: [0.0; WIDTH],
            inverse: [0.0; WIDTH],
            top: ((1 << bits) - 1) as f32,
        };
        for i in 0..WIDTH {
            // No rows at all leave the grid of zeros.
            if low[i] < high[i] {
                let minimum = f16_at_most(low[i]).max(f16::MIN);
                let span = high[i] - minimum.to_f32();
                let scale = f16_at_least(span / grids.top).min(f16::MAX);
                (grids.minimum[i], grids.scale[i]) = (minimum, scale);
                grids.origin[i] = minimum.to_f32();
                grids.inverse[i] = 1.0 / scale.to_f32();
            } else if low[i] == high[i] {
                grids.minimum[i] = f16::from_f32(low[i]).clamp(f16::MIN, f16::MAX);
            }
        }
        grids
    }

    /// The codes nearest to the first WIDTH values of `row`.
    #[inline(always)]
    pub fn codes(&self, row: &[f32]) -> [u8; WIDTH] {
        let row = &row[..WIDTH];
        let mut codes = [0; WIDTH];
        for i in 0..WIDTH {
            let steps = (row[i] - self.origin[i]) * self.inverse[i];
            let steps = if steps > 0.0 { steps } else { 0.0 };
            let steps = if steps < self.top { steps } else { self.top };
            // 2^23 leaves the whole number, rounded to even, in the lowest bits.
            codes[i] = (steps + 8_388_608.0).to_bits() as u8;
        }
        codes
    }
}
