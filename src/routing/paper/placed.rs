//! A piece where its tokens are now.
//!
//! A piece never changes and copies of a sequence share it. When its tokens move, their keys turn on
//! read: rows, mean key and the folded query that meets it are turned back instead. The norm of the
//! projected mean key is the one number that has to follow, and is kept here.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::Piece;
use crate::model::Rotation;
use crate::summary::Projection;

/// How far a piece's tokens have moved since it was sealed.
struct Moved {
    rotation: Arc<Rotation>,
    /// |W R k_S|, `[n_heads]`; none without a span.
    norms: Vec<f32>,
}

#[derive(Clone)]
pub struct Placed {
    pub piece: Arc<Piece>,
    moved: Option<Arc<Moved>>,
}

impl Deref for Placed {
    type Target = Piece;

    fn deref(&self) -> &Piece {
        &self.piece
    }
}

impl Placed {
    /// A piece where it was sealed.
    pub fn new(piece: Piece) -> Self {
        Self::from_piece(Arc::new(piece))
    }

    pub fn from_piece(piece: Arc<Piece>) -> Self {
        Self { piece, moved: None }
    }

    /// The same piece at a distance from where it was sealed; None: none.
    pub fn at(&self, rotation: Option<Arc<Rotation>>, projection: &Projection) -> Self {
        let piece = Arc::clone(&self.piece);
        let Some(rotation) = rotation else { return Self { piece, moved: None } };
        let shape = piece.shape;
        let mut norms = Vec::new();
        let n_heads = if shape.n_span > 0 { shape.n_heads } else { 0 };
        let mut mean_key = vec![0.0; shape.key_dim];
        for query_head in 0..n_heads {
            let head = query_head / (shape.n_heads / shape.n_kv_heads);
            shape.mean_codec.decode(piece.mean_key(head), &mut mean_key);
            rotation.apply(&mut mean_key);
            norms.push(projection.norm(query_head, &mean_key));
        }
        Self { piece, moved: Some(Arc::new(Moved { rotation, norms })) }
    }

    pub fn rotation(&self) -> Option<&Rotation> {
        self.moved.as_ref().map(|moved| &*moved.rotation)
    }

    pub fn rotation_shared(&self) -> Option<Arc<Rotation>> {
        self.moved.as_ref().map(|moved| Arc::clone(&moved.rotation))
    }

    pub fn shift(&self) -> i32 {
        self.rotation().map_or(0, |rotation| rotation.shift)
    }

    /// The routing norm of the span where it is.
    pub fn routing_norm(&self, query_head: usize) -> f32 {
        match &self.moved {
            Some(moved) => moved.norms[query_head],
            None => self.piece.norm(query_head),
        }
    }

    /// [`Piece::read_span`] with keys where they are.
    pub fn read_span_here(
        &self,
        head: usize,
        tokens: Range<usize>,
        gated: bool,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        self.piece.read_span(head, tokens, gated, keys, values);
        self.turn(keys);
    }

    /// Turns keys of the piece to where they are.
    pub fn turn(&self, keys: &mut [f32]) {
        if let Some(rotation) = self.rotation() {
            keys.chunks_exact_mut(self.shape.key_dim).for_each(|key| rotation.apply(key));
        }
    }
}
