//! Attend: the chosen tokens exactly, all others through their block's coarse row, and those
//! between through their value sketch as well.

use std::slice::ChunksExactMut;

use super::layer::Walk;
use super::plan::{Chosen, Piece, PieceScratch, Sealed};
use super::slab::Stream;
use crate::attend::{ROWS_AT_ONCE, attend_rows};
use crate::kernels::{
    Coefficients, RowCodec, Rows, TokenWeights, coefficients_accumulate, half_bytes, prefetch,
    row_accumulate,
};
use crate::model::Rotation;

/// Fetched rows that are attended together. While some are, the next ones are asked for, one with
/// each: a burst of them would wait for its first.
const FETCHED_AT_ONCE: usize = 16;

/// A sum of coarse shares that is only what rounding left of it.
const NOTHING: f32 = 1e-30;

/// The piece's share of a unit's attention, into the piece's own state.
pub fn attend_piece(
    piece: &mut Piece,
    sealed: &Sealed,
    q: &[f32],
    log_sum: &[f32],
    dims: [usize; 2],
) {
    let [key_dim, value_dim] = dims;
    let n_group = log_sum.len();
    piece.scratch.state.reset(n_group, value_dim);
    if piece.n_blocks == 0 {
        return;
    }
    coarse(piece, sealed, log_sum, value_dim);
    middle(piece, sealed, n_group, value_dim);
    exact(piece, sealed, q, key_dim);
}

/// One row a block: weight sum over t in the block, not fetched, of exp(s_t), value the block's
/// mean. Weights are relative to Z, so the state's m is log Z; it stays open where every token is
/// fetched.
fn coarse(piece: &mut Piece, sealed: &Sealed, log_sum: &[f32], value_dim: usize) {
    let n_group = log_sum.len();
    let scratch = &mut piece.scratch;
    let n = piece.n_blocks;
    scratch.coarse.clear();
    let sums = piece.block_sum[..n_group * n].iter().zip(&piece.factor);
    scratch.coarse.extend(sums.map(|(sum, factor)| sum * factor));
    for of_block in piece.fetched.chunk_by(|a, b| a.block == b.block) {
        let block = of_block[0].block as usize;
        let (start, n_candidates) = (piece.starts[block] as usize, piece.counts[block] as usize);
        let shares = &piece.weights[start * n_group..][..n_candidates * n_group];
        let rest = scratch.coarse[block..].iter_mut().step_by(n);
        for (line, rest) in shares.chunks_exact(n_candidates).zip(rest) {
            let share = |chosen: &Chosen| line[chosen.number as usize];
            *rest = (*rest - of_block.iter().map(share).sum::<f32>()).max(0.0);
        }
    }
    let state = &mut scratch.state;
    for (g, &log_sum) in log_sum.iter().enumerate() {
        let sum = scratch.coarse[g * n..][..n].iter().sum();
        if sum > NOTHING {
            (state.m[g], state.l[g]) = (log_sum, sum);
        } else {
            // Z is a sketch's: the rows themselves may all score far below it.
            scratch.coarse[g * n..][..n].fill(0.0);
        }
    }
    // Some blocks' means, and the next ones.
    let mut means: [&[u8]; 2 * ROWS_AT_ONCE] = [&[]; 2 * ROWS_AT_ONCE];
    let mut done = 0;
    for (slab, range) in sealed.layer.runs(piece.first..piece.first + n) {
        let codec = slab.shape.mean_codec;
        for start in range.clone().step_by(ROWS_AT_ONCE) {
            let stream = slab.stream(Stream::MeanValue, sealed.head, start);
            let stream = stream.chunks_exact(codec.row_bytes(value_dim));
            let n_rows = (range.end - start).min(ROWS_AT_ONCE);
            let n_means = (range.end - start).min(2 * ROWS_AT_ONCE);
            means.iter_mut().zip(stream).take(n_means).for_each(|(mean, row)| *mean = row);
            let rows = Rows { rows: &means[..n_rows], next: &means[n_rows..n_means] };
            let weights = &scratch.coarse[done..];
            row_accumulate(codec, value_dim, weights, n, n_group, rows, &mut state.o);
            done += n_rows;
        }
    }
}

