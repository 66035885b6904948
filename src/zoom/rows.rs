//! The rows that one query head attends under routing `paper`, each with its bias.
//!
//! One softmax runs over all of them; a row's logit is q.k / sqrt(d) plus its bias.

use crate::span::Span;

/// What a row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// A token kept whole: an anchor, or one of a full-resolution span.
    Resident,
    /// A span's mean key and value.
    Coarse,
    /// A token of a zoomed span, rebuilt from the basis.
    Rebuilt,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub kind: RowKind,
    /// Index into the spans; none for an anchor.
    pub span: Option<usize>,
    /// The token, for all but coarse rows.
    pub token: Option<usize>,
    pub bias: f32,
}

/// The reference closes a row with a gate of 1e-6 rather than leaving it out, so its logarithm is
/// what a closed row's bias gets.
pub const CLOSED_GATE: f32 = 1e-6;

/// The bias of a span's coarse row: log|S|, and closed where this head zoomed the span, whose
/// tokens speak for themselves then.
pub fn coarse_bias(tokens: usize, zoomed: bool) -> f32 {
    let length = (tokens as f32).ln();
    if zoomed { length + CLOSED_GATE.ln() } else { length }
}

/// The bias of a rebuilt row: 0 in the heads that zoomed its span; closed in those that did not,
/// where another head of the group did.
pub fn rebuilt_bias(zoomed: bool) -> f32 {
    if zoomed { 0.0 } else { CLOSED_GATE.ln() }
}

/// The rows of one query head: anchors first, then each span in order. `zoomed` are this head's
/// spans, `rebuilt` those of its group, both ascending.
pub fn list(anchors: &[usize], spans: &[Span], zoomed: &[usize], rebuilt: &[usize]) -> Vec<Row> {
    let whole = |span, token| Row { kind: RowKind::Resident, span, token: Some(token), bias: 0.0 };
    let mut rows: Vec<Row> = anchors.iter().map(|&token| whole(None, token)).collect();
    for (index, span) in spans.iter().enumerate() {
        if span.full_resolution {
            rows.extend(span.tokens().map(|token| whole(Some(index), token)));
            continue;
        }
        let zooms = zoomed.binary_search(&index).is_ok();
        rows.push(Row {
            kind: RowKind::Coarse,
            span: Some(index),
            token: None,
            bias: coarse_bias(span.len(), zooms),
        });
        if rebuilt.binary_search(&index).is_ok() {
            rows.extend(span.tokens().map(|token| Row {
                kind: RowKind::Rebuilt,
                span: Some(index),
                token: Some(token),
                bias: rebuilt_bias(zooms),
            }));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_coarse_zoomed_or_rebuilt_for_another_head() {
        let span = |start, end, full_resolution| Span { start, end, full_resolution };
        let spans = [span(0, 1, true), span(2, 4, false), span(4, 6, false), span(6, 8, false)];
        let rows = list(&[1], &spans, &[1], &[1, 2]);
        let closed = 1e-6f32.ln();
        let two = 2f32.ln();
        let expected = [
            (RowKind::Resident, None, Some(1), 0.0),
            (RowKind::Resident, Some(0), Some(0), 0.0),
            (RowKind::Coarse, Some(1), None, two + closed),
            (RowKind::Rebuilt, Some(1), Some(2), 0.0),
            (RowKind::Rebuilt, Some(1), Some(3), 0.0),
            (RowKind::Coarse, Some(2), None, two),
            (RowKind::Rebuilt, Some(2), Some(4), closed),
            (RowKind::Rebuilt, Some(2), Some(5), closed),
            (RowKind::Coarse, Some(3), None, two),
        ];
        let found: Vec<_> = rows.iter().map(|r| (r.kind, r.span, r.token, r.bias)).collect();
        assert_eq!(found, expected);
    }
}
