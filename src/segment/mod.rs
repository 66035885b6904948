//! Segmentation: surprisal in, anchors and spans out (paper, "semantic segmentation").
//!
//! H_t = -log p(x_t | x_<t) in nats. Tokens strictly above mu + alpha * sigma are anchors and stay
//! whole; what lies between two anchors is a span. Spans below `span_min` tokens stay whole too.
//!
//! Three things are ours:
//! - The reference loses token 0, the attention sink, where no token is an anchor. Here it becomes
//!   an anchor then.
//! - A span longer than `span_max` is cut into even pieces: the cost of a basis grows with the
//!   square of its tokens, and one mean says little about thousands of them.
//! - A host may not know a token's surprisal (NaN). Such a token is never an anchor; a run of
//!   unknown tokens is cut every [`FIXED_SPAN`] tokens instead.

mod moments;

pub use moments::Moments;

use crate::error::{Result, fail};
use crate::span::Span;

/// Tokens in a span where surprisal is unknown and cannot say where to cut.
pub const FIXED_SPAN: usize = 64;

/// How to segment. The names are those of the C parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentRule {
    /// Sigmas above the mean from which a token is an anchor. 1.0 in the paper.
    pub alpha: f32,
    /// l_min: a shorter span stays whole. 16 in the paper, 4 in the reference's configuration.
    pub span_min: usize,
    /// l_max: a longer span is cut. 0: never.
    pub span_max: usize,
}

impl Default for SegmentRule {
    fn default() -> Self {
        Self { alpha: 1.0, span_min: 16, span_max: 512 }
    }
}

/// What a stretch of tokens was cut into. Every token is in `anchors` or in one span.
#[derive(Clone, Debug, PartialEq)]
pub struct Segmentation {
    /// Ascending.
    pub anchors: Vec<usize>,
    /// Ascending, none empty.
    pub spans: Vec<Span>,
    pub threshold: f64,
    /// Tokens of unknown surprisal. Where there are any, spans may be fixed ones: to be reported.
    pub unknown: usize,
}

impl Segmentation {
    /// Spans seen by their summary.
    pub fn compressed(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| !span.full_resolution)
    }
}

/// Refuses surprisal that no probability has. NaN is allowed and means unknown.
pub fn check(surprisal: &[f32]) -> Result<()> {
    for (token, &h) in surprisal.iter().enumerate() {
        if h.is_infinite() || h < 0.0 {
            fail!(
                Value,
                "surprisal of token {token} is {h}, expected a finite number of nats, 0 or more, or \
                 NaN where it is unknown"
            );
        }
    }
    Ok(())
}

/// Segments a whole prompt by its own mean and sigma.
pub fn segment(surprisal: &[f32], rule: &SegmentRule) -> Result<Segmentation> {
    check(surprisal)?;
    let mut moments = Moments::new();
    moments.extend(surprisal);
    Ok(cut(surprisal, moments.threshold(rule.alpha), rule, true))
}

/// Cuts a stretch of tokens at a threshold that the caller keeps. `first` says that the stretch
/// begins with the first token of its sequence, which has to stay in sight.
///
/// One call over a whole prompt with its own threshold is [`segment`]. The values have passed
/// [`check`].
pub fn cut(surprisal: &[f32], threshold: f64, rule: &SegmentRule, first: bool) -> Segmentation {
    let n = surprisal.len();
    let unknown = surprisal.iter().filter(|h| h.is_nan()).count();
    // NaN compares false: an unknown token is no anchor.
    let mut anchors: Vec<usize> =
        (0..n).filter(|&token| f64::from(surprisal[token]) > threshold).collect();
    if first && anchors.is_empty() && n >= rule.span_min.max(1) {
        anchors.push(0);
    }
    let mut spans = Vec::new();
    let mut start = 0;
    for &end in anchors.iter().chain(std::iter::once(&n)) {
        cut_between(start, end, surprisal, rule, &mut spans);
        start = end + 1;
    }
    Segmentation { anchors, spans, threshold, unknown }
}

/// Cuts what lies between two anchors: at long runs of unknown tokens first, then by length.
fn cut_between(
    start: usize,
    end: usize,
    surprisal: &[f32],
    rule: &SegmentRule,
    spans: &mut Vec<Span>,
) {
    let mut known_from = start;
    let mut token = start;
    while token < end {
        let run = surprisal[token..end].iter().take_while(|h| h.is_nan()).count();
        // A shorter run joins what surrounds it: hosts that keep no logits across batches lack
        // one value a batch, and that is no reason to cut.
        if run >= FIXED_SPAN {
            divide(known_from, token, rule, spans);
            let size = if rule.span_max == 0 { FIXED_SPAN } else { FIXED_SPAN.min(rule.span_max) };
            let mut at = token;
            while at < token + run {
                let to = (at + size).min(token + run);
                spans.push(Span { start: at, end: to, full_resolution: to - at < rule.span_min });
                at = to;
            }
            known_from = token + run;
        }
        token += run.max(1);
    }
    divide(known_from, end, rule, spans);
}

/// Adds [start, end) as one span, or as the fewest even pieces of at most `span_max` tokens.
pub(crate) fn divide(start: usize, end: usize, rule: &SegmentRule, spans: &mut Vec<Span>) {
    let length = end.saturating_sub(start);
    if length == 0 {
        return;
    }
    // Judged before the cut: a piece of a long span is no short span.
    let full_resolution = length < rule.span_min;
    let cuts = rule.span_max > 0 && length > rule.span_max && !full_resolution;
    let pieces = if cuts { length.div_ceil(rule.span_max) } else { 1 };
    for piece in 0..pieces {
        let at = |i: usize| start + i * (length / pieces) + i.min(length % pieces);
        spans.push(Span { start: at(piece), end: at(piece + 1), full_resolution });
    }
}

#[cfg(test)]
mod tests;