/// Adds sum of exp(s_t) U_v c_t over the middle tokens: the residuals from the coarse rows.
fn middle(piece: &mut Piece, sealed: &Sealed, n_group: usize, value_dim: usize) {
    let rank = sealed.layout.value_basis.len() / value_dim;
    if piece.middle.is_empty() || rank == 0 {
        return;
    }
    let scratch = &mut piece.scratch;
    scratch.coefficients.clear();
    scratch.coefficients.resize(n_group * rank, 0.0);
    let mut blocks = sealed.layer.walk();
    let first = piece.first;
    let mut runs = piece.middle.chunk_by(|a, b| a.block == b.block).peekable();
    let mut ahead = sealed.layer.walk();
    while let Some(run) = runs.next() {
        if let Some(next) = runs.peek() {
            let (slab, block) = ahead.find(first + next[0].block as usize);
            prefetch(slab.block(Stream::Coefficients, sealed.head, block));
            prefetch(slab.block(Stream::CoefficientScales, sealed.head, block));
        }
        let b = run[0].block as usize;
        let (slab, block) = blocks.find(first + b);
        if slab.shape.value_rank == 0 {
            continue;
        }
        scratch.tokens.clear();
        scratch.tokens.extend(run.iter().map(|chosen| chosen.token));
        scratch.numbers.clear();
        scratch.numbers.extend(run.iter().map(|chosen| chosen.number));
        let (minimum, scale) = slab.coefficient_scales(sealed.head, block);
        let codes = slab.block(Stream::Coefficients, sealed.head, block);
        let coefficients = Coefficients { codes, minimum, scale };
        let (start, n) = (piece.starts[b] as usize, piece.counts[b] as usize);
        let lines = &piece.weights[start * n_group..][..n * n_group];
        let weights = TokenWeights { lines, n, numbers: &scratch.numbers };
        let out = &mut scratch.coefficients[..];
        coefficients_accumulate(&coefficients, &scratch.tokens, &weights, n_group, out);
    }
    let mut rows: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    let directions = sealed.layout.value_basis.chunks(ROWS_AT_ONCE * value_dim);
    for (some, directions) in directions.enumerate() {
        let n_rows = directions.len() / value_dim;
        for (row, direction) in rows.iter_mut().zip(directions.chunks_exact(value_dim)) {
            *row = half_bytes(direction);
        }
        let (rows, c) = (&rows[..n_rows], &scratch.coefficients[some * ROWS_AT_ONCE..]);
        row_accumulate(RowCodec::F16, value_dim, c, rank, n_group, rows, &mut scratch.state.o);
    }
}

/// Rows of fetched tokens.
#[derive(Default)]
struct Batch<'a> {
    keys: [&'a [u8]; FETCHED_AT_ONCE],
    values: [&'a [u8]; FETCHED_AT_ONCE],
    n: usize,
}

impl<'a> Batch<'a> {
    /// Takes the rows of some tokens, up to the first that cannot be addressed.
    fn address(&mut self, tokens: &[Chosen], first: usize, head: usize, blocks: &mut Walk<'a>) {
        self.n = 0;
        for chosen in tokens {
            let (slab, block) = blocks.find(first + chosen.block as usize);
            let Some(row) = slab.addressed_row(head, block, chosen.token as usize) else { return };
            self.push(row);
        }
    }

    fn push(&mut self, (key, value): (&'a [u8], &'a [u8])) {
        (self.keys[self.n], self.values[self.n]) = (key, value);
        self.n += 1;
    }

    fn keys(&self) -> &[&'a [u8]] {
        &self.keys[..self.n]
    }

    fn values(&self) -> &[&'a [u8]] {
        &self.values[..self.n]
    }
}

/// The fetched tokens, from their rows.
fn exact(piece: &mut Piece, sealed: &Sealed, q: &[f32], key_dim: usize) {
    let Some(codec) = sealed.layer.slabs().next().map(|slab| slab.shape.row_codec) else { return };
    if sealed.layer.is_turned() {
        return exact_turned(piece, sealed, q, codec, key_dim);
    }
    let Piece { fetched, first, scratch, .. } = piece;
    let (mut ahead, mut blocks) = (sealed.layer.walk(), sealed.layer.walk());
    let (mut batch, mut next) = (Batch::default(), Batch::default());
    let (mut batch, mut next) = (&mut batch, &mut next);
    next.address(&fetched[..fetched.len().min(FETCHED_AT_ONCE)], *first, sealed.head, &mut ahead);
    for start in (0..fetched.len()).step_by(FETCHED_AT_ONCE) {
        let end = fetched.len().min(start + FETCHED_AT_ONCE);
        let run = &fetched[start..end];
        (batch, next) = (next, batch);
        let coming = &fetched[end..fetched.len().min(end + FETCHED_AT_ONCE)];
        next.address(coming, *first, sealed.head, &mut ahead);
        let mut read;
        let here = if batch.n == run.len() {
            &*batch
        } else {
            read = Batch::default();
            let mut rooms = rooms(&mut scratch.room, sealed, run.len());
            for chosen in run {
                let (slab, block) = blocks.find(*first + chosen.block as usize);
                let room = rooms.next().unwrap_or_default();
                read.push(slab.row(sealed.head, block, chosen.token as usize, room));
            }
            &read
        };
        let keys = Rows { rows: here.keys(), next: next.keys() };
        let values = Rows { rows: here.values(), next: next.values() };
        attend_rows(codec, key_dim, q, keys, values, None, &mut scratch.state, &mut scratch.rows);
    }
}

/// Room for each of `n` rows, of the layer's first slab's size: all have one.
fn rooms<'a>(room: &'a mut Vec<u8>, sealed: &Sealed, n: usize) -> ChunksExactMut<'a, u8> {
    let mut pair = 1;
    if let Some(slab) = sealed.layer.slabs().next() {
        pair = slab.shape.row_pair();
        slab.make_room(room, n);
    }
    room.chunks_exact_mut(pair)
}

