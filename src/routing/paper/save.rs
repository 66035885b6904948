//! Sealed tokens in an image (docs/state.md, "Sealed tokens of `paper`").

use std::collections::HashMap;
use std::sync::Arc;

use super::piece::{PieceShape, SpanForm, SpanHead, form_bytes};
use super::{PaperTokens, Piece, Placed, Run};
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::Rotation;
use crate::store::{Image, ImageReader, Segment};

pub fn save(tokens: &PaperTokens, image: &mut Image) -> Result<()> {
    image.flag(tokens.weights.is_some());
    let Some(weights) = &tokens.weights else { return Ok(()) };
    image.u32(weights.checksum()?);
    image.count(tokens.runs.len());
    for run in &tokens.runs {
        image.count(run.n_whole);
        image.count(run.n_span);
    }
    image.blob(tokens.surprisal.iter().flat_map(|h| h.to_le_bytes()).collect());
    image.count(tokens.anchors.len());
    image.blob(tokens.anchors.iter().flat_map(|anchor| anchor.to_le_bytes()).collect());
    image.u64(tokens.demoted);
    for placed in tokens.layers.iter().flatten() {
        image.i32(placed.shift());
        save_piece(&placed.piece, image);
    }
    Ok(())
}

/// What a form is called in an image, by its codec. The numbers never change.
const ROW_CODECS: [RowCodec; 3] = [RowCodec::F32, RowCodec::F16, RowCodec::Int8];
const LOW_RANK: u8 = 16;

fn codec_number(codec: RowCodec) -> u8 {
    ROW_CODECS.iter().position(|&other| other == codec).unwrap_or_default() as u8
}

fn save_piece(piece: &Arc<Piece>, image: &mut Image) {
    for head in &piece.span_heads {
        match head.form {
            SpanForm::Rows(codec) => image.u8(codec_number(codec)),
            SpanForm::LowRank { codec, rank } => {
                image.u8(LOW_RANK + codec_number(codec));
                image.u32(rank as u32);
            }
        }
    }
    piece.slow.iter().for_each(|segment| image.segment(segment));
    image.shared_blob(piece, || Arc::clone(piece) as _);
}

/// Fills tokens that are empty.
pub fn restore(tokens: &mut PaperTokens, image: &mut ImageReader) -> Result<()> {
    if !image.flag()? {
        return Ok(());
    }
    let checksum = tokens.take_weights()?.checksum()?;
    let saved = image.u32()?;
    if saved != checksum {
        fail!(
            Unsupported,
            "the state was made with routing weights of checksum {saved:08x}, this context has \
             {checksum:08x}: expected the same seed or sidecar"
        );
    }
    restore_runs(tokens, image)?;
    let n_tokens = tokens.runs.last().map_or(0, Run::end);
    tokens.surprisal = image
        .blob("surprisal", 4 * n_tokens)?
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    if tokens.surprisal.iter().any(|h| *h < 0.0 || h.is_infinite()) {
        fail!(Format, "the state has surprisal that is negative or infinite");
    }
    let n_anchors = image.count("anchors", 0, n_tokens)?;
    tokens.anchors = image
        .blob("anchors", 4 * n_anchors)?
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    let is_ordered = tokens.anchors.is_sorted_by(|a, b| a < b);
    if !is_ordered || tokens.anchors.last().is_some_and(|&last| last as usize >= n_tokens) {
        fail!(Format, "the state's anchors are out of order");
    }
    tokens.demoted = image.u64()?;
    let mut rotations: HashMap<i32, Arc<Rotation>> = HashMap::new();
    for layer in 0..tokens.layers.len() {
        let mut pieces = Vec::new();
        pieces.try_reserve_exact(tokens.runs.len())?;
        for run in &tokens.runs {
            let shift = image.i32()?;
            let piece = restore_piece(tokens.shape(layer, run), image)?;
            let new = || Arc::new(Rotation::new(&tokens.model.geometry, shift));
            let rotation =
                (shift != 0).then(|| Arc::clone(rotations.entry(shift).or_insert_with(new)));
            pieces.push(Placed::from_piece(piece).at(rotation, &tokens.recipe(layer)?.projection));
        }
        let shift_of = |pieces: &[Placed]| pieces.iter().map(Placed::shift).collect::<Vec<i32>>();
        if layer > 0 && shift_of(&pieces) != shift_of(&tokens.layers[0]) {
            fail!(Format, "the state's layer {layer} has moved otherwise than layer 0");
        }
        tokens.layers[layer] = pieces;
    }
    Ok(())
}

fn restore_runs(tokens: &mut PaperTokens, image: &mut ImageReader) -> Result<()> {
    let mut first = 0;
    for _ in 0..image.length("runs")? {
        let n_whole = image.count("whole tokens in a run", 0, i32::MAX as usize)?;
        let n_span = image.count("tokens in a span", 0, i32::MAX as usize)?;
        let run = Run { first, n_whole, n_span };
        if run.end() == first || run.end() > i32::MAX as usize {
            fail!(
                Format,
                "the state has a run of {} tokens from token {first} on",
                n_whole + n_span
            );
        }
        first = run.end();
        tokens.runs.push(run);
    }
    Ok(())
}

fn restore_piece(shape: PieceShape, image: &mut ImageReader) -> Result<Arc<Piece>> {
    let (mut span_heads, mut start) = (Vec::new(), 0);
    let n_heads = if shape.n_span > 0 { shape.n_kv_heads } else { 0 };
    for _ in 0..n_heads {
        let form = restore_form(&shape, image)?;
        span_heads.push(SpanHead { form, start });
        start += form_bytes(form, shape.n_span, shape.key_dim, shape.value_dim);
    }
    let slow = (n_heads > 0).then(|| image.segment("basis", start, start)).transpose()?;
    let address = |slow: &Option<Segment>| slow.as_ref().map(Segment::address);
    let (heads, at) = (span_heads.clone(), address(&slow));
    let is_same = |piece: &Piece| {
        piece.shape == shape && piece.span_heads == heads && address(&piece.slow) == at
    };
    image.shared_blob("piece", shape.fast_bytes(), is_same, |fast| {
        Ok(Piece { shape, fast, span_heads, slow })
    })
}

fn restore_form(shape: &PieceShape, image: &mut ImageReader) -> Result<SpanForm> {
    let name = image.u8()?;
    let codec = ROW_CODECS.get(usize::from(name % LOW_RANK)).copied();
    match (name / LOW_RANK, codec) {
        (0, Some(codec)) => Ok(SpanForm::Rows(codec)),
        (1, Some(codec)) => {
            let (rank, most) = (image.u32()? as usize, shape.key_dim.max(shape.value_dim));
            if !(1..=most).contains(&rank) {
                fail!(Format, "the state has a basis of rank {rank}, expected 1 to {most}");
            }
            Ok(SpanForm::LowRank { codec, rank })
        }
        _ => fail!(Format, "the state has a span of form {name}"),
    }
}
