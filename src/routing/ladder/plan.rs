//! The scores of one route, and what was chosen by them.

use std::any::Any;

use super::{HeadLayout, Layer};
use crate::attend::{RowScratch, SoftmaxState, TurnedQuery};
use crate::kernels::GROUP;
use crate::routing::Plan;

/// A sealed token that is more than a part of its block's coarse row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chosen {
    /// Its block's number in the piece.
    pub block: u32,
    /// Its place in the block.
    pub token: u32,
    /// Its number among its block's candidates.
    pub number: u32,
    /// Mean over the group of the token's share of the attention.
    pub share: f32,
}

/// A run of blocks scored and attended by one thread, for one unit.
#[derive(Default)]
pub struct Piece {
    /// First block of the layer, and number of blocks.
    pub first: usize,
    pub n_blocks: usize,
    /// The score that a block's weights are relative to, and the sum of its weights
    /// exp(score - reference), `[n_group][n_blocks]`.
    pub reference: Vec<f32>,
    pub block_sum: Vec<f32>,
    /// exp(reference) / Z, by which weights become shares, `[n_group][n_blocks]`.
    pub factor: Vec<f32>,
    /// From scoring to choosing: the tokens that what is known of Z then leaves to be chosen from,
    /// their places in their blocks. Those of the newest blocks come first, `n_recent`; there is
    /// room for more.
    pub candidates: Vec<u32>,
    pub n_candidates: usize,
    pub n_recent: usize,
    /// How many each block has, and, after choosing, how many come before them, `[n_blocks]`.
    pub counts: Vec<u32>,
    pub starts: Vec<u32>,
    /// Their weights, after choosing their shares, of each block `[n_group][count]`, and room for
    /// more.
    pub weights: Vec<f32>,
    /// Read exactly (the set T).
    pub fetched: Vec<Chosen>,
    /// Seen through the value sketch.
    pub middle: Vec<Chosen>,
    pub scratch: PieceScratch,
}

/// Buffers of one piece, kept from step to step.
#[derive(Default)]
pub struct PieceScratch {
    /// Softmax over the piece's largest scores, to merge into the unit's.
    pub m: Vec<f32>,
    pub l: Vec<f32>,
    pub q: Vec<f32>,
    pub q_rest: Vec<f32>,
    /// The query for blocks that have moved; no bias: those in hand have not.
    pub turned: TurnedQuery,
    /// What the mean keys add to their blocks' scores, `[n_group][SCORED_AT_ONCE]`.
    pub offsets: Vec<f32>,
    /// What the next blocks' weights are relative to: log of the sum so far, of each query.
    pub running: Vec<[f32; GROUP]>,
    /// What blocks scored meanwhile add to it, relative to it.
    pub known: Vec<[f32; GROUP]>,
    /// Coarse weights, `[n_group][n_blocks]`.
    pub coarse: Vec<f32>,
    /// Fetched rows that cannot be addressed where they lie.
    pub room: Vec<u8>,
    pub coefficients: Vec<f32>,
    /// Tokens of one block, their numbers among the candidates, and their shares.
    pub tokens: Vec<u32>,
    pub numbers: Vec<u32>,
    pub shares: Vec<f32>,
    /// By which a block's weights become shares.
    pub factors: Vec<[f32; GROUP]>,
    /// Of a run of blocks, by which their sums are added.
    pub run_factors: Vec<f32>,
    /// Weights of the block that is being scored, `[n_group][stride]`.
    pub block_weights: Vec<f32>,
    pub state: SoftmaxState,
    pub rows: RowScratch,
}

impl Piece {
    fn bytes(&self) -> usize {
        let numbers = [
            &self.reference,
            &self.block_sum,
            &self.factor,
            &self.weights,
            &self.scratch.block_weights,
            &self.scratch.coarse,
        ];
        let numbers: usize = numbers.iter().map(|list| list.capacity()).sum();
        let chosen = self.fetched.capacity() + self.middle.capacity();
        let candidates = self.candidates.capacity() + 2 * self.counts.capacity();
        4 * (numbers + candidates) + chosen * size_of::<Chosen>()
    }
}

/// What the units of one pass and layer chose.
#[derive(Default)]
pub struct LadderPlan {
    /// `[unit][piece]`
    pub pieces: Vec<Piece>,
    pub n_pieces: usize,
    pub n_units: usize,
    /// Log of the sum of exp(score) over every token, `[unit][n_group]`.
    pub log_sum: Vec<f32>,
}

impl LadderPlan {
    /// Cuts `n_blocks` into pieces for each unit, and empties them.
    pub fn prepare(&mut self, n_units: usize, n_blocks: usize, n_pieces: usize) {
        (self.n_units, self.n_pieces) = (n_units, n_pieces);
        if self.pieces.len() < n_units * n_pieces {
            self.pieces.resize_with(n_units * n_pieces, Piece::default);
        }
        for (i, piece) in self.pieces[..n_units * n_pieces].iter_mut().enumerate() {
            let number = i % n_pieces;
            piece.first = number * n_blocks / n_pieces;
            piece.n_blocks = (number + 1) * n_blocks / n_pieces - piece.first;
            piece.fetched.clear();
            piece.middle.clear();
            piece.n_candidates = 0;
        }
    }

    pub fn unit_pieces(&self, unit: usize) -> &[Piece] {
        &self.pieces[unit * self.n_pieces..][..self.n_pieces]
    }

    pub fn active(&mut self) -> &mut [Piece] {
        let n = self.n_units * self.n_pieces;
        &mut self.pieces[..n]
    }
}

impl Plan for LadderPlan {
    fn fetched(&self, unit: usize) -> usize {
        self.unit_pieces(unit).iter().map(|piece| piece.fetched.len()).sum()
    }

    fn middle(&self, unit: usize) -> usize {
        self.unit_pieces(unit).iter().map(|piece| piece.middle.len()).sum()
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes() as u64).sum()
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// What a piece reads: the blocks of one layer and the choices of one KV head.
#[derive(Clone, Copy)]
pub struct Sealed<'a> {
    pub layer: &'a Layer,
    pub head: usize,
    pub layout: &'a HeadLayout,
}