/// The fetched tokens where some have moved: the query is turned once for each run of tokens that
/// have moved alike.
fn exact_turned(piece: &mut Piece, sealed: &Sealed, q: &[f32], codec: RowCodec, key_dim: usize) {
    let mut blocks = sealed.layer.walk();
    let mut at = 0;
    while at < piece.fetched.len() {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut room = std::mem::take(&mut piece.scratch.room);
        let mut rooms = rooms(&mut room, sealed, ROWS_AT_ONCE);
        let mut rotation: Option<&Rotation> = None;
        for chosen in piece.fetched[at..].iter().take(ROWS_AT_ONCE) {
            let (slab, block) = blocks.find(piece.first + chosen.block as usize);
            let turn = blocks.turn().as_deref();
            if keys.is_empty() {
                rotation = turn;
            } else if turn.map(|turn| turn.shift) != rotation.map(|turn| turn.shift) {
                break;
            }
            let room = rooms.next().unwrap_or_default();
            let (key, value) = slab.row(sealed.head, block, chosen.token as usize, room);
            keys.push(key);
            values.push(value);
        }
        at += keys.len();
        attend_moved(&mut piece.scratch, sealed, rotation, q, codec, key_dim, &keys, &values);
        piece.scratch.room = room;
    }
}

/// Adds rows that have moved by a rotation.
#[allow(clippy::too_many_arguments, reason = "one row is a key and a value, each with its shape")]
fn attend_moved(
    scratch: &mut PieceScratch,
    sealed: &Sealed,
    rotation: Option<&Rotation>,
    q: &[f32],
    codec: RowCodec,
    key_dim: usize,
    keys: &[&[u8]],
    values: &[&[u8]],
) {
    let (state, rows) = (&mut scratch.state, &mut scratch.rows);
    let Some(rotation) = rotation else {
        return attend_rows(codec, key_dim, q, keys, values, None, state, rows);
    };
    scratch.turned.turn(rotation, &sealed.layout.centre, q, state.n_group());
    scratch.turned.attend_rows(codec, key_dim, keys, values, state, rows);
}

/// Every token of the piece's blocks from its rows: a dense layer.
pub fn attend_dense(
    piece: &mut Piece,
    sealed: &Sealed,
    q: &[f32],
    n_group: usize,
    dims: [usize; 2],
) {
    let [key_dim, value_dim] = dims;
    piece.scratch.state.reset(n_group, value_dim);
    let mut keys: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    let mut values: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    let runs = sealed.layer.turned_runs(piece.first..piece.first + piece.n_blocks);
    for (slab, blocks, rotation) in runs {
        let (codec, n_tokens) = (slab.shape.row_codec, slab.shape.n_tokens);
        for block in blocks {
            for start in (0..n_tokens).step_by(ROWS_AT_ONCE) {
                let n = (n_tokens - start).min(ROWS_AT_ONCE);
                for (t, (key, value)) in keys.iter_mut().zip(&mut values).take(n).enumerate() {
                    (*key, *value) = slab.row(sealed.head, block, start + t, &mut []);
                }
                let (keys, values) = (&keys[..n], &values[..n]);
                let scratch = &mut piece.scratch;
                attend_moved(scratch, sealed, rotation, q, codec, key_dim, keys, values);
            }
        }
    }
}
