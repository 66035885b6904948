//! Small contexts, what is done to them, and their states.

use std::sync::Arc;

use sekv::cache::{BatchToken, Context};
use sekv::error::{Error, Result, Status};
use sekv::kernels::RowCodec;
use sekv::params::{BasisCodec, Params, RoutingKind};

use crate::common::{Random, Shape, raw_params, view};

/// Bits of an input's first byte: what kind of context the rest is loaded into, and how.
pub const PAPER: u8 = 1;
/// The default codecs, not f32.
pub const CODED: u8 = 2;
/// All sequences, not the first.
pub const ALL: u8 = 4;
/// Lengths and checksums stay what the input says.
pub const UNREPAIRED: u8 = 8;

pub const SEQUENCES: i32 = 2;

/// Params with which a dozen tokens are sealed in part.
pub fn params(kind: u8) -> Params {
    let codecs = if kind & CODED == 0 { raw_params() } else { Params::default() };
    let ladder = Params {
        n_seq_max: SEQUENCES as usize,
        n_threads: 1,
        n_sinks: 1,
        window: 2,
        block_tokens: 4,
        layout_tokens: 8,
        ..codecs
    };
    if kind & PAPER == 0 {
        return ladder;
    }
    let basis_codec = match kind & CODED {
        0 => BasisCodec::LowRank(RowCodec::F32),
        _ => BasisCodec::LowRank(RowCodec::F16),
    };
    Params { routing: RoutingKind::Paper, block_tokens: 1, span_min: 3, basis_codec, ..ladder }
}

pub fn new_context(kind: u8) -> Context {
    let model = Shape::uniform(2, 2, 1, 8).model();
    Context::new(model, params(kind)).expect("these params are legal")
}

/// A pass of `n` tokens behind the last of a sequence, which it may already fill to the last
/// position.
pub fn pass(context: &mut Context, random: &mut Random, sequence: i32, n: i32, commit: bool) {
    let last = context.position_max(sequence).expect("the sequence exists");
    let Some(end) = (last + 1).checked_add(n) else { return };
    let batch: Vec<BatchToken> = (last + 1..end)
        .map(|position| BatchToken { position, sequences: std::slice::from_ref(&sequence) })
        .collect();
    context.begin(&batch).expect("a pass can begin");
    let model = Arc::clone(context.model());
    let (key_dim, value_dim, n) = (model.geometry.key_dim, model.geometry.value_dim, batch.len());
    for (il, layer) in model.geometry.layers.iter().enumerate() {
        let mut keys = random.normals(n * layer.n_kv_heads * key_dim);
        let mut values = random.normals(n * layer.n_kv_heads * value_dim);
        let mut queries = random.normals(n * layer.n_heads * key_dim);
        let mut out = vec![0.0; n * layer.n_heads * value_dim];
        let keys = view(&mut keys, key_dim, layer.n_kv_heads, n);
        let values = view(&mut values, value_dim, layer.n_kv_heads, n);
        context.ingest(il, &keys, &values).expect("a layer takes its rows");
        let queries = view(&mut queries, key_dim, layer.n_heads, n);
        let out = view(&mut out, value_dim, layer.n_heads, n);
        context.attend(il, &queries, None, &out).expect("a layer answers its queries");
    }
    let surprisal: Vec<f32> = (0..n).map(|_| -random.uniform().max(1e-7).ln()).collect();
    let ended = if commit { context.commit(Some(&surprisal)) } else { context.abort() };
    ended.expect("a pass can end");
}

pub fn save(context: &Context, id: i32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let saved = context.save_to(id, &mut |part| {
        bytes.extend_from_slice(part);
        Ok(())
    });
    saved.expect("a state can be saved");
    bytes
}

/// Loads a state from a source that doesn't know its length.
pub fn load(context: &mut Context, id: i32, mut bytes: &[u8]) -> Result<()> {
    context.load_from(id, None, &mut |out| match bytes.split_at_checked(out.len()) {
        Some((part, rest)) => {
            out.copy_from_slice(part);
            bytes = rest;
            Ok(())
        }
        None => Err(Error::new(Status::Format, "the bytes end before the state does")),
    })
}
